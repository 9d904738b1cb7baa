"""Processes that are killed, that hang or that go astray: the run is what it would have been, or ends in a sentence."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_run import CPU, assert_like, fork_members, run
from small_run import SMALL, Silent

from whet import cli
from whet.cluster import crew
from whet.cluster.crew import Crew
from whet.errors import Stopped, WhetError
from whet.recipe import dump_config, load_config
from whet.rollout import vllm_fit
from whet.run import read_metrics

WARM = ("warm_start.steps=4", "warm_start.batch=5")
REWARDS = ("data.0.reward=small_run:even_digits", "eval.0.reward=small_run:even_digits")
SMALLEST = tuple(f"--set={item}" for item in (*SMALL, *CPU, *REWARDS, "steps=2"))
VLLM = ("rollout.engine=vllm", "model.device=cpu")
FULL = 'mount -t tmpfs -o size=8k tmpfs /dev/shm && { cat /dev/zero > /dev/shm/all 2> /dev/null; exec "$@"; }'
SETS = ("steps=6", "save.every=2", "curriculum.name=speed", "curriculum.speed.n_init=2")


class Reaper:
    """Kills a process a little after chosen questions of the driver, counted from the beginning."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, when: dict[int, tuple[int, float]]) -> None:
        self.when, self.asked, self.pids, self.names = when, 0, list[int](), list[str]()
        self.timers: list[threading.Timer] = []
        ask, tell, start = Crew._ask, Crew.tell, Crew._start

        def counted(crew: Crew, numbers: Any, name: str, *args: Any, **more: Any) -> Any:
            self.strike(crew, name)
            return ask(crew, numbers, name, *args, **more)

        def told(crew: Crew, number: int, name: str, *args: Any) -> None:
            self.strike(crew, name)
            tell(crew, number, name, *args)

        def started(crew: Crew, number: int) -> Any:
            hand = start(crew, number)
            self.pids.append(hand.process.pid)
            return hand

        for name, changed in (("_ask", counted), ("tell", told), ("_start", started)):
            monkeypatch.setattr(Crew, name, changed)

    def strike(self, crew: Crew, name: str) -> None:
        self.asked += 1
        if (chosen := self.when.pop(self.asked, None)) is not None:
            number, delay = chosen
            pid = crew.hands[number].process.pid
            self.names.append(name)
            self.timers.append(threading.Timer(delay, kill, [pid]))
            self.timers[-1].start()

    def finish(self) -> None:
        for timer in self.timers:
            timer.join()
        assert not [pid for pid in self.pids if alive(pid)], "nothing is left running"


def kill(pid: int) -> None:
    if alive(pid):
        os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder, *SETS, *WARM)
    yield folder


@pytest.mark.parametrize(
    ("when", "started"),
    [
        pytest.param({45: (1, 0.01), 70: (0, 0.005)}, 4, id="in the run", marks=pytest.mark.slow),
        pytest.param(
            {6: (1, 0.0)}, 4, id="in the warm start, where all begin again", marks=pytest.mark.slow
        ),
    ],
)
def test_a_process_that_is_killed_changes_no_number(
    tmp_path: Path,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    when: dict[int, tuple[int, float]],
    started: int,
) -> None:
    kills = len(when)
    if kills == 1:  # the other case starts its processes as a run does
        fork_members(monkeypatch)
    reaper = Reaper(monkeypatch, dict(when))
    silent = run(tmp_path / "run", *SETS, *WARM, gpus=2)
    reaper.finish()
    assert len(reaper.names) == kills and len(reaper.pids) == started
    assert (
        sum("killed by signal 9; it is started again" in message for message in silent.messages)
        == kills
    )
    assert_like(whole, tmp_path / "run", counters=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "sets", [(), ("learn.updates=2", "learn.kl_coef=0.1")], ids=["one update", "two updates"]
)
def test_kills_at_random_instants_change_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, sets: tuple[str, ...]
) -> None:
    """Five kills of the second process in each of four runs: between questions, within them, while one is mended."""
    fork_members(monkeypatch)
    draw = random.Random(seed)
    delays = (0.0, 0.003, 0.01, 0.03)
    when = {20 * number + draw.randrange(4, 20): (1, draw.choice(delays)) for number in range(5)}
    run(tmp_path / "one", *SETS, *WARM, *sets)
    reaper = Reaper(monkeypatch, when)
    run(tmp_path / "two", *SETS, *WARM, *sets, gpus=2)
    reaper.finish()
    assert len(reaper.names) == 5, reaper.asked
    assert_like(tmp_path / "one", tmp_path / "two", counters=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sets", [(), ("learn.shard=optimizer",)], ids=["both die", "one dies with its share"]
)
def test_what_no_process_holds_any_more_is_taken_from_the_last_checkpoint(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...]
) -> None:
    class Sudden(Reaper):
        def strike(self, crew: Crew, name: str) -> None:
            self.asked += 1
            if self.asked == 70:
                for hand in crew.hands[len(sets) :]:
                    hand.process.kill()

    fork_members(monkeypatch)
    reaper = Sudden(monkeypatch, {})
    silent = run(tmp_path / "run", *SETS, *WARM, *sets, gpus=2)
    reaper.finish()
    assert any(
        message.endswith("The run goes on from its last checkpoint.") for message in silent.messages
    )
    assert len(reaper.pids) >= 4, "one death may be seen before the other"
    assert_like(whole, tmp_path / "run", counters=False)


