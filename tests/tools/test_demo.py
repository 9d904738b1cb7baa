"""The demo's settings are sound, its base is the one that was tried, and a small demo runs to its page."""

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

from whet.errors import WhetError
from whet.report.arms import Arm, RunLog
from whet.report.formats import Reach
from whet.run import is_in_use
from whet.tools import demo
from whet.tools.demo import (
    arm_recipes,
    check_base,
    conclude,
    count_informative,
    describe_elicited,
    describe_mix,
    find_outcomes,
    has_display,
    mix_table,
    read_demo,
    run_demo,
    times,
    with_mix,
)

SMALL: dict[str, Any] = {
    "sha256": read_demo()["sha256"],
    "arm": {
        "steps": 3,
        "data": [{"task": "chain", "options": {"train_count": 60}}],
        "eval": [
            {
                "task": "chain",
                "options": {"eval_count": 12, "eval_range": "4"},
                "max_tokens": 24,
                "every": 1,
            }
        ],
        "held_out": {"size": 0},
        "rollout": {"context": 64, "max_tokens": 24, "slots": 12},
        "curriculum": {"rollouts": 4, "patience": 200},
    },
    "mixes": {
        "few": {
            "about": "All prompts have four operations.",
            "target": 0.6,
            "mix": {"4": 1.0},
            "arms": {
                "uniform": {"curriculum": {"name": "uniform", "groups": 6}},
                "speed": {"curriculum": {"name": "speed", "groups": 2, "speed": {"n_init": 2}}},
            },
        },
        "many": {
            "about": "Some have three.",
            "target": 0.9,
            "mix": {"4": 0.9, "3": 0.1},
            "arm": {"steps": 2},
            "arms": {
                "speed": {"curriculum": {"name": "speed", "groups": 2, "speed": {"n_init": 2}}}
            },
        },
    },
}


def test_every_arm_has_its_mix_and_no_more_tokens_than_uniform(tmp_path: Path) -> None:
    tree = read_demo()
    recipes = arm_recipes(tree, tmp_path, tmp_path / "base", seed=3)
    for mix, folders in recipes.items():
        assert next(iter(folders)).name == "uniform" and 2 <= len(folders) <= 3
        budgets = [settings.token_budget for settings in folders.values()]
        assert max(budgets) == budgets[0] > 0
        for folder, settings in folders.items():
            assert folder.parent == tmp_path / mix
            assert settings.data[0].options["mix"] == tree["mixes"][mix]["mix"]
            assert settings.seed == 3 and settings.model.name == str(tmp_path / "base")
            assert (
                settings.learn.schedule == "linear"
                and settings.learn.lr == tree["arm"]["learn"]["lr"]
            )


def test_the_base_is_the_one_that_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = read_demo()["sha256"]
    assert (check_base(digest) / "tokenizer.json").is_file()
    with pytest.raises(WhetError, match="missing or changed; install whet again"):
        check_base("0" * 64)
    monkeypatch.setattr(demo, "BASE", tmp_path)
    with pytest.raises(WhetError, match="missing or changed"):
        check_base(digest)


def test_a_mix_takes_the_place_of_another() -> None:
    recipe = {
        "steps": 1,
        "data": [{"task": "chain", "options": {"train_count": 9, "mix": {"1": 0.5, "2": 0.5}}}],
    }
    assert with_mix(recipe, {"3": 1.0})["data"] == [
        {"task": "chain", "options": {"train_count": 9, "mix": {"3": 1.0}}}
    ]
    assert recipe["data"][0]["options"]["mix"] == {"1": 0.5, "2": 0.5}  # type: ignore[index]


