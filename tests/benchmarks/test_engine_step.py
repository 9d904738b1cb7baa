"""The seconds of a step by engine: one recipe, steps that count, and what is told of them."""

import json
from pathlib import Path

import pytest
from engine_step import PARTS, measure, summary

from whet.model.load import load_tokenizer, tiny_model


def test_steps_that_warm_up_and_time_for_checkpoints_do_not_count() -> None:
    rows = [{"step": step, "time/total": 9.0, "time/sync": 0.1 * step} for step in (1, 2)]
    rows += [
        {"step": 3, "time/total": 3.0, "time/save": 1.0, "time/sync": 0.3},
        {"step": 4, "time/total": 4.0},
    ]
    found = summary(rows)
    assert found["steps"]["step_s"] == [2.0, 4.0]
    assert found["median"] == {"step_s": 3.0, "sync_s": 0.3}


@pytest.mark.slow
def test_a_step_of_our_engine_has_every_part(tmp_path: Path) -> None:
    from whet.config import Model

    tokenizer = load_tokenizer(Model(name="tiny"), "0123456789=?abcdefghijklmnopqrstuvwxyz #,.T\n")
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model(len(tokenizer), hidden=16, layers=1, heads=1, context=128).save_pretrained(
        tmp_path / "model"
    )
    rows = [{"problem": f"{i}=", "answer": str(i % 10)} for i in range(16)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"prompts": 4, "completions": 4, "tokens": 8, "steps": 4}
    found = summary(
        measure("native", tmp_path / "model", tmp_path / "data.jsonl", tmp_path, **sizes)
    )
    assert set(found["median"]) == set(PARTS)
    assert found["median"]["mismatch"] < 1e-4 and found["median"]["trained_tokens"] > 0
