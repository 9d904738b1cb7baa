"""The demo's settings are sound, and a small demo runs from the base to the page."""

from __future__ import annotations

import io
import json
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
from whet.report.formats import Reach
from whet.run import is_in_use
from whet.tools.demo import (
    Informative,
    Outcome,
    arm_recipes,
    compare_mixes,
    conclude,
    count_informative,
    describe_elicited,
    describe_mix,
    find_outcomes,
    read_demo,
    run_demo,
    with_mix,
)
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
    assert page.index("<title>whet demo") < page.index("<h1>Mix few</h1>") < page.index("<h1>Mix many</h1>")
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


@pytest.mark.slow
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
    _, said = process.communicate(timeout=600)
    assert process.returncode == 143 and "The demo stopped" in said
    assert not is_in_use(run), "the arm has left, too"


def run_of(name: str, curve: dict[int, float], signal: list[float], curriculum: str, **settings: Any) -> RunLog:
    """curve: thousand tokens -> accuracy; signal: the share at each step after the first row."""
    rows: list[dict[str, Any]] = []
    for step, (tokens, accuracy) in enumerate(curve.items()):
        row = {"step": step, "tokens_generated": 1000.0 * tokens, "time_s": step, "eval/held_out/accuracy": accuracy}
        if step:
            row |= {"curriculum/signal_share": signal[step - 1], "curriculum/accepted": 40.0 * step}
        rows.append(row)
    own = {"curriculum.name": curriculum, "curriculum.groups": 40, "curriculum.rollouts": 16, "eval.0.limit": 400}
    return RunLog(name=name, folder=Path(name), settings=own | settings, rows=rows)


def arm(name: str, curve: dict[int, float], curriculum: str = "speed", signal: float = 0.5, **settings: Any) -> Arm:
    return Arm(name=name, runs=(run_of(name, curve, [signal] * (len(curve) - 1), curriculum, **settings),))


SLOW = {0: 0.1, 100: 0.3, 200: 0.62, 300: 0.62}  # 0.60 after 200k
FAST = {0: 0.1, 50: 0.4, 100: 0.63, 150: 0.7, 200: 0.72}  # 0.60 after 100k, 0.70 after 150k
FLAT = {0: 0.1, 100: 0.12, 300: 0.11}


def test_a_method_that_pays() -> None:
    (found,) = find_outcomes([arm("uniform_48", SLOW, "uniform"), arm("speed_16", FAST)])
    assert (found.arm, found.rival, found.level) == ("speed_16", "uniform_48", 0.6)
    assert (found.tokens.low, found.rival_tokens.low, found.saving) == (100_000, 200_000, Reach(2.0, 2.0))
    assert str(found) == (
        "speed_16: 100k tokens to 0.60 against 200k of uniform_48 (2.0×, cheaper); ended at 0.683 against 0.513 of "
        "uniform_48 (higher)."
    )
    assert found.paid


def test_a_method_that_loses_is_said_to_lose() -> None:
    (found,) = find_outcomes([arm("uniform_48", FAST, "uniform"), arm("speed_16", SLOW)])
    assert (found.verdict, found.end_verdict, found.paid) == ("costlier", "lower", False)


def test_equal_is_no_difference() -> None:
    (found,) = find_outcomes([arm("uniform_48", FAST, "uniform"), arm("speed_16", FAST)])
    assert (found.verdict, found.end_verdict, found.paid) == ("no clear difference", "no clear difference", False)
    assert found.level == 0.7


def test_sooner_but_lower_has_not_paid() -> None:
    falls = {0: 0.1, 20: 0.62, 40: 0.62, 200: 0.3, 250: 0.3, 300: 0.3}
    (found,) = find_outcomes([arm("uniform_48", FAST, "uniform"), arm("speed_16", falls)])
    assert (found.verdict, found.end_verdict, found.paid) == ("cheaper", "lower", False)


def test_the_level_is_that_of_the_median_saving() -> None:
    """Up to 0.40 half the tokens of the other (50k against 100k), from 0.45 to 0.70 four times as many."""
    other = {0: 0.1, 100: 0.72, 150: 0.72}
    late = {0: 0.1, 50: 0.4, 100: 0.4, 400: 0.72, 450: 0.72}
    (found,) = find_outcomes([arm("uniform_48", other, "uniform"), arm("speed_16", late)])
    assert (found.level, found.saving) == (0.7, Reach(0.25, 0.25)), "one of 2 (0.40), four of a quarter"
    soon = {0: 0.1, 50: 0.62, 100: 0.62, 400: 0.72, 450: 0.72}
    (found,) = find_outcomes([arm("uniform_48", other, "uniform"), arm("speed_16", soon)])
    assert (found.level, found.saving) == (0.6, Reach(2.0, 2.0)), "three of 2, two of a quarter"


def test_few_prompts_cannot_tell_two_ends_apart() -> None:
    """0.683 and 0.513: of 20 prompts two standard errors are 0.30, of 400 they are 0.07."""
    few = {"eval.0.limit": 20}
    (found,) = find_outcomes([arm("uniform_48", SLOW, "uniform", **few), arm("speed_16", FAST, **few)])
    assert found.end_verdict == "no clear difference"


