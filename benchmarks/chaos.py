"""Kills and joins at random instants of a run on Ray: it must end, and be the run that nobody disturbed.

    python benchmarks/chaos.py --seeds 5 --kills 20 --joins 5

Of each seed a plan is drawn: workers, judges, the learner and the driver are killed, and nodes join, each within a step
and at a moment of it that the seed chose; a driver that is dead is started again with resume. A ledger follows every
rollout that was trained. Under barrier the run is compared with one of a single process without any fault: tokens and
verdicts, the weights at the end, and the metrics of every step but those of time and of how rollouts share a forward.
These change the order of sums, so numbers agree to their rounding. It writes chaos-MODE.json after each seed. The
cluster is real and of this machine: each node that joins is a raylet of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from command_line import RESULTS, Out, run_script, tell

from whet import api, files
from whet.errors import WhetError
from whet.recipe import load_config
from whet.run import read_metrics, read_rollouts
from whet.tools.experiment import circumstances

app = typer.Typer(add_completion=False)
KINDS = {"worker": 10, "judge": 4, "learner": 3, "driver": 3}  # of 20 kills
RECIPE = (
    "model.hidden=16",
    "model.layers=1",
    "model.heads=2",
    "model.device=cpu",
    "model.dtype=float64",
    'data.0.options={train_count=60, mix={"1"=0.5, "2-4"=0.5}}',
    "eval.0.options={eval_count=60}",
    "eval.0.limit=12",
    "eval.0.max_tokens=12",
    "eval.0.every=10",
    "rollout.context=48",
    "rollout.max_tokens=12",
    "rollout.slots=12",
    "curriculum.groups=3",
    "curriculum.rollouts=4",
    "curriculum.patience=50",
    "learn.lr=3e-3",
    "learn.warmup=2",
    "judge.timeout_s=120",
    "judge.workers=2",
    "save.every=1",
    "save.rollouts=100000",
)
CLUSTER = ("cluster.workers=4", "cluster.timeout_s=60")
# the head has room for the learner and two workers; so many other nodes, with one worker each
HEAD, GUESTS = 3, 2
LIMIT_S = 3000.0
OWN = ("time", "rollout/", "judge/", "draft/")  # metrics of a run that tell how it was made


def even_digits(prompt: Any, response: str) -> float:
    """A reward that an untrained model earns about half the time."""
    return float(sum(letter.isdigit() for letter in response) % 2 == 0)


# ---- the driver, in a process of its own


class Told:
    """A watcher that prints what it is told, and does not pass the step after which something is due."""

    def __init__(self, gate: Path | None = None) -> None:
        self.gate = gate

    def update(self, metrics: dict[str, float], progress: float) -> None:
        while (
            self.gate is not None
            and self.gate.exists()
            and metrics["step"] > int(self.gate.read_text())
        ):
            time.sleep(0.01)

    def message(self, text: str) -> None:
        print(text, flush=True)

    def warm_start(self, name: str, step: int, steps: int, loss: float) -> None:
        pass


def drive(folder: Path, sets: Sequence[str], resume: bool) -> None:
    """Train; write down which processes learn, and what was trained."""
    from whet.cluster.crew import Crew
    from whet.cluster.fleet import Chorus

    ask, step = Crew._ask, Chorus.step
    known: list[int] = []

    def asked(crew: Any, *args: Any, **named: Any) -> Any:
        pids = [hand.dialled.pid for hand in crew.hands if not hand.lost and type(crew) is Crew]
        if pids and pids != known:
            known[:] = pids
            spare = folder.with_suffix(".new")
            spare.write_text(json.dumps(known))
            spare.replace(folder.with_suffix(".pids"))
        return ask(crew, *args, **named)

    def stepped(chorus: Any, batch: Any, *args: Any, **named: Any) -> Any:
        report = step(chorus, batch, *args, **named)
        keys = [[*rollout.key] for group in batch.groups for rollout in group.rollouts]
        with folder.with_suffix(".ledger").open("a") as ledger:
            ledger.write(json.dumps({"version": chorus.version, "keys": keys}) + "\n")
        return report

    Crew._ask, Chorus.step = asked, stepped  # type: ignore[method-assign]
    api.run_recipe(
        load_config(sets=list(sets)),
        folder,
        watcher=Told(folder.with_suffix(".gate")),
        resume=resume,
        reward=even_digits,
    )


# ---- the one who kills


class Driver:
    """The process of a run, started again whenever it is killed."""

    def __init__(self, folder: Path, sets: Sequence[str]) -> None:
        self.folder, self.sets = folder, sets
        self.log = folder.with_suffix(".log").open("ab")
        self.start(resume=False)

    def start(self, resume: bool) -> None:
        folder = str(self.folder)
        code = f"import chaos, pathlib; chaos.drive(pathlib.Path({folder!r}), {list(self.sets)!r}, {resume})"
        paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        own = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], env=own, stdout=self.log, stderr=self.log
        )

    def newest(self) -> tuple[int, float]:
        """The last step, and the seconds that it took."""
        if not (self.folder / "config.toml").exists() or not (rows := read_metrics(self.folder)):
            return -1, 0.0
        return int(rows[-1]["step"]), float(rows[-1].get("time/total", 0.0))

    def pids(self, kind: str) -> list[int]:
        if kind == "driver":
            return [self.process.pid]
        if kind == "judge":  # they are forked, so have the driver's own words
            return [
                pid
                for pid in children_of(self.process.pid)
                if words_of(pid) == words_of(self.process.pid)
            ]
        path = self.folder.with_suffix(".pids")
        learners = json.loads(path.read_text()) if path.exists() else []
        if kind == "learner":
            return learners
        actors = [pid for raylet in children_of(os.getpid()) for pid in children_of(raylet)]
        return [
            pid
            for pid in actors
            if words_of(pid).startswith(b"ray::Station") and pid not in learners
        ]

    def kill(self, kind: str, seed: int) -> bool:
        """Kill one of them; False where none is there."""
        there = [pid for pid in self.pids(kind) if pid and words_of(pid)]
        if there:
            os.kill(random.Random(seed).choice(there), signal.SIGKILL)
        if there and kind == "driver":
            self.process.wait()
            self.folder.with_suffix(".pids").unlink(missing_ok=True)
        return bool(there)


def words_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def children_of(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def draw_plan(seed: int, kills: int, joins: int, steps: int) -> list[tuple[int, float, str]]:
    """(after this step, when that share of the next one is over, what happens), in order."""
    draw = random.Random(seed)
    kinds = [
        kind for kind, share in KINDS.items() for _ in range(max(1, round(share * kills / 20)))
    ][:kills]
    events = [*kinds, *["join"] * joins]
    draw.shuffle(events)
    after = sorted(draw.randrange(1, steps - 1) for _ in events)
    return [(step, draw.random(), event) for step, event in zip(after, events, strict=True)]


def write_gate(path: Path, waiting: Sequence[tuple[int, float, str]]) -> None:
    spare = path.with_suffix(".next")
    spare.write_text(str(waiting[0][0] if waiting else 10**9))
    spare.replace(path)


@contextlib.contextmanager
def real_cluster() -> Iterator[Any]:
    os.environ.update({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"})
    from ray.cluster_utils import Cluster

    head = {"num_cpus": HEAD, "node_ip_address": "127.0.0.1", "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        yield cluster
    finally:
        os.environ.pop("RAY_ADDRESS")
        if before is not None:
            os.environ["RAY_ADDRESS"] = before
        cluster.shutdown()


def disturb(
    folder: Path, sets: Sequence[str], plan: Sequence[tuple[int, float, str]]
) -> Counter[str]:
    """Run it, with all that the plan holds. Returns what was done."""
    done: Counter[str] = Counter()
    waiting, guests, until = list(plan), list[Any](), time.monotonic() + LIMIT_S
    gate = folder.with_suffix(".gate")
    write_gate(gate, waiting)
    with real_cluster() as cluster:
        driver = Driver(folder, sets)
        try:
            while driver.process.poll() is None or driver.process.returncode == -signal.SIGKILL:
                if time.monotonic() > until:
                    raise WhetError(
                        f"The run has not ended after {LIMIT_S:g} s: {folder.with_suffix('.log')}"
                    )
                if driver.process.poll() is not None:
                    driver.start(resume=True)
                step, took = driver.newest()
                if not waiting or step < waiting[0][0]:
                    time.sleep(0.01)
                    continue
                _, moment, event = waiting[0]
                time.sleep(moment * took)
                if event == "join":
                    if len(guests) == GUESTS:
                        cluster.remove_node(guests.pop(0), allow_graceful=False)
                        done["node lost"] += 1
                    guests.append(cluster.add_node(num_cpus=1, node_ip_address="127.0.0.1"))
                elif not driver.kill(event, len(waiting)):
                    continue  # none is there yet
                done[event] += 1
                waiting.pop(0)
                write_gate(gate, waiting)
        finally:
            driver.process.kill()
            driver.process.wait()
            driver.log.close()
    if driver.process.returncode != 0:
        raise WhetError(
            f"The run ended with {driver.process.returncode}: {folder.with_suffix('.log').read_text()[-600:]}"
        )
    return done


# ---- what must hold


def check_ledger(folder: Path) -> dict[str, int]:
    """Each rollout is trained at most once, and judged once; each prompt has its visit before any has one more."""
    lines = folder.with_suffix(".ledger").read_text().splitlines()
    # steps that were lost are made again
    newest = {row["version"]: row["keys"] for row in map(json.loads, lines)}
    trained = Counter(tuple(key) for keys in newest.values() for key in keys)
    rows = [row for row in read_rollouts(folder) if row["phase"] != "eval"]
    judged = Counter((row["group_id"], row["index"]) for row in rows)
    visits = Counter(prompt for prompt, _ in {(row["prompt_id"], row["group_id"]) for row in rows})
    return {
        "steps made again": len(lines) - len(newest),
        "rollouts trained": len(trained),
        "trained twice": sum(count > 1 for count in trained.values()),
        "trained without a verdict": len(trained.keys() - judged.keys()),
        "judged twice": sum(count > 1 for count in judged.values()),
        "prompts": len(visits),
        "most visits to a prompt": max(visits.values()),
        "fewest visits to a prompt": min(visits.values()),
        "prompts without a visit": 60 - len(visits),
    }


def largest_difference(one: Path, other: Path) -> float:
    """Of weights at the end, relative to the largest of each tensor, and of metrics, absolute below 1 and relative
    above; infinite where a token or a verdict differs."""
    from safetensors.numpy import load_file

    def tokens(folder: Path) -> list[Any]:
        rows = [
            (r["step"], r["group_id"], r["index"], r["response"], r["verdict"])
            for r in read_rollouts(folder)
        ]
        return sorted(rows)

    def metrics(folder: Path) -> list[dict[str, float]]:
        return [
            {name: row[name] for name in sorted(row) if not name.startswith(OWN)}
            for row in read_metrics(folder)
        ]

    if tokens(one) != tokens(other):
        return float("inf")
    found = []
    for row, same in zip(metrics(one), metrics(other), strict=True):
        assert row.keys() == same.keys(), row.keys() ^ same.keys()
        found += [abs(row[name] - same[name]) / max(1.0, abs(row[name])) for name in row]
    mine, theirs = (
        load_file(max((f / "checkpoints").glob("step_*")) / "model.safetensors")
        for f in (one, other)
    )
    found += [np.abs(mine[name] - theirs[name]).max() / np.abs(mine[name]).max() for name in mine]
    return float(max(found))


def bring_chaos(
    base: Path, seed: int, kills: int, joins: int, steps: int, mode: str
) -> dict[str, Any]:
    sets = [
        *RECIPE,
        f"steps={steps}",
        f"rollout.mode={mode}",
        *(["curriculum.max_age=2"] if mode == "stream" else []),
    ]
    whole, folder = base / f"whole-{mode}", base / f"{mode}-{seed}"
    if mode == "barrier" and not whole.exists():
        api.run_recipe(load_config(sets=sets), whole, watcher=Told(), reward=even_digits)
    begun = time.monotonic()
    done = disturb(folder, [*sets, *CLUSTER], draw_plan(seed, kills, joins, steps))
    result: dict[str, Any] = {"seed": seed, "mode": mode, **done, **check_ledger(folder)}
    result["seconds"] = round(time.monotonic() - begun)
    if mode == "barrier":
        result["largest difference"] = largest_difference(whole, folder)
    return result


@app.command()
def main(
    seeds: Annotated[int, typer.Option(help="Plans to draw.")] = 5,
    kills: Annotated[int, typer.Option(help="Kills in each run.")] = 20,
    joins: Annotated[int, typer.Option(help="Nodes that join each run.")] = 5,
    steps: Annotated[int, typer.Option(help="Updates of each run.")] = 50,
    mode: Annotated[str, typer.Option(help="barrier or stream.")] = "barrier",
    out: Out = RESULTS,
) -> None:
    """Disturb runs by plans drawn from seeds, and write what became of them."""
    base, runs = Path(tempfile.mkdtemp(prefix="chaos-")), list[dict[str, Any]]()
    found = {**circumstances(), "runs": runs}
    for seed in range(seeds):
        runs.append(bring_chaos(base, seed, kills, joins, steps, mode))
        tell(json.dumps(runs[-1]))
        files.make_folder(out)
        files.write_text(out / f"chaos-{mode}.json", json.dumps(found, indent=1))


if __name__ == "__main__":
    run_script(app)
