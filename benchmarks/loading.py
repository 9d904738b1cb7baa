"""Every problem set of a folder, read as it is and trained on for two steps by the tiny model.

    python benchmarks/loading.py --data DIR --out benchmarks/results

Shows that real files need no preparation: what was read, what was left out, and that weights moved. Rewards come
from a judge that random bytes please about half the time, so that every file has something to learn from.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import whet
from whet import config
from whet.assembly import check_run
from whet.recipe import load_config
from whet.tools.bench.stand import circumstances

SETTINGS = {
    "steps": 2,
    "model.hidden": 16,
    "model.heads": 2,
    "model.layers": 1,
    "rollout.max_tokens": 24,
    "rollout.slots": 16,
    "curriculum.groups": 4,
    "curriculum.rollouts": 4,
    "held_out.size": 20,
    "text.max_prompt": 2000,
    "learn.warmup": 0,
}


def even_length(prompt: whet.types.Prompt, response: str) -> float:
    return float(len(response) % 2 == 0)


def load(path: Path, folder: Path) -> dict[str, object]:
    begun = time.perf_counter()
    settings = load_config(None, [f"data.0.path='{path}'", *(f"{k}={v}" for k, v in SETTINGS.items())])
    problems = check_run(settings).problems
    result = whet.train("tiny", path, even_length, settings=SETTINGS, out=folder / path.stem, quiet=True)
    trained = [row for row in result.metrics if row["step"] > 0]
    return {
        "file": path.name,
        "prompts": len(problems.train),
        "held_out": len(problems.evals.get(config.HELD_OUT, ())),
        "repeats": problems.repeats,
        "notes": [note.replace(str(path.parent), "DIR") for note in problems.notes],
        "steps": len(trained),
        "grad_norms": [round(row["learn/grad_norm"], 4) for row in trained],
        "seconds": round(time.perf_counter() - begun, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="A folder with parquet or JSONL files.")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(p for p in options.data.iterdir() if p.suffix in (".parquet", ".jsonl", ".json")):
            rows.append(load(path, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    result = {**circumstances(), "seed": 0, "settings": SETTINGS, "files": rows}
    (options.out / "loading.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
