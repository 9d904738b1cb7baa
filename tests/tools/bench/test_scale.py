"""`whet bench scale`: sums worked out by hand, what holds for every layout, stored measurements, and bad input."""

import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet import cli
from whet.tools.bench.rollout import CELLS
from whet.tools.bench.scale import (
    Layout,
    LengthDraws,
    ScaleInputs,
    Simulation,
    best_split,
    read_inputs,
    simulate,
    study,
)

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def plain(**changes: Any) -> ScaleInputs:
    """A token takes 10 ms whatever the batch, a trained token 1 ms, and nothing else takes any time."""
    nothing = {"prompt_ms": 0.0, "update_ms": 0.0, "host_ms": 0.0, "weights_gb": 0.0, "failures": 0.0, "signal": 1.0}
    base = {"decode_ms": {1: 10.0}, "train_tokens_per_s": 1000.0, "groups": 1, "rollouts": 1, "restart_s": 2.0}
    return read_inputs().model_copy(update={**nothing, **base, **changes})


def by_unit(*lengths: int) -> Callable[[int, int], list[int]]:
    """All rollouts of a unit are of one length; the last one given goes for all that follow."""
    return lambda unit, count: [lengths[min(unit, len(lengths) - 1)]] * count


# ---- one worker


@pytest.mark.parametrize(
    ("changes", "step_s", "idle_s"),
    [
        ({}, 1.0 + 0.4, 0.0),  # 100 steps of 10 ms; 4 rollouts of 100 tokens at 1 ms
        ({"slots": 2}, 2.0 + 0.4, 0.0),  # two rounds
        ({"decode_ms": {1: 10.0, 5: 14.0}}, 1.3 + 0.4, 0.0),  # 13 ms with 4 rows
        ({"prompt_ms": 50.0}, 0.1 + 1.0 + 0.4, 0.0),  # two prompts are read, one for each group
        ({"host_ms": 100.0, "update_ms": 200.0}, 1.0 + 0.1 + 0.2 + 0.4, 0.1),
        ({"signal": 0.5}, 1.0 + 0.4, 0.0),  # twice as many rows at once, of which half trains
        ({"signal": 0.5, "slots": 4}, 2.0 + 0.4, 0.0),
    ],
)
def test_one_worker_with_a_constant_length(changes: dict[str, Any], step_s: float, idle_s: float) -> None:
    found = Simulation(plain(**{"groups": 2, "rollouts": 2, **changes}), Layout(gpus=1), by_unit(100)).run(3)
    assert found.step_s == pytest.approx(step_s)
    assert found.idle_share == pytest.approx(idle_s / step_s)


def test_a_row_is_faster_when_it_is_left_alone() -> None:
    inputs = plain(groups=2, decode_ms={1: 10.0, 2: 12.0})
    found = Simulation(inputs, Layout(gpus=1), by_unit(100, 300)).run(1)
    assert found.step_s == pytest.approx(100 * 0.012 + 200 * 0.010 + 0.4)


def test_a_freed_slot_is_filled_in_mid_flight() -> None:
    """Slots for two of three: 100 and 300 begin, and the third, of 300, follows the short one: 1 + 3 s."""
    found = Simulation(plain(groups=3, slots=2), Layout(gpus=1), by_unit(100, 300)).run(1)
    assert found.step_s == pytest.approx(4.0 + 0.7)


# ---- several


def test_idle_share_of_two_workers_with_two_lengths() -> None:
    """1 s and 3 s of decoding, then 400 tokens by two learners: 0.2 s. The first waits for 2 of its 3.2 s."""
    found = Simulation(plain(groups=2), Layout(gpus=2), by_unit(100, 300)).run(1)
    assert found.step_s == pytest.approx(3.2)
    assert found.idle_share == pytest.approx(2.0 / 6.4)
    assert found.spare_s == pytest.approx(2.0)


def test_gradients_are_added_up() -> None:
    """2 (L - 1) / L * 2 * 3 GB at 6 GB/s: 1 s for two learners."""
    found = Simulation(plain(groups=2, weights_gb=3.0, reduce_gb_s=6.0), Layout(gpus=2), by_unit(100)).run(1)
    assert found.step_s == pytest.approx(1.0 + 0.1 + 1.0)


def test_weights_are_published_in_rounds() -> None:
    """17 workers are three nodes of 8: one gets the weights, then the other two. 2 rounds of 10 GB at 5 GB/s."""
    inputs = plain(weights_gb=10.0, publish_gb_s=5.0)
    found = Simulation(inputs, Layout(gpus=18, learners=1), by_unit(100)).run(3)
    assert found.step_s == pytest.approx(1.0 + 0.1 + 4.0)


