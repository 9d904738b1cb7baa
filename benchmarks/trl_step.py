"""Seconds of an update of TRL's GRPOTrainer, by what generates: whet's engine, transformers' generate, vLLM colocated;
and of `whet train` itself ("own").

    python benchmarks/gguf_model.py smollm2 models/smollm2
    python benchmarks/trl_step.py benchmarks/operations_matrix.toml

Each engine trains the start weights of the matrix by the same config on the same problems of its recipe, each problem
once, in a process of its own, one after the other: 64 prompts x 8 completions per update, 2 updates to warm up and 8
that count. An update is what lies between TRL's on_step_begin and on_step_end. Generation is the time within the calls
that make completions, sync of weights included. The rewards of the counted updates should agree within two standard
errors. `whet train` leaves groups without a signal out of its update, whose gradient is zero; TRL's trainer feeds them,
and `signal` is the share of groups that have one. It writes trl_step.json.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from command_line import RESULTS, Out, run_script, tell
from matrix import MatrixPlan, make_start, read_plan

from whet import files
from whet.api import train
from whet.errors import WhetError
from whet.tasks.build import build_task
from whet.tools.experiment import circumstances
from whet.types import Prompt

app = typer.Typer(add_completion=False)
ENGINES = ("own", "whet", "vllm", "generate")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
WARM, COUNTED = 2, 8  # updates


def last_number(text: str) -> float | None:
    """
    >>> last_number("so 1,200 is #### 1,234.50"), last_number("none")
    (1234.5, None)
    """
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def right(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """The reward: 1 where the last number is the answer."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [float(last_number(t) == last_number(a)) for t, a in zip(texts, answer, strict=True)]


def judge(prompt: Prompt, response: str) -> float:
    """The same reward for `whet train`."""
    return right([response], [prompt.answer])[0]


class Stopwatch:
    """Seconds within a method of one object, waiting for the GPU before and after."""

    def __init__(self, owner: Any, name: str) -> None:
        self.total, inner = 0.0, getattr(owner, name)

        @wraps(inner)
        def timed(*args: Any, **named: Any) -> Any:
            begun = now()
            try:
                return inner(*args, **named)
            finally:
                self.total += now() - begun

        setattr(owner, name, timed)


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def make_trainer(engine: str, model: Path, data: Path, folder: Path, **sizes: int) -> Any:
    """The trainer, with the name of the method in which it generates."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig
    from trl import GRPOTrainer as Stock

    rows = [json.loads(line) for line in data.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = tokenizer.chat_template is not None
    prompts = [
        [{"role": "user", "content": row["problem"]}] if chat else row["problem"] for row in rows
    ]
    table = Dataset.from_dict({"prompt": prompts, "answer": [row["answer"] for row in rows]})
    on_gpu = torch.cuda.is_available()
    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=sizes["prompts"],
        gradient_accumulation_steps=sizes["completions"],
        num_generations=sizes["completions"],
        max_completion_length=sizes["tokens"],
        max_steps=sizes["warm"] + sizes["counted"],
        learning_rate=1e-6,
        beta=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        bf16=False,  # the weights themselves are bfloat16 on a GPU
        use_cpu=not on_gpu,
        model_init_kwargs={"dtype": "bfloat16" if on_gpu else "float32"},
        use_vllm=engine == "vllm",
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
    )
    given = {
        "model": str(model),
        "args": config,
        "train_dataset": table,
        "processing_class": tokenizer,
    }
    if engine != "whet":
        return Stock(**given, reward_funcs=right)
    from whet.adapters.trl import GRPOTrainer

    return GRPOTrainer(**given, reward_funcs=right, curriculum="uniform")


def measure_own(model: Path, data: Path, folder: Path, **sizes: int) -> dict[str, Any]:
    """The same updates by `whet train`: uniform sampling, GRPO, every group asked once."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    settings = own_settings(sizes["warm"] + sizes["counted"], **sizes)
    prompts = [(row["problem"], row["answer"]) for row in rows]
    found = train(
        str(model), prompts, judge, "uniform", settings=settings, out=folder / "run", quiet=True
    )
    counted = [row for row in found.metrics if row["step"] > sizes["warm"]]
    apart = ("time/save", "time/eval")
    steps = [
        (row["time/total"] - sum(row.get(name, 0.0) for name in apart), row["time/generate"])
        for row in counted
    ]
    columns = ("reward/mean", "length/mean", "curriculum/signal_share")
    return summary(steps, *([row[name] for row in counted] for name in columns))


def own_settings(steps: int, **sizes: int) -> dict[str, Any]:
    """A recipe for `whet train` with so many prompts, completions and tokens per update, and nothing else to do."""
    on_gpu = torch.cuda.is_available()
    return {
        "steps": steps,
        "model.device": "cuda" if on_gpu else "cpu",
        "model.dtype": "bfloat16" if on_gpu else "float32",
        "held_out.size": 0,
        "rollout.slots": sizes["prompts"] * sizes["completions"],
        "rollout.max_tokens": sizes["tokens"],
        "curriculum.groups": sizes["prompts"],
        "curriculum.rollouts": sizes["completions"],
        "curriculum.starvation": "partial",
        "learn.estimator": "grpo",
        "learn.lr": 1e-6,
        "learn.pack_tokens": 32_768,
        "save.every": 100_000,
    }


