"""The judge pool, with real worker processes and judges that do their worst."""

import json
import mmap
import os
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from types import MappingProxyType

import numpy as np
import pytest

from whet import config
from whet.errors import WhetError
from whet.tasks import worker
from whet.tasks.answers import Matcher
from whet.tasks.base import Judgement
from whet.tasks.formulas import TooSlow
from whet.tasks.judge import Judge
from whet.types import Prompt, Rollout, Sampling, Trace

TASK = "test"


def lookup(prompt_id: str) -> Prompt:
    return Prompt(id=prompt_id, text="?", answer="yes", task=TASK)


def decode(ids) -> str:
    return "".join(map(chr, ids))


def rollout(text: str, index: int = 0, **changes) -> Rollout:
    ids = np.array([ord(c) for c in text], np.int32)
    trace = Trace(
        ids=ids, log_probs=np.zeros(ids.size, np.float32), versions=np.zeros(ids.size, np.int32)
    )
    fields = {
        "prompt_id": "p",
        "group_id": 0,
        "index": index,
        "phase": "train",
        "sampling": Sampling(max_tokens=64),
        "length": ids.size,
        "finish": "stop",
        "first_version": 0,
        "last_version": 0,
        "trace": trace,
    }
    return Rollout(**{**fields, **changes})


def rollouts(*texts: str) -> list[Rollout]:
    return [rollout(text, i) for i, text in enumerate(texts)]


def scribble(garbage: bytes = b"\xff" * 100) -> None:
    """Into every socket the judge can find: its own pipe."""
    for fd in range(3, 256):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, garbage)
        except OSError:
            continue


def half_a_message() -> None:
    scribble(b"\x00\x00\x00\x50abc")
    time.sleep(60)


def plays_for_time() -> None:
    """Tells its parent again and again that it has only just begun."""
    while True:
        begun = worker.Reply(-1, worker.Kind.STARTED, 0.0, time.monotonic(), "").pack()
        scribble(struct.pack("!i", len(begun)) + begun)
        time.sleep(0.05)


def deaf_to_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def spin() -> None:
    while True:
        pass


def recurse() -> None:
    recurse()


def interrupt() -> None:
    raise KeyboardInterrupt


