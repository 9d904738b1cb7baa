"""What Ray costs on one GPU: seconds of a step, milliseconds of a publish, and what `whet bench scale` says of both.

    python benchmarks/cluster_step.py                                   on a GPU: 135m and 1.5b, four minutes at most
    python benchmarks/cluster_step.py --shape tiny --prompts 4 --completions 4 --tokens 8 --steps 5      on a CPU

One recipe is run in three ways: by one process ("one"), by a driver and one actor that decodes and learns
("colocated"), and by a driver, a worker and a learner, each with half of the card ("split"). Weights are random ones of
a shape, prompts consist of digits, responses of made-up words. A response is right if its text has an even number of
characters, so that nearly every group is trained on. Runs that are compared are alive at the same time and take their
steps in turn, one at a time: so each step has a step of the other run right beside it, and compiling is done side by
side. Three runs of 1.5B do not fit on a card, so there "one" runs beside either of the others. No checkpoint is
written. The first steps do not count.

Under "split" each update publishes the weights: `pack` is the learner's copy, `travel` lasts until the worker is told
to take them over, `take_over` until its checksum is back. The script goes on where a run fails, and says why. It writes
cluster_step_SHAPES.json after each of its parts.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from command_line import RESULTS, Out, run_script, tell
from engine_step import WARM, even, shaped, summary
from scale_measured import MeasuredRun, against, fit
from trl_step import own_settings
from turns import END, Runner, go_step_by_step, take_turns

from whet import files
from whet.errors import WhetError
from whet.run import read_metrics
from whet.tools.bench.peers import SHAPES, shape_config
from whet.tools.bench.scale import Layout, LengthDraws, ScaleInputs, read_inputs, simulate
from whet.tools.experiment import circumstances

app = typer.Typer(add_completion=False)
ARMS: dict[str, dict[str, Any]] = {
    "one": {},
    "colocated": {"cluster.workers": 1, "cluster.placement": "colocated"},
    "split": {"cluster.workers": 1, "cluster.gpus_per_worker": 0.5},
}
LARGE = {"1.5b"}  # of these only two runs fit on a card at the same time
AIMS = {"ratio": 1.05, "publish_ms": 50.0, "error": 0.15}
LETTERS = 64  # of a prompt, each a token
Number = Annotated[int, typer.Option(min=1)]


# ---- the process of a run


def write_words(vocab: int, folder: Path) -> Path:
    """A tokenizer whose tokens are bytes and words, as many as the model knows; the last one ends a response. It is of
    the one kind (bytes, joined by no rule) that also a model type with a tokenizer class of its own reads as it is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: vocab // 2]  # digits are among the first
    names = [*letters, "<|endoftext|>", *("w" * (1 + i % 2) + str(i) for i in range(len(letters) + 1, vocab))]
    words = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=names[-1]).save_pretrained(folder)
    return folder