def test_the_rivals_are_the_first_and_the_best_of_the_uniform_arms() -> None:
    early = {0: 0.1, 20: 0.62, 40: 0.62, 60: 0.2, 80: 0.2, 100: 0.2}  # first at 0.60, then down
    arms = [arm("uniform_16", early, "uniform"), arm("uniform_48", SLOW, "uniform"), arm("speed_16", FAST)]
    (found,) = find_outcomes(arms)
    assert (found.rival, found.best) == ("uniform_16", "uniform_48")
    assert found.verdict == "costlier" and found.end_verdict == "higher" and not found.paid


def test_an_arm_that_never_got_there_has_a_bound_only() -> None:
    (found,) = find_outcomes([arm("uniform_48", FLAT, "uniform"), arm("speed_16", FAST)])
    assert found.level == 0.7 and found.verdict == "cheaper"
    assert "against >300k of uniform_48 (>2.0×, cheaper)" in str(found)
    (found,) = find_outcomes([arm("uniform_48", FAST, "uniform"), arm("speed_16", FLAT)])
    assert found.verdict == "costlier" and "speed_16: >300k tokens" in str(found)


def test_nothing_is_said_of_nothing() -> None:
    assert find_outcomes([arm("uniform_48", FLAT, "uniform"), arm("speed_16", FLAT)]) == []
    assert find_outcomes([arm("speed_16", FAST)]) == []
    assert count_informative([arm("speed_16", FAST)]) is None


def test_several_seeds_are_a_median() -> None:
    """The median of 100k, 200k and never is 200k."""
    runs = [run_of(f"speed-{i}", curve, [0.5] * 9, "speed") for i, curve in enumerate((FAST, SLOW, FLAT))]
    (found,) = find_outcomes([arm("uniform_48", SLOW, "uniform"), Arm(name="speed", runs=tuple(runs))])
    assert found.tokens == Reach(200_000, 200_000) and found.end == pytest.approx((0.3 + 0.62 + 0.62) / 3)


def test_informative_prompts_are_counted_in_the_first_update_of_the_larger_uniform_arm() -> None:
    small = run_of("uniform_16", SLOW, [0.9, 0.9, 0.9], "uniform", **{"curriculum.groups": 16})
    large = run_of("uniform_48", SLOW, [0.25, 0.5, 0.75], "uniform")
    found = count_informative([Arm(name="uniform_16", runs=(small,)), Arm(name="uniform_48", runs=(large,))])
    assert found is not None
    assert (found.arm, found.asked, found.at_start, found.over_run) == ("uniform_48", 40, 0.25, 0.5)
    said = str(found)  # Wilson's interval of 10 in 40
    assert "of the 40 asked first" in said and "25% got both right and wrong answers among 16" in said
    assert "95% range 14% to 40%" in said and "over the whole run of uniform_48, 50%" in said


def share(at_start: float) -> Informative:
    return Informative(arm="uniform_48", asked=48, at_start=at_start, over_run=0.5, rollouts=16)


def outcome(ratio: float, end: float) -> Outcome:
    return Outcome(
        arm="speed_16",
        level=0.7,
        tokens=Reach(100.0, 100.0),
        rival="uniform_48",
        rival_tokens=Reach(100 * ratio, 100 * ratio),
        end=end,
        best="uniform_48",
        best_end=0.8,
        prompts=400,
    )


def test_the_two_mixes_together_either_way() -> None:
    found = {"few": (share(0.2), [outcome(2.0, 0.8)]), "many": (share(0.5), [outcome(1.0, 0.7)])}
    assert compare_mixes("speed_16", found) == (
        "speed_16 paid in the mix few, where 20% were informative at the start (tokens: cheaper, 2.0×; end: no clear "
        "difference); it did not pay in the mix many, where 50% were informative at the start (tokens: no clear "
        "difference, 1.0×; end: lower)."
    )
    found = {"few": (share(0.2), [outcome(0.5, 0.8)]), "many": (share(0.5), [outcome(1.0, 0.9)])}
    said = compare_mixes("speed_16", found)
    assert said.startswith("speed_16 did not pay in the mix few") and "it paid in the mix many" in said
    assert compare_mixes("dapo_16", found) == ""
    assert compare_mixes("speed_16", {"few": (None, []), "many": (share(0.5), [])}) == ""


def test_an_answer_with_a_running_value_shows_its_work(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.toml").write_text("")
    texts = {0: ["#8", "#869"], 1: ["+5=8#8", "#8"], 2: ["+5=8#8", "+1=9#9"], 3: ["+5=8#8", "+1=9#9"]}
    for step, responses in texts.items():
        rows = [{"step": step, "phase": "eval", "response": response} for response in responses]
        rows.append({"step": step, "phase": "train", "response": "#1"})
        path = tmp_path / "rollouts" / f"eval_{step:08d}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = run_of("best", SLOW, [0.5] * 3, "uniform")
    best = Arm(name="best", runs=(RunLog(name="best", folder=tmp_path, settings=run.settings, rows=run.rows),))
    said = describe_elicited("few", [best])
    assert said.startswith("In best (mix few)") and "from 0% to 100% by step 2, where accuracy was 0.62" in said
    assert said.endswith("only the slower climb from there on is new.")
    for step in (1, 2, 3):
        (tmp_path / "rollouts" / f"eval_{step:08d}.jsonl").unlink()
    assert describe_elicited("few", [best]).endswith("from 0% to 0% by step 0, where accuracy was 0.10.")