def test_a_screening_asks_for_less_and_trains_on_as_much() -> None:
    """Signal 0.5: 2 groups of 8, or 2 screenings of 4 and the other 4; one slot each, so seconds count rollouts."""
    inputs = plain(rollouts=8, n_init=4, slots=1, signal=0.5, signal_screened=0.5, signal_allocated=1.0)
    seconds = {
        name: Simulation(inputs, layout, by_unit(100)).run(2).step_s
        for name, layout in {
            "plain": Layout(gpus=1),
            "screening": Layout(gpus=1, screening=True),
            "allocation": Layout(gpus=1, allocation=True),
        }.items()
    }
    assert seconds == pytest.approx({"plain": 16.8, "screening": 12.8, "allocation": 8.8})


def test_the_share_of_prompts_that_teach_holds_on_average() -> None:
    """Signal 0.4: 2.5 groups for one that trains; 10 that train take 25."""
    simulation = Simulation(plain(groups=10, signal=0.4), Layout(gpus=1), by_unit(100))
    simulation.run(1)
    assert simulation.finished == 25 * 100


def test_speculation_by_acceptance_and_rows() -> None:
    inputs = plain(speculation={0.5: {1: 2.0, 3: 1.0}})
    one = Simulation(inputs, Layout(gpus=1, acceptance=0.5), by_unit(100)).run(1)
    two = Simulation(inputs.model_copy(update={"groups": 2}), Layout(gpus=1, acceptance=0.25), by_unit(100)).run(1)
    assert one.step_s == pytest.approx(0.5 + 0.1)
    assert two.step_s == pytest.approx(1.0 / 1.25 + 0.2)  # half of the gain at two rows, which is 1.5


# ---- failures


def test_a_worker_that_fails_loses_what_it_wrote() -> None:
    """At 0.5 s its 50 tokens are lost, and its rollout begins again beside the other one: it ends at 1.5 s."""
    simulation = Simulation(plain(groups=2), Layout(gpus=3, learners=1), by_unit(100), faults=[(0.5, 0)])
    found = simulation.run(1)
    assert found.step_s == pytest.approx(1.5 + 0.2)
    assert simulation.lost == pytest.approx(50) and simulation.finished == 200
    assert found.idle_share == pytest.approx(1 - (0.5 + 1.5 + 0.2) / (3 * 1.7))


def test_no_update_begins_without_a_gpu_that_trains() -> None:
    """The same with GPUs that generate and train in turn: the update waits until 0.5 + 2 s."""
    found = Simulation(plain(groups=2), Layout(gpus=2), by_unit(100), faults=[(0.5, 0)]).run(1)
    assert found.step_s == pytest.approx(2.5 + 0.1)


def test_a_learner_that_fails_begins_its_update_again() -> None:
    """The update runs from 1.0 to 1.1; the learner is back at 1.05 + 2 s and takes 0.1 s again."""
    found = Simulation(plain(), Layout(gpus=2, learners=1), by_unit(100), faults=[(1.05, 1)]).run(1)
    assert found.step_s == pytest.approx(3.15)


def test_rollouts_wait_where_no_worker_is_left() -> None:
    found = Simulation(plain(), Layout(gpus=2, learners=1), by_unit(100), faults=[(0.4, 0)]).run(1)
    assert found.step_s == pytest.approx(2.4 + 1.0 + 0.1)


def test_failures_come_as_often_as_they_should() -> None:
    """360 per GPU and hour and 5 GPUs: one in 2 s. Each takes its GPU away for a moment only."""
    inputs = plain(failures=360.0, restart_s=0.0, groups=4)
    simulation = Simulation(inputs, Layout(gpus=5, learners=1), by_unit(20))
    simulation.run(2000)
    assert simulation.faults == pytest.approx(simulation.now * 0.5, rel=0.15)


# ---- stream


@pytest.mark.parametrize(
    ("rate", "max_age", "step_s"),
    [
        (200.0, None, 1.0 + 0.5),
        (200.0, 0, 1.0 + 0.5),
        (200.0, 1, 1.0),  # the worker never waits
        (50.0, 0, 1.0 + 2.0),
        (50.0, 1, 2.0),  # the learner never waits
    ],
)
def test_stream_hides_the_shorter_of_both(rate: float, max_age: int | None, step_s: float) -> None:
    layout = Layout(gpus=2, learners=1, max_age=max_age)
    found = Simulation(plain(slots=1, train_tokens_per_s=rate), layout, by_unit(100)).run(12, 4)
    assert found.step_s == pytest.approx(step_s)
    assert found.age_mean == (max_age or 0)