def nameless() -> None:
    class Nameless(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no name")

    raise Nameless


SAYS = {
    "right": 1.0,
    "wrong": 0.0,
    "half": 0.5,
    "true": True,
    "np": np.float32(1.0),
    "np_bool": np.bool_(True),
    "nan": float("nan"),
    "two": 2,
    "minus": -0.1,
    "none": None,
    "string": "1.0",
    "list": [1.0],
    "complex": 1j,
}
DOES = {
    "raise": lambda: 1 / 0,
    "exit": lambda: sys.exit(0),
    "interrupt": interrupt,
    "nameless": nameless,
    "recurse": recurse,
    "memory": lambda: bytearray(2**36),
    "_exit": lambda: os._exit(0),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "close": lambda: os.closerange(3, 256),
    "scribble": scribble,
    "hang": lambda: time.sleep(60),
    "spin": spin,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "deaf": deaf_to_sigterm,
    "half message": half_a_message,
    "plays": plays_for_time,
}


def hostile(prompt: Prompt, response: str):
    assert prompt.answer == "yes"
    if response in SAYS:
        return SAYS[response]
    if response.startswith("slow "):
        time.sleep(float(response[5:]))
        return 1.0
    DOES[response]()
    return 1.0


@pytest.fixture
def pool() -> Iterator[Judge]:
    with make() as judge:
        yield judge


@pytest.fixture
def hasty() -> Iterator[Judge]:
    """For judges that hang; a machine that stalls for less costs no other rollout."""
    with make(timeout_s=3.0) as judge:
        yield judge


def make(judge=hostile, ordered: bool = True, hopeless: int = 0, **settings) -> Judge:
    chosen = config.JudgeSettings(**{"workers": 1, "timeout_s": 30.0, "memory_mb": 512, **settings})
    return Judge(lookup, {TASK: judge}, chosen, decode=decode, ordered=ordered, hopeless=hopeless)


def pids(judge: Judge) -> list[int]:
    return [w.pid for w in judge._workers]


def alive(pid: int) -> bool:
    """A zombie that some other parent has not fetched yet is dead enough."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def soon_dead(pid: int) -> bool:
    for _ in range(3000):
        if not alive(pid):
            return True
        time.sleep(0.02)
    return False


def test_verdict_score_reward_and_trace(pool: Judge) -> None:
    sent = rollouts("right", "wrong", "half", "true", "np", "np_bool")
    pool.send(sent)
    got = pool.receive(wait=True)
    assert [r.verdict for r in got] == ["right", "wrong", "wrong", "right", "right", "right"]
    assert [r.score for r in got] == [r.reward for r in got] == [1.0, 0.0, 0.5, 1.0, 1.0, 1.0]
    assert all(a.trace is b.trace and a.key == b.key for a, b in zip(got, sent, strict=True))
    assert pool.idle and pool.pending() == [] and pool.receive(wait=True) == []
    stats = pool.stats()
    assert (stats["judge/right"], stats["judge/wrong"], stats["judge/unjudged"]) == (4, 2, 0)
    assert stats["judge/seconds"] >= 0 and set(pool.stats().values()) == {0.0}


def test_pass_at_decides() -> None:
    with make(pass_at=0.5) as judge:
        assert [r.verdict for r in judge.judge(rollouts("half", "wrong"))] == ["right", "wrong"]


def test_what_becomes_of_a_response_cut_at_the_limit() -> None:
    cut = [
        rollout("yes", 0, finish="length"),
        rollout("yes", 1, finish="length", phase="eval"),
        rollout("yes", 2),
    ]
    expected = {
        "judge": ["right", "right", "right"],
        "wrong": ["wrong", "right", "right"],
        "mask": ["unjudged", "right", "right"],
    }
    for policy, verdicts in expected.items():
        with make(lambda prompt, response: float(response == "yes"), truncated=policy) as judge:
            judged = judge.judge(cut)
            assert [r.verdict for r in judged] == verdicts, policy
            assert judged[0].reward == {"judge": 1.0, "wrong": 0.0, "mask": None}[policy]
            assert judge.stats()["judge/unjudged"] == 0, "a masked response is no failure"


ERRORS = ["raise", "exit", "interrupt", "nameless", "recurse", "memory"]
NONSENSE = ["nan", "two", "minus", "none", "string", "list", "complex"]
CRASHES = ["_exit", "segfault", "kill", "close", "scribble", "plays"]
HANGS = ["hang", "spin", "stop", "deaf"]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("act", "count"),
    [(a, "errors") for a in ERRORS + NONSENSE]
    + [(a, "crashes") for a in CRASHES]
    + [(a, "timeouts") for a in HANGS],
)
def test_a_bad_judge_costs_one_rollout(
    request: pytest.FixtureRequest, act: str, count: str
) -> None:
    pool = request.getfixturevalue("hasty" if count == "timeouts" else "pool")
    pool.send(rollouts("right", act, "wrong", "right"))
    got = pool.receive(wait=True)
    assert [r.verdict for r in got] == ["right", "unjudged", "wrong", "right"]
    assert (got[1].score, got[1].reward) == (None, None)
    stats = pool.stats()
    assert {name: n for name, n in stats.items() if n and name != "judge/seconds"} == {
        "judge/right": 2,
        "judge/wrong": 1,
        "judge/unjudged": 1,
        f"judge/{count}": 1,
    }
    assert 'prompt "p"' in pool.complaint and pool.complaint.isprintable()


def test_the_complaint_names_the_error(hasty: Judge) -> None:
    hasty.judge(rollouts("raise"))
    assert (
        hasty.complaint
        == 'the judge of task test failed with ZeroDivisionError: division by zero (prompt "p")'
    )
    hasty.judge(rollouts("two"))
    assert "a score is from 0 to 1, not 2" in hasty.complaint
    hasty.judge(rollouts("hang"))
    assert "took longer than 3 s" in hasty.complaint


def test_a_judge_that_raises_is_quoted_at_once_and_once() -> None:
    said: list[str] = []

    def needy(prompt: Prompt, response: str) -> float:
        return float(prompt.meta["nums"][0])

    with make(needy) as judge:
        judge.on_message = said.append
        first, second = judge.judge(rollouts("x", "y"))
    assert said == [
        "The judge of task test failed with KeyError: 'nums' (prompt \"p\"); such a response stays unjudged and trains "
        "nothing."
    ]
    assert first.note == second.note == "failed with KeyError: 'nums'"


def test_a_judge_that_hangs_is_told_at_its_first_timeout() -> None:
    said: list[str] = []
    with make(timeout_s=0.5) as judge:
        judge.on_message = said.append
        first, fine, second = judge.judge(rollouts("hang", "right", "hang"))
        assert said == [
            'The judge of task test took longer than 0.5 s (prompt "p"); such a response stays unjudged and trains '
            "nothing."
        ]
        assert first.note == second.note == "took longer than 0.5 s" and fine.note == ""
        judge.judge(rollouts("raise", "raise"))
        assert len(said) == 2 and "failed with ZeroDivisionError" in said[1], (
            "another fault is told, too"
        )


def test_a_judge_that_gives_up_by_itself_is_no_news() -> None:
    """As whet's own does over hostile answers."""
    said: list[str] = []

    def slow(prompt: Prompt, response: str) -> float:
        raise TooSlow("it takes too long")

    with make(slow) as judge:
        judge.on_message = said.append
        (gave_up,) = judge.judge(rollouts("x"))
    assert said == [] and gave_up.note == "gave up: TooSlow: it takes too long"


@pytest.mark.parametrize(
    ("act", "cure"), [("hang", "raise judge.timeout_s"), ("raise", "repair it")]
)
def test_a_judge_without_any_verdict_is_given_up(act: str, cure: str) -> None:
    """Not before so many responses, and never once there was a verdict."""
    with make(timeout_s=0.2, hopeless=4) as judge:
        assert {r.verdict for r in judge.judge(rollouts(act, act, act))} == {"unjudged"}
        with pytest.raises(WhetError) as error:
            judge.judge(rollouts(act, "right"))
    said = str(error.value)
    assert said.startswith("The judge of task test ")
    assert said.endswith(f'(prompt "p"), and none of the first 4 responses has a verdict: {cure}.')
    with make(timeout_s=0.2, hopeless=4) as judge:
        verdicts = [r.verdict for r in judge.judge(rollouts(act, act, act, "wrong", act, act))]
    assert verdicts == ["unjudged"] * 3 + ["wrong"] + ["unjudged"] * 2


def test_a_complaint_cannot_drive_the_terminal() -> None:
    def loud(prompt: Prompt, response: str) -> float:
        raise ValueError("\x1b]0;title\x07\u202eabc" * 100)

    with make(loud) as judge:
        judge.judge(rollouts("x"))
        assert judge.complaint.isprintable() and len(judge.complaint) < 500


def test_printing_goes_nowhere(capfd) -> None:
    def noisy(prompt: Prompt, response: str) -> float:
        sys.stdout.write("garbage\n")
        sys.stderr.write("garbage\n")
        os.write(1, b"garbage")
        os.write(2, b"garbage")
        assert sys.stdin.read() == "" and os.read(0, 10) == b""
        return 1.0

    with make(noisy) as judge:
        assert judge.judge(rollouts("x"))[0].verdict == "right"
    assert capfd.readouterr() == ("", "")


def test_half_a_message_does_not_stop_the_parent(monkeypatch) -> None:
    monkeypatch.setattr(worker, "STALL_S", 1)
    with make(timeout_s=3.0) as judge:
        got = judge.judge(rollouts("right", "half message", "right"))
    assert [r.verdict for r in got] == ["right", "unjudged", "right"]


def test_a_hung_worker_is_killed_and_replaced(hasty: Judge) -> None:
    (before,) = pids(hasty)
    assert hasty.judge(rollouts("hang"))[0].verdict == "unjudged"
    assert not os.path.exists(f"/proc/{before}")
    assert hasty.judge(rollouts("right"))[0].verdict == "right"
    assert pids(hasty) != [before]


def test_what_the_judge_started_dies_with_it(tmp_path) -> None:
    note = tmp_path / "pid"

    def starts_another(prompt: Prompt, response: str) -> float:
        child = subprocess.Popen(["sleep", "60"])
        note.write_text(str(child.pid))
        child.wait()
        return 1.0

    with make(starts_another, timeout_s=3.0) as judge:
        judge.judge(rollouts("x"))
    assert soon_dead(int(note.read_text()))


def test_a_judge_that_forks_answers_once() -> None:
    def twice(prompt: Prompt, response: str) -> float:
        os.fork()
        return 1.0

    with make(twice, timeout_s=3.0) as judge:
        got = judge.judge(rollouts("a", "b", "c"))
        assert len(got) == 3 and got[0].verdict == "right"


def test_a_judge_that_always_kills_its_process_ends() -> None:
    with make(lambda prompt, response: os._exit(1), workers=2) as judge:
        judge.send(rollouts(*"abcdefghijklmnop"))
        assert {r.verdict for r in judge.receive(wait=True)} == {"unjudged"}
        assert judge.stats()["judge/crashes"] == 16


def test_memory_is_limited_beyond_the_parent() -> None:
    ballast = np.zeros(2**27)  # one gigabyte mapped before the fork does not count

    def takes(prompt: Prompt, response: str) -> float:
        return float(len(bytearray(int(response) * 2**20)) > 0)

    with make(takes, memory_mb=256) as judge:
        got = judge.judge(rollouts("100", "400", "100"))
        assert [r.verdict for r in got] == ["right", "unjudged", "right"]
        assert judge.stats()["judge/errors"] == 1
    assert ballast.size


def test_a_leak_is_forgotten_with_its_worker() -> None:
    kept: list[mmap.mmap] = []

    def leaks(prompt: Prompt, response: str) -> float:
        """Mapped anew each time: a bytearray may find its place in what this process has freed before the fork."""
        try:
            kept.append(mmap.mmap(-1, 100 * 2**20))
        except OSError:
            raise MemoryError from None
        return 1.0

    with make(leaks, memory_mb=350) as judge:
        verdicts = [r.verdict for r in judge.judge(rollouts(*"abcdefgh"))]
    assert verdicts == ["right", "right", "right", "unjudged"] * 2


def test_closures_work() -> None:
    secret = {"yes"}
    with make(lambda prompt, response: response in secret) as judge:
        assert [r.verdict for r in judge.judge(rollouts("yes", "no"))] == ["right", "wrong"]


@pytest.mark.parametrize("workers", [1, 3])
def test_ordered_delivery(workers: int) -> None:
    texts = ["slow 0.1", "right", "_exit", "wrong", "slow 0.05", "raise", "right"]
    with make(workers=workers) as judge:
        judge.send(rollouts(*texts[:4]))
        judge.send([rollout(text, i + 4) for i, text in enumerate(texts[4:])])
        got = judge.receive(wait=False)
    assert [r.index for r in got] == list(range(7))
    assert [r.verdict for r in got] == [
        "right",
        "right",
        "unjudged",
        "wrong",
        "right",
        "unjudged",
        "right",
    ]


@pytest.mark.parametrize(("pace", "busy"), [(1e-4, 1), (1.0, 3)])
def test_little_work_is_not_divided(pace: float, busy: int) -> None:
    with make(workers=3) as judge:
        judge._pace = pace
        judge.send(rollouts(*["slow 0.2"] * 6))
        assert sum(bool(worker.chunk) for worker in judge._workers) == busy
        assert [r.verdict for r in judge.receive(wait=True)] == ["right"] * 6
        assert judge._pace > 0.05, "it is measured"


def test_unordered_delivery() -> None:
    with make(workers=2, ordered=False) as judge:
        judge.send(rollouts("slow 1", "right"))
        first = judge.receive(wait=True)
        assert [r.index for r in first] == [1] and not judge.idle
        assert judge.receive(wait=False) == []
        assert [r.index for r in judge.pending()] == [0]
        assert [r.index for r in judge.receive(wait=True)] == [0]
        assert judge.idle and judge.receive(wait=True) == []


def test_unordered_delivers_everything_once() -> None:
    texts = ["right", "wrong", "raise", "_exit"] * 10
    with make(workers=2, ordered=False) as judge:
        judge.send(rollouts(*texts))
        got: list[Rollout] = []
        while not judge.idle:
            got += judge.receive(wait=True)
    expected = {"right": "right", "wrong": "wrong", "raise": "unjudged", "_exit": "unjudged"}
    assert {r.index: r.verdict for r in got} == {i: expected[text] for i, text in enumerate(texts)}
    assert len(got) == len(texts)


def test_cut_rollouts_pass_through_in_order(pool: Judge) -> None:
    cut = rollout("raise", 1, finish="cut")
    pool.send([rollout("right", 0), cut, rollout("wrong", 2)])
    got = pool.receive(wait=True)
    assert [r.index for r in got] == [0, 1, 2] and got[1] is cut
    assert pool.stats()["judge/unjudged"] == 0
    assert pool.judge([cut]) == [cut]


def test_cut_rollouts_do_not_wait_for_judges() -> None:
    with make(ordered=False) as judge:
        judge.send([rollout("slow 0.5", 0), rollout("", 1, finish="cut")])
        assert [r.index for r in judge.receive(wait=True)] == [1]


def test_judge_leaves_the_others_queued(hasty: Judge) -> None:
    sent = rollouts("slow 0.1", "right", "wrong", "slow 0.1")
    hasty.send(sent)
    evaluated = hasty.judge([rollout("wrong", 10), rollout("hang", 11), rollout("right", 12)])
    assert [(r.index, r.verdict) for r in evaluated] == [
        (10, "wrong"),
        (11, "unjudged"),
        (12, "right"),
    ]
    assert hasty.pending() == sent and not hasty.idle
    assert [r.verdict for r in hasty.receive(wait=True)] == ["right", "right", "wrong", "right"]


@pytest.mark.parametrize("ordered", [True, False])
def test_an_interrupted_judge_is_forgotten(ordered: bool) -> None:
    """One worker: what was given up is answered late, before what was sent since, and delivered to no caller."""

    def ring(number, frame) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    with make(ordered=ordered) as pool:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                pool.judge(rollouts("slow 0.3", "right"))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        pool.send([rollout("wrong", 7)])
        assert [(r.index, r.verdict) for r in pool.receive(wait=True)] == [(7, "wrong")]
        assert pool.stats()["judge/right"] == 2, "the late answers did come"
        assert pool.idle and pool.receive(wait=True) == []


def test_pending_can_be_sent_again() -> None:
    with make() as first:
        first.send(rollouts("slow 0.2", "right"))
        kept = first.pending()
    with make() as second:
        second.send(kept)
        assert [r.verdict for r in second.receive(wait=True)] == ["right", "right"]


def test_ctrl_c_does_not_reach_workers(pool: Judge) -> None:
    pool.judge(rollouts("right"))
    (pid,) = pids(pool)
    os.kill(pid, signal.SIGINT)
    assert pool.judge(rollouts("right"))[0].verdict == "right"
    assert pids(pool) == [pid] and os.getpgid(pid) != os.getpgid(0)


def test_a_worker_that_dies_idle_costs_nothing(pool: Judge) -> None:
    pool.judge(rollouts("right"))
    (pid,) = pids(pool)
    os.kill(pid, signal.SIGTERM)
    assert [r.verdict for r in pool.judge(rollouts("right", "wrong"))] == ["right", "wrong"]
    assert pool.stats()["judge/unjudged"] == 0 and pids(pool) != [pid]


def test_close_leaves_no_process() -> None:
    judge = make(workers=3)
    judge.send(rollouts("hang", "hang", "hang", "right"))
    known = pids(judge)
    judge.close()
    judge.close()
    assert len(known) == 3 and not any(os.path.exists(f"/proc/{pid}") for pid in known)


def test_a_forgotten_pool_closes_itself() -> None:
    judge = make(workers=2)
    known = pids(judge)
    del judge
    assert not any(os.path.exists(f"/proc/{pid}") for pid in known)


def test_workers_die_with_their_parent(tmp_path) -> None:
    """Also one that hangs in the middle of a judge, and without a word from the parent."""
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from test_judge import make, pids, rollouts\n"
        "judge = make(workers=2, timeout_s=60)\n"
        "judge.send(rollouts('deaf'))\n"
        "time.sleep(0.2)\n"
        "print(*pids(judge), flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2 and all(map(alive, workers))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all(map(soon_dead, workers))


def test_a_program_may_end_without_closing(tmp_path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from test_judge import make, rollouts\n"
        "judge = make(workers=2, timeout_s=60)\n"
        "judge.send(rollouts('deaf', 'deaf'))\n"
    )
    subprocess.run([sys.executable, str(script)], check=True, timeout=600)


def test_without_standard_streams(tmp_path) -> None:
    """Started with closed streams, the pipe takes their numbers; the answer must come all the same."""
    script, answer = tmp_path / "run.py", tmp_path / "answer"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from test_judge import make, rollouts\n"
        "os.closerange(0, 3)\n"
        "judge = make()\n"
        f"open({str(answer)!r}, 'w').write(judge.judge(rollouts('right'))[0].verdict)\n"
        "judge.close()\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, str(script)], check=True, timeout=600)
    assert answer.read_text() == "right"


def test_two_thousand_rollouts() -> None:
    texts = ["right", "wrong"] * 1000
    with make(workers=2) as judge:
        judge.send([rollout(text, i) for i, text in enumerate(texts)])
        got = judge.receive(wait=True)
        assert [(r.index, r.verdict) for r in got] == list(enumerate(texts))
        assert judge.stats()["judge/right"] == 1000


def test_long_responses_pass() -> None:
    with make(lambda prompt, response: len(response) == 2_000_000) as judge:
        assert [r.verdict for r in judge.judge(rollouts("x" * 2_000_000, "y"))] == [
            "right",
            "wrong",
        ]


def test_no_process_to_be_had(monkeypatch) -> None:
    def full() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", full)
    with pytest.raises(WhetError, match=r"No judge process can be started: .*unavailable"):
        make()


def test_fewer_processes_than_wanted_do() -> None:
    real, calls = os.fork, []

    def scarce() -> int:
        calls.append(1)
        if len(calls) > 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return real()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fork", scarce)
        with make(workers=3) as judge:
            assert [r.verdict for r in judge.judge(rollouts("right", "wrong"))] == [
                "right",
                "wrong",
            ]
            assert len(pids(judge)) == 1


def test_a_prompt_that_cannot_travel() -> None:
    def odd(prompt_id: str) -> Prompt:
        return Prompt(id=prompt_id, text="?", answer="yes", task=TASK, meta=MappingProxyType({}))

    with (
        Judge(odd, {TASK: hostile}, config.JudgeSettings(workers=1), decode=decode) as judge,
        pytest.raises(WhetError, match="cannot be sent to a judge process"),
    ):
        judge.judge(rollouts("right"))


def test_a_judgement_travels_whole() -> None:
    def says(prompt: Prompt, response: str):
        return Judgement(
            score=0.5, final=response, terms={"format": np.float32(0.25), "own:taste": -3}
        )

    with make(says) as judge:
        long, odd = judge.judge(rollouts("x" * 1000, "4\ud800\x1b[0m\U0001f600"))
    assert (long.score, long.reward, long.final) == (0.5, 0.5, "x" * 300)
    assert long.terms == {"format": 0.25, "own:taste": -3.0}
    assert odd.final == "4??[0m\U0001f600", "what cannot be printed is not let through"


@pytest.mark.parametrize(
    "said",
    [
        Judgement(score=2.0),
        Judgement(score=float("nan")),
        Judgement(score=1.0, final=3),  # type: ignore[arg-type]
        Judgement(score=1.0, terms={"a": float("inf")}),
        Judgement(score=1.0, terms={"a": "1"}),  # type: ignore[dict-item]
        Judgement(score=1.0, terms={str(i): 0.0 for i in range(worker.MOST_TERMS + 1)}),
    ],
)
def test_a_judgement_that_is_none(said: Judgement) -> None:
    with make(lambda prompt, response: said) as judge:
        assert judge.judge(rollouts("x"))[0].verdict == "unjudged"
        assert judge.stats()["judge/errors"] == 1


def test_the_largest_judgement_fits() -> None:
    terms = {chr(0x1F600 + i) * 64: -1.2345678901234567e-300 for i in range(worker.MOST_TERMS)}
    with make(
        lambda prompt, response: Judgement(score=1.0, final="\U0001f600" * 300, terms=terms)
    ) as judge:
        (got,) = judge.judge(rollouts("x"))
    assert got.terms == terms and len(got.final) == 300


def test_a_judge_that_gives_up_is_a_timeout() -> None:
    def slow(prompt: Prompt, response: str) -> float:
        try:
            raise TooSlow("too slow for this")
        except Exception:
            return 1.0

    with make(slow) as judge:
        (before,) = pids(judge)
        assert [r.verdict for r in judge.judge(rollouts("a", "b"))] == ["unjudged"] * 2
        assert judge.stats()["judge/timeouts"] == 2 and "too slow for this" in judge.complaint
        assert pids(judge) == [before], "the worker lives on"


def test_replies_say_nothing_but_a_judgement() -> None:
    good = worker.Reply(3, worker.Kind.SCORE, 0.5, 12.0, "", "42", {"format": 1.0})
    assert worker.Reply.unpack(good.pack()) == good
    error = worker.Reply(3, worker.Kind.ERROR, 0.0, 12.0, "note\x1b")
    assert worker.Reply.unpack(error.pack()) == error._replace(note="note?")
    odd = good._replace(final="\ud800")
    assert worker.Reply.unpack(odd.pack()).final == "?", "a judge may return any string"

    def packed(kind: int = 1, note: bytes = b"", final: bytes = b"", terms: bytes = b"") -> bytes:
        return (
            struct.pack("!qBddHH", 3, kind, 0.5, 12.0, len(note), len(final)) + note + final + terms
        )

    assert worker.Reply.unpack(packed(final=b"42", terms=b'{"format": 1.0}')) == good
    for bad in (
        b"",
        b"\xff" * 25,
        b"\xff" * 60,
        good._replace(score=2.0).pack(),
        good._replace(score=float("nan")).pack(),
        good._replace(at=float("inf")).pack(),
        packed(kind=9),
        packed(final=b"42")[:-1],
        packed(final=b"42")[:20],
        packed(terms=b"[]x"),
        packed(terms=b'["a"]'),
        packed(terms=b'"a"'),
        packed(terms=b"3"),
        packed(terms=b'{"b": NaN}'),
        packed(terms=b'{"b": 1e999}'),
        packed(terms=b'{"b": "1"}'),
        packed(terms=b'{"b": {}}'),
        packed(terms=json.dumps({str(i): 0.0 for i in range(worker.MOST_TERMS + 1)}).encode()),
        packed(final=b"a" * 301),
        packed(kind=2, note=b"a" * 301),
        packed(final=b"\xff\xfe"),
        packed(terms=b"[" * 30_000),
        packed(terms=b"9" * 30_000),
    ):
        with pytest.raises(worker.UNREADABLE):
            worker.Reply.unpack(bad)


HOSTILE = [
    "\\boxed{9**9**9}",
    "\\boxed{10^{10^{10}}}",
    "\\boxed{99999999!}",
    "\\boxed{" + "\\frac{1}{1+" * 30 + "x" + "}" * 31,
    "\\boxed{\\sum_{i=1}^{10000000} i^i}",
    "(" * 100_000,
    "\\boxed{" * 20_000,
    "x" * 1_000_000,
    "\\boxed{4\x002}",
    "\\boxed{\ud800}",
    "\U0001f600" * 1000,
    "\\boxed{\u202e24}",
    "\\boxed{__import__('os').system('touch hacked')}",
    "\\boxed{1\\pm1\\pm1\\pm1\\pm1\\pm1\\pm1\\pm1}",
    "\\boxed{\\frac{42}{0}}",
    "\\boxed{42",
    "",
]


@pytest.mark.parametrize("answer", ["42", r"\frac{\pi}{2}", "1, 2", "[0, 1)"])
def test_hostile_answers_are_wrong_and_cost_no_worker(answer: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    matcher = Matcher()
    prompt = Prompt(id="p", text="?", answer=answer, task=TASK)
    settings = config.JudgeSettings(workers=1, timeout_s=20.0)
    with Judge(lambda _: prompt, {TASK: matcher.judge}, settings, decode=decode) as judge:
        before = pids(judge)
        got = judge.judge(rollouts(*HOSTILE, f"\\boxed{{{answer}}}"))
        assert [r.verdict for r in got] == ["wrong"] * len(HOSTILE) + ["right"]
        assert pids(judge) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kills", "text", "verdict"), [(1, "slow 1", "right"), (2, "slow 20", "unjudged")]
)
def test_killed_by_the_system_while_judging(kills: int, text: str, verdict: str) -> None:
    """Not by us and not by the judge: as the kernel does when memory runs out. Such an item has a second chance."""
    with make() as judge:
        judge.send(rollouts("right", text, "wrong"))
        while not judge.stats()["judge/right"]:
            judge._move(wait=True)
        for _ in range(kills):
            while not (judge._workers and judge._workers[0].started):
                judge._move(wait=True)
            before = pids(judge)[0]
            os.kill(before, signal.SIGKILL)
            while before in pids(judge):
                judge._move(wait=True)
        assert [r.verdict for r in judge.receive(wait=True)] == ["right", verdict, "wrong"]
        assert judge.stats()["judge/crashes"] == kills - 1
