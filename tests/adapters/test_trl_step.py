"""The benchmark of an update of TRL runs, and counts what it says."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
pytest.importorskip("trl")

import trl_step  # noqa: E402
from trl_parts import model, tokenizer  # noqa: E402


def test_both_engines_are_measured_alike(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"problem": f"{i}=", "answer": str(i % 10)} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"prompts": 4, "completions": 2, "tokens": 4, "warm": 1, "counted": 2}
    for engine in ("whet", "generate"):
        trainer = trl_step.make_trainer(engine, tmp_path / "model", tmp_path / "data.jsonl", tmp_path / engine, **sizes)
        found = trl_step.measure(trainer, engine, warm=1)
        assert len(found["step_s"]) == len(found["generation_s"]) == len(found["reward"]) == 2
        assert all(0 < part < whole for part, whole in zip(found["generation_s"], found["step_s"], strict=True))
        assert 0 < found["mean_length"] <= 4
