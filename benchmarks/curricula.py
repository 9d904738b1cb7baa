"""Curricula side by side on chained arithmetic, from the same start, over several seeds, in two mixes of difficulty.

    python benchmarks/curricula.py --runs runs/curricula --out benchmarks/results

few: 40% of the prompts trivial, 12% of middling difficulty, 48% hopeless for the base: few groups carry signal.
many: 45%, 25% and 30%. All arms and seeds start from one base, train on 500 prompts of a mix, spend as many
tokens and are evaluated greedily on 400 problems. As many arms run at a time as there are cores; what is there already
is not run again. Writes curricula_MIX.json and .md, and calibration.json.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from base import make_base
from rich.console import Console

from whet.config import merged as merge
from whet.recipe import parse_config
from whet.report.arms import Folders, read_arms
from whet.report.compare import TableCell, compare
from whet.report.formats import final_accuracy
from whet.run import read_metrics, read_rollouts
from whet.text import printable
from whet.tools.experiment import circumstances, train_arms

MIXES = {
    "few": {"1": 0.40, "3-7": 0.12, "9-12": 0.48},
    "many": {"1-2": 0.45, "3-7": 0.25, "8-12": 0.30},
}
PROMPTS = 500
"""Few enough for prompts to come up again: what CurES and ScalingRL learn of a prompt is of use at its next visit."""
FIVE, TWO = (0, 1, 2, 3, 4), (0, 1)
LIMIT, SHORT = 56, 28
"""Tokens a response; the solution of a chain of k operations takes 4 k + 5."""


def arm(name: str, groups: int = 16, every: int = 2, lr: float = 1e-4, **more: Any) -> dict[str, Any]:
    """every: updates between evaluations, so that all arms are evaluated about as often by tokens."""
    own = {"name": name, "groups": groups, **more.pop("curriculum", {})}
    return {"curriculum": own, "learn": {"lr": lr, "schedule": "constant"}, "eval": {"every": every}, **more}


def without(term: int) -> dict[str, Any]:
    """The data effectiveness score with one of its three weights 0 and the others in proportion."""
    weights = [0.0 if i == term else w for i, w in enumerate((0.4, 0.3, 0.3))]
    return {"scalingrl": {"weights": [w / sum(weights) for w in weights]}}


ALL_ROLLOUTS = {"rollouts": 100_000}
"""All rollouts of a step are kept: calibration reads them."""
MAIN = {
    "uniform_16": arm("uniform", every=4),
    "uniform_48": arm("uniform", 48, every=1, lr=2e-4),
    "dapo_16": arm("dapo"),
    "speed_16": arm("speed", lr=2e-4),
    "cures_16": arm("cures", every=4, lr=2e-4, save=ALL_ROLLOUTS),
    "uniform_16_2e-4": arm("uniform", every=4, lr=2e-4),
    "uniform_48_1e-4": arm("uniform", 48, every=1),
    "dapo_16_2e-4": arm("dapo", lr=2e-4),
    "speed_16_1e-4": arm("speed"),
    "cures_16_1e-4": arm("cures", every=4, save=ALL_ROLLOUTS),
}
# Each has learning rates 1e-4 and 2e-4; the first five have the rate chosen on other seeds (docs/evidence/LOG.md).
FURTHER = {
    "speed_2_16": arm("speed", lr=2e-4, curriculum={"speed": {"n_init": 2}}),
    "speed_8_16": arm("speed", lr=2e-4, curriculum={"speed": {"n_init": 8}}),
    "speed_gate_16": arm("speed", lr=2e-4, curriculum={"speed": {"use_screening": False}}),
    "cures_sampling_16": arm("uniform", every=4, lr=2e-4, curriculum={"source": "cures"}, save=ALL_ROLLOUTS),
    "cures_allocation_16": arm("cures", every=4, lr=2e-4, curriculum={"cures": {"tau": 1e6}}),
    "cures_gradient_16": arm("cures", every=4, lr=2e-4, curriculum={"cures": {"sigma": "gradient"}}),
    "cures_memory_16": arm("cures", every=4, lr=2e-4, curriculum={"cures": {"memory": 0.9}}, save=ALL_ROLLOUTS),
    "scalingrl_16": arm("scalingrl", every=4),
    "random_set_16": arm("scalingrl", every=4, curriculum={"scalingrl": {"select": "random"}}),
    "fixed_set_16": arm("scalingrl", every=4, curriculum={"scalingrl": {"select": "fixed"}}),
    "no_difficulty_16": arm("scalingrl", every=4, curriculum=without(0)),
    "no_complexity_16": arm("scalingrl", every=4, curriculum=without(1)),
    "no_adaptability_16": arm("scalingrl", every=4, curriculum=without(2)),
    "stages_16": arm("stages", every=4),
    "fixed_short_16": arm("uniform", every=4, rollout={"max_tokens": SHORT}),
    "staged_16": arm(
        "stages",
        every=4,
        curriculum={"stages": [{"subset": "short", "max_tokens": SHORT, "steps": 20}, {"max_tokens": LIMIT}]},
    ),
    "all_16": arm("all", lr=2e-4, curriculum={"max_age": 1, "starvation": "partial"}),
}
ARMS = MAIN | FURTHER
"""`uniform_16` is also the arm of the long limit, fixed."""


def to_markdown(folders: Folders) -> str:
    """The tables of `whet compare`, for a README or an issue."""
    result = compare(read_arms(folders))
    parts = []
    for place, (title, heads, rows) in enumerate(result.tables()):
        lines = [f"| {' | '.join([title if place else 'arm', *heads])} |", "|---|" + "---:|" * len(heads)]
        for name, row in zip(result.arms, rows, strict=True):
            lines.append(f"| {' | '.join([_markdown_text(name), *map(_markdown_cell, row)])} |")
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, " ".join(map(_markdown_text, result.notes))]) + "\n"


def _markdown_cell(cell: TableCell) -> str:
    ratio = f" **{cell.ratio}**" if cell.ratio else ""
    return f"{cell.value}{ratio}" + (f" ({cell.range})" if cell.range else "")


def _markdown_text(text: str) -> str:
    """A name must not end the table or start markup."""
    for mark in "\\`*_[]<>|":
        text = text.replace(mark, f"\\{mark}")
    return printable(text, one_line=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", help="All arms with these, instead of five or two.")
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--runs", type=Path, default=Path("runs/curricula"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    wanted = {
        mix: {
            f"{name}-seed{seed}": options.runs / mix / f"{name}-seed{seed}"
            for name in options.arms
            for seed in options.seeds or (FIVE if name in MAIN else TWO)
        }
        for mix in options.mixes
    }
    run_missing(wanted, options)
    options.out.mkdir(parents=True, exist_ok=True)
    for mix, folders in wanted.items():
        result = {"mix": MIXES[mix], "prompts": PROMPTS, "tokens": options.tokens, "runs": curves(folders)}
        write_json(options.out / f"curricula_{mix}.json", {**circumstances(), **result})
        (options.out / f"curricula_{mix}.md").write_text(to_markdown(folders))
        print(to_markdown(folders))
    of = {
        f"{name} {mix}": calibration(
            [folder for key, folder in wanted[mix].items() if key.rsplit("-seed", 1)[0] == name], memory_of(name)
        )
        for mix in options.mixes
        for name in options.arms
        if ARMS[name].get("save")
    }
    if of:
        write_json(options.out / "calibration.json", {**circumstances(), "arms": of})


def read_ground() -> dict[str, Any]:
    """The base and the recipe that all arms share."""
    return tomllib.loads(Path(__file__).with_name("curricula.toml").read_text())


def run_missing(wanted: Mapping[str, Mapping[str, Path]], options: argparse.Namespace) -> None:
    """The base, and then every run that is not finished, all in one queue."""
    tree = read_ground()
    console = Console()
    base = make_base(options.runs / "base", {**tree["base"], "seed": 0}, console)
    recipes = {}
    for mix, folders in wanted.items():
        (options.runs / mix).mkdir(parents=True, exist_ok=True)
        for key, folder in folders.items():
            name, seed = key.rsplit("-seed", 1)
            if not (folder / "report.html").is_file():
                own = {"seed": int(seed), "token_budget": options.tokens, "model": {"name": str(base), "device": "cpu"}}
                recipe = merge(merge(tree["arm"], ARMS[name]), own)
                recipe["data"][0]["options"] = {"train_count": PROMPTS, "mix": MIXES[mix]}
                recipes[folder] = parse_config(recipe)
    if recipes:
        train_arms(recipes, console)


def curves(folders: Mapping[str, Path]) -> dict[str, Any]:
    """For each run: [step, tokens, seconds, accuracy] of its evaluations, and what every fourth update looked like."""
    found = {}
    for run in (run for each in read_arms(folders) for run in each.runs):
        points = run.points("held_out")
        rows = [row for row in read_metrics(folders[run.name]) if row["step"] % 4 == 1]
        found[run.name] = {
            "accuracy": round(final_accuracy(points), 4),
            "curve": [[p.step, p.tokens, round(p.seconds, 2), round(p.accuracy, 4)] for p in points],
            "updates": [
                [row["step"], row["tokens_generated"], *(rounded(row.get(key)) for key in LOOKED_AT)] for row in rows
            ],
        }
    return found


LOOKED_AT = ("learn/entropy", "length/right", "length/truncated", "curriculum/signal_share")


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def calibration(folders: Iterable[Path], memory: float = 1.0) -> dict[str, list[list[float]]]:
    """[mean prediction, share right, rollouts] in ten bins, of verdicts that the posterior had not seen.

    The prediction of a rollout is the mean of Beta(1 + right, 1 + wrong) over what earlier steps said of its prompt,
    faded by `memory` a step. `first`: of prompts met for the first time (the prior's 1/2); `again`: of all others.
    """
    bins: dict[str, Any] = {"first": defaultdict(lambda: [0.0, 0, 0]), "again": defaultdict(lambda: [0.0, 0, 0])}
    for folder in folders:
        steps: dict[int, list[tuple[str, bool]]] = defaultdict(list)
        for row in read_rollouts(folder):
            if row["phase"] != "eval" and row["verdict"] != "unjudged":
                steps[row["step"]].append((row["prompt_id"], row["verdict"] == "right"))
        seen: dict[str, list[float]] = {}
        for _, verdicts in sorted(steps.items()):
            for prompt_id, is_right in verdicts:
                wrong, right = seen.get(prompt_id, (0.0, 0.0))
                predicted = (1 + right) / (2 + right + wrong)
                kind = bins["again" if prompt_id in seen else "first"][min(9, int(predicted * 10))]
                for i, value in enumerate((predicted, is_right, 1)):
                    kind[i] += value
            seen = {prompt_id: [memory * count for count in counts] for prompt_id, counts in seen.items()}
            for prompt_id, is_right in verdicts:
                seen.setdefault(prompt_id, [0.0, 0.0])[is_right] += 1.0
    return {
        kind: [[round(p / n, 4), round(r / n, 4), n] for _, (p, r, n) in sorted(found.items())]
        for kind, found in bins.items()
    }


def memory_of(name: str) -> float:
    return ARMS[name]["curriculum"].get("cures", {}).get("memory", 1.0)


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