def test_a_browser_opens_only_where_there_is_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("CI", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not has_display()
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    assert has_display()
    monkeypatch.setenv("CI", "true")
    assert not has_display()


@pytest.mark.slow
def test_a_small_demo_from_base_to_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(demo, "read_demo", lambda: SMALL)
    run_demo(tmp_path, 0, Console(file=shown, width=200))
    said = shown.getvalue()
    assert "Mix few: All prompts have four operations." in said
    assert said.index("tokens to 0.60") < said.index("speed ") < said.index("Curves and rollouts")
    assert "plain sampling" in said.split("Curves and rollouts")[0].splitlines()[-2]
    page = (tmp_path / "report.html").read_text()
    assert "of the 6 asked first" in page and "in the mix few" in page
    assert (tmp_path / "many" / "speed" / "report.html").is_file()


def test_arms_that_did_not_finish_are_not_judged() -> None:
    unfinished, whole = arm("speed", FAST, steps=9), arm("speed", FAST)
    arms = [arm("uniform", SLOW, "uniform"), unfinished]
    said = describe_mix(SMALL, "few", arms)
    assert (
        "Not judged, since it did not finish: speed stopped at step 4 of 9." in said
        and "speed: it" not in said
    )
    assert "speed: it took" in describe_mix(SMALL, "few", [arms[0], whole])
    assert (
        conclude({"few": arms}, {"few": 0.6})
        == "No arm came to its end, so there is nothing to conclude."
    )
    assert "stopped at step 4 of 9" in shown_table(arms)
    assert find_outcomes([arm("uniform", SLOW, "uniform", steps=9), whole], 0.6) == [], (
        "nothing to compare with"
    )


@pytest.mark.slow
def test_a_demo_that_is_stopped_stops_its_arms(tmp_path: Path) -> None:
    """On SIGTERM, too, which would else leave them to run on without it."""
    endless = {
        "endless": {"steps": 100_000, "curriculum": {"name": "uniform", "groups": 2, "rollouts": 2}}
    }
    tree = SMALL | {"mixes": {"few": SMALL["mixes"]["few"] | {"arms": endless}}}
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


def run_of(
    name: str, curve: dict[int, float], signal: list[float], curriculum: str, **settings: Any
) -> RunLog:
    """curve: thousand tokens -> accuracy; signal: the share at each step after the first row."""
    rows: list[dict[str, Any]] = []
    for step, (tokens, accuracy) in enumerate(curve.items()):
        row = {
            "step": step,
            "tokens_generated": 1000.0 * tokens,
            "time_s": step,
            "eval/held_out/accuracy": accuracy,
        }
        if step:
            row |= {"curriculum/signal_share": signal[step - 1], "curriculum/accepted": 40.0 * step}
        rows.append(row)
    own = {
        "curriculum.name": curriculum,
        "curriculum.rollouts": 16,
        "eval.0.options.eval_count": 400,
    }
    own |= {"steps": len(rows) - 1}
    return RunLog(name=name, folder=Path(name), settings=own | settings, rows=rows)


def arm(
    name: str,
    curve: dict[int, float],
    curriculum: str = "speed",
    signal: float = 0.5,
    **settings: Any,
) -> Arm:
    return Arm(
        name=name, runs=(run_of(name, curve, [signal] * (len(curve) - 1), curriculum, **settings),)
    )


SLOW = {0: 0.1, 100: 0.3, 200: 0.62, 300: 0.62}  # 0.60 after 200k
FAST = {0: 0.1, 50: 0.4, 100: 0.63, 150: 0.7, 200: 0.72}  # 0.60 after 100k, 0.70 after 150k
FLAT = {0: 0.1, 100: 0.12, 300: 0.11}


def shown_table(arms: list[Arm]) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(mix_table("few", arms, 0.6))
    return out.getvalue()


def test_a_method_that_pays() -> None:
    arms = [arm("uniform", SLOW, "uniform", signal=0.12), arm("speed", FAST)]
    (found,) = find_outcomes(arms, 0.6)
    assert (found.tokens.low, found.rival_tokens.low, found.share) == (
        100_000,
        200_000,
        Reach(0.5, 0.5),
    )
    said = "With `speed` the model reached 60% after 100k tokens; plain sampling needed 200k."
    assert found.paid and conclude({"few": arms}, {"few": 0.6}) == said
    lines = [line.split() for line in shown_table(arms).splitlines()]
    assert ["uniform", "200k", "0.513"] in lines and ["speed", "100k", "0.50", "0.683"] in lines


def test_a_method_that_loses_is_said_to_lose() -> None:
    arms = {"few": [arm("uniform", FAST, "uniform"), arm("speed", SLOW)]}
    (found,) = find_outcomes(arms["few"], 0.6)
    assert (found.verdict, found.end_verdict, found.paid) == ("costlier", "lower", False)
    said = "With `speed` the model reached 60% after 200k tokens; plain sampling needed 100k: nothing was saved and it "
    assert conclude(arms, {"few": 0.6}) == said + "ended at 51%, plain sampling at 68%."


def test_equal_is_no_difference() -> None:
    (found,) = find_outcomes([arm("uniform", FAST, "uniform"), arm("speed", FAST)], 0.7)
    assert (found.verdict, found.end_verdict, found.paid) == (
        "no clear difference",
        "no clear difference",
        False,
    )


def test_sooner_but_lower_has_not_paid() -> None:
    falls = {0: 0.1, 20: 0.62, 40: 0.62, 200: 0.3, 250: 0.3, 300: 0.3}
    (found,) = find_outcomes([arm("uniform", FAST, "uniform"), arm("speed", falls)], 0.6)
    assert (found.verdict, found.end_verdict, found.paid) == ("cheaper", "lower", False)


def test_few_prompts_cannot_tell_two_ends_apart() -> None:
    """0.683 and 0.513: of 20 prompts two standard errors are 0.30, of 400 they are 0.07."""
    few = {"eval.0.options.eval_count": 20}
    (found,) = find_outcomes(
        [arm("uniform", SLOW, "uniform", **few), arm("speed", FAST, **few)], 0.6
    )
    assert found.end_verdict == "no clear difference"


def test_an_arm_that_never_got_there_has_a_bound_only() -> None:
    (found,) = find_outcomes([arm("uniform", FLAT, "uniform"), arm("speed", FAST)], 0.7)
    assert found.verdict == "cheaper" and times(found.share) == "less than 0.50"
    assert "(150k against more than 300k, cheaper)" in str(found)
    (found,) = find_outcomes([arm("uniform", FAST, "uniform"), arm("speed", FLAT)], 0.7)
    assert found.verdict == "costlier" and times(found.share) == "more than 2.00"
    (found,) = find_outcomes([arm("uniform", FLAT, "uniform"), arm("speed", FLAT)], 0.7)
    assert found.verdict == "no clear difference" and "neither it nor uniform reached 0.70" in str(
        found
    )
    assert find_outcomes([arm("speed", FAST)], 0.7) == [] and count_informative(
        [arm("speed", FAST)]
    ) == ("", "")


def test_several_seeds_are_a_median() -> None:
    """The median of 100k, 200k and never is 200k."""
    runs = [
        run_of(f"speed-{i}", curve, [0.5] * 9, "speed")
        for i, curve in enumerate((FAST, SLOW, FLAT))
    ]
    (found,) = find_outcomes(
        [arm("uniform", SLOW, "uniform"), Arm(name="speed", runs=tuple(runs))], 0.6
    )
    assert found.tokens == Reach(200_000, 200_000) and found.end == pytest.approx(
        (0.3 + 0.62 + 0.62) / 3
    )


def test_informative_prompts_are_counted_in_the_first_update_of_uniform() -> None:
    run = run_of("uniform", SLOW, [0.25, 0.5, 0.75], "uniform")
    # at first 10 in 40
    over_run, said = count_informative([arm("speed", FAST), Arm(name="uniform", runs=(run,))])
    assert over_run == "50%" and "of the 40 asked first" in said
    assert "25% got both right and wrong answers among 16" in said
    assert "95% range 14% to 40%" in said and "over the whole run of uniform, 50%" in said


def test_an_arm_that_never_got_there_is_said_plainly() -> None:
    def said(rival: dict[int, float], mine: dict[int, float]) -> str:
        return conclude({"few": [arm("uniform", rival, "uniform"), arm("all", mine)]}, {"few": 0.7})

    paid = (
        "With `all` the model reached 70% after 150k tokens; plain sampling needed more than 300k."
    )
    assert said(FLAT, FAST) == paid
    assert (
        said(FAST, FLAT)
        == "With `all` the model did not reach 70% in 300k tokens; plain sampling needed 150k."
    )
    neither = (
        "Neither `all` nor plain sampling reached 70%; it ended at 11%, plain sampling at 11%."
    )
    assert said(FLAT, FLAT) == neither


def test_each_mix_is_one_sentence() -> None:
    arms = {
        "few": [arm("uniform", SLOW, "uniform"), arm("speed", FLAT), arm("all", FAST)],
        "most": [arm("uniform", FAST, "uniform"), arm("all", FAST)],
    }
    said = conclude(arms, {"few": 0.6, "most": 0.6})
    few, most = said.split(". ")
    assert (
        few
        == "With `all` the model reached 60% in the mix few after 100k tokens; plain sampling needed 200k"
    )
    assert most == few.replace("few", "most").replace("200k", "100k") + ": nothing was saved."


def test_an_answer_with_a_running_value_shows_its_work(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.toml").write_text("")
    texts = {
        0: ["#8", "#869"],
        1: ["+5=8#8", "#8"],
        2: ["+5=8#8", "+1=9#9"],
        3: ["+5=8#8", "+1=9#9"],
    }
    for step, responses in texts.items():
        rows = [{"step": step, "phase": "eval", "response": response} for response in responses]
        rows.append({"step": step, "phase": "train", "response": "#1"})
        path = tmp_path / "rollouts" / f"eval_{step:08d}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = run_of("best", SLOW, [0.5] * 3, "uniform")
    best = Arm(
        name="best",
        runs=(RunLog(name="best", folder=tmp_path, settings=run.settings, rows=run.rows),),
    )
    said = describe_elicited("few", [best])
    assert (
        said.startswith("In best (mix few)")
        and "from 0% to 100% by step 2, where accuracy was 0.62" in said
    )
    assert said.endswith("elicits a skill that the base already had.")
    for step in (1, 2, 3):
        (tmp_path / "rollouts" / f"eval_{step:08d}.jsonl").unlink()
    assert describe_elicited("few", [best]).endswith(
        "from 0% to 0% by step 0, where accuracy was 0.10."
    )
