"""judge.where = "workers": judge processes that real Ray actors start. Verdicts are those of the driver's judges."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_run import assert_like, run
from ray_run import MARKS, SPLIT, TEN, cluster, strike_down, whole

from whet import config
from whet.errors import WhetError
from whet.tasks.base import Judgement
from whet.tasks.judge import Judge
from whet.tasks.worker import FarWorker, relay
from whet.types import Prompt, Rollout, Sampling, Trace

pytestmark = [*MARKS, pytest.mark.usefixtures("cluster")]
__all__ = ["cluster", "whole"]

TEXTS = ("yes", "no", "raise", "die", "yes", "hang", "eat", "lie", "yes", "die", "no", "yes")


def hostile(prompt: Any, text: str) -> Any:
    """It stands for a judge that runs what a model wrote."""
    if text == "raise":
        raise ValueError("a judge that fails")
    if text == "die":
        os._exit(3)
    if text == "hang":
        time.sleep(1000)
    if text == "eat":
        return len(bytearray(2**40))
    return Judgement(score=2.0 if text == "lie" else float(text == "yes"), final=text)


def asleep(folder: str, prompt: Any, text: str) -> float:
    """Says that it works, and in which process; the second one that is asked the same ends at once."""
    mark = Path(folder) / text
    if not mark.exists():
        mark.write_text(str(os.getppid()))
        time.sleep(1000)
    return 1.0


def rollouts(*texts: str) -> list[Rollout]:
    out = []
    for index, text in enumerate(texts):
        ids = np.array([ord(c) for c in text], np.int32)
        trace = Trace(
            ids=ids, log_probs=np.zeros(ids.size, np.float32), versions=np.zeros(ids.size, np.int32)
        )
        given: dict[str, Any] = {
            "prompt_id": "p",
            "group_id": 0,
            "index": index,
            "phase": "train",
            "finish": "stop",
        }
        given |= {
            "sampling": Sampling(max_tokens=64),
            "length": ids.size,
            "first_version": 0,
            "last_version": 0,
        }
        out.append(Rollout(**given, trace=trace))
    return out


def pool(judge: Callable[..., Any], start: Any = None, **settings: Any) -> Judge:
    given = config.JudgeSettings(**{"workers": 2, "memory_mb": 256, **settings})
    prompt = Prompt(id="p", text="?", answer="yes", task="test")
    decode: Callable[..., str] = lambda ids: "".join(map(chr, ids))  # noqa: E731
    return Judge(lambda name: prompt, {"test": judge}, given, decode=decode, start=start)


@pytest.fixture
def far() -> Iterator[Callable[..., Judge]]:
    """Makes pools whose processes are started by an actor."""
    from whet.cluster.stations import Benches

    made: list[Any] = []

    def make(judge: Callable[..., Any], **settings: Any) -> Judge:
        benches = Benches(partial(relay, {"test": judge}, 256), 120.0)
        made.append(benches)
        return pool(judge, lambda: FarWorker(*benches.dial()), **settings)

    yield make
    for benches in made:
        benches.end()


@pytest.mark.slow
def test_hostile_texts_get_the_verdicts_of_the_drivers_judges(far: Callable[..., Judge]) -> None:
    with pool(hostile, timeout_s=8) as near, far(hostile, timeout_s=8) as away:
        wanted, found = near.judge(rollouts(*TEXTS)), away.judge(rollouts(*TEXTS))
        counts, same = near.stats(), away.stats()
    for one, other in zip(wanted, found, strict=True):
        for name in ("verdict", "score", "reward", "terms", "final", "note"):
            assert getattr(one, name) == getattr(other, name), (name, one, other)
    assert {r.verdict for r in found} == {"right", "wrong", "unjudged"}
    del counts["judge/seconds"], same["judge/seconds"]
    assert counts == same and counts["judge/timeouts"] == 1 and counts["judge/crashes"] == 2


def test_an_actor_that_is_killed_costs_no_verdict(
    far: Callable[..., Judge], tmp_path: Path
) -> None:
    with far(partial(asleep, str(tmp_path)), workers=1, timeout_s=600) as judge:
        sent = rollouts("one", "two")
        (tmp_path / "two").touch()
        mark = tmp_path / "one"

        def strike() -> None:
            while not (mark.exists() and mark.read_text()):
                time.sleep(0.05)
            # the actor, in the midst of the first
            strike_down(int(mark.read_text()), signal.SIGKILL)

        threading.Thread(target=strike, daemon=True).start()
        assert [r.verdict for r in judge.judge(sent)] == ["right", "right"]
        assert judge.stats()["judge/crashes"] == 0


def test_a_run_is_that_with_judges_beside_the_driver(tmp_path: Path, whole: Path) -> None:
    run(tmp_path / "ray", *TEN, *SPLIT, "judge.where=workers")
    assert_like(whole, tmp_path / "ray")


def test_judges_on_workers_need_workers(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=r'judge\.where = "workers" needs workers in a cluster'):
        run(tmp_path / "run", "judge.where=workers")


@pytest.mark.slow
def test_a_judge_that_nodes_do_not_have_ends_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from whet.cluster.stations import Benches

    (tmp_path / "only_here.py").write_text("def judge(prompt, text): return 1.0")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        import only_here  # type: ignore[import-not-found]

    benches = Benches(partial(relay, {"test": only_here.judge}, 256), 120.0)
    with pytest.raises(
        WhetError, match=r"No judge process can be started: .*No module named 'only_here'"
    ):
        pool(only_here.judge, lambda: FarWorker(*benches.dial()))
