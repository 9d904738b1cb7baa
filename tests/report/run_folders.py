"""Run folders as a run leaves them, with curves of a known shape."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from whet.recipe import dump_config, parse_config


def write_run(
    folder: Path,
    rows: Iterable[Mapping[str, Any]],
    rollouts: Iterable[Mapping[str, Any]] = (),
    **settings: Any,
) -> Path:
    """A run folder that holds exactly these rows and rollouts."""
    folder.mkdir(parents=True)
    rows = list(rows)
    tree: dict[str, Any] = {"eval": [{"name": "held_out", "limit": 400}], "learn": {"lr": 2e-4}}
    tree |= {"steps": max((row["step"] for row in rows), default=0), **settings}
    (folder / "config.toml").write_text(dump_config(parse_config(tree)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rollouts").mkdir()
    for rollout in rollouts:
        path = folder / "rollouts" / f"step_{rollout['step']:08d}.jsonl"
        with path.open("a") as file:
            file.write(json.dumps(rollout) + "\n")
    return folder


def learning_rows(
    pace: float, steps: int, tokens: int, signal: float, seed: int
) -> list[dict[str, Any]]:
    """Rows of a run whose accuracy rises from 0.2 towards 0.85; larger pace, sooner."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for step in range(steps + 1):
        spent = step * tokens
        accuracy = 0.2 + 0.65 * (1 - math.exp(-pace * spent / 1e6))
        row: dict[str, Any] = {
            "step": step,
            "time_s": 0.35 * step,
            "version": step,
            "tokens_generated": spent,
        }
        row |= {
            "tokens_trained": int(0.6 * spent),
            "rollouts": 256 * step,
            "prompts_seen": 16 * step,
        }
        if step:
            length = 20 + 25 * accuracy + rng.uniform(-2, 2)
            row |= {
                "reward/mean": accuracy - 0.1,
                "verdict/right": accuracy - 0.1,
                "verdict/wrong": 1.1 - accuracy,
            }
            row |= {
                "length/mean": length,
                "length/p50": length,
                "length/p90": length + 18,
                "length/p99": length + 25,
            }
            row |= {
                "length/max": 56.0,
                "curriculum/signal_share": min(1.0, max(0.0, rng.gauss(signal, 0.07))),
            }
            row |= {
                "rollout/tokens_per_s": rng.gauss(21_000, 1000),
                "learn/entropy": 1.2 - accuracy,
            }
            row |= {"learn/grad_norm": rng.uniform(0.2, 0.6), "learn/mismatch": 1e-6}
            row |= {
                "time/generate": 0.2,
                "time/judge": 0.02,
                "time/train": 0.1,
                "time/idle": 0.03,
                "time/total": 0.35,
                "time/gpu_idle": 0.5,
            }
        if step % 5 == 0:
            noisy = round((accuracy + rng.gauss(0, 0.015)) * 400) / 400
            row |= {"eval/held_out/accuracy": noisy, "eval/held_out/length": 40.0, "time/eval": 0.4}
            row |= {
                f"eval/held_out/level/{k}": max(0.0, min(1.0, noisy + 0.3 - 0.07 * k))
                for k in range(1, 9)
            }
        rows.append(row)
    return rows


def chain_rollouts(
    steps: Iterable[int], seed: int, response: str | None = None
) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    rollouts = []
    for step in steps:
        for group in range(3):
            prompt_id = f"chain-{rng.randrange(10_000)}"
            for index in range(4):
                right = rng.random() < 0.5
                text = response or ("+5=8*2=6-7=9#869" if right else "#12")
                rollouts.append(
                    {
                        "step": step,
                        "prompt_id": prompt_id,
                        "group_id": group,
                        "index": index,
                        "phase": "train",
                    }
                    | {
                        "prompt": "3+5*2-7=",
                        "response": text,
                        "answer": "869",
                        "length": len(text) + 1,
                    }
                    | {
                        "verdict": "right" if right else "wrong",
                        "score": float(right),
                        "reward": float(right),
                    }
                    | {"finish": "stop", "version": step}
                )
    return rollouts
