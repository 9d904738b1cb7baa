"""Small tokenizers with the chat templates of the well-known families, in their style: turns, bos, end of turn."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Family:
    template: str
    added: tuple[str, ...]
    eos: str
    end: str
    """What ends a turn."""
    asked: str
    """What the model reads when asked "1+1?"."""
    bos: str = ""
    """Set in front by the tokenizer itself."""
    plainly_added: tuple[str, ...] = ()
    """Added tokens that are not special."""


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}"
    "{% for m in messages %}{{ '<start_of_turn>' + (m['role'] | replace('assistant', 'model')) + '\n' }}"
    "{{ m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ ' [INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
QWEN3 = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '<|Assistant|>' + m['content'].split('</think>')[-1] + eos_token }}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)

FAMILIES = {
    "chatml": Family(
        CHATML,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "<|endoftext|>",
        "<|im_end|>",
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama3": Family(
        LLAMA3,
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        ),
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        bos="<|begin_of_text|>",
    ),
    "gemma": Family(
        GEMMA,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<eos>",
        "<end_of_turn>",
        "<bos><start_of_turn>user\n1+1?<end_of_turn>\n<start_of_turn>model\n",
        bos="<bos>",
    ),
    "mistral": Family(
        MISTRAL, ("<s>", "</s>"), "</s>", "</s>", "<s> [INST] 1+1? [/INST]", bos="<s>"
    ),
    "phi3": Family(
        PHI3,
        ("<|endoftext|>", "<|assistant|>", "<|user|>", "<|end|>"),
        "<|endoftext|>",
        "<|end|>",
        "<|user|>\n1+1?<|end|>\n<|assistant|>\n",
    ),
    "qwen3": Family(
        QWEN3,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        plainly_added=("<think>", "</think>"),
    ),
    "r1": Family(
        R1,
        ("<|begin|>", "<|eos|>", "<|User|>", "<|Assistant|>", "<think>", "</think>"),
        "<|eos|>",
        "<|eos|>",
        "<|begin|><|User|>1+1?<|Assistant|><think>\n",
        bos="<|begin|>",
    ),
}


def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Byte-level, without merges: any text, one token a byte, and the family's own tokens after them."""
    family = FAMILIES[name]
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in family.added])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in family.plainly_added])
    if family.bos:
        number = tokenizer.token_to_id(family.bos)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[(family.bos, number)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=family.eos, bos_token=family.bos or None
    )
    fast.chat_template = family.template
    return fast