def measure(trainer: Any, engine: str, warm: int) -> dict[str, Any]:
    """Train, and say what the updates after the first `warm` took."""
    from transformers import TrainerCallback

    generation = Stopwatch(trainer, "_rollouts" if engine == "whet" else "_generate_single_turn")
    # seconds of the clock and of generation, at begin and end of each update
    marks: list[tuple[float, float]] = []

    class Marks(TrainerCallback):
        def on_step_begin(self, *args: Any, **named: Any) -> None:
            marks.append((now(), generation.total))

        on_step_end: Callable[..., None] = on_step_begin

    trainer.add_callback(Marks())
    trainer.train()
    steps = [
        (end[0] - begin[0], end[1] - begin[1])
        for begin, end in zip(marks[::2], marks[1::2], strict=True)
    ][warm:]
    rows = [row for row in trainer.state.log_history if "reward" in row][warm:]
    signal = [1 - row["frac_reward_zero_std"] for row in rows]
    return summary(
        steps,
        [row["reward"] for row in rows],
        [row["completions/mean_length"] for row in rows],
        signal,
    )


def summary(
    steps: Sequence[tuple[float, float]],
    rewards: list[float],
    lengths: list[float],
    signal: list[float],
) -> dict[str, Any]:
    """steps: seconds of an update, and those in which it generated."""
    return {
        "step_s": [round(step, 4) for step, _ in steps],
        "generation_s": [round(generated, 4) for _, generated in steps],
        "reward": rewards,
        "reward_mean": statistics.fmean(rewards),
        "reward_se": statistics.stdev(rewards) / len(rewards) ** 0.5 if len(rewards) > 1 else None,
        "mean_length": statistics.fmean(lengths),
        "signal": statistics.fmean(signal),
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None,
    }


def write_problems(plan: MatrixPlan, count: int, path: Path) -> None:
    """The first problems that the recipe trains on, as JSON lines."""
    settings = plan.cells[0].settings
    table = build_task(settings.data[0], folder=settings.data_folder).prompts(
        "train", settings.seed
    )
    if len(table.problems) < count:
        raise WhetError(
            f"The recipe has {len(table.problems):,} problems, and {count:,} are needed."
        )
    rows = zip(table.problems[:count], table.answers[:count], strict=True)
    files.write_text(
        path,
        "".join(json.dumps({"problem": text, "answer": answer}) + "\n" for text, answer in rows),
    )


Number = Annotated[int, typer.Option(min=1)]


@app.command()
def main(
    matrix: Annotated[
        Path, typer.Argument(help="A TOML matrix, for its start weights and problems.")
    ],
    engine: Annotated[
        list[str] | None, typer.Option(help="One of them alone; each --engine adds one.")
    ] = None,
    prompts: Number = 64,
    completions: Number = 8,
    warm: Annotated[int, typer.Option(min=0, help="Updates that warm up.")] = WARM,
    counted: Number = COUNTED,
    runs: Annotated[Path, typer.Option(help="Folder for the start weights.")] = Path("runs/trl"),
    one: Annotated[
        Path | None, typer.Option(hidden=True, help="Measure in this process, and write here.")
    ] = None,
    out: Out = RESULTS,
) -> None:
    """Measure each engine in a process of its own."""
    engines = engine or ENGINES
    if wrong := [name for name in engines if name not in ENGINES]:
        raise WhetError(f'There is no engine "{wrong[0]}"; there are {", ".join(ENGINES)}.')
    plan = read_plan(matrix)
    start, data = make_start(plan, runs, tell), runs / "problems.jsonl"
    sizes = {"prompts": prompts, "completions": completions, "warm": warm, "counted": counted}
    whole = sizes | {"tokens": plan.cells[0].settings.rollout.max_tokens}
    if one is not None:
        with tempfile.TemporaryDirectory() as folder:
            if engines[0] == "own":
                found = measure_own(start.folder, data, Path(folder), **whole)
            else:
                found = measure(
                    make_trainer(engines[0], start.folder, data, Path(folder), **whole),
                    engines[0],
                    warm,
                )
            files.write_text(one, json.dumps(found))
        return
    write_problems(plan, prompts * (warm + counted), data)
    about = {
        **circumstances(),
        "trl": version("trl"),
        "matrix": plan.name,
        "start": dict(start.hashes),
        "sizes": whole,
    }
    found = {}
    for name in engines:
        with tempfile.TemporaryDirectory() as folder:
            told = [f"--{key}={value}" for key, value in {"runs": runs, **sizes}.items()]
            path = Path(folder) / "one.json"
            done = subprocess.run(
                [sys.executable, __file__, str(matrix), *told, f"--engine={name}", f"--one={path}"],
                capture_output=True,
                text=True,
            )
            if done.returncode:
                found[name] = {"failed": done.stderr.strip().splitlines()[-1][:500]}
                tell(f"{name}: {done.stderr[-3000:]}")
                continue
            found[name] = json.loads(path.read_text())
        medians = [statistics.median(found[name][part]) for part in ("step_s", "generation_s")]
        tell(
            f"{name}: {medians[0]:.3f} s per update, of which generation takes {medians[1]:.3f} s."
        )
        files.write_text(
            out / "trl_step.json", json.dumps({**about, "engines": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    run_script(app)