def run_arm(arm: str, shape: str, weights: Path, folder: Path, pack: int, sizes: dict[str, int]) -> None:
    """Train, a step whenever the other side says so, and write the times of publishes beside the run."""
    from whet.api import train

    go_step_by_step()
    watch_publishes(folder / "publish.jsonl")
    prompts = [(f"{i:04d}" * (LETTERS // 4), str(i)) for i in range(4 * sizes["prompts"])]
    settings = own_settings(**sizes) | {"learn.pack_tokens": pack} | ARMS[arm]
    train(str(weights), prompts, even, "uniform", settings=settings, out=folder / "run", quiet=True)
    print(END, flush=True)


def start(arm: str, folder: Path, given: Mapping[str, Any]) -> Runner:
    options = {**given, "arm": arm, "folder": folder}
    return Runner(arm, folder, [__file__, *(f"--{key}={value}" for key, value in options.items())])


def watch_publishes(path: Path) -> None:
    from whet.cluster.crew import Crew
    from whet.cluster.workers import Workers

    first, told, refresh = Crew.first, Workers.tell, Workers.refresh
    marks: dict[str, float] = {}

    def timed_first(self: Crew, name: str, *args: Any) -> Any:
        found = first(self, name, *args)
        marks[name] = time.perf_counter()
        return found

    def timed_tell(self: Workers, number: int, name: str, *args: Any) -> None:
        marks[name] = time.perf_counter()
        told(self, number, name, *args)

    def timed_refresh(self: Workers, version: int) -> list[Any]:
        begun = time.perf_counter()
        found = refresh(self, version)
        ends = [begun, marks["pack_up"], marks["publish"], time.perf_counter()]
        parts = [1e3 * (end - start) for start, end in itertools.pairwise(ends)]
        row = dict(zip(("pack_ms", "travel_ms", "take_over_ms"), parts, strict=True))
        shared = not self.post.apart  # else the bytes went through Ray's store
        with path.open("a") as file:
            file.write(json.dumps({"version": version, "ms": sum(parts), **row, "shared": shared}) + "\n")
        return found

    Crew.first, Workers.tell, Workers.refresh = timed_first, timed_tell, timed_refresh  # type: ignore[method-assign]


# ---- figures


def ratio(steps: Sequence[float], beside: Sequence[float]) -> dict[str, Any]:
    """Of steps to those right beside them: the median, its quartiles, and the ratio of the medians.

    >>> ratio([2.0, 2.2, 2.4], [2.0, 2.0, 2.0])
    {'median': 1.1, 'quartiles': [1.05, 1.15], 'of_medians': 1.1, 'steps': 3}
    """
    found = sorted(mine / other for mine, other in zip(steps, beside, strict=False))
    quartiles = statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3
    medians = statistics.median(steps) / statistics.median(beside)
    low, middle, high = (round(value, 4) for value in quartiles)
    return {"median": middle, "quartiles": [low, high], "of_medians": round(medians, 4), "steps": len(found)}


def publishes(path: Path) -> dict[str, Any]:
    """Medians of the publishes after the first steps, and all of them."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    counted = [row for row in rows if row["version"] > WARM]
    names = [name for name in (counted or [{}])[0] if name.endswith("ms")]
    return {"median": {name: statistics.median(row[name] for row in counted) for name in names}, "all": rows}


def figures(runners: Sequence[Runner], shape: str) -> dict[str, Any]:
    """What runs that took turns have shown."""
    arms: dict[str, Any] = {}
    runs: dict[str, MeasuredRun] = {}
    found: dict[str, Any] = {"arms": arms, "ratio": {}, "predicted": []}
    for runner in runners:
        rows = []
        with suppress(WhetError, OSError):
            rows = [dict(row) for row in read_metrics(runner.folder / "run")]
        counted = sum(row["step"] > WARM for row in rows)
        if not counted:
            arms[runner.arm] = {"failed": runner.why or "no step was counted"}
            continue
        arms[runner.arm] = summary(rows) | ({"ended_early": runner.why} if runner.why else {})
        runs[runner.arm] = MeasuredRun(f"{runner.folder / 'run'}@1", warm=WARM)
        if runner.arm == "split":
            found["publish"] = publishes(runner.folder / "publish.jsonl")
    for arm in runs:
        if arm != "one" and "one" in runs:
            seconds = [arms[name]["steps"]["step_s"] for name in (arm, "one")]
            found["ratio"][arm] = ratio(*seconds)
    found["predicted"] = list(predictions(runs, read_inputs(shape if shape in LARGE else "135m")))
    return found


def predictions(runs: Mapping[str, MeasuredRun], base: ScaleInputs) -> Iterator[dict[str, Any]]:
    """Each run by its own figures, the others by those of "one", and "one" by those of scale.toml.

    A run's own figures are fitted to its own steps, with what is left over as `host_ms`: the error says whether the
    simulation adds up, and little more. Those of scale.toml were measured elsewhere, without prompts in an update, so
    they foretell; of the run they take sizes, lengths and signal alone.
    """
    pairs = [(arm, arm) for arm in runs] + [(arm, "one") for arm in runs if arm != "one" and "one" in runs]
    for arm, source in pairs:
        named = {"arm": arm, "figures_of": source}
        try:
            yield {**named, **against([runs[name] for name in dict.fromkeys((source, arm))], base, seed=0)[-1]}
        except WhetError as error:
            yield {**named, "failed": str(error)}
    if "one" in runs:
        run, own = runs["one"], fit(runs["one"], base)
        c, r = run.settings.curriculum, run.settings.rollout
        sizes = {"groups": c.groups, "rollouts": c.rollouts, "slots": r.slots, "failures": 0.0}
        inputs = base.model_copy(update={**sizes, "lengths": own.lengths, "signal": own.signal})
        predicted = simulate(inputs, Layout(gpus=1), LengthDraws(inputs, 0)).step_s
        measured = float(run.step_s.mean())
        seconds = {"predicted_s": predicted, "measured_s": measured, "error": predicted / measured - 1.0}
        yield {"arm": "one", "figures_of": "scale.toml", **seconds}


def report(shape: str, found: Mapping[str, Any]) -> None:
    for arm, figures_of in found["arms"].items():
        median = figures_of.get("median", {})
        told = ", ".join(f"{part} {value:.4g}" for part, value in median.items())
        tell(f"{shape} {arm}: {told or figures_of['failed']}")
    for arm, of in found["ratio"].items():
        low, high = of["quartiles"]
        tell(f"{shape} {arm} / one: {of['median']:.3f} ({low:.3f} to {high:.3f}; aim {AIMS['ratio']})")
    if median := found.get("publish", {}).get("median"):
        way = "by its handle" if found["publish"]["all"][-1]["shared"] else "THROUGH RAY'S STORE"
        told = ", ".join(f"{name} {value:.1f}" for name, value in median.items())
        tell(f"{shape} publish {way}: {told} (aim {AIMS['publish_ms']:g})")
    for row in found["predicted"]:
        if "failed" in row:
            tell(f"{shape} {row['arm']} was not simulated: {row['failed']}")
            continue
        seconds = f"{row['predicted_s']:.3f} s against {row['measured_s']:.3f} s"
        of = f"by the figures of {row['figures_of']}"
        tell(f"{shape} {row['arm']}, simulated {of}: {seconds}, {row['error']:+.1%} (aim {AIMS['error']:.0%})")


@app.command()
def main(
    shape: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(SHAPES)}; 135m and 1.5b by default.")] = None,
    prompts: Number = 64,
    completions: Number = 4,
    tokens: Number = 128,
    pack: Annotated[int, typer.Option(min=16, help="learn.pack_tokens; half a card must have room for it.")] = 4096,
    steps: Annotated[int, typer.Option(min=WARM + 1)] = 10,
    limit: Annotated[float, typer.Option(min=10, help="Seconds for all of it; steps are left out beyond.")] = 225.0,
    arm: Annotated[str | None, typer.Option(hidden=True)] = None,
    weights: Annotated[Path | None, typer.Option(hidden=True)] = None,
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
    out: Out = RESULTS,
) -> None:
    """Measure all shapes."""
    begun, shapes = time.monotonic(), shape or ["135m", "1.5b"]
    for name in shapes:
        shape_config(name)  # refuses one that is not known
    sizes = {"prompts": prompts, "completions": completions, "tokens": tokens, "steps": steps}
    if arm is not None and weights is not None and folder is not None:
        run_arm(arm, shapes[0], weights, folder, pack, sizes)
        return
    pairs = [("one", "colocated"), ("one", "split")]
    plan = [(name, arms) for name in shapes for arms in (pairs if name in LARGE else [tuple(ARMS)])]
    result = {**circumstances(), "sizes": {**sizes, "pack": pack}, "aims": AIMS, "parts": list[dict[str, Any]]()}
    with tempfile.TemporaryDirectory() as name:
        made: dict[str, Path] = {}
        for number, (own, arms) in enumerate(plan):
            until = time.monotonic() + (begun + limit - time.monotonic()) / (len(plan) - number)
            if own not in made:
                words = write_words(shape_config(own).vocab_size, Path(name) / f"words-{own}")
                made[own] = shaped(own, words, Path(name) / own)
                torch.cuda.empty_cache()
            given = {"shape": own, "weights": made[own], "pack": pack, **sizes}
            runners = [start(arm, Path(name) / f"{number}-{arm}", given) for arm in arms]
            try:
                # A run that hangs leaves time to the parts after it.
                take_turns(runners, steps, until, (until + begun + limit) / 2)
            finally:
                for runner in runners:
                    runner.close()
            part = {"shape": own, **figures(runners, own)}
            report(own, part)
            result["parts"] = [*result["parts"], part]
            result["seconds"] = round(time.monotonic() - begun, 1)
            out.mkdir(parents=True, exist_ok=True)
            label = "_".join(shapes)
            files.write_text(out / f"cluster_step_{label}.json", json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_script(app)
