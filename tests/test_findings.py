"""The sentences say what the numbers say, whichever way they go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whet.report.arms import Arm, RunLog
from whet.report.formats import Reach
from whet.tools import findings


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
    (found,) = findings.outcomes([arm("uniform_48", SLOW, "uniform"), arm("speed_16", FAST)])
    assert (found.arm, found.rival, found.level) == ("speed_16", "uniform_48", 0.6)
    assert (found.tokens.low, found.rival_tokens.low, found.saving) == (100_000, 200_000, Reach(2.0, 2.0))
    assert str(found) == (
        "speed_16: 100k tokens to 0.60 against 200k of uniform_48 (2.0×, cheaper); ended at 0.683 against 0.513 of "
        "uniform_48 (higher)."
    )
    assert found.paid


def test_a_method_that_loses_is_said_to_lose() -> None:
    (found,) = findings.outcomes([arm("uniform_48", FAST, "uniform"), arm("speed_16", SLOW)])
    assert (found.verdict, found.end_verdict, found.paid) == ("dearer", "lower", False)


def test_equal_is_no_difference() -> None:
    (found,) = findings.outcomes([arm("uniform_48", FAST, "uniform"), arm("speed_16", FAST)])
    assert (found.verdict, found.end_verdict, found.paid) == ("no clear difference", "no clear difference", False)
    assert found.level == 0.7


def test_sooner_but_lower_has_not_paid() -> None:
    falls = {0: 0.1, 20: 0.62, 40: 0.62, 200: 0.3, 250: 0.3, 300: 0.3}
    (found,) = findings.outcomes([arm("uniform_48", FAST, "uniform"), arm("speed_16", falls)])
    assert (found.verdict, found.end_verdict, found.paid) == ("cheaper", "lower", False)


def test_the_level_is_that_of_the_median_saving() -> None:
    """Up to 0.40 half the tokens of the other (50k against 100k), from 0.45 to 0.70 four times as many."""
    other = {0: 0.1, 100: 0.72, 150: 0.72}
    late = {0: 0.1, 50: 0.4, 100: 0.4, 400: 0.72, 450: 0.72}
    (found,) = findings.outcomes([arm("uniform_48", other, "uniform"), arm("speed_16", late)])
    assert (found.level, found.saving) == (0.7, Reach(0.25, 0.25)), "one of 2 (0.40), four of a quarter"
    soon = {0: 0.1, 50: 0.62, 100: 0.62, 400: 0.72, 450: 0.72}
    (found,) = findings.outcomes([arm("uniform_48", other, "uniform"), arm("speed_16", soon)])
    assert (found.level, found.saving) == (0.6, Reach(2.0, 2.0)), "three of 2, two of a quarter"


def test_few_prompts_cannot_tell_two_ends_apart() -> None:
    """0.683 and 0.513: of 20 prompts two standard errors are 0.30, of 400 they are 0.07."""
    few = {"eval.0.limit": 20}
    (found,) = findings.outcomes([arm("uniform_48", SLOW, "uniform", **few), arm("speed_16", FAST, **few)])
    assert found.end_verdict == "no clear difference"


def test_the_rivals_are_the_first_and_the_best_of_the_uniform_arms() -> None:
    early = {0: 0.1, 20: 0.62, 40: 0.62, 60: 0.2, 80: 0.2, 100: 0.2}  # first at 0.60, then down
    arms = [arm("uniform_16", early, "uniform"), arm("uniform_48", SLOW, "uniform"), arm("speed_16", FAST)]
    (found,) = findings.outcomes(arms)
    assert (found.rival, found.best) == ("uniform_16", "uniform_48")
    assert found.verdict == "dearer" and found.end_verdict == "higher" and not found.paid


def test_who_never_got_there_has_a_bound_only() -> None:
    (found,) = findings.outcomes([arm("uniform_48", FLAT, "uniform"), arm("speed_16", FAST)])
    assert found.level == 0.7 and found.verdict == "cheaper"
    assert "against >300k of uniform_48 (>2.0×, cheaper)" in str(found)
    (found,) = findings.outcomes([arm("uniform_48", FAST, "uniform"), arm("speed_16", FLAT)])
    assert found.verdict == "dearer" and "speed_16: >300k tokens" in str(found)


def test_nothing_is_said_of_nothing() -> None:
    assert findings.outcomes([arm("uniform_48", FLAT, "uniform"), arm("speed_16", FLAT)]) == []
    assert findings.outcomes([arm("speed_16", FAST)]) == []
    assert findings.informative([arm("speed_16", FAST)]) is None


def test_several_seeds_are_a_median() -> None:
    """Of 100k, 200k and never: 200k."""
    runs = [run_of(f"speed-{i}", curve, [0.5] * 9, "speed") for i, curve in enumerate((FAST, SLOW, FLAT))]
    (found,) = findings.outcomes([arm("uniform_48", SLOW, "uniform"), Arm(name="speed", runs=tuple(runs))])
    assert found.tokens == Reach(200_000, 200_000) and found.end == pytest.approx((0.3 + 0.62 + 0.62) / 3)


def test_informative_prompts_are_counted_in_the_first_update_of_the_larger_uniform_arm() -> None:
    small = run_of("uniform_16", SLOW, [0.9, 0.9, 0.9], "uniform", **{"curriculum.groups": 16})
    large = run_of("uniform_48", SLOW, [0.25, 0.5, 0.75], "uniform")
    found = findings.informative([Arm(name="uniform_16", runs=(small,)), Arm(name="uniform_48", runs=(large,))])
    assert found is not None
    assert (found.arm, found.asked, found.at_start, found.over_run) == ("uniform_48", 40, 0.25, 0.5)
    said = str(found)  # Wilson's interval of 10 in 40
    assert "of the 40 asked first" in said and "25% got both right and wrong answers among 16" in said
    assert "95% range 14% to 40%" in said and "over the whole run of uniform_48, 50%" in said


def share(at_start: float) -> findings.Informative:
    return findings.Informative(arm="uniform_48", asked=48, at_start=at_start, over_run=0.5, rollouts=16)


def outcome(ratio: float, end: float) -> findings.Outcome:
    return findings.Outcome(
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
    assert findings.across("speed_16", found) == (
        "speed_16 paid in the mix few, where 20% were informative at the start (tokens: cheaper, 2.0×; end: no clear "
        "difference); it did not pay in the mix many, where 50% were informative at the start (tokens: no clear "
        "difference, 1.0×; end: lower)."
    )
    found = {"few": (share(0.2), [outcome(0.5, 0.8)]), "many": (share(0.5), [outcome(1.0, 0.9)])}
    said = findings.across("speed_16", found)
    assert said.startswith("speed_16 did not pay in the mix few") and "it paid in the mix many" in said
    assert findings.across("dapo_16", found) == ""
    assert findings.across("speed_16", {"few": (None, []), "many": (share(0.5), [])}) == ""


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
    said = findings.elicited("few", [best])
    assert said.startswith("In best (mix few)") and "from 0% to 100% by step 2, where accuracy was 0.62" in said
    assert said.endswith("only the slower climb from there on is new.")
    for step in (1, 2, 3):
        (tmp_path / "rollouts" / f"eval_{step:08d}.jsonl").unlink()
    assert findings.elicited("few", [best]).endswith("from 0% to 0% by step 0, where accuracy was 0.10.")
