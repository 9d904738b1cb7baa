"""The benchmark of an update of TRL: the whole command, with every engine that a CPU has."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
pytest.importorskip("trl")

import trl_step  # noqa: E402
from trl_parts import model, tokenizer  # noqa: E402

RECIPE = """
[model]
name = "tiny"
[[data]]
task = "chain"
[rollout]
max_tokens = 4
"""


def test_engines_are_measured_alike_on_the_ground_of_a_matrix(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    matrix = tmp_path / "small.toml"
    matrix.write_text(
        'recipe = "recipe.toml"\nseeds = [0]\nstart = "model"\n[[arm]]\nname = "uniform"\n'
    )
    engines = ["own", "whet", "generate"]
    trl_step.main(matrix, engines, 4, 2, 1, 2, tmp_path / "runs", None, tmp_path)
    result = json.loads((tmp_path / "trl_step.json").read_text())
    rows = [
        json.loads(line) for line in (tmp_path / "runs" / "problems.jsonl").read_text().splitlines()
    ]
    assert len({row["problem"] for row in rows}) > 1 and len(rows) == 4 * 3
    assert list(result["engines"]) == engines
    for found in result["engines"].values():
        assert len(found["step_s"]) == len(found["generation_s"]) == len(found["reward"]) == 2
        assert all(
            0 < part < whole
            for part, whole in zip(found["generation_s"], found["step_s"], strict=True)
        )
        assert 0 < found["mean_length"] <= 4 and 0 <= found["signal"] <= 1
