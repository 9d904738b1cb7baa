"""How fast rollouts are generated: our engine beside its peers, the same work on the same model.

A cell is B prompts of one length with 128 new tokens each, or a long-tailed workload. Every peer warms up once and
then runs in `repeats` rounds, one after the other in each round, so that all meet the same machine.
Tokens per second include the prefill. The decode rate leaves it out: B (n - 1) / (T_n - T_1), where T_1 is the time of
the same prompts with one new token; it is compared with what `whet.estimate` gives for the cell's mean context.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from whet import files
from whet.errors import WhetError
from whet.estimate import MEASURED, PAPER, attainable_step, dims_of
from whet.model.memory import measure
from whet.tools.bench.peers import (
    PEERS,
    Apart,
    Peer,
    PeerFailed,
    Prompts,
    Whet,
    missing,
    shape_config,
    shape_model,
)
from whet.tools.experiment import circumstances
from whet.types import Rollout

Stand = Peer | Apart
# seconds of a cell, and of its prompts with one new token (not for the tail)
Round = tuple[float, float | None]


def spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "all": list(values),
    }


# ---- cells

NEW = 128
SLOW_NEW = 32  # new tokens of a slow peer where only the decode rate counts
WARM = 8  # new tokens of a warm-up: graphs are captured and kernels built by then
WHAT = "tokens per second of random weights at temperature 1; decode_ leaves out the prefill; ratios: ours / theirs"
TAIL = {"requests": 256, "median": 256, "sigma": 1.0, "cap": 2048, "prompt": 128}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCell:
    name: str
    batch: int
    prompt: int
    new: int
    # cells of one group are measured with one engine; the next group has longer contexts
    group: int
    tail: bool = False
    decode_only: bool = False  # only the decode rate counts, so a slow peer may make fewer tokens

    @property
    def context(self) -> int:
        """The mean context while decoding."""
        return self.prompt + self.new // 2

    def work(self, vocab: int, seed: int, round_: int) -> tuple[list[list[int]], list[int]]:
        """Prompts and lengths: the lengths depend on the seed alone, the prompts are new in every round."""
        rng = np.random.default_rng((seed, round_, self.batch, self.prompt))
        prompts = rng.integers(1, vocab, (self.batch, self.prompt)).tolist()
        if not self.tail:
            return prompts, [self.new] * self.batch
        draws = np.random.default_rng(seed).standard_normal(self.batch)
        lengths = np.exp(np.log(self.new / 8) + TAIL["sigma"] * draws).clip(1, self.new)
        return prompts, lengths.astype(int).tolist()

    def new_of(self, peer: str) -> int:
        """New tokens per row, at most, that a peer makes in this cell; 0 if it takes no part."""
        if PEERS[peer].slow and self.name.endswith("_p128"):
            return 0
        return min(self.new, SLOW_NEW) if PEERS[peer].slow and self.decode_only else self.new


def _cells() -> Iterator[DecodeCell]:
    """The most wanted cells come first, because a run may end early."""
    for batch in (64, 256, 8, 1):
        yield DecodeCell(name=f"b{batch}_p128", batch=batch, prompt=128, new=NEW, group=0)
    for batch in (64, 256, 1, 8):
        yield DecodeCell(
            name=f"b{batch}_c512",
            batch=batch,
            prompt=512 - NEW // 2,
            new=NEW,
            group=0,
            decode_only=True,
        )
    yield DecodeCell(name="tail", batch=256, prompt=128, new=2048, group=0, tail=True)
    for batch in (64, 8, 1, 256):
        yield DecodeCell(
            name=f"b{batch}_c4k",
            batch=batch,
            prompt=4096 - NEW // 2,
            new=NEW,
            group=1,
            decode_only=True,
        )
    yield DecodeCell(
        name="b8_c16k", batch=8, prompt=16384 - NEW // 2, new=NEW, group=2, decode_only=True
    )


CELLS = {cell.name: cell for cell in _cells()}


def decode_bench(
    out: Path,
    *,
    device: str = "cuda",
    shapes: Sequence[str] = ("135m", "1.5b"),
    cells: Sequence[str] = (),
    peers: Sequence[str] = tuple(PEERS),
    repeats: int = 3,
    seconds: float = float("inf"),
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure, write rollout_gpu.json (rollout_grid_cpu.json on a CPU) into `out` along the way, and return it.

    cells, peers: names; no cells means all of them. seconds: cells that are left after these are skipped and named.
    """
    until = time.monotonic() + seconds
    path = out / ("rollout_gpu.json" if device == "cuda" else "rollout_grid_cpu.json")
    for shape in shapes:
        shape_config(shape)  # refuses an unknown shape
    for what, given, known in (("cell", cells, CELLS), ("peer", peers, PEERS)):
        if unknown := [name for name in given if name not in known]:
            raise WhetError(f'There is no {what} "{unknown[0]}"; there are {", ".join(known)}.')
    chosen = [cell for cell in CELLS.values() if not cells or cell.name in cells]
    why_not = {name: missing(name, device) for name in peers}
    for why in filter(None, why_not.values()):
        on_progress(why)
    here = [name for name in PEERS if name in peers and not why_not[name]]
    # An earlier run's cells are kept; one that is measured again replaces the old one.
    new = {"what": WHAT, "runs": [], "shapes": {}}
    result: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else new
    result["runs"].append(
        {"repeats": repeats, "seed": seed, "device": device, "peers": here, **circumstances()}
    )
    for shape in shapes:
        found = result["shapes"].setdefault(shape, {"cells": {}, "startup_seconds": {}})
        found["skipped"] = [cell.name for cell in chosen]
        bench = ShapeBench(shape, torch.device(device), chosen, repeats, seed, until, on_progress)
        with closing(bench):
            bench.start(here)
            for cell, measured in bench.measured():
                found["cells"][cell.name] = {"run": len(result["runs"]) - 1, **measured}
                found["skipped"].remove(cell.name)
                found["startup_seconds"] |= bench.startup
                if "whet" in bench.stands and cell is chosen[0]:
                    found["log_probs"] = bench.log_probs(cell)
                files.write_text(path, json.dumps(result, indent=1) + "\n")
        if found["skipped"]:
            on_progress(f"{shape}: no time was left for {', '.join(found['skipped'])}.")
        files.write_text(path, json.dumps(result, indent=1) + "\n")
    return result


