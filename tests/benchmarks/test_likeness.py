import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from curriculum_bench import app
from likeness import GRID, Fit, Twin, calibrate, evaluation_gap, likeness_bench, quantities, sentences
from toy import play
from typer.testing import CliRunner

from whet.errors import WhetError
from whet.recipe import dump_config, parse_config
from whet.report.arms import Point
from whet.types import Batch, Request, Rollout
from whet.watch import group_metrics, rollout_metrics

UPDATES = 30


def at(logit: float) -> np.ndarray:
    return np.where(logit == GRID, 1.0, 0.0)


def rising(low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    return np.array([0.0, 2.0]), np.array([low, high])


TRUTH = Fit(
    start=0.3 * at(-6.0) + 0.5 * at(-2.0) + 0.2 * at(0.0),
    end=0.3 * at(-6.0) + 0.7 * at(2.0),
    rate=0.04,
    ceiling=1.5,
    exam=(-2.0, 4.0, 1.0),
    lengths={"right": rising(10, 20), "wrong": rising(8, 30)},
)


class Recorded(Twin):
    """A twin that writes down what a run would."""

    seen: Sequence[Rollout] = ()
    batch: Sequence[Any] = ()

    def answer(self, requests: Sequence[Request], version: int) -> list[Rollout]:
        done = super().answer(requests, version)
        self.seen = [*self.seen, *done]
        return done

    def learn(self, batch: Batch) -> float:
        self.batch = batch.groups
        return super().learn(batch)

    def row(self, step: int) -> dict[str, float]:
        found = {**super().row(step), **rollout_metrics(self.seen), **group_metrics(self.batch)}
        self.seen = ()
        own = {"batch/groups": float(len(self.batch)), "curriculum/prompts": float(self.prompts)}
        return {**found, "eval/held_out/accuracy": self.accuracy, **(own if step else {})}


def write_run(folder: Path, name: str, fit: Fit = TRUTH, **data: Any) -> Path:
    """The metrics and the recipe that a run would have left whose policy is a known toy."""
    curriculum = {"name": name, "groups": 16, "rollouts": 16}
    tree = {
        "curriculum": curriculum,
        "learn": {"warmup": 0, "lr": 2e-4},
        "rollout": {"max_tokens": 400},
        "data": [{"task": "chain", **data}],
        "eval": [{"task": "chain", "name": "held_out", "every": 2}],
    }
    settings = parse_config(tree)
    toy = Recorded("", 11, 300, fit=fit)
    rows, _ = play(settings.curriculum, toy, lambda: toy.tokens / (UPDATES * 4000))
    folder.mkdir()
    (folder / "config.toml").write_text(dump_config(settings))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three of one policy, and one that learns five times as fast: nothing a uniform run could tell."""
    folder = tmp_path_factory.mktemp("runs")
    made = {name: write_run(folder / name, name) for name in ("speed", "uniform", "dapo")}
    return made | {"other": write_run(folder / "other", "dapo", replace(TRUTH, rate=5 * TRUTH.rate))}


@pytest.mark.slow
def test_a_policy_that_is_a_toy_is_predicted_and_another_is_not(runs: dict[str, Path]) -> None:
    """Fitted to the uniform run alone, wherever it stands in the list; runs of the same policy are within a fifth."""
    found = calibrate(list(runs.values()))
    assert found["fitted"] == "uniform" and list(found["runs"]) == list(runs)
    for policy in ("speed", "uniform", "dapo"):
        for name in ("signal", "kept", "rollouts_an_update", "tokens_an_update", "updates", "accuracy"):
            values = found["runs"][policy][name]
            assert 1 / 1.2 < values["off"] < 1.2, (policy, name, values)
    assert 0.2 < sum(w for logit, w in zip(found["logits"], found["start"], strict=True) if logit < -3) < 0.4
    assert any(sentence.startswith("other: tokens to") for sentence in found["where_off"])


@pytest.mark.slow
def test_the_command_prints_and_writes(runs: dict[str, Path], tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "--mix", "made_up", "--like", str(runs["uniform"])]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0 and "uniform (fitted)" in done.output and "fitted to uniform alone" in done.output
    stored = json.loads((tmp_path / "curriculum_calibration_made_up.json").read_text())
    assert stored["fitted"] == "uniform" and {"commit", "hardware", "versions"} <= stored.keys()


def test_what_cannot_be_calibrated_is_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(WhetError, match="None of these runs is uniform"):
        calibrate([runs["speed"], runs["dapo"]])
    with pytest.raises(WhetError, match=r"differ in data\.0\.limit"):
        calibrate([runs["uniform"], write_run(tmp_path / "dapo", "dapo", limit=5)])
    with pytest.raises(WhetError, match="letters"):
        likeness_bench(tmp_path, list(runs.values()), "../few")
    with pytest.raises(WhetError, match="is not a run folder"):
        calibrate([tmp_path])
    old = tmp_path / "uniform"
    old.mkdir()
    (old / "config.toml").write_text((runs["uniform"] / "config.toml").read_text())
    rows = [json.loads(line) for line in (runs["uniform"] / "metrics.jsonl").read_text().splitlines()]
    bare = [{k: v for k, v in row.items() if not k.startswith("pass_rate/")} for row in rows]
    (old / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bare))
    with pytest.raises(WhetError, match="no pass_rate/ metrics"):
        calibrate([old])


def test_quantities_by_hand() -> None:
    rows: list[dict[str, float]] = [
        {"step": 0, "rollouts": 0, "tokens_generated": 0},
        {"step": 1, "rollouts": 100, "tokens_generated": 3000, "learn/signal_share": 0.5},
        {"step": 2, "rollouts": 240, "tokens_generated": 8000, "learn/signal_share": 1.0}
        | {"curriculum/accepted": 30, "curriculum/rejected_easy": 10, "curriculum/rejected_hard": 60},
    ]
    accuracies = (0.1, 0.6, 0.7)
    points = [
        Point(step=i, tokens=row["tokens_generated"], seconds=0, accuracy=a)
        for i, (row, a) in enumerate(zip(rows, accuracies, strict=True))
    ]
    assert quantities(rows, points, [0.5, 0.65]) == {
        "signal": 0.75,
        "kept": 0.3,
        "rollouts_an_update": 120,
        "tokens_an_update": 4000,
        "updates": 2,
        "accuracy": pytest.approx(1.4 / 3),
        "tokens_to_0.50": 3000,
        "tokens_to_0.65": None,
    }
    assert [evaluation_gap(points, tokens) for tokens in (0, 2999, 3000, 9000)] == [3000, 3000, 5000, 5000]
    assert evaluation_gap(points[:1], 0) == 0


def test_sentences_say_what_is_off_and_no_more() -> None:
    def values(measured: float | None, simulated: float | None) -> dict[str, float | None]:
        both = measured is not None and simulated is not None
        return {"measured": measured, "simulated": simulated, "off": simulated / measured if both else None}  # type: ignore[operator]

    found = {
        "signal": values(0.5, 0.59),
        "kept": values(0.5, 0.3),
        "tokens_to_0.50": values(1000, 1900),
        "tokens_to_0.60": values(1000, 2100),
        "tokens_to_0.70": values(None, 9000),
        "tokens_to_0.80": values(9000, None),
        "tokens_to_0.90": values(None, None),
    }
    points = [Point(step=i, tokens=1000 * i, seconds=0, accuracy=0.5) for i in range(4)]
    said = sentences("speed", found, points)
    assert [sentence.split(";")[0] for sentence in said] == [
        "speed: kept is 0.60 times the measured",
        "speed: tokens to 0.50 is 1.90 times the measured",
        "speed: tokens to 0.60 is 2.10 times the measured",
        "speed: tokens to 0.70 is reached by the toy alone",
        "speed: tokens to 0.80 is never reached by the toy",
    ]
    assert "one evaluation" in said[1] and "one evaluation" not in said[2]
