"""`whet train` beside TRL: the same sizes, the same reward, and seconds that can be compared."""

import json
from pathlib import Path

import pytest
from trl_step import judge, measure_own

from whet.model.load import load_tokenizer, tiny_model
from whet.types import Prompt


def test_the_reward_is_the_one_that_trl_gets() -> None:
    prompt = Prompt(id="a", text="2 + 2 =", answer="4", task="own")
    assert [judge(prompt, text) for text in ("so #### 4", "4.0", "5", "")] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.slow
def test_updates_of_our_own_are_measured(tmp_path: Path) -> None:
    from whet.config import Model

    tokenizer = load_tokenizer(Model(name="tiny"), "0123456789=?abcdefghijklmnopqrstuvwxyz #,.T\n")
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model(len(tokenizer), hidden=16, layers=1, heads=1, context=128).save_pretrained(
        tmp_path / "model"
    )
    rows = [{"problem": f"{i}=", "answer": str(i % 10)} for i in range(16)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"prompts": 4, "completions": 2, "tokens": 4, "warm": 1, "counted": 2}
    found = measure_own(tmp_path / "model", tmp_path / "data.jsonl", tmp_path, **sizes)
    assert len(found["step_s"]) == len(found["generation_s"]) == len(found["reward"]) == 2
    assert all(
        0 < part < whole for part, whole in zip(found["generation_s"], found["step_s"], strict=True)
    )
    assert 0 < found["mean_length"] <= 4 and 0 <= found["signal"] <= 1
