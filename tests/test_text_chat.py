"""Prompts by chat template: what the model reads, where a response ends, and what a judge sees of it."""

import pytest
import torch
from chat_families import FAMILIES, family_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from whet.config import Text
from whet.errors import WhetError
from whet.learn.learner import warm_start
from whet.text import Codec
from whet.types import Prompt

EVERY = pytest.mark.parametrize("name", FAMILIES)
TEXT = Prompt(id="t", text="1+1?", answer="2", task="text")


def chat(*turns: tuple[str, str]) -> Prompt:
    messages = tuple({"role": role, "content": content} for role, content in turns)
    return Prompt(id="c", messages=messages, answer="2", task="text")


def codec(name: str, eos: int | list[int] | None = None, **settings: str) -> Codec:
    return Codec(family_tokenizer(name), eos, Text(**settings))


def number(made: Codec, token: str) -> int:
    return made.tokenizer.convert_tokens_to_ids(token)


@EVERY
def test_a_text_problem_becomes_a_users_turn(name: str) -> None:
    made = codec(name)
    assert made.render(TEXT) == FAMILIES[name].asked
    assert made.encode(TEXT) == made.encode(chat(("user", "1+1?")))
    assert made.tokenizer.decode(made.encode(TEXT)) == FAMILIES[name].asked


@EVERY
def test_encoding_is_the_librarys_own(name: str) -> None:
    """The two steps, rendering and tokenising many, come to what apply_chat_template makes of each."""
    made = codec(name)
    prompts = [Prompt(id=str(n), text="é1 " * n + "?", answer="", task="text") for n in range(30)]
    own = [
        made.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for prompt in prompts
    ]
    assert [made.encode(prompt) for prompt in prompts] == own
    assert made.encode_all(prompts) == own


@EVERY
def test_bos_comes_once(name: str) -> None:
    bos = FAMILIES[name].bos
    for template in ("chat", "plain"):
        made = codec(name, template=template)
        assert made.render(TEXT).count(bos) == 1 if bos else made.tokenizer.bos_token_id is None
        if bos:
            ids = made.encode(TEXT)
            assert ids.index(number(made, bos)) == 0 and ids.count(number(made, bos)) == 1


def test_a_plain_text_that_brings_its_bos() -> None:
    """Prompts rendered elsewhere."""
    made = codec("gemma", template="plain")
    whole = Prompt(id="w", text="<bos>1+1?", answer="2", task="text")
    assert (
        made.encode(whole) == made.encode(TEXT)
        and made.render(whole) == made.render(TEXT) == "<bos>1+1?"
    )


@EVERY
def test_the_end_of_turn_is_read_off_the_template(name: str) -> None:
    made, family = codec(name), FAMILIES[name]
    end, eos = number(made, family.end), number(made, family.eos)
    assert made.stop_tokens() == list(dict.fromkeys([(eos, family.eos), (end, family.end)]))
    assert made.encode_response("2")[-1] == end
    assert codec(name, template="plain").encode_response("2")[-1] == eos
    assert set(codec(name, template="plain").stop_ids) == {eos, end}


def test_the_generation_config_comes_first_and_knows_its_tokens() -> None:
    plain = codec("chatml")
    start, end = number(plain, "<|im_start|>"), number(plain, "<|im_end|>")
    made = codec("chatml", [start, 10**6, -1])
    assert made.stop_ids == (start, number(plain, "<|endoftext|>"), end)
    assert made.encode_response("2")[-1] == end


def test_the_end_of_turn_has_no_name_of_its_own() -> None:
    tokenizer = family_tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<|endoftext|>")
    made = Codec(tokenizer)
    assert made.stop_tokens() == [(number(made, "<|endoftext|>"), "<|endoftext|>")]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}",
        "{% for m in messages %}{{ '<|im_start|>' + m['content'] }}{% endfor %}",
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ raise_exception('no') }}{% endif %}{% endfor %}?",
        "{{ messages[0]['content'] }}<|im_end|>",
    ],
    ids=["no token", "open", "refuses", "silent"],
)
def test_a_template_without_an_end_of_turn(template: str) -> None:
    tokenizer = family_tokenizer("chatml")
    tokenizer.chat_template = template
    made = Codec(tokenizer)
    assert (
        made.stop_ids == (tokenizer.eos_token_id,)
        and made.encode_response("2")[-1] == tokenizer.eos_token_id
    )


def test_an_end_of_turn_that_is_not_special() -> None:
    """Its text must reach neither reader nor judge, though the tokenizer would show it."""
    tokenizer = family_tokenizer("qwen3")
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "</think>")
    made = Codec(tokenizer)
    ids = made.encode_response("2")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "2</think>"
    assert made.decode(ids) == made.judged(ids) == "2"


def test_system_prompt_and_suffix() -> None:
    made = codec("chatml", system_prompt="Be brief.", prompt_suffix="\nThink.")
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    ask = "<|im_start|>user\n1+1?\nThink.<|im_end|>\n<|im_start|>assistant\n"
    assert made.render(TEXT) == made.render(chat(("user", "1+1?"))) == system + ask
    own = chat(("system", "Be long."), ("user", "0?"), ("assistant", "0"), ("user", "1+1?"))
    assert made.render(own) == (
        "<|im_start|>system\nBe long.<|im_end|>\n<|im_start|>user\n0?<|im_end|>\n<|im_start|>assistant\n0<|im_end|>\n"
        + ask
    )
    assert own.messages[-1]["content"] == "1+1?"
    assert codec("mistral", template="plain", prompt_suffix=" =").render(TEXT) == "<s>1+1? ="