def test_a_death_while_processes_start_is_tried_again_once_there_is_a_checkpoint(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A death in the run, and one in each start that follows: three more are tried. Then a run that is resumed, where
    one dies in the first start."""

    class InStarts(Reaper):
        def __init__(self, first: int, starts: int) -> None:
            super().__init__(monkeypatch, {})
            self.first, self.starts = first, starts

        def strike(self, crew: Crew, name: str) -> None:
            self.asked += 1
            dies = name == "begin" and self.asked > self.first and self.starts > 0
            self.starts -= dies
            if dies or self.asked == self.first:
                crew.hands[1].process.kill()

    fork_members(monkeypatch)
    sets, folder = (*SETS, *WARM, "learn.shard=optimizer"), tmp_path / "run"
    silent = Silent()
    with monkeypatch.context() as monkeypatch:
        reaper = InStarts(first=70, starts=9)
        with pytest.raises(WhetError) as ended:
            run(folder, *sets, gpus=2, silent=silent)
        reaper.finish()
    sentence = "Process 1 of 2 was killed by signal 9 while it started."
    assert str(ended.value) == f"{sentence} --resume goes on from the last checkpoint."
    assert silent.messages.count(f"{sentence} The run goes on from its last checkpoint.") == 3
    reaper = InStarts(first=0, starts=1)
    silent = run(folder, *sets, gpus=2, resume=True)
    reaper.finish()
    assert silent.messages.count(f"{sentence} The run goes on from its last checkpoint.") == 1
    assert_like(whole, folder, counters=False)


def test_the_folder_of_a_run_that_was_killed_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of one that still runs stays."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import time; from whet.cluster.scratch import scratch_folder\n"
    code += "print(scratch_folder()[0], flush=True); time.sleep(9e6)"
    given: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "text": True,
        "env": {**os.environ, "TMPDIR": str(tmp_path)},
    }
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, **given) as killed, subprocess.Popen(command, **given) as alive:
        assert killed.stdout is not None and alive.stdout is not None
        folders = [Path(driver.stdout.readline().strip()) for driver in (killed, alive)]
        killed.kill()
        killed.wait()
        assert all(folder.is_dir() for folder in folders)
        fork_members(monkeypatch)
        run(tmp_path / "run", "steps=1", gpus=2)
        assert list(tmp_path.glob("whet-*")) == [folders[1]]
        alive.kill()


def command(monkeypatch: pytest.MonkeyPatch, capsys: Any, *args: str) -> tuple[int, str]:
    """The exit code of `whet train`, and what it said last."""
    monkeypatch.setattr(sys, "argv", ["whet", "train", *args])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0), " ".join(
        capsys.readouterr().err.rpartition("whet: ")[2].split()
    )


def assert_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any, sentence: str, *args: str) -> None:
    code, said = command(monkeypatch, capsys, *args)
    assert code == 2 and sentence in said and "Traceback" not in said, said


def go_astray(monkeypatch: pytest.MonkeyPatch, fault: str, mark: Path) -> Reaper:
    script = Path(__file__).parent / "astray.py"
    monkeypatch.setattr(crew, "COMMAND", (sys.executable, str(script), fault, str(mark)))
    return Reaper(monkeypatch, {})


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (
            "never starts",
            "Process 0 of 2 ended (1), and said: libfabric is missing while it started",
        ),
        ("other weights", "Process 1 of 2 holds other weights than process 0 after update 1."),
        pytest.param(
            "other recipe",
            "Process 1 of 2 has another recipe than process 0 at the start.",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "breaks",
            "A process of the fleet failed with RuntimeError: a kernel went wrong",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "sleeps",
            "Process 0 of 2 did not answer begin for 2 s while it started; nothing was trained.",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_go_on_ends_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, fault: str, sentence: str
) -> None:
    reaper = go_astray(monkeypatch, fault, tmp_path / "mark")
    if fault == "sleeps":
        monkeypatch.setattr(crew, "START_S", 2.0)
    elif fault != "never starts":
        fork_members(monkeypatch)
    monkeypatch.setattr(crew, "GRACE_S", 1.0)
    assert_refused(
        monkeypatch, capsys, sentence, f"--out={tmp_path / 'run'}", "--gpus=2", *SMALLEST
    )
    reaper.finish()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("none", ""),
        ("shares memory", "No space left on device (28); df -h /dev/shm shows whether it is full"),
        (
            "maps memory",
            "was killed by signal 7, as happens where /dev/shm is full while it started",
        ),
    ],
)
def test_a_full_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, fault: str, sentence: str
) -> None:
    """Processes with a /dev/shm that is full: over gloo they do not need it, and where they do it is named."""
    own = ("unshare", "-m", "bash", "-c", FULL, "bash")
    if subprocess.run([*own, "true"], capture_output=True).returncode:
        pytest.skip("a mount of its own takes the rights of root")
    reaper = go_astray(monkeypatch, fault, tmp_path / "mark")
    monkeypatch.setattr(crew, "COMMAND", (*own, *crew.COMMAND))
    args = (f"--out={tmp_path / 'run'}", "--gpus=2", *SMALLEST)
    if sentence:
        assert_refused(monkeypatch, capsys, sentence, *args)
    else:
        assert command(monkeypatch, capsys, *args)[0] == 0
    reaper.finish()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("missed update", "Process 1 of 2 decoded with version 1 of the weights in place of 2"),
        ("hangs", "Process 1 of 2 kept the others waiting in step"),
    ],
)
def test_a_process_that_goes_astray_once_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, sentence: str
) -> None:
    run(tmp_path / "one")
    fork_members(monkeypatch)
    reaper = go_astray(monkeypatch, fault, tmp_path / "mark")
    monkeypatch.setattr(crew, "EXCHANGE_S", 15.0)
    monkeypatch.setattr(crew, "GRACE_S", 1.0)
    silent = run(tmp_path / "two", gpus=2)
    reaper.finish()
    assert f"{sentence}; it is started again." in silent.messages
    assert_like(tmp_path / "one", tmp_path / "two", counters=False)


def test_what_this_machine_or_recipe_cannot_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refused(sentence: str, *sets: str) -> None:
        given = [f"--set={item}" for item in (*SMALL, *sets)]
        assert_refused(
            monkeypatch, capsys, sentence, f"--out={tmp_path / 'run'}", "--gpus=3", *given
        )
        assert not (tmp_path / "run").exists()

    monkeypatch.setattr(vllm_fit, "version_of_vllm", lambda: "0.9.2")
    refused("cannot run here: vLLM 0.9.2 is installed, and whet runs with 0.24 to 0.32.", *VLLM)
    monkeypatch.setattr(vllm_fit, "version_of_vllm", lambda: "0.32.0")
    exact = ("rollout.mode=stream", "rollout.ordered=true")
    refused(
        "rollout.ordered = true asks for a run that repeats exactly, which takes keyed noise",
        *VLLM,
        *exact,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused('--gpus 3, but torch sees no GPU; model.device = "cpu" divides the cores instead')
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    refused("--gpus 3 is more than the 2 GPUs that torch sees here")


@pytest.mark.slow
def test_a_signal_in_the_warm_start_stops_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupts(Silent):
        def warm_start(self, name: str, step: int, steps: int, loss: float) -> None:
            if step == 2:
                os.kill(os.getpid(), signal.SIGINT)

    fork_members(monkeypatch)
    reaper = Reaper(monkeypatch, {})
    with pytest.raises(Stopped):
        run(tmp_path / "run", "warm_start.steps=100", gpus=2, silent=Interrupts())
    reaper.finish()


def test_the_plan_of_several_processes_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    sets = [f"--set={item}" for item in (*SMALL, *CPU)]
    monkeypatch.setattr(sys, "argv", ["whet", "train", *sets, "--gpus", "2", "--dry-run"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0
    assert "memory is that of each of the 2 GPUs" in capsys.readouterr().out


def children_of(pid: int) -> list[int]:
    """Processes that it started, and that are not its judges: those have its own name."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def wait_until(reached: Callable[[], bool], process: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + 600
    while not reached():
        assert process is None or process.poll() is None, "it ended"
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow)],
)
def test_a_signal_to_the_run_leaves_nothing_behind(tmp_path: Path, number: int, code: int) -> None:
    recipe, folder = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(dump_config(load_config(sets=[*SMALL, *CPU, *REWARDS, "steps=100000"])))
    command = [
        sys.executable,
        "-m",
        "whet",
        "train",
        str(recipe),
        "--out",
        str(folder),
        "--gpus",
        "2",
    ]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    # the port that torch would meet at; processes meet in a file
    busy = socket.create_server(("127.0.0.1", 0))
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(busy.getsockname()[1])}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=own, stdout=log, stderr=log, start_new_session=True)
    wait_until(
        lambda: (folder / "metrics.jsonl").is_file() and len(read_metrics(folder)) > 2, process
    )
    children = children_of(process.pid)
    assert len(children) == 3, "two processes and a judge"
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    assert process.wait(600) == code, (tmp_path / "log").read_text()
    wait_until(lambda: not any(map(alive, children)))
    busy.close()
    if number == signal.SIGINT:
        last = int(read_metrics(folder)[-1]["step"])
        assert (folder / "checkpoints" / f"step_{last:08d}").is_dir()