@pytest.mark.parametrize(("max_age", "step_s"), [(None, 4.0), (0, 3.0)])
def test_stream_asks_as_slots_become_free(max_age: int | None, step_s: float) -> None:
    """3 s, then three of 1 s, two workers with a slot each: handed out at once, or one after the other."""
    layout = Layout(gpus=2, max_age=max_age)
    found = Simulation(plain(groups=4, slots=1), layout, by_unit(300, 100)).run(1)
    assert found.step_s == pytest.approx(step_s + 0.3)


def test_stream_waits_for_a_group_that_would_be_too_old() -> None:
    """The first rollout takes 10 s, the others 1 s. Update 1 may pass it, update 2 must not: age 2 is too old. By then
    one more has been written, which trains at once."""
    layout = Layout(gpus=3, learners=1, max_age=1)
    simulation = Simulation(plain(slots=1, train_tokens_per_s=1e9), layout, by_unit(1000, 100))
    simulation.run(2)
    assert simulation.now == pytest.approx(10.0) and simulation.ages[:3] == [0, 1, 1]


def test_stream_of_workers_that_train_pauses_them() -> None:
    """One GPU does 1 s of decoding and 0.1 s of training for each update, whatever the age."""
    found = Simulation(plain(slots=1), Layout(gpus=1, max_age=2), by_unit(100)).run(12, 4)
    assert found.step_s == pytest.approx(1.1) and found.idle_share == pytest.approx(0.0)


# ---- what holds always

LAYOUTS = st.builds(
    lambda workers, learners, max_age, screening, acceptance: Layout(
        gpus=workers + learners, learners=learners, max_age=max_age, screening=screening, acceptance=acceptance
    ),
    st.integers(1, 5),
    st.integers(0, 3),
    st.none() | st.integers(0, 3),
    st.booleans(),
    st.sampled_from([0.0, 0.5]),
)
WORKS = st.fixed_dictionaries(
    {
        "groups": st.integers(1, 4),
        "rollouts": st.integers(2, 4),
        "n_init": st.just(1),
        "slots": st.integers(1, 6),
        "signal": st.sampled_from([0.3, 0.5, 1.0]),
        "decode_ms": st.sampled_from([{1: 10.0}, {1: 10.0, 4: 16.0}]),
        "host_ms": st.sampled_from([0.0, 30.0]),
        "prompt_ms": st.sampled_from([0.0, 30.0]),
        "weights_gb": st.sampled_from([0.0, 5.0]),
    }
)
FAULTS = st.lists(st.tuples(st.floats(0, 10), st.integers(0, 7)), max_size=3)


@settings(max_examples=150, deadline=None)
@given(LAYOUTS, WORKS, FAULTS, st.integers(0, 99))
def test_no_token_is_lost_and_no_rollout_too_old(
    layout: Layout, work: dict[str, Any], faults: Sequence[tuple[float, int]], seed: int
) -> None:
    inputs = plain(**work, lengths=[(0.0, 1.0), (0.9, 30.0), (1.0, 120.0)])
    asked: dict[int, int] = {}
    drawn = LengthDraws(inputs, seed)

    def lengths(unit: int, count: int) -> list[int]:
        asked[unit] = sum(drawn(unit, count))
        return drawn(unit, count)

    simulation = Simulation(inputs, layout, lengths, [(at, gpu % layout.gpus) for at, gpu in faults])
    found = simulation.run(4)
    # Tokens by the rates of the workers are those that have ended, that are under way, and that were lost.
    rows = [(n, mark - w.written) for w in simulation.workers for mark, n, _ in w.rows]
    under_way = sum(n - left for n, left in rows)
    assert simulation.generated == pytest.approx(simulation.finished + under_way + simulation.lost)
    # Every token that was asked has been written, is under way or waits.
    waiting = sum(n for w in simulation.workers for n, _ in w.waiting)
    waiting += sum(sum(piece) for _, piece in simulation.pieces)
    assert sum(asked.values()) == simulation.finished + sum(n for n, _ in rows) + waiting
    assert max(simulation.ages) <= (layout.max_age or 0) and min(simulation.ages) >= 0
    assert len(simulation.ages) >= 4 * inputs.groups
    assert -1e-9 <= found.idle_share < 1 and found.step_s > 0