@dataclass
class ShapeBench:
    """One shape: its model, the stands of its peers, and the rounds."""

    shape: str
    device: torch.device
    cells: Sequence[DecodeCell]
    repeats: int
    seed: int
    until: float
    on_progress: Callable[[str], None]
    stands: dict[str, Stand] = field(default_factory=dict)
    # seconds until ready, once per group it is made for
    startup: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dims = dims_of(measure(shape_model(self.shape, "meta")))

    def start(self, peers: Sequence[str]) -> None:
        """vLLM first: it reads how much of the GPU is free, and nothing else may take any memory meanwhile."""
        for name in sorted(peers, key=lambda name: name != "vllm"):
            apart = name == "vllm"
            self.stands[name] = (
                Apart(name, self.shape, "cuda") if apart else PEERS[name](self.shape, self.device)
            )
            # ours is made for each group of cells, the others once, for the longest
            if name != "whet":
                self._prepare(name, self.cells)
        self.stands = {name: self.stands[name] for name in PEERS if name in self.stands}

    def _prepare(self, name: str, cells: Sequence[DecodeCell]) -> None:
        """A peer that cannot be made ready is left out of what follows."""
        batch = max(c.batch for c in cells)
        context = max(c.prompt + c.new for c in cells)
        try:
            self.startup.setdefault(name, []).append(self.stands[name].prepare(batch, context))
        except PeerFailed as error:
            self.on_progress(f"{self.shape}, {name}: {error}")
            self.stands.pop(name).close()

    def measured(self) -> Iterator[tuple[DecodeCell, dict[str, Any]]]:
        group = None
        for cell in self.cells:
            if time.monotonic() >= self.until:
                return
            if cell.group != group and "whet" in self.stands:
                self._prepare("whet", [c for c in self.cells if c.group == cell.group])
            group = cell.group
            yield cell, self.measure(cell)

    def measure(self, cell: DecodeCell) -> dict[str, Any]:
        """All peers that take part in a cell, in turn: a warm-up, then the rounds."""
        rounds: dict[str, list[Round]] = {name: [] for name in self.stands if cell.new_of(name)}
        warm: dict[str, float] = {}
        peers: dict[str, Any] = {}  # first those that failed
        for number in range(self.repeats + 1):  # the first is the warm-up
            if number > 1 and time.monotonic() >= self.until:
                break
            for name, taken in rounds.items():
                slow = PEERS[name].slow
                new = cell.new_of(name)
                if name in peers or (cell.tail and slow and number != 1):
                    continue
                try:
                    if number == 0:
                        warm[name] = self._timed(name, cell, 0, new if slow else WARM)
                    else:
                        whole = self._timed(name, cell, number, new)
                        taken.append(
                            (whole, None if cell.tail else self._timed(name, cell, number, 1))
                        )
                except PeerFailed as error:
                    peers[name] = {"failed": str(error)}
                    self.on_progress(f"{self.shape} {cell.name}, {name}: {error}")
        for name, taken in rounds.items():
            if taken and name not in peers:
                known = {"warmup_seconds": warm.get(name), "note": PEERS[name].note}
                peers[name] = self._figures(cell, taken, cell.new_of(name)) | known
        rates = {
            name: main_rate(found, cell.decode_only)
            for name, found in peers.items()
            if "failed" not in found
        }
        shown = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
        self.on_progress(f"{self.shape} {cell.name}: tokens/s {shown}")
        return {
            "batch": cell.batch,
            "prompt": cell.prompt,
            "new": cell.new,
            "decode_only": cell.decode_only,
            **({"workload": TAIL} if cell.tail else {"context": cell.context}),
            "peers": peers,
            "ratios": ratios(peers),
        }

    def _timed(self, name: str, cell: DecodeCell, number: int, most: int) -> float:
        """Seconds of round `number` with at most so many new tokens per row."""
        prompts, lengths = cell.work(self.dims.vocab, self.seed, number)
        return self.stands[name].timed(prompts, [min(n, most) for n in lengths])

    def _figures(self, cell: DecodeCell, rounds: Sequence[Round], new: int) -> dict[str, Any]:
        figures: dict[str, Any] = {
            "repeats": len(rounds),
            "seconds": spread([whole for whole, _ in rounds]),
        }
        if new == cell.new:  # else the prefill would weigh too much
            tokens = sum(cell.work(self.dims.vocab, self.seed, 0)[1])
            figures["tokens_per_second"] = spread([tokens / whole for whole, _ in rounds])
        firsts = [first for _, first in rounds if first is not None]
        steps = [(whole - first) / (new - 1) for whole, first in rounds if first is not None]
        if firsts:
            figures["prefill_seconds"] = spread(firsts)
        if steps and min(steps) > 0:  # else the steps are smaller than the noise of the prefill
            figures["ms_a_step"] = spread([1000 * step for step in steps])
            figures["decode_tokens_per_second"] = spread([cell.batch / step for step in steps])
            figures["share_of_attainable"] = {
                name: attainable_step(self.dims, cell.batch, cell.context, gpu)
                / statistics.median(steps)
                for name, gpu in {"paper": PAPER, "measured": MEASURED}.items()
            }
        return figures

    def log_probs(self, cell: DecodeCell) -> dict[str, float]:
        """The gap between our engine, as it stands, and the plain model."""
        ours = self.stands["whet"]
        assert isinstance(ours, Whet)
        few = DecodeCell(
            name="", batch=8, prompt=cell.prompt, new=min(cell.new, 64), group=cell.group
        )
        prompts, lengths = few.work(self.dims.vocab, self.seed, self.repeats + 1)
        return log_prob_gap(ours.model, prompts, ours.rollouts(prompts, lengths))

    def close(self) -> None:
        while self.stands:
            self.stands.popitem()[1].close()
        # what was compiled holds models and graphs, and the next shape needs the memory
        torch.compiler.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def ratios(peers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Our rate divided by each peer's, round by round, for every rate that both have."""
    ours = peers.get("whet", {})
    found: dict[str, dict[str, Any]] = {}
    for name, theirs in peers.items():
        for rate in ("tokens_per_second", "decode_tokens_per_second"):
            if name != "whet" and rate in ours and rate in theirs:
                pairs = zip(ours[rate]["all"], theirs[rate]["all"], strict=False)
                found.setdefault(name, {})[rate] = spread([a / b for a, b in pairs])
    return found


def main_rate(figures: Mapping[str, Any], decode: bool) -> float:
    """The median rate that a peer is shown by: without the prefill if `decode` and known, else with it."""
    order = ("tokens_per_second", "decode_tokens_per_second")
    rates = [
        figures[name]["median"]
        for name in (reversed(order) if decode else order)
        if name in figures
    ]
    return float(rates[0]) if rates else float("nan")


@torch.inference_mode()
def log_prob_gap(
    model: PreTrainedModel, prompts: Prompts, rollouts: Sequence[Rollout]
) -> dict[str, float]:
    """How far recorded log-probs are from those of a teacher-forced forward of the plain model.

    Over all tokens of rollouts at temperature 1, with d = plain - recorded: max |d|, mean |d|, and the mean of
    exp(d) - 1 - d, which estimates KL(engine || plain) because the tokens were drawn by the engine.
    """
    gaps = []
    for rollout in rollouts:
        assert rollout.trace is not None
        prompt = list(prompts[int(rollout.prompt_id)])  # prompts are named by their place
        ids = torch.tensor([prompt + rollout.trace.ids.tolist()], device=model.device)
        logits = (
            model(ids[:, :-1], use_cache=False, logits_to_keep=rollout.length).logits[0].float()
        )
        plain = torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
        gaps.append(plain.double().cpu().numpy() - rollout.trace.log_probs)
    d = np.concatenate(gaps)
    found = {
        "tokens": d.size,
        "max": np.abs(d).max(),
        "mean": np.abs(d).mean(),
        "kl": np.mean(np.exp(d) - 1 - d),
    }
    return {name: float(value) for name, value in found.items()}
