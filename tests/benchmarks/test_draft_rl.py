"""Plain and drafted RL steps of the long-tail model: the same rollouts, compared update by update."""

import json
from pathlib import Path

import pytest
import tail_model
from draft_rl import compare, parser, problems, summary

SIZES = {"hidden": 16, "layers": 1, "heads": 2, "kv-heads": 1, "steps": 8, "batch": 4, "cap": 64, "lr": 0.01}


def test_three_arms_train_on_the_same_rollouts(tmp_path: Path) -> None:
    asked = [part for name, value in SIZES.items() for part in (f"--{name}", str(value))]
    tail_model.main(["--out", str(tmp_path / "tail"), "--device", "cpu", *asked])
    few = ["--steps", "4", "--prompts", "2", "--rollouts", "2", "--problems", "12", "--cap", "24", "--device", "cpu"]
    model = ["--model", str(tmp_path / "tail" / "model"), "--out", str(tmp_path)]
    found = compare(parser().parse_args([*model, *few, "--set", "curriculum.starvation=partial"]))
    assert {name: len(rows) for name, rows in found["arms"].items()} == {"plain": 4, "model_free": 4, "eagle": 4}
    assert all(one["mean_length_apart"] == 0 for one in found["summary"].values()), "drafts change no token"
    assert found["summary"]["plain"]["faster"] == 1 and found["summary"]["eagle"]["lessons_share"] > 0
    assert json.loads((tmp_path / "draft_rl.json").read_text()) == json.loads(json.dumps(found))


def test_updates_are_compared_in_pairs() -> None:
    def rows(*seconds: float) -> list[dict[str, float]]:
        return [
            {"step": i + 1.0, "time/total": s, "time/generate": s / 2, "length/mean": 9.0 + s / 10}
            for i, s in enumerate(seconds)
        ]

    found = summary({"plain": rows(9, 9, 4, 6, 8), "eagle": rows(9, 9, 2, 2, 2)})["eagle"]
    assert found["faster"] == 3 and found["seconds"] == 2 and found["generate_share"] == 0.5
    assert found["mean_length_apart"] == pytest.approx(0.6) and found["lessons_share"] == 0


def test_the_share_of_lessons_is_of_all_seconds() -> None:
    """Every other update has one: the median would be none, or twice as much."""
    lessons = [0.0, 0.5, 0.0, 0.2, 0.0]
    rows = [
        {"step": i + 1.0, "time/total": s, "time/generate": s / 2, "time/draft": lesson, "length/mean": 9.0}
        for i, (s, lesson) in enumerate(zip([9, 9, 4, 2, 4], lessons, strict=True))
    ]
    assert summary({"plain": rows})["plain"]["lessons_share"] == pytest.approx(0.2 / 10)


def test_no_problem_comes_twice(tmp_path: Path) -> None:
    lines = Path(problems(tmp_path / "p.jsonl", 100, 0)).read_text().splitlines()
    assert len(lines) == len(set(lines)) == 100
