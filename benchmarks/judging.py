"""How often whet and math-verify alone accept a wrong response and refuse a right one.

    python benchmarks/judging.py --out benchmarks/results

Judges the pairs of tests/tasks/judging_pairs.jsonl, each in the pool of worker processes that a run uses, so that a
response that takes too long counts as refused. Prints a table and writes it to judging.json, with the false verdicts
of whet.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import math_verify
import numpy as np

from whet import config
from whet.tasks.answers import Matcher
from whet.tasks.judge import Judge
from whet.types import Prompt, Rollout, Sampling, Trace

PAIRS = Path(__file__).parents[1] / "tests" / "tasks" / "judging_pairs.jsonl"
PARTS = {
    "open": "made by rules of meaning, used to mend the judge",
    "held out": "made by the same rules, not used",
    "math-verify": "math-verify's own tests",
    "claims": "names in tuples, words taken back, percent, angles: written by hand, used",
    "claims, unseen": "the same kinds, not used",
    "hostile": "bombs of powers, brackets and digits, attempts to run code, odd characters",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    result: dict[str, Any] = {"parts": PARTS}
    result["libraries"] = {name: version(name) for name in ("math-verify", "sympy")}
    for name, judge in (("whet", Matcher().judge), ("math-verify", math_verify_alone)):
        result[name] = error_rates(judge, args.workers)
    for counts in result["math-verify"]["parts"].values():
        del counts["false"]  # thousands of lines
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "judging.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print("| pairs | judge | wrong accepted | right refused |\n|---|---|---:|---:|")
    for part in PARTS:
        for name in ("whet", "math-verify"):
            counts = result[name]["parts"][part]
            print(f"| {part} | {name} | {share(counts['accepted'], counts['wrong'])} ", end="")
            print(f"| {share(counts['refused'], counts['right'])} |")


def share(count: int, of: int) -> str:
    return f"{count} of {of:,} ({count / max(of, 1):.1%})"


def math_verify_alone(prompt: Prompt, response: str) -> float:
    gold = math_verify.parse(f"\\boxed{{{prompt.answer}}}", parsing_timeout=None)
    found = math_verify.parse(response, parsing_timeout=None)
    return float(math_verify.verify(gold, found, timeout_seconds=None))


def error_rates(judge: Callable[[Prompt, str], float], workers: int) -> dict[str, Any]:
    """Counts of each part; a response without a verdict counts as refused."""
    cases = [
        (group, text, kind)
        for group in read_pairs()
        for kind in ("right", "wrong")
        for text in group[kind]
    ]
    prompts = {
        str(number): Prompt(
            id=str(number), text=group["question"], answer=group["gold"], task="text"
        )
        for number, (group, _, _) in enumerate(cases)
    }
    start = time.perf_counter()
    settings = config.JudgeSettings(workers=workers)
    spell = lambda ids: "".join(map(chr, ids))  # noqa: E731
    with Judge(prompts.__getitem__, {"text": judge}, settings, decode=spell) as pool:
        judged = pool.judge([rollout(number, text) for number, (_, text, _) in enumerate(cases)])
    parts: dict[str, Any] = {
        part: {"right": 0, "refused": 0, "wrong": 0, "accepted": 0, "unjudged": 0, "false": []}
        for part in PARTS
    }
    for (group, text, kind), got in zip(cases, judged, strict=True):
        part = parts[group["part"]]
        part[kind] += 1
        part["unjudged"] += got.verdict == "unjudged"
        if (got.verdict == "right") != (kind == "right"):
            part["refused" if kind == "right" else "accepted"] += 1
            part["false"].append([group["family"], group["gold"], text])
    return {"parts": parts, "seconds": round(time.perf_counter() - start, 1)}


def read_pairs() -> list[dict[str, Any]]:
    """Groups of responses to one question: part, family, question, gold, right, wrong."""
    return [
        {"right": [], "wrong": [], **json.loads(line)} for line in PAIRS.read_text().splitlines()
    ]


def rollout(number: int, text: str) -> Rollout:
    ids = np.array(list(map(ord, text)), np.int32)
    nothing = np.zeros(ids.size)
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
        trace=Trace(
            ids=ids, log_probs=nothing.astype(np.float32), versions=nothing.astype(np.int32)
        ),
    )


if __name__ == "__main__":
    main()
