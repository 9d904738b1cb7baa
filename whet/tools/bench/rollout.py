"""How fast rollouts are generated: our engine beside transformers' `generate`, the same work on the same model.

64 requests with log-normal lengths (median 60, sigma 1, at most 512) on one CPU thread; `generate` takes them in the
given order in batches of 16 and of 64, each batch running until its longest request is done. Only asked-for tokens
count, and all ways must have produced the same number. Repeats are interleaved, so that a busy machine slows all
alike. `whet bench rollout` prints what this returns; nothing is printed here.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from whet import files
from whet.errors import WhetError
from whet.estimate import CARDS, attainable_rate, dims_of
from whet.model.load import tiny_model
from whet.rollout.engine import LocalEngine
from whet.tools.bench.peers import LIMITS, PEERS, Whet, missing, shape_config
from whet.tools.bench.stand import Apart, Here, PeerFailed, Taken, circumstances
from whet.tools.experiment import one_thread
from whet.types import Request, Rollout, Sampling

VOCAB = 20
REQUESTS = 64
LONGEST = 512
CONTEXT = 544


def rollout_bench(out: Path, repeats: int = 3, seed: int = 0) -> dict[str, Any]:
    """Measures, writes `rollout.json` into `out`, and returns what it wrote."""
    prompts, lengths = _work(seed)
    model = tiny_model(VOCAB, seed=seed).eval()
    engine = _make_engine(model, prompts, seed)  # made once, as a run makes it
    ways: dict[str, Callable[[], int]] = {
        "engine": lambda: _engine(engine, lengths),
        "generate_16": lambda: _generate(model, prompts, lengths, 16),
        "generate_64": lambda: _generate(model, prompts, lengths, 64),
    }
    tokens = sum(lengths)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with one_thread(), torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, run in ways.items():  # warm: the first call pays for lazy imports and thread pools
            assert run() == tokens, f"{name} made another number of tokens"
        for _ in range(repeats):
            for name, run in ways.items():
                begin = time.perf_counter()
                made = run()
                rates[name].append(tokens / (time.perf_counter() - begin))
                assert made == tokens, f"{name} made another number of tokens"
        full = [_full_batch(engine) for _ in range(repeats)]
    result = {
        "what": "tokens a second, one CPU thread, tiny model (hidden 96, 2 layers), float32, temperature 1",
        "requests": REQUESTS,
        "lengths": {"median": 60, "sigma": 1.0, "cap": LONGEST, "mean": tokens / REQUESTS, "max": max(lengths)},
        "tokens": tokens,
        "same_tokens": "every way generated the same number of asked-for tokens",
        "tokens_per_second": {name: _summary(values) for name, values in rates.items()},
        "tokens_per_second_full_batch": _summary(full),
        "ratio_to_generate": {
            name: _summary([a / b for a, b in zip(rates["engine"], rates[name], strict=True)])
            for name in rates
            if name != "engine"
        },
        "repeats": repeats,
        "seed": seed,
        **circumstances(),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "rollout.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def _work(seed: int) -> tuple[list[list[int]], list[int]]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, VOCAB, rng.integers(8, 25)).tolist() for _ in range(REQUESTS)]
    lengths = np.clip(np.exp(np.log(60) + rng.standard_normal(REQUESTS)), 1, LONGEST).astype(int)
    return prompts, lengths.tolist()


def _make_engine(model: PreTrainedModel, prompts: list[list[int]], seed: int) -> LocalEngine:
    def decode(ids: Any) -> str:
        raise AssertionError("no stop strings here")

    return LocalEngine(model, encode=lambda i: prompts[int(i)], decode=decode, seed=seed, slots=64, context=CONTEXT)


def _engine(engine: LocalEngine, lengths: list[int]) -> int:
    engine.submit([_request(i, n) for i, n in enumerate(lengths)])
    return sum(r.length for r in engine.collect())


def _request(i: int, tokens: int) -> Request:
    return Request(prompt_id=str(i), group_id=i, n=1, sampling=Sampling(max_tokens=tokens))


def _full_batch(engine: LocalEngine, tokens: int = 100) -> float:
    """All 64 rows running throughout: what a batch that is kept full gives."""
    begin = time.perf_counter()
    made = _engine(engine, [tokens] * REQUESTS)
    return made / (time.perf_counter() - begin)


def _generate(model: PreTrainedModel, prompts: list[list[int]], lengths: list[int], batch: int) -> int:
    """Left-padded batches in the given order; what a row writes beyond its own length is thrown away."""
    made = 0
    for first in range(0, REQUESTS, batch):
        rows, wanted = prompts[first : first + batch], lengths[first : first + batch]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max(wanted),
            eos_token_id=None,
            pad_token_id=0,
        )
        made += sum(row[width : width + n].numel() for row, n in zip(out, wanted, strict=True))
    return made


def _summary(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "all": values}


# ---- gap
#
# How far recorded log-probs are from those of a teacher-forced forward of the plain model: max, mean and KL.


@torch.inference_mode()
def log_prob_gap(
    model: PreTrainedModel, prompts: Mapping[str, Sequence[int]], rollouts: Sequence[Rollout]
) -> dict[str, float]:
    """Over all tokens of rollouts at temperature 1, with d = plain - recorded: max |d|, mean |d|, and the mean of
    exp(d) - 1 - d, which estimates KL(engine || plain) as the tokens were drawn by the engine."""
    gaps = []
    for rollout in rollouts:
        assert rollout.trace is not None
        prompt = list(prompts[rollout.prompt_id])
        ids = torch.tensor([prompt + rollout.trace.ids.tolist()], device=model.device)
        logits = model(ids[:, :-1], use_cache=False, logits_to_keep=rollout.length).logits[0].float()
        plain = torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
        gaps.append(plain.double().cpu().numpy() - rollout.trace.log_probs)
    d = np.concatenate(gaps)
    return {
        "tokens": float(d.size),
        "max": float(np.abs(d).max()),
        "mean": float(np.abs(d).mean()),
        "kl": float(np.mean(np.exp(d) - 1 - d)),
    }


# ---- decode
#
# `whet bench rollout` on a GPU: a grid of batch sizes and contexts, our engine and its peers in turn on one card.
#
# A cell is B prompts of one length with 128 new tokens each, or the long-tailed workload. Every peer runs it once to
# warm up and then in `repeats` rounds, one after the other in each round, so that all meet the same machine. Tokens a
# second include the prefill. The decode rate leaves it out: B (n - 1) / (T_n - T_1), where T_1 is the same prompts
# asked for one token; it is compared with what `roofline.py` says of the cell's mean context. The file is written
# after every cell, and a later run adds to it, so that nothing measured is lost.


NEW = 128
WARM = 8
"""New tokens of a warm-up, where a peer does not warm up whole: graphs are captured and kernels built by then."""
TAIL = {"requests": 256, "median": 256, "sigma": 1.0, "cap": 2048, "prompt": 128}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCell:
    name: str
    batch: int
    prompt: int
    new: int
    group: int
    """Cells of one group are measured with one engine; the next has longer contexts."""
    tail: bool = False
    decode_only: bool = False
    """Where a peer may make fewer tokens, as only its decode rate is asked for."""

    @property
    def context(self) -> int:
        """The mean while decoding.

        >>> CELLS["b64_c512"].context, CELLS["b64_p128"].context
        (512, 192)
        """
        return self.prompt + self.new // 2

    def work(self, vocab: int, seed: int, round_: int) -> tuple[list[list[int]], list[int]]:
        """Prompts and lengths: the lengths hang on the seed alone, the prompts are new in every round."""
        rng = np.random.default_rng((seed, round_, self.batch, self.prompt))
        prompts = rng.integers(1, vocab, (self.batch, self.prompt)).tolist()
        if not self.tail:
            return prompts, [self.new] * self.batch
        draws = np.random.default_rng(seed).standard_normal(self.batch)
        lengths = np.exp(np.log(self.new / 8) + TAIL["sigma"] * draws).clip(1, self.new)
        return prompts, lengths.astype(int).tolist()


def _cells() -> Iterator[DecodeCell]:
    """The most wanted first: a run may end early."""
    for batch in (64, 256, 8, 1):
        yield DecodeCell(name=f"b{batch}_p128", batch=batch, prompt=128, new=NEW, group=0)
    for batch in (64, 256, 1, 8):
        yield DecodeCell(name=f"b{batch}_c512", batch=batch, prompt=512 - NEW // 2, new=NEW, group=0, decode_only=True)
    yield DecodeCell(name="tail", batch=256, prompt=128, new=2048, group=0, tail=True)
    for batch in (64, 8, 1, 256):
        yield DecodeCell(name=f"b{batch}_c4k", batch=batch, prompt=4096 - NEW // 2, new=NEW, group=1, decode_only=True)
    yield DecodeCell(name="b8_c16k", batch=8, prompt=16384 - NEW // 2, new=NEW, group=2, decode_only=True)


CELLS = {cell.name: cell for cell in _cells()}
TINY = {
    cell.name: cell
    for cell in (
        DecodeCell(name="b4_p8", batch=4, prompt=8, new=6, group=0),
        DecodeCell(name="b1_c512", batch=1, prompt=13, new=6, group=0, decode_only=True),
        DecodeCell(name="tail", batch=12, prompt=8, new=24, group=0, tail=True),
        DecodeCell(name="b2_c4k", batch=2, prompt=29, new=6, group=1, decode_only=True),
    )
}
"""The same in small, for a CPU: the names are those of cells that all peers take part in."""
Stand = Here | Apart


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
    """Measures, writes rollout_gpu.json (rollout_grid_cpu.json on a CPU) into `out` as it goes, and returns it.

    cells, peers: which, by name; no cells means all of them. seconds: after these, what is left is skipped and said so.
    """
    until = time.monotonic() + seconds
    path = out / ("rollout_gpu.json" if device == "cuda" else "rollout_grid_cpu.json")
    chosen = {shape: _chosen(shape, cells) for shape in shapes}
    unknown = [name for name in peers if name not in PEERS]
    if unknown:
        raise WhetError(f'There is no peer "{unknown[0]}"; there are {", ".join(PEERS)}.')
    for name in peers:
        if why := missing(name, device):
            on_progress(why)
    here = [name for name in PEERS if name in peers and missing(name, device) is None]
    result = _begun(path)
    result["runs"].append({"repeats": repeats, "seed": seed, "device": device, "peers": here, **circumstances()})
    files.make_folder(out)
    for shape in shapes:
        found = result["shapes"].setdefault(shape, {"cells": {}, "startup_seconds": {}})
        found["skipped"] = [cell.name for cell in chosen[shape]]
        bench = _Bench(shape, torch.device(device), chosen[shape], repeats, seed, until, on_progress)
        try:
            bench.start(here)
            for cell, measured in bench.measured():
                found["cells"][cell.name] = {"run": len(result["runs"]) - 1, **measured}
                found["skipped"].remove(cell.name)
                found["startup_seconds"] |= bench.startup
                if "whet" in bench.stands and cell is chosen[shape][0]:
                    found["log_probs"] = bench.log_probs(cell)
                files.write_text(path, json.dumps(result, indent=1) + "\n")
        finally:
            bench.close()
        if found["skipped"]:
            on_progress(f"{shape}: no time was left for {', '.join(found['skipped'])}.")
        files.write_text(path, json.dumps(result, indent=1) + "\n")
    return result


class _Bench:
    """One shape: its model, the stands of its peers, and the rounds."""

    def __init__(
        self,
        shape: str,
        device: torch.device,
        cells: Sequence[DecodeCell],
        repeats: int,
        seed: int,
        until: float,
        on_progress: Callable[[str], None],
    ) -> None:
        self.shape, self.device, self.cells = shape, device, cells
        self.repeats, self.seed, self.until, self.on_progress = repeats, seed, until, on_progress
        self.dims = dims_of(shape_config(shape))
        self.stands: dict[str, Stand] = {}
        self.startup: dict[str, list[float]] = {}
        """Until a peer was ready, once for each group it was made for; what it does at its first run comes on top."""
        self.group: int | None = None

    def start(self, peers: Sequence[str]) -> None:
        """vLLM first: it reads how much of the GPU is free, and nothing else may take any meanwhile."""
        for name in sorted(peers, key=lambda name: name != "vllm"):
            try:
                if name == "vllm":
                    self.stands[name] = Apart(stand_of, name, self.shape, "cuda")
                else:
                    self.stands[name] = stand_of(name, self.shape, self.device)
            except PeerFailed as error:
                self.on_progress(f"{self.shape}, {name}: {error}")
                continue
            if not self.stands[name].sized:
                self._prepare(name, self.cells)
        self.stands = {name: self.stands[name] for name in PEERS if name in self.stands}

    def _prepare(self, name: str, cells: Sequence[DecodeCell]) -> None:
        """A peer that cannot be made ready is left out of what follows."""
        batch, context = max(c.batch for c in cells), max(c.prompt + c.new for c in cells)
        try:
            self.startup.setdefault(name, []).append(self.stands[name].prepare(batch, context))
        except PeerFailed as error:
            self.on_progress(f"{self.shape}, {name}: {error}")
            self.stands.pop(name).close()

    def measured(self) -> Iterator[tuple[DecodeCell, dict[str, Any]]]:
        for cell in self.cells:
            if time.monotonic() >= self.until:
                return
            if cell.group != self.group:
                mine = [c for c in self.cells if c.group == cell.group]
                for name in list(self.stands):
                    if self.stands[name].sized:
                        self._prepare(name, mine)
                self.group = cell.group
            yield cell, self._cell(cell)

    def _cell(self, cell: DecodeCell) -> dict[str, Any]:
        takes_part = {name: stand for name, stand in self.stands.items() if LIMITS[name].takes(cell.name)}
        rounds: dict[str, list[tuple[Taken, Taken | None]]] = {name: [] for name in takes_part}
        warm: dict[str, float] = {}
        failed: dict[str, str] = {}
        for round_ in range(self.repeats + 1):  # the first is the warm-up
            if round_ > 1 and time.monotonic() >= self.until:
                break
            for name, stand in takes_part.items():
                once = cell.tail and not LIMITS[name].tail_repeats
                if name in failed or (once and round_ != 1):
                    continue
                try:
                    if round_ == 0:
                        warm[name] = self._warm(stand, cell)
                    else:
                        rounds[name].append(self._round(stand, cell, round_))
                except PeerFailed as error:
                    failed[name] = str(error)
                    self.on_progress(f"{self.shape} {cell.name}, {name}: {error}")
        peers: dict[str, Any] = {name: {"failed": reason} for name, reason in failed.items()}
        for name, taken_ in rounds.items():
            if taken_ and name not in failed:
                peers[name] = self._figures(cell, taken_, self._new(name, cell)) | {
                    "warmup_seconds": warm.get(name),
                    "idle_share": self._idle(takes_part[name], cell, taken_),
                    "note": takes_part[name].note,
                }
        self.on_progress(_line(self.shape, cell, peers))
        return {
            "batch": cell.batch,
            "prompt": cell.prompt,
            "new": cell.new,
            "decode_only": cell.decode_only,
            **({"workload": TAIL} if cell.tail else {"context": cell.context}),
            "peers": peers,
            "ratios": ratios(peers),
        }

    def _new(self, name: str, cell: DecodeCell) -> int:
        most = LIMITS[name].most
        return min(cell.new, most) if most is not None and cell.decode_only else cell.new

    def _warm(self, stand: Stand, cell: DecodeCell) -> float:
        """Seconds of a first run, a short one but for peers whose first call of a length is slower."""
        prompts, lengths = cell.work(self.dims.vocab, self.seed, 0)
        most = self._new(stand.name, cell) if LIMITS[stand.name].warm_whole else WARM
        return stand.timed(prompts, [min(n, most) for n in lengths]).seconds

    def _round(self, stand: Stand, cell: DecodeCell, round_: int) -> tuple[Taken, Taken | None]:
        """The cell once, and its prompts for one token."""
        prompts, lengths = cell.work(self.dims.vocab, self.seed, round_)
        new = self._new(stand.name, cell)
        whole = stand.timed(prompts, [min(n, new) for n in lengths])
        return whole, None if cell.tail else stand.timed(prompts, [1] * cell.batch)

    def _figures(self, cell: DecodeCell, rounds: Sequence[tuple[Taken, Taken | None]], new: int) -> dict[str, Any]:
        figures: dict[str, Any] = {"repeats": len(rounds), "seconds": spread([t.seconds for t, _ in rounds])}
        if new == cell.new:  # else the prefill would weigh too much
            figures["tokens_per_second"] = spread([t.tokens / t.seconds for t, _ in rounds])
        firsts = [first.seconds for _, first in rounds if first is not None]
        steps = [(t.seconds - first.seconds) / (new - 1) for t, first in rounds if first is not None]
        if firsts:
            figures["prefill_seconds"] = spread(firsts)
        if steps and min(steps) > 0:  # else the steps drown in the noise of the prefill
            figures["ms_a_step"] = spread([1000 * step for step in steps])
            figures["decode_tokens_per_second"] = spread([cell.batch / step for step in steps])
            figures["share_of_attainable"] = {
                name: cell.batch / statistics.median(steps) / attainable_rate(self.dims, cell.batch, cell.context, card)
                for name, card in CARDS.items()
            }
        last = rounds[-1][0]
        figures["peak_gib"] = None if last.peak is None else last.peak / 2**30
        graphs = last.stats.get("rollout/graph_bytes")
        figures["graph_gib"] = None if graphs is None else graphs / 2**30
        figures["stats"] = last.stats
        return figures

    def _idle(self, stand: Stand, cell: DecodeCell, rounds: Sequence[tuple[Taken, Taken | None]]) -> float | None:
        """1 - busy / wall: the busy seconds of a profiled run over the seconds of those that were not profiled.

        Slow peers are profiled where they make few tokens only."""
        slow = LIMITS[stand.name].most is not None and not cell.decode_only
        if slow or time.monotonic() >= self.until:
            return None
        prompts, lengths = cell.work(self.dims.vocab, self.seed, self.repeats)
        new = self._new(stand.name, cell)
        try:
            busy = stand.busy(prompts, [min(n, new) for n in lengths])
        except PeerFailed as error:
            self.on_progress(f"{self.shape} {cell.name}, {stand.name}, profiled: {error}")
            return None
        return None if busy is None else 1 - busy / statistics.median(t.seconds for t, _ in rounds)

    def log_probs(self, cell: DecodeCell) -> dict[str, float]:
        """Of our engine, as it stands, against the plain model."""
        stand = self.stands["whet"]
        assert isinstance(stand, Here) and isinstance(stand.peer, Whet)
        few = DecodeCell(name="", batch=8, prompt=cell.prompt, new=min(cell.new, 64), group=cell.group)
        prompts, lengths = few.work(self.dims.vocab, self.seed, self.repeats + 1)
        rollouts = stand.peer.rollouts(prompts, lengths)
        return log_prob_gap(stand.peer.model, {str(i): prompt for i, prompt in enumerate(prompts)}, rollouts)

    def close(self) -> None:
        while self.stands:
            self.stands.popitem()[1].close()
        torch.compiler.reset()  # what was compiled holds models and graphs, and the next shape wants the memory
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def stand_of(name: str, shape: str, device: torch.device | str) -> Here:
    """A peer with the model of a shape; called in this process or in one of its own."""
    width = 2 if torch.device(device).type == "cuda" else 4
    return Here(PEERS[name](shape, device), device, width * dims_of(shape_config(shape)).weights)


def ratios(peers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Ours over theirs, round by round, of whatever both have."""
    ours = peers.get("whet", {})
    found: dict[str, dict[str, Any]] = {}
    for name, theirs in peers.items():
        for rate in ("tokens_per_second", "decode_tokens_per_second"):
            if name != "whet" and rate in ours and rate in theirs:
                pairs = zip(ours[rate]["all"], theirs[rate]["all"], strict=False)
                found.setdefault(name, {})[rate] = spread([a / b for a, b in pairs])
    return found


def spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "all": list(values)}


def _chosen(shape: str, names: Sequence[str]) -> list[DecodeCell]:
    shape_config(shape)  # refuses a shape that is not there
    known = TINY if shape == "tiny" else CELLS
    unknown = [name for name in names if name not in known]
    if unknown:
        raise WhetError(f'The shape {shape} has no cell "{unknown[0]}"; it has {", ".join(known)}.')
    return [cell for cell in known.values() if not names or cell.name in names]


def _begun(path: Path) -> dict[str, Any]:
    """What an earlier run left, to be added to; a cell that is measured again replaces the old one."""
    if path.is_file():
        earlier: dict[str, Any] = json.loads(path.read_text())
        return earlier
    what = (
        "tokens a second of random weights at temperature 1; decode_ leaves out the prefill; ratios are ours / theirs"
    )
    return {"what": what, "runs": [], "shapes": {}}


def _line(shape: str, cell: DecodeCell, peers: Mapping[str, Mapping[str, Any]]) -> str:
    """What is told of a cell when it is done."""
    shown = [
        f"{name} {main_rate(found, cell.decode_only):,.0f}" for name, found in peers.items() if "failed" not in found
    ]
    return f"{shape} {cell.name}: tokens/s {', '.join(shown)}"


def main_rate(figures: Mapping[str, Any], decode: bool = False) -> float:
    """The median of the rate a peer is shown by: with the prefill where it has it, or without if asked and known."""
    order = ("tokens_per_second", "decode_tokens_per_second")
    rates = [figures[name]["median"] for name in (reversed(order) if decode else order) if name in figures]
    return float(rates[0]) if rates else float("nan")
