"""The demo's settings are sound, and a small demo runs from the base to the page."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from whet.recipe import dump_config, parse_config
from whet.report.arms import Arm, RunLog
from whet.run import is_in_use
from whet.tools.demo import arm_recipes, conclude, describe_mix, read_demo, run_demo, with_mix
from whet.tools.experiment import make_base

SMALL_BASE: dict[str, Any] = {
    "steps": 0,
    "model": {"hidden": 16, "layers": 1, "heads": 2},
    "data": [{"task": "chain", "options": {"train_count": 60}}],
    "warm_start": [{"steps": 60, "lr": 1e-2, "options": {"max_level": 1, "direct": 1.0}}],
    "eval": [{"task": "chain", "limit": 12, "max_tokens": 12}],
    "rollout": {"context": 48, "max_tokens": 12, "slots": 12},
}
SMALL = {
    "base": SMALL_BASE,
    "arm": {key: SMALL_BASE[key] for key in ("data", "eval", "rollout")} | {"steps": 3, "curriculum": {"rollouts": 4}},
    "arms": {
        "uniform 48": {"curriculum": {"name": "uniform", "groups": 6}, "eval": {"every": 1}},
        "speed 16": {
            "curriculum": {"name": "speed", "groups": 2, "patience": 200, "speed": {"n_init": 2}},
            "eval": {"every": 1},
        },
    },
    "mixes": {
        "few": {"mix": {"1": 1.0}, "arms": ["uniform 48"]},
        "many": {"mix": {"1": 0.9, "2": 0.1}, "arms": ["speed 16"]},
    },
}


def test_every_arm_has_its_mix_and_as_many_tokens(tmp_path: Path) -> None:
    tree = read_demo()
    recipes = arm_recipes(tree, tmp_path, tmp_path / "base", seed=3)
    names = {mix: [folder.name for folder in folders] for mix, folders in recipes.items()}
    assert names["few"] == ["uniform_16", "uniform_48", "dapo_16", "speed_16", "all_16"]
    assert names["most"] == ["uniform_16", "speed_16"]
    for mix, folders in recipes.items():
        for folder, settings in folders.items():
            assert folder.parent == tmp_path / mix
            assert settings.data[0].options["mix"] == tree["mixes"][mix]["mix"]
            assert settings.token_budget == tree["arm"]["token_budget"] and settings.seed == 3
            assert settings.model.name == str(tmp_path / "base")


def test_the_base_knows_no_mix() -> None:
    """All arms start from it, whatever they train on; and it can be evaluated as they are."""
    tree = read_demo()
    base = parse_config(tree["base"])
    assert "mix" not in dump_config(base)
    arm = parse_config(tree["arm"])
    assert (base.eval[0].limit, base.eval[0].max_tokens) == (arm.eval[0].limit, arm.eval[0].max_tokens)
    assert base.rollout == arm.rollout


def test_a_mix_takes_the_place_of_another() -> None:
    recipe = {"steps": 1, "data": [{"task": "chain", "options": {"train_count": 9, "mix": {"1": 0.5, "2": 0.5}}}]}
    assert with_mix(recipe, {"3": 1.0})["data"] == [{"task": "chain", "options": {"train_count": 9, "mix": {"3": 1.0}}}]
    assert recipe["data"][0]["options"]["mix"] == {"1": 0.5, "2": 0.5}  # type: ignore[index]


@pytest.mark.slow
def test_a_small_demo_from_base_to_page(tmp_path: Path) -> None:
    shown = io.StringIO()
    run_demo(tmp_path, 0, Console(file=shown, width=200), tree=SMALL)
    said = shown.getvalue()
    assert said.index("Mix few") < said.index("Mix many") < said.index("Curves and rollouts")
    assert "100% of 1. Informative prompts: of the 6 asked first" in said
    assert "90% of 1, 10% of 2." in said and said.count("Informative prompts") == 1, "only a uniform arm can tell"
    page = (tmp_path / "report.html").read_text()
    assert page.index("<h1>whet demo") < page.index("<h1>Mix few</h1>") < page.index("<h1>Mix many</h1>")
    assert "of the 6 asked first" in page and (tmp_path / "many" / "speed_16" / "report.html").is_file()
    again = io.StringIO()
    make_base(tmp_path / "base", SMALL_BASE, Console(file=again, width=200))
    assert "Starting from the base in" in again.getvalue()


def test_arms_that_did_not_finish_are_not_judged(tmp_path: Path) -> None:
    def arm(name: str, curriculum: str, steps: int) -> Arm:
        rows = [
            {"step": k, "tokens_generated": 1000.0 * k, "time_s": k, "eval/held_out/accuracy": 0.1 + 0.2 * k}
            for k in range(4)
        ]
        settings = {"curriculum.name": curriculum, "steps": steps, "eval.0.limit": 400}
        return Arm(name=name, runs=(RunLog(name=name, folder=tmp_path / name, settings=settings, rows=rows),))

    arms = [arm("uniform_48", "uniform", 3), arm("speed_16", "speed", 9)]
    said = describe_mix({"1": 1.0}, arms)
    assert "Not judged, since it did not finish: speed_16 stopped at step 3 of 9." in said
    assert "speed_16: " not in said and "speed_16: " in describe_mix({"1": 1.0}, [arms[0], arm("speed_16", "speed", 3)])
    assert conclude({"few": arms[1:]}) == "No arm came to its end, so there is nothing to conclude."


def test_a_demo_that_is_stopped_stops_its_arms(tmp_path: Path) -> None:
    """On SIGTERM, too, which would else leave them to run on without it."""
    arm = {"steps": 100_000, "data": SMALL_BASE["data"], "eval": SMALL_BASE["eval"], "rollout": SMALL_BASE["rollout"]}
    tree = {
        "base": SMALL_BASE | {"warm_start": []},
        "arm": arm,
        "arms": {"endless": {"curriculum": {"name": "uniform", "groups": 2, "rollouts": 2}}},
        "mixes": {"few": {"mix": {"1": 1.0}, "arms": ["endless"]}},
    }
    code = f"import whet.tools.demo as d; d.read_demo = lambda: {tree!r}\nfrom whet.cli import main; main()"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, "demo", "--out", str(tmp_path)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    run = tmp_path / "few" / "endless"
    while not (run / "metrics.jsonl").is_file():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 143 and "The demo stopped" in said
    assert not is_in_use(run), "the arm has left, too"
