"""What speculation is worth by batch size and tokens to verify, as in TLT's table 4, with the acceptance forced.

Weights are random, so nothing could be guessed; but noise is keyed, so what plain decoding wrote is what verification
will draw: a drafter that knows it proposes it, wrong with chance 1 - a at each place. Temperature is 100: the noise
decides, and rounding of logits hardly ever makes a verified row part from the plain one (`same_rollouts`). A cell is
`batch` rows at a context of about --context; only steps count in which all of them run. speed_up = (tokens a row and
step) x (plain step) / (verifying step), on a GPU by its own clock: drafters there make their drafts on the device and
steps are launched ahead, while this one proposes from the host. A real drafter's own time is not in it; `draft_ms` is
what this one took.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draft_watch import Fixed, Step, Watch, WatchedSpeculation, accept_length

from whet import files
from whet.draft.base import OFF, DraftArm, Drafter, RowView
from whet.fast.fused import share_storage
from whet.fast.graphs import GraphRunners
from whet.model.twin import PAGE
from whet.rollout.engine import LocalEngine
from whet.tools.bench.peers import SHAPES, shape_model
from whet.tools.experiment import circumstances
from whet.types import Request, Sampling

HEAT = 100.0


class Forced(Drafter):
    """Proposes what plain decoding wrote, wrong with chance 1 - accept at each place."""

    name = "forced"

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.plain = self.guesses = np.zeros((0, 0), np.int32)
        """[rows, tokens], by group id."""

    def know(self, plain: np.ndarray, accept: float, most: int, seed: int) -> None:
        """`most`: tokens that a draft may have; behind the end lies nothing of worth."""
        wrong = np.random.default_rng(seed).random(plain.shape) >= accept
        guesses = np.where(wrong, (plain + 1) % self.vocab, plain)
        self.plain, self.guesses = plain, np.pad(guesses, ((0, 0), (0, most)))

    def propose(self, rows: Sequence[RowView], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        row = np.array([view.group_id for view in rows])[:, None]
        at = np.array([view.ids.size for view in rows])[:, None]
        return self.guesses[row, at + np.arange(int(most.max(initial=0)))], most.astype(np.int32)


class Grid:
    """One engine for all cells of a shape."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        model = shape_model(options.shape, options.device)
        share_storage(model)
        self.vocab: int = model.config.vocab_size
        known = max(1, options.context - options.new // 2)
        self.forced = Forced(self.vocab)
        self.speculation = WatchedSpeculation([self.forced], Fixed(OFF), vocab=self.vocab)
        self.engine = LocalEngine(
            model,
            encode=lambda name: np.random.default_rng(int(name)).integers(1, self.vocab, known).tolist(),
            decode=lambda ids: "",
            seed=options.seed,
            slots=max(options.batch),
            context=-(-(known + options.new) // PAGE) * PAGE,
            runners=GraphRunners() if options.device == "cuda" else None,
            speculation=self.speculation,
        )

    def run(self, batch: int, arm: DraftArm) -> tuple[list[Step], float, np.ndarray]:
        """The steps of a run, seconds of one in which all rows run, and what was written [batch, new]."""
        watch = self.speculation.chooser = Watch(Fixed(arm))
        self.speculation.drafting = 0.0
        wanted = Sampling(max_tokens=self.options.new, temperature=HEAT)
        engine = self.engine
        engine.submit([Request(prompt_id=str(i), group_id=i, n=1, sampling=wanted) for i in range(batch)])
        while engine.rows.ready < batch:
            engine.step()
        engine.stats()
        while engine.rows.size == batch:
            engine.step()
        found = engine.stats()
        done = sorted(engine.collect(), key=lambda rollout: rollout.group_id)
        steps = watch.take()
        on_device = found.get("rollout/gpu_seconds", 0.0) / found["rollout/steps"]
        written = np.stack([rollout.trace.ids for rollout in done if rollout.trace is not None])
        return steps, on_device or seconds_a_step(steps, batch), written

    def plain(self, batch: int) -> tuple[float, np.ndarray]:
        """Seconds a step, and the tokens."""
        _, seconds, written = self.run(batch, OFF)
        return seconds, written

    def cell(self, batch: int, verify: int, accept: float, off: Sequence[float], plain: np.ndarray) -> dict[str, Any]:
        arm = DraftArm(Forced.name, verify - 1)
        self.engine.runner.prepare(batch, arm)
        self.forced.know(plain, accept, arm.depth, self.options.seed)
        taken, lengths, drafting, same = [], [], [], []
        for _ in range(self.options.repeats):
            steps, seconds, written = self.run(batch, arm)
            full = [s for s in steps if s.batch == batch and s.most is not None and s.most.min() == arm.depth]
            lengths.append(accept_length(full or steps) or 1.0)
            taken.append(seconds)
            drafting.append(self.speculation.drafting / len(steps))
            same.append(float((written == plain).all(1).mean()))
        length = statistics.fmean(lengths)
        return {
            "accept_length": length,
            "expected_length": expected_length(accept, arm.depth),
            "ms": 1000 * statistics.median(taken),
            "draft_ms": 1000 * statistics.median(drafting),
            "speed_up": length * statistics.median(off) / statistics.median(taken),
            "same_rollouts": min(same),
        }


def seconds_a_step(steps: Sequence[Step], batch: int) -> float:
    """From one step to the next, the median over those in which all rows run; of the only one, its own."""
    full = [step for step in steps if step.batch == batch]
    apart = [(b.at - a.at) / b.steps for a, b in itertools.pairwise(full)]
    return statistics.median(apart) if apart else full[0].seconds / full[0].steps


def expected_length(accept: float, depth: int) -> float:
    """1 + a + a^2 + ... + a^depth.

    >>> expected_length(0.5, 2)
    1.75
    """
    return sum(accept**i for i in range(depth + 1))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser().parse_args(arguments)
    path = options.out / f"draft_grid_{options.shape}.json"
    until = time.monotonic() + options.seconds
    grid = Grid(options)
    result: dict[str, Any] = {
        "what": "speed-up over plain decoding by tokens to verify and rows, acceptance forced (draft_grid.py)",
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "off_ms": {},
        "cells": [],
        "skipped": 0,
        "circumstances": circumstances(),
    }
    for batch in options.batch:
        grid.plain(batch)  # captures, and builds kernels
        first, plain = grid.plain(batch)
        cells = [(verify, accept) for verify in options.verify for accept in options.accept]
        found = []
        for verify, accept in cells:
            if time.monotonic() >= until:
                result["skipped"] += 1
                continue
            found.append({"batch": batch, "verify": verify, "accept": accept})
            found[-1] |= grid.cell(batch, verify, accept, [first], plain)
            files.write_text(path, json.dumps({**result, "cells": [*result["cells"], *found]}, indent=1) + "\n")
        last, _ = grid.plain(batch)
        off = (first + last) / 2
        for cell in found:
            cell["speed_up"] *= off / first
        result["off_ms"][str(batch)] = {"first": 1000 * first, "last": 1000 * last}
        result["cells"] += found
        result["graph_bytes"] = grid.engine.stats().get("rollout/graph_bytes", 0.0)
        files.write_text(path, json.dumps(result, indent=1) + "\n")
        print(f"batch {batch}: plain {1000 * off:.3f} ms", flush=True)
    return result


def table(result: dict[str, Any]) -> str:
    """Speed-ups, a line for each acceptance and number of tokens to verify, a column for each batch."""
    batches = result["settings"]["batch"]
    lines = ["accept verify " + " ".join(f"{f'b{batch}':>6}" for batch in batches)]
    for accept in result["settings"]["accept"]:
        for verify in result["settings"]["verify"]:
            mine = {c["batch"]: c for c in result["cells"] if c["accept"] == accept and c["verify"] == verify}
            row = " ".join(f"{mine[b]['speed_up']:6.2f}" if b in mine else " " * 6 for b in batches)
            lines.append(f"{accept:6.2f} {verify:6d} {row}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--shape", choices=tuple(SHAPES), default="1.5b")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--accept", type=float, nargs="+", default=[0.4, 0.6, 0.8])
    made.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    made.add_argument("--verify", type=int, nargs="+", default=[2, 5, 9, 17, 33], help="2 or more")
    made.add_argument("--context", type=int, default=512)
    made.add_argument("--new", type=int, default=128, help="tokens a row writes")
    made.add_argument("--repeats", type=int, default=2)
    made.add_argument("--seconds", type=float, default=3600.0, help="cells left after these are skipped")
    made.add_argument("--seed", type=int, default=0)
    return made


if __name__ == "__main__":
    print(table(main()))
