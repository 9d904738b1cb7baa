"""Whole runs with rollout.engine = "vllm": real vLLM, on a CPU."""

from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from small_run import Silent, Stop, even_digits, small_config

from whet.rollout.vllm_fit import version_of_vllm

if version_of_vllm() is None:  # not importorskip: the import alone takes long
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

from whet.api import run_recipe
from whet.errors import Diverged, WhetError
from whet.recipe import load_config
from whet.rollout.vllm import VllmEngine
from whet.run import read_metrics

VLLM = ('rollout.engine="vllm"', 'model.device="cpu"', "model.hidden=64")  # heads of 32 numbers
WARM = "warm_start=[{steps=3, batch=4, lr=1e-2}]"  # weights change before the first update, too
CLOSE = 1e-4


def run(
    folder: Path, *sets: str, resume: bool = False, watcher: Silent | None = None
) -> list[dict[str, Any]]:
    settings = small_config(*VLLM, *sets)
    run_recipe(settings, folder, watcher=watcher or Silent(), resume=resume, reward=even_digits)
    return read_metrics(folder)


def mismatches(rows: list[dict[str, Any]]) -> list[float]:
    return [row["learn/mismatch"] for row in rows if "learn/mismatch" in row]


def test_a_run_is_on_policy_and_goes_on_after_an_interrupt(tmp_path: Path) -> None:
    watcher = Stop(after=2)
    rows = run(tmp_path / "run", WARM, watcher=watcher)
    assert rows[-1]["step"] == 2
    assert any("vLLM 0." in text and "no keyed noise" in text for text in watcher.messages)
    rows = run(tmp_path / "run", WARM, resume=True)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert len(mismatches(rows)) == 5 and max(mismatches(rows)) < CLOSE
    assert all(row["learn/grad_norm"] > 0 for row in rows[1:]), (
        "weights have changed between the updates"
    )
    assert rows[-1]["rollout/tokens"] > 0 and rows[-1]["version"] == 5


@pytest.mark.parametrize("on_update", ["cut", "recompute", "keep"])
def test_a_stream_runs_over_updates(tmp_path: Path, on_update: str) -> None:
    age = "curriculum.max_age=0" if on_update == "cut" else "curriculum.max_age=2"
    sets = [
        'rollout.mode="stream"',
        f'rollout.on_update="{on_update}"',
        age,
        "steps=4",
        "rollout.slots=6",
    ]
    rows = run(tmp_path / "run", *sets)
    assert rows[-1]["step"] == 4 and all(row["rollout/occupied"] > 0 for row in rows[1:])
    if on_update == "cut":
        assert max(mismatches(rows)) < CLOSE


def test_a_run_ends_where_an_update_does_not_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nets: what vLLM holds is compared, and so are the log-probs that come back."""
    from whet.rollout import vllm

    update = VllmEngine.update

    def lost(self: VllmEngine, version: int) -> None:
        if version < 3:
            return update(self, version)
        self.version, self.stale = version, False

    monkeypatch.setattr(VllmEngine, "update", lost)
    monkeypatch.setattr(VllmEngine, "take_back", lambda self: None)
    with pytest.raises(
        Diverged,
        match=r"Step 4: log-probs of the engine and the learner drift apart .*--resume goes",
    ):
        run(tmp_path / "drifts", "learn.lr=0.5", "learn.warmup=0", "save.every=100")
    monkeypatch.undo()
    compared = 0

    def differs(theirs: Any, ours: Any) -> str | None:
        nonlocal compared
        compared += 1
        return "model.norm.weight" if compared == 3 else None

    monkeypatch.setattr(vllm, "first_difference", differs)
    with pytest.raises(
        WhetError, match=r"vLLM does not hold the weights it was sent: model\.norm\.weight differs"
    ):
        run(tmp_path / "differs")


@pytest.mark.slow
def test_the_demo_task_is_learnt_as_by_the_native_engine(tmp_path: Path) -> None:
    assert_learns_as_native(tmp_path)


def assert_learns_as_native(folder: Path, *others: str, seeds: int = 3, says: str = "vLLM") -> None:
    """Chains of operations, from one warm start: in the steep part of the curve the accuracy that vLLM's rollouts lead
    to lies within the spread of the native engine's seeds, and in the end both solve the task. others: settings of the
    runs with vLLM, which say `says`."""

    def train(name: str, *sets: str) -> list[float]:
        small = [
            'model.device="cpu"',
            "eval.0.limit=200",
            "save.every=100",
            "judge.timeout_s=120",
            *sets,
        ]
        said = Silent()
        run_recipe(load_config(Path("recipes/chain.toml"), small), folder / name, watcher=said)
        assert any(says in line for line in said.messages) == name.startswith("vllm"), said.messages
        rows = read_metrics(folder / name)
        assert (
            max([0.0, *(row["learn/mismatch_max"] for row in rows if row.get("learn/tokens"))])
            < CLOSE
        )
        return [row[key] for row in rows if (key := "eval/held_out/accuracy") in row]

    (begin,) = train("base", "steps=0")
    base = max((folder / "base" / "checkpoints").glob("step_*"))
    learnt: dict[str, list[list[float]]] = {}
    for engine, own, count in (("native", (), 3), ("vllm", others, seeds)):
        sets = [
            f'model.name="{base}"',
            "warm_start=[]",
            "steps=8",
            f'rollout.engine="{engine}"',
            *own,
        ]
        learnt[engine] = [train(f"{engine}-{seed}", *sets, f"seed={seed}") for seed in range(count)]
    assert begin < 0.3
    for mine, theirs in zip(learnt["vllm"], learnt["native"], strict=seeds == 3):
        assert abs(mine[0] - theirs[0]) <= 0.01, "the same weights and prompts, greedily"
    for place in (1, 2):  # after four updates and after eight
        native, vllm = (
            [scores[place] for scores in learnt[engine]] for engine in ("native", "vllm")
        )
        # of seeds, of 200 prompts
        noise = max(stdev(native), (fmean(native) * (1 - fmean(native)) / 200) ** 0.5)
        assert abs(fmean(vllm) - fmean(native)) <= 3 * noise, (native, vllm)
    assert min(scores[2] for scores in learnt["vllm"]) > 0.9
