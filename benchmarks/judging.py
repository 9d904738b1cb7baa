"""Judging reference answers: are equal answers taken, wrong ones refused, hostile ones survived, and how fast.

    python benchmarks/judging.py --data DIR --out benchmarks/results [--limit N] [--workers K] [--repeats R]
    python benchmarks/judging.py --out OTHER                     the pairs alone, say of an earlier commit
    python benchmarks/judging.py --data DIR --before OTHER/judging.json

DIR holds eval_gsm8k.parquet, eval_math500.parquet, eval_olympiadbench.parquet and others of that kind. Every answer
passes through the pool of worker processes that a run uses, with the default limits; each repeat starts its pool anew.
Writes judging.json: counts, each false verdict in full, and answers per second with their range. "pairs" holds how
many wrong responses were accepted and how many right ones refused of judging_pairs.py (open and held out) and of
judging_known.py, and the same of an earlier run under "before".
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import math_verify  # noqa: F401  (loaded before the workers fork, as in a run)
import numpy as np
from judging_cases import boxed, equals, hostile, wrongs
from judging_known import known
from judging_pairs import pairs as make_pairs

from whet import config
from whet.tasks.judge import Judge
from whet.tasks.matcher import Matcher, right_answers
from whet.tasks.text import TextTask
from whet.tools.experiment import circumstances
from whet.types import Prompt, Rollout, Sampling, Trace

SETS = ("gsm8k", "math500", "olympiadbench", "minerva", "aime2024", "aime2025", "amc2023")
SEED = 0
HOSTILE = 1000
KILLS = 10


class Case(NamedTuple):
    prompt: Prompt
    rule: str
    response: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--before", type=Path, help="an earlier judging.json, whose pairs are kept beside the new ones")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--limit", type=int, default=0, help="problems of a set; 0 is all")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    result: dict[str, Any] = {"seed": SEED, "workers": args.workers, "repeats": args.repeats, "sets": {}}
    result["libraries"] = {name: version(name) for name in ("math-verify", "sympy")}
    result["pairs"] = judge_pairs(args.workers)
    print(
        "pairs",
        json.dumps({name: {k: v for k, v in part.items() if k != "false"} for name, part in result["pairs"].items()}),
    )
    if args.before:
        earlier = json.loads(args.before.read_text())
        shares = {name: {k: v for k, v in part.items() if k != "false"} for name, part in earlier["pairs"].items()}
        result["before"] = {"pairs": shares, "commit": earlier["commit"], "date": earlier["date"]}
    if args.data:
        judge_sets(args, result)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "judging.json").write_text(json.dumps({**result, **circumstances()}, indent=1) + "\n")


def judge_sets(args: argparse.Namespace, result: dict[str, Any]) -> None:
    tasks = {name: load(args.data / f"eval_{name}.parquet", args.limit) for name in SETS}
    for name, task in tasks.items():
        if task is not None:
            result["sets"][name] = measure(task, args.workers, args.repeats)
            print(name, json.dumps({kind: summary["counts"] for kind, summary in result["sets"][name].items()}))
    result["hostile"] = endure([t for t in (tasks["math500"], tasks["olympiadbench"]) if t], args.workers)
    print("hostile", json.dumps(result["hostile"]))


def judge_pairs(workers: int) -> dict[str, Any]:
    """How often a wrong response was accepted and a right one refused; one that is not judged counts as refused."""
    pairs = [("held out" if p.held_out else "open", *p) for p in make_pairs(SEED)]
    pairs += [("math-verify", "tests", *case, "?") for case in known()]
    cases = [
        Case(Prompt(id=str(i), text=question, answer=gold, task="text"), family, response)
        for i, (_, family, gold, response, _, question) in enumerate(pairs)
    ]
    with pool(Matcher().judge, cases, workers) as judge:
        got = [rollout.verdict == "right" for rollout in judge.judge(rollouts(cases))]
    parts: dict[str, Any] = {}
    for (name, family, gold, response, right, _), accepted in zip(pairs, got, strict=True):
        part = parts.setdefault(name, {"right": 0, "refused": 0, "wrong": 0, "accepted": 0, "false": []})
        part["right" if right else "wrong"] += 1
        if accepted != right:
            part["refused" if right else "accepted"] += 1
            part["false"].append([family, gold, response])
    for part in parts.values():
        part["refused_share"] = round(part["refused"] / part["right"], 5)
        part["accepted_share"] = round(part["accepted"] / part["wrong"], 5)
    return parts


def load(path: Path, limit: int) -> TextTask | None:
    return TextTask(config.Eval(task="text", path=str(path), limit=limit)) if path.is_file() else None


def answers(prompt: Prompt) -> list[str]:
    """All reference answers of a problem, without the dollars some are written in."""
    golds = right_answers(prompt.answer)
    return [gold.strip("$") if gold.count("$") == 2 and gold[0] == gold[-1] == "$" else gold for gold in golds]


def measure(task: TextTask, workers: int, repeats: int) -> dict[str, Any]:
    prompts = list(task.prompts("eval", SEED))
    rng = random.Random(SEED)
    every = [gold for prompt in prompts for gold in answers(prompt)]
    cases = {
        "itself": [Case(p, "itself", boxed(gold)) for p in prompts for gold in answers(p)],
        "equal": [Case(p, rule, text) for p in prompts for rule, text in equals(answers(p)[0])],
        "wrong": [Case(p, *c) for p in prompts if len(answers(p)) == 1 for c in wrongs(answers(p)[0], every, rng)],
    }
    return {kind: judged(task, some, workers, repeats, right=kind != "wrong") for kind, some in cases.items()}


def judged(task: TextTask, cases: list[Case], workers: int, repeats: int, right: bool) -> dict[str, Any]:
    rates = []
    for _ in range(repeats):
        with pool(task.judge, cases, workers) as judge:
            start = time.perf_counter()
            got = judge.judge(rollouts(cases))
            rates.append(len(cases) / (time.perf_counter() - start))
    false = "wrong" if right else "right"
    failed = [(case, r) for case, r in zip(cases, got, strict=True) if r.verdict in (false, "unjudged")]
    return {
        "counts": {**Counter(r.verdict for r in got), "of": len(cases)},
        "false": [[r.verdict, case.rule, case.prompt.answer, case.response] for case, r in failed],
        "rules": dict(Counter(case.rule for case in cases)),
        "answers_per_s": {"median": round(statistics.median(rates)), "range": [round(min(rates)), round(max(rates))]},
    }


def endure(tasks: list[TextTask], workers: int) -> dict[str, Any]:
    """Hostile responses against references of both sets; meanwhile the system kills workers."""
    rng = random.Random(SEED)
    prompts = [p for task in tasks for p in task.prompts("eval", SEED)]
    cases = [Case(rng.choice(prompts), "hostile", text) for text in hostile(HOSTILE, rng)]
    before = set(os.listdir())
    with pool(tasks[0].judge, cases, workers) as judge:
        killer = Killer(judge)
        killer.start()
        start = time.perf_counter()
        got = judge.judge(rollouts(cases))
        seconds = time.perf_counter() - start
        killer.stop()
        stats = judge.stats()
    right = [[c.prompt.answer, c.response[:300]] for c, r in zip(cases, got, strict=True) if r.verdict == "right"]
    return {
        "of": len(cases),
        "counts": dict(Counter(r.verdict for r in got)),
        "unjudged_by": {k: int(stats[f"judge/{k}"]) for k in ("timeouts", "crashes", "errors")},
        "killed_from_outside": killer.kills,
        "judged_right": right,
        "files_made": sorted(set(os.listdir()) - before),
        "answers_per_s": round(len(cases) / seconds),
        "seconds": round(seconds, 1),
    }


class Killer(threading.Thread):
    """What the kernel does when memory runs out: SIGKILL, while the worker judges."""

    def __init__(self, judge: Judge) -> None:
        super().__init__(daemon=True)
        self._judge, self._over, self.kills = judge, threading.Event(), 0

    def run(self) -> None:
        dead: set[int] = set()
        while len(dead) < KILLS and not self._over.wait(0.1):
            for pid in {worker.pid for worker in self._judge._workers[:1]} - dead:
                os.kill(pid, signal.SIGKILL)
                dead.add(pid)
                self.kills += 1

    def stop(self) -> None:
        self._over.set()
        self.join()


def pool(judge: Callable[[Prompt, str], float], cases: Iterable[Case], workers: int) -> Judge:
    by_id = {str(i): case.prompt for i, case in enumerate(cases)}
    judges = {prompt.task: judge for prompt in by_id.values()}
    settings = config.JudgeSettings(workers=workers)
    return Judge(by_id.__getitem__, judges, settings, decode=lambda ids: "".join(map(chr, ids)))


def rollouts(cases: list[Case]) -> list[Rollout]:
    return [_rollout(i, case.response) for i, case in enumerate(cases)]


def _rollout(number: int, text: str) -> Rollout:
    ids = np.array([ord(c) for c in text], np.int32)
    return Rollout(
        prompt_id=str(number),
        group_id=number,
        index=0,
        phase="eval",
        sampling=Sampling(max_tokens=len(text) + 1),
        length=len(text),
        finish="stop",
        first_version=0,
        last_version=0,
        trace=Trace(ids=ids, log_probs=np.zeros(ids.size, np.float32), versions=np.zeros(ids.size, np.int32)),
    )


if __name__ == "__main__":
    main()
