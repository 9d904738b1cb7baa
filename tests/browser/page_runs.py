"""Run folders that hold everything a page can show, as a run would leave them, and texts that try to break out."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whet.recipe import dump_config, parse_config

WAIT_MS = 120_000  # for any one thing in a browser: the machine may be slow
SHAPES = ("none", "ngram 4", "ngram 8", "eagle 4")
HOSTILE = (
    "<script>document.title = 'owned'</script>",
    "</script><script>document.title = 'owned'</script>",
    "<img src=x onerror=\"document.title = 'owned'\">",
    "javascript:alert(1) {{7*7}} ${7*7} <!-- --> ]]>",
    "\u202eright to left\u202c and \u2066isolated\u2069",
    "a lone surrogate \ud800 and \udfff",
    "\x1b[31mred\x1b[0m \x07 bell \x00 nul",
    "line\u2028separator\u2029paragraph",
    "x" * 1_000_000,
)


def metrics_row(step: int, steps: int, pace: float, rng: random.Random) -> dict[str, Any]:
    accuracy = 0.15 + 0.7 * (1 - math.exp(-3 * pace * step / steps))
    tokens = int(step * 9_000 / (0.6 + 0.4 * pace))
    row: dict[str, Any] = {
        "step": step,
        "time_s": 2.1 * step,
        "tokens_generated": tokens,
        "rollouts": 256 * step,
    }
    if step % max(1, steps // 24) == 0 or step == steps:
        for name, shift in (("held_out", 0.0), ("benchmark", -0.1)):
            value = min(1.0, max(0.0, accuracy + shift + rng.gauss(0, 0.01)))
            row |= {
                f"eval/{name}/accuracy": value,
                f"eval/{name}/accuracy_low": max(0.0, value - 0.05),
            }
            row |= {f"eval/{name}/accuracy_high": min(1.0, value + 0.05)}
        row |= {
            f"eval/held_out/level/{k}": max(0.0, min(1.0, accuracy + 0.3 - 0.09 * k))
            for k in range(1, 7)
        }
        row |= {"time/eval": 1.4}
    if step == 0:
        return row
    length = 60 + 90 * accuracy + rng.uniform(-6, 6)
    row |= {
        "reward/mean": accuracy - 0.1 + rng.gauss(0, 0.03),
        "curriculum/signal_share": rng.uniform(0.3, 0.5),
    }
    row |= {
        "length/p50": length,
        "length/p90": 1.5 * length,
        "length/p99": 2 * length,
        "length/max": 2.4 * length,
    }
    row |= {
        "length/truncated": max(0.0, 0.2 - 0.2 * accuracy + rng.gauss(0, 0.01)),
        "learn/entropy": 1.1 - accuracy,
    }
    row |= {
        "learn/grad_norm": rng.uniform(0.2, 0.7),
        "learn/kl": 0.002 * step,
        "learn/mismatch": rng.uniform(0, 1e-6),
    }
    row |= {"learn/loss": rng.gauss(0, 0.02), "curriculum/stage": float(3 * step // (steps + 1))}
    row |= {
        "rollout/tokens_per_s": rng.gauss(21_000, 900),
        "rollout/batch_mean": rng.uniform(40, 60),
    }
    row |= {
        "rollout/tokens": 9_000,
        "draft/saved": int(3_000 * accuracy),
        "draft/accept_length": 1 + 1.6 * accuracy,
    }
    row |= {"draft/share_none": 0.5 - 0.3 * accuracy, "draft/share_ngram": 0.5 + 0.3 * accuracy}
    times = {"generate": 1.2, "judge": 0.1, "train": 0.6, "sync": 0.05, "save": 0.03, "idle": 0.12}
    row |= {f"time/{name}": seconds * rng.uniform(0.9, 1.1) for name, seconds in times.items()}
    row |= {"time/total": 2.1, "time/gpu_idle": 0.1 + 0.05 * rng.random()}
    return row


def picture(step: int, steps: int, rng: random.Random) -> dict[str, Any]:
    centre = 2 + 6 * step / steps
    near = [math.exp(-(((k - centre) / 2.2) ** 2)) for k in range(11)]
    rates = [int(30 * x + rng.random() * 3) for x in near[:-1]] + [int(30 * near[10])]
    rates[0] += 12
    twenty = [int(400 * math.exp(-(((k - 2 * centre) / 5) ** 2))) for k in range(20)]
    given = [4 + k * (19 - k) / 8 if n else None for k, n in enumerate(twenty)]
    asked = sum(rates)
    easy, hard = rates[10] + rates[9], rates[0]
    flow = {
        "asked": asked,
        "screened": asked,
        "too_easy": easy,
        "too_hard": hard,
        "continued": asked - easy - hard,
    }
    flow |= {"stale": step % 3, "spare": 4, "trained": asked - easy - hard - step % 3 - 4}
    tail = [[round(2 * t / 30, 3), int(64 * (1 - (t / 30) ** 3))] for t in range(31)]
    return {
        "step": step,
        "pass_rates": rates,
        "flow": flow,
        "levels": {str(k): [40, 40 - 5 * k] for k in range(1, 7)},
        "posterior": {"counts": twenty, "rollouts": given},
        "scores": {
            "low": -1.5,
            "high": 2.5,
            "counts": twenty,
            "active": [0] * 9 + [n // 3 for n in twenty[9:]],
        },
        "running": tail,
        "arm": SHAPES[min(3, 4 * step // (steps + 1))],
        "accepts": {
            "position": [[400, int(400 * 0.85 ** (k + 1))] for k in range(6)],
            "rows": [[2**k, 200, 500 - 60 * k] for k in range(6)],
        },
    }


def rollouts(
    step: int, groups: int, rng: random.Random, texts: tuple[str, ...] = ()
) -> Iterator[dict[str, Any]]:
    for group in range(groups):
        a, b = rng.randrange(2, 99), rng.randrange(2, 99)
        for index in range(4):
            right = rng.random() < 0.2 + 0.02 * step
            pieces = [
                "First",
                ",",
                f" {a}",
                " plus",
                f" {b}",
                " is",
                f" {a + b + (not right)}",
                ".",
                "\n",
                f"#{a + b + (not right)}",
            ]
            if texts:
                pieces = [texts[(group * 4 + index) % len(texts)], " #1"]
            row = {
                "step": step,
                "prompt_id": f"sum-{group}",
                "group_id": 100 * step + group,
                "index": index,
            }
            row |= {
                "phase": ("train", "screen")[group % 2],
                "level": 1 + group % 6,
                "version": step - 1,
                "note": "",
            }
            row |= {
                "prompt": texts[group % len(texts)] if texts else f"What is {a}+{b}?",
                "response": "".join(pieces),
            }
            row |= {
                "answer": str(a + b),
                "length": len(pieces),
                "finish": "stop",
                "score": float(right),
            }
            row |= {
                "verdict": "right" if right else "wrong",
                "reward": float(right) - (0.5 if index == 3 else 0.0),
            }
            row |= {
                "pieces": pieces,
                "log_probs": [round(-3 * rng.random() ** 3, 2) for _ in pieces],
            }
            row |= {"entropies": [round(3 * rng.random() ** 2, 2) for _ in pieces]}
            row |= {"drafted": "".join(rng.choice("001") for _ in pieces)}
            yield row


def write_run(
    folder: Path,
    *,
    steps: int = 40,
    until: int | None = None,
    pace: float = 1.0,
    seed: int = 0,
    groups: int = 6,
    texts: tuple[str, ...] = (),
) -> Path:
    """A run of `steps` steps that has come to step `until`; all of its texts are `texts` where there are some."""
    rng = random.Random(seed)
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    tree = {
        "steps": steps,
        "seed": seed,
        "eval": [{"name": "held_out", "limit": 400}],
        "learn": {"lr": 2e-4},
    }
    (folder / "config.toml").write_text(dump_config(parse_config(tree)))
    (folder / "machine.json").write_text(
        json.dumps({"hardware": "2 cores, x86_64", "whet": "0.2", "recipe": "chain"})
    )
    end = steps if until is None else until
    with (
        (folder / "metrics.jsonl").open("w") as metrics,
        (folder / "pictures.jsonl").open("w") as pictures,
    ):
        for step in range(end + 1):
            metrics.write(json.dumps(metrics_row(step, steps, pace, rng)) + "\n")
            if step:
                pictures.write(json.dumps(picture(step, steps, rng)) + "\n")
                lines = [json.dumps(row) + "\n" for row in rollouts(step, groups, rng, texts)]
                (folder / "rollouts" / f"step_{step:08d}.jsonl").write_text("".join(lines))
    return folder