@settings(max_examples=60, deadline=None)
@given(LAYOUTS, WORKS, st.integers(0, 99))
def test_stream_without_age_is_barrier(layout: Layout, work: dict[str, Any], seed: int) -> None:
    inputs = plain(**{**work, "slots": 64}, lengths=[(0.0, 1.0), (1.0, 90.0)])
    both = [
        Simulation(
            inputs, Layout(gpus=layout.gpus, learners=layout.learners, max_age=age), LengthDraws(inputs, seed)
        ).run(4)
        for age in (None, 0)
    ]
    assert both[0].step_s == pytest.approx(both[1].step_s)
    assert both[0].idle_share == pytest.approx(both[1].idle_share)


def test_more_gpus_are_faster_until_the_tail_is_all() -> None:
    inputs = read_inputs(sets=["failures=0", "weights_gb=0", "groups=32"])
    steps = [simulate(inputs, Layout(gpus=2**i), LengthDraws(inputs, 0), 2).step_s for i in range(9)]
    assert all(more <= fewer for fewer, more in itertools.pairwise(steps))
    tail = inputs.lengths[-1][1] * min(inputs.decode_ms.values()) / 1e3
    assert steps[0] > 4 * steps[-1] and steps[-1] == pytest.approx(tail, rel=0.15)


def test_the_best_split_where_both_sides_take_as_long() -> None:
    """R workers write R rollouts per second, 24 are wanted, and L learners train on 300 L tokens per second of 2,400:
    4 s and 4 s for 6 and 2."""
    inputs = plain(groups=24, slots=1, train_tokens_per_s=300.0, lengths=[(0.0, 100.0), (1.0, 100.0)], max_age=1)
    arms = study(inputs, 8, None, 0)["arms"]
    assert arms["stream, split"]["learners"] == 2
    assert arms["stream, split"]["step_s"] == pytest.approx(4.0)
    assert arms["barrier"]["step_s"] == pytest.approx(3.0 + 1.0)  # all 8 do both: 24 / 8 and 2,400 / 2,400
    assert arms["barrier, split"]["step_s"] == pytest.approx(5 + 8 / 3)
    # By hand, of 1 to 7 learners: 12, 8, 7.67, 8, 9.6, 13.3 and 25.1 s; a worker writes whole rollouts.
    assert min(math.ceil(24 / (8 - n)) + 8 / n for n in range(1, 8)) == 5 + 8 / 3
    assert study(inputs, 8, 5, 0)["arms"]["stream, split"]["step_s"] == pytest.approx(24 / 3)


@pytest.mark.parametrize("work", [20, 124, 511, 1000])
def test_the_search_finds_the_valley_wherever_it_is(work: int) -> None:
    def seconds(learners: int) -> float:
        return (1024 - work) / (1024 - learners) + work / learners  # both are smooth: the valley is flat

    best = min(seconds(learners) for learners in range(1, 1024))
    assert seconds(best_split(seconds, 1024)) < 1.001 * best


def test_spot_training_gains_by_idle_time_alone() -> None:
    """Idle: 2 s of one worker. A lesson of 4 s gets half of what would raise the acceptance from 0.2 to 0.6."""
    inputs = plain(groups=2, acceptance=0.2, acceptance_trained=0.6, speculation={1.0: {1: 1.0}}, lesson_s=4.0)
    inputs = inputs.model_copy(update={"lengths": [(0.0, 100.0), (1.0, 100.0)]})
    arms = study(inputs, 2, 1, 0)["arms"]
    assert arms["speculation, spot"]["acceptance"] == pytest.approx(0.2)  # equal lengths: nobody waits
    inputs = inputs.model_copy(update={"host_ms": 1000.0})  # 1 s in which both GPUs wait
    arms = study(inputs, 2, 1, 0)["arms"]
    assert arms["speculation"]["spare_s"] == pytest.approx(2.0)
    assert arms["speculation, spot"]["acceptance"] == pytest.approx(0.2 + 0.5 * 0.4)


# ---- against stored measurements on an H200, of which only the figures of scale.toml were used


def test_the_long_tail_on_one_gpu() -> None:
    """256 requests of one to 2,048 tokens: 4.26 s were measured."""
    cells = json.loads((RESULTS / "rollout_gpu.json").read_text())["shapes"]["1.5b"]["cells"]
    _, lengths = CELLS["tail"].work(vocab=100, seed=0, round_=0)
    quick = {"host_ms": 0.0, "update_ms": 0.0, "train_tokens_per_s": 1e12, "failures": 0.0, "signal": 1.0}
    inputs = read_inputs().model_copy(update={**quick, "groups": 256, "rollouts": 1, "slots": 256})
    found = Simulation(inputs, Layout(gpus=1), lambda unit, count: [lengths[unit % 256]]).run(1)
    assert found.step_s == pytest.approx(cells["tail"]["peers"]["whet"]["seconds"]["median"], rel=0.15)


