"""Seconds of a training step with whet's own engine and with vLLM: the same recipe, one process each, in turn.

    python benchmarks/engine_step.py --model models/smollm2 --data gsm8k.jsonl --engine native --engine vllm
    python benchmarks/engine_step.py --model models/smollm2 --data gsm8k.jsonl --engine native --engine vllm \
        --shape 1.5b

With `--shape` the weights are random ones of that size, and the tokenizer is that of `--model`. A response is right if
it has an even number of characters, so that nearly every group is trained on, whatever the model writes: the cost of a
step is measured, not what is learnt. Two steps warm up. `sync` is the time until the engine has the new weights,
`mismatch` the mean distance of its log-probs from the learner's. It writes engine_step_NAME.json.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from command_line import RESULTS, Out, run_script, tell
from trl_step import own_settings

from whet import files
from whet.api import train
from whet.errors import WhetError
from whet.tools.bench.peers import SHAPES, shape_model
from whet.tools.experiment import circumstances
from whet.types import Prompt

app = typer.Typer(add_completion=False)
ENGINES = ("native", "vllm")
WARM = 2
PARTS = {
    "step_s": "time/total",
    "generate_s": "time/generate",
    "train_s": "time/train",
    "sync_s": "time/sync",
    "mismatch": "learn/mismatch",
    "tokens": "rollout/tokens",
    "trained_tokens": "learn/tokens",
    "length": "length/mean",
}
Number = Annotated[int, typer.Option(min=1)]


def even(prompt: Prompt, response: str) -> float:
    return float(len(response) % 2 == 0)


def shaped(shape: str, tokenizer: Path, folder: Path) -> Path:
    """A folder with random weights of this shape, beside a tokenizer whose tokens it knows."""
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(tokenizer)
    model = shape_model(shape, "cuda" if torch.cuda.is_available() else "cpu")
    if len(words) > model.config.vocab_size:
        raise WhetError(
            f"The shape {shape} has {model.config.vocab_size} tokens and the tokenizer {len(words)}."
        )
    model.config.eos_token_id = words.eos_token_id
    model.generation_config.eos_token_id = words.eos_token_id
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def measure(
    engine: str, model: Path, data: Path, folder: Path, **sizes: int
) -> list[dict[str, Any]]:
    """The metrics of all steps."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    settings = own_settings(**sizes)
    if engine != "native":
        settings["rollout.engine"] = engine
    prompts = [(row["problem"], str(row["answer"])) for row in rows]
    found = train(
        str(model), prompts, even, "uniform", settings=settings, out=folder / "run", quiet=True
    )
    return [dict(row) for row in found.metrics]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the steps after the first `WARM`, and the steps themselves. Evaluations and checkpoints are apart."""
    counted = [row for row in rows if row["step"] > WARM]
    for row in counted:
        row["time/total"] -= row.get("time/save", 0.0) + row.get("time/eval", 0.0)
    steps = {part: [row[name] for row in counted if name in row] for part, name in PARTS.items()}
    medians = {part: statistics.median(values) for part, values in steps.items() if values}
    return {"median": medians, "steps": steps}


@app.command()
def main(
    model: Annotated[Path, typer.Option(help="Folder of a Hugging Face model.")],
    data: Annotated[Path, typer.Option(help="JSON lines with problem and answer.")],
    engine: Annotated[list[str], typer.Option(help="native or vllm; each --engine adds one.")],
    shape: Annotated[
        str | None, typer.Option(help=f"Random weights of this size: {', '.join(SHAPES)}.")
    ] = None,
    prompts: Number = 64,
    completions: Number = 8,
    tokens: Number = 256,
    steps: Annotated[int, typer.Option(min=WARM + 1)] = 8,
    one: Annotated[
        Path | None, typer.Option(hidden=True, help="Measure in this process, and write here.")
    ] = None,
    out: Out = RESULTS,
) -> None:
    """Measure each engine in a process of its own."""
    if wrong := [name for name in engine if name not in ENGINES]:
        raise WhetError(f'There is no engine "{wrong[0]}"; there are {" and ".join(ENGINES)}.')
    sizes = {"prompts": prompts, "completions": completions, "tokens": tokens, "steps": steps}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if one is not None:
            files.write_text(one, json.dumps(measure(engine[0], model, data, folder, **sizes)))
            return
        weights = shaped(shape, model, folder / "model") if shape else model
        found: dict[str, Any] = {}
        for own in engine:
            given = {
                "model": weights,
                "data": data,
                "engine": own,
                "one": folder / f"{own}.json",
                **sizes,
            }
            command = [
                sys.executable,
                __file__,
                *(f"--{key}={value}" for key, value in given.items()),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                found[own] = {"failed": (done.stderr.strip().splitlines() or ["no word"])[-1][:500]}
                tell(f"{own}: {done.stderr[-3000:]}")
                continue
            found[own] = summary(json.loads((folder / f"{own}.json").read_text()))
            told = ", ".join(f"{part} {value:.4g}" for part, value in found[own]["median"].items())
            tell(f"{own}: {told}")
        label = shape or model.name
        result = {**circumstances(), "model": label, "sizes": sizes, "engines": found}
        files.write_text(out / f"engine_step_{label}.json", json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_script(app)