def test_a_suffix_needs_a_user() -> None:
    with pytest.raises(
        WhetError, match=r'The prompt "c" has no user message to which text.prompt_suffix could go'
    ):
        codec("chatml", prompt_suffix="!").encode(chat(("system", "1+1?")))


def test_thinking() -> None:
    asked, closed = FAMILIES["qwen3"].asked, "<think>\n\n</think>\n\n"
    assert codec("qwen3", thinking="on").render(TEXT) == asked
    assert codec("qwen3", thinking="off").render(TEXT) == asked + closed
    assert codec("qwen3", thinking="off").encode(TEXT)[-2:] == codec("qwen3").encode(TEXT)[-1:] * 2


@pytest.mark.parametrize("thinking", ["on", "off"])
def test_thinking_without_a_switch(thinking: str) -> None:
    with pytest.raises(
        WhetError,
        match=f'text.thinking = "{thinking}", but the chat template of the model has no such',
    ):
        codec("chatml", thinking=thinking)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"template": "chat"},
            'text.template = "chat", but the model has no chat template; set it to "plain"',
        ),
        (
            {"system_prompt": "Hi."},
            "text.system_prompt is for chat templates, but the model has no chat template",
        ),
        (
            {"thinking": "on"},
            "text.thinking is for chat templates, but the model has no chat template; leave it out",
        ),
    ],
)
def test_a_model_without_a_template(settings: dict[str, str], sentence: str) -> None:
    tokenizer = family_tokenizer("chatml")
    tokenizer.chat_template = None
    with pytest.raises(WhetError, match=sentence):
        Codec(tokenizer, None, Text(**settings))


def test_plain_takes_no_messages() -> None:
    with pytest.raises(
        WhetError,
        match=r'is a list of chat messages, but text.template = "plain" takes plain text only',
    ):
        codec("chatml", template="plain").encode(chat(("user", "1+1?")))
    with pytest.raises(
        WhetError, match=r'text.system_prompt is for chat templates, but text.template = "plain"'
    ):
        codec("chatml", template="plain", system_prompt="Hi.")


def test_a_template_that_refuses_names_the_prompt() -> None:
    with pytest.raises(
        WhetError, match='The chat template refuses the prompt "t": System role not supported'
    ):
        codec("gemma", system_prompt="Hi.").encode(TEXT)
    with pytest.raises(
        WhetError,
        match='The chat template refuses the prompt "c": Conversation roles must alternate',
    ):
        codec("mistral").encode_all([TEXT, chat(("user", "1"), ("user", "2"))])


@pytest.mark.parametrize("name", ["qwen3", "r1"])
def test_thoughts_reach_the_judge(name: str) -> None:
    """R1's tokenizer here hides the marks as special tokens, Qwen3's does not."""
    made = codec(name)
    ids = made.encode_response("<think>1+1</think>\n2")
    assert number(made, "</think>") in ids
    assert made.judged(ids).endswith("<think>1+1</think>\n2") and "eos" not in made.judged(ids)
    assert made.decode(ids) == ("1+1\n2" if name == "r1" else "<think>1+1</think>\n2")


def test_a_prompt_that_opens_the_thought() -> None:
    """A thought cut short must not read like an answer."""
    made = codec("r1")
    assert made.judged(made.encode_response("so 2")) == "<think>\nso 2"
    assert made.judged(made.encode_response("so</think>2")) == "<think>\nso</think>2"
    assert made.decode(made.encode_response("so 2")) == "so 2"
    assert codec("r1", template="plain").judged([]) == ""
    assert (
        codec("r1", template="plain", prompt_suffix="\nAssistant: <think>").judged([])
        == "<think>\n"
    )


@pytest.mark.parametrize(
    "settings", [{}, {"thinking": "on"}, {"thinking": "off"}, {"prompt_suffix": " Use <think>."}]
)
def test_a_prompt_that_opens_none(settings: dict[str, str]) -> None:
    made = codec("qwen3", **settings)
    assert made.judged(made.encode_response("2")) == "2"


def test_judged_never_raises() -> None:
    made = codec("r1")
    assert made.judged([-5, 10**9, 2**40, *made.encode_response("2")]) == "<think>\n2"


def test_pad_may_be_eos() -> None:
    """As published for SmolLM2. Padding is recognised by length, never by id."""
    tokenizer = family_tokenizer("chatml")
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    made = Codec(tokenizer, tokenizer.eos_token_id)
    assert made.encode_response("2") == [*tokenizer("2")["input_ids"], tokenizer.pad_token_id]
    prompts = [TEXT, chat(("user", "1+1? " * 40))]
    assert made.encode_all(prompts) == [made.encode(prompt) for prompt in prompts]
    assert made.encode(TEXT).count(tokenizer.pad_token_id) == 1


def test_an_eos_that_is_also_the_pad_is_trained() -> None:
    """Two worked solutions of different length in one batch: both learn to stop."""
    pad = 4
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, pad_token_id=pad, eos_token_id=pad, bos_token_id=None, **shape)
    )
    pairs = [([1], [2, pad]), ([3, pad, 3], [5, 5, 6, pad])]
    warm_start(model, iter([pairs] * 40), steps=40, lr=1e-2, on_step=lambda step, loss: None)
    for prompt, response in pairs:
        logits = model(torch.tensor([prompt + response[:-1]])).logits[0, -1]
        assert int(logits.argmax()) == pad and float(logits.softmax(0)[pad].detach()) > 0.8
