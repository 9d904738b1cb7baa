"""The demo's curricula in a stream with two workers of a Ray cluster: the accuracy is that of one process."""

import json
from pathlib import Path
from statistics import fmean, stdev

import pytest
from ray_run import MARKS, cluster
from small_run import Silent

from whet import api
from whet.config import merged
from whet.recipe import parse_config
from whet.run import read_metrics
from whet.tools.demo import arm_recipes, check_base, read_demo

pytestmark = [*MARKS, pytest.mark.slow, pytest.mark.usefixtures("cluster")]
__all__ = ["cluster"]
SEEDS = range(3)
ROOT = Path(__file__).resolve().parents[2]
PLACES = {
    "one process": {},
    "one process, stream": {"rollout": {"mode": "stream"}},
    "two workers, stream": {"rollout": {"mode": "stream", "slots": 256}, "cluster": {"workers": 2}},
}


def accuracies(folder: Path, seed: int, extra: dict[str, object]) -> list[float]:
    """Of the arm `all` where few prompts teach, at each evaluation."""
    tree = read_demo()
    recipes = arm_recipes(tree, folder, check_base(tree["sha256"]), seed)["few"]
    (settings,) = (own for where, own in recipes.items() if where.name == "all")
    patient = {"judge": {"timeout_s": 120}}
    whole = merged(merged(settings.model_dump(exclude_unset=True), patient), extra)
    api.run_recipe(parse_config(whole), folder / "run", watcher=Silent())
    rows = read_metrics(folder / "run")
    assert rows[-1]["tokens_generated"] >= settings.token_budget
    return [
        row[name]
        for row in rows
        for name in row
        if name.startswith("eval/") and name.endswith("/accuracy")
    ]


def spread() -> float:
    """The standard deviation of the demo's accuracy at the end over ten seeds of one process, as they were stored."""
    mix = json.loads((ROOT / "benchmarks/results/demo_seeds_arm.json").read_text())["mixes"]["few"]
    ends = [run["accuracy"] for name, run in mix.items() if name.startswith("all-")]
    assert len(ends) == 10
    return stdev(ends)


def test_the_demo_in_a_stream_of_two_workers(tmp_path: Path) -> None:
    found = {
        place: [accuracies(tmp_path / f"{number}-{seed}", seed, extra) for seed in SEEDS]
        for number, (place, extra) in enumerate(PLACES.items())
    }
    ends = {place: [fmean(curve[-3:]) for curve in curves] for place, curves in found.items()}
    *single, two = ends.values()
    for one in single:
        assert abs(fmean(two) - fmean(one)) <= 3 * spread(), ends
    assert min(two) > 2 * max(curve[0] for curve in found["one process"]), ends