@pytest.mark.parametrize(("arm", "max_age"), [("barrier", None), ("stream, keep, 2 ahead", 2)])
def test_barrier_and_stream_with_a_learner_on_one_gpu(arm: str, max_age: int | None) -> None:
    stored = json.loads((RESULTS / "stream_learner.json").read_text())
    inputs = read_inputs("135m", sets=["signal=1", "failures=0", "groups=64", "slots=512"])
    found = Simulation(inputs, Layout(gpus=1, max_age=max_age), LengthDraws(inputs, 0)).run(8)
    assert found.step_s == pytest.approx(stored["arms"][arm]["seconds"] / 8, rel=0.15)


# ---- the command


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["whet", "bench", "scale", *words])
    monkeypatch.setenv("COLUMNS", "200")
    try:
        cli.main()
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def test_the_tables_and_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--gpus", "1, 4", "--set", "groups=4", "--set=slots=16", "--out")
    assert call(monkeypatch, *words, str(tmp_path / "a")) == 0
    shown = capsys.readouterr().out
    named = re.search(r"are listed in (\S+)\.$", " ".join(shown.split()))
    assert named and Path(named[1]).read_text().startswith("# The inputs of `whet bench scale`")
    assert "1 GPUs" in shown and "4 GPUs" in shown and "speculation, spot" in shown
    stored = json.loads((tmp_path / "a" / "scale.json").read_text())
    assert stored["inputs"]["groups"] == 4 and [size["gpus"] for size in stored["sizes"]] == [1, 4]
    alone, four = (size["arms"] for size in stored["sizes"])
    assert alone.keys() == {name for name in four if "split" not in name}  # one GPU cannot be split
    assert f"{four['stream']['step_s']:.2f} ({four['stream']['idle_share']:.0%})" in shown
    assert f"{four['stream, split']['step_s']:.2f}" in shown
    assert four["all"]["gain"] == pytest.approx(four["barrier"]["step_s"] / four["all"]["step_s"])
    assert call(monkeypatch, *words, str(tmp_path / "b")) == 0  # from a seed: the same again
    assert (tmp_path / "b" / "scale.json").read_text() == (tmp_path / "a" / "scale.json").read_text()


def test_inputs_of_a_file(tmp_path: Path) -> None:
    own, listed = tmp_path / "own.toml", tmp_path / "own.json"
    own.write_text("slots = 7\ndecode_ms = { 1 = 5.0 }\n")
    listed.write_text('{"slots": 8}')
    assert read_inputs("135m", own, ["slots=9"]).slots == 9
    assert read_inputs("135m", own).decode_ms == {1: 5.0} and read_inputs("135m", own).update_ms == 3.0
    assert read_inputs(path=listed).slots == 8
    copy = tmp_path / "copy.toml"
    copy.write_text((Path(cli.__file__).parent / "tools/bench/scale.toml").read_text())
    assert read_inputs(path=copy) == read_inputs()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "prompt_ms=-1"], '"prompt_ms" is wrong: input should be greater than or equal to 0'),
        (["--set", "decode_ms={1=-2.0}"], '"decode_ms.1" is wrong: input should be greater than 0'),
        (["--set", "decode_ms={}"], '"decode_ms" is wrong'),
        (["--set", "slots=many"], '"slots" is wrong'),
        (["--set", "slotz=1"], 'There is no input "slotz"; there are decode_ms,'),
        (["--set", "lengths=[[0.0, 9.0], [1.0, 3.0]]"], '"lengths" is wrong: ranks and lengths must not fall'),
        (["--set", "n_init=8"], "must be smaller than a group of 8"),
        (["--set", "failures=1e9", "--gpus", "4"], "no step comes to its end"),
        (["--learners", "8"], "--learners 8 leaves no GPU of 8 to generate"),
        (["--gpus", "8,x"], 'got "8,x"'),
        (["--gpus", "0"], 'got "0"'),
        (["--gpus", ","], 'got ","'),
        (["--shape", "70b"], 'There is no shape "70b"; there are 1.5b, 135m'),
        (["--inputs", "none.toml"], "none.toml cannot be read"),
        (["--inputs", "torn.json"], "torn.json cannot be read"),
        (["--inputs", "list.json"], "list.json cannot be read"),
    ],
)
def test_bad_input(
    words: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torn.json").write_text('{"slots": ')
    (tmp_path / "list.json").write_text("[1, 2]")
    assert call(monkeypatch, *words) == 2
    sentence = capsys.readouterr().err.strip()
    assert sentence.startswith("whet: ") and says in sentence and len(sentence.splitlines()) == 1
    assert not list(tmp_path.rglob("scale*.json"))
