"""What real tokenizers and chat templates bring: special tokens, how a text begins, and what ends a response."""

import json
from pathlib import Path

import pytest
import torch
from real_parts import plan_of
from transformers import AutoTokenizer

from whet.build import build_model
from whet.model.twin import rollout_twin

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def test_prompts_are_those_of_the_chat_template(folder: Path) -> None:
    """Token for token as transformers encodes the conversation, with one beginning of text at most."""
    plan, tokenizer = plan_of(folder, "cpu"), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template
    for i in range(len(plan.problems.train)):
        prompt = plan.problems.train.at(i)
        chat = [{"role": "user", "content": prompt.text}]
        wanted = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert list(plan.encoded(prompt.id)) == wanted
        text = plan.codec.render(prompt)
        assert text.count(prompt.text) == 1 and tokenizer.decode(wanted) == text


def test_every_end_of_the_model_ends_a_response(folder: Path) -> None:
    """Those of the generation settings, of the tokenizer, and of the template."""
    plan, tokenizer = plan_of(folder, "cpu"), AutoTokenizer.from_pretrained(folder)
    said = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    ends = set(said if isinstance(said, list) else [said]) | {tokenizer.eos_token_id}
    assert ends <= set(plan.codec.stop_ids)
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]
    after = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("yes")[2]
    turn = tokenizer(after, add_special_tokens=False).input_ids[0]
    assert turn in plan.codec.stop_ids and plan.codec.encode_response("yes")[-1] == turn
    assert tokenizer.pad_token_id != turn, (
        "an end that pads would be masked from the loss by other trainers"
    )


def test_text_comes_back(folder: Path) -> None:
    plan = plan_of(folder, "cpu")
    for line in Path(__file__).with_name("problems.jsonl").read_text().splitlines():
        for text in (line, json.loads(line)["prompt"]):
            ids = plan.codec.encode_response(text)
            assert plan.codec.decode(ids) == text
            assert "".join(plan.codec.pieces(ids) or []) == text


@DEVICES
def test_the_model_is_taken_in_half_precision(folder: Path, device: str) -> None:
    """Key biases of 200 and a few huge activations round far; that is no reason to refuse a model."""
    model = build_model(plan_of(folder, device, dtype="bfloat16"))
    assert model.dtype == torch.bfloat16
    rollout_twin(model)
