"""verl 0.9.1 on a CPU with real Ray and TransferQueue: what it trains, what a restart changes, and what is refused.

verl runs in processes of its own (`verl_run.py`), which write logs: importing it takes long, and a kill must be one.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

if find_spec("verl") is None:  # not importorskip: the import alone takes long
    pytest.skip("verl is not installed: make test-verl", allow_module_level=True)
HERE = Path(__file__).parent
SPEED = {
    "steps": 10,
    "workers": 2,
    "sampler": {"curriculum": {"name": "speed", "speed": {"n_init": 2}}},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "duplicate": (
        {"numbers": [4, 9, 4, *range(20, 40)]},
        'Two rows of the training data are "rule/4"',
    ),
    "nameless": ({"nameless": True}, "Row 1 of the training data has no data_source"),
    "no dataset": (
        {"without": ["custom_cls"]},
        "needs data.custom_cls = {'path': 'pkg://whet.adapters.verl'",
    ),
    "no sampler": ({"without": ["custom_sampler"]}, "needs trainer.v1.sampler.custom_sampler ="),
    "no manager": (
        {"without": ["agent_loop_manager"]},
        "verl's own workers were about to generate; add +actor_rollout",
    ),
    "fetched ahead": (
        {"without": ["dataloader_num"]},
        "needs data.dataloader_num_workers = 0, not 8",
    ),
    "sync": ({"more": ["trainer.v1.trainer_mode=sync"]}, "trainer_mode = colocate_async, not sync"),
    "filtered": (
        {"more": ["algorithm.filter_groups.enable=True"]},
        "filter_groups.enable = False, not True",
    ),
    "unknown": ({"sampler": {"curriculum": {"name": "quick"}}}, 'no curriculum "quick"'),
    "foreign": (
        {"foreign": True},
        "has no curriculum; resume it without whet, or start a new run.",
    ),
    "not a number": ({"numbers": [777, 14, 24, 34, 44, 54, 64, 74, 84, 94]}, "has the reward nan"),
}


def start(folder: Path, runs: dict[str, Any]) -> int:
    """Run these in one process; return its exit code."""
    env = {
        **os.environ,
        "PYTHONPATH": str(HERE),
        "PYTHONWARNINGS": "ignore",
        "TQ_LOGGING_LEVEL": "ERROR",
    }
    with (folder / "output.txt").open("ab") as output:
        command = [sys.executable, str(HERE / "verl_run.py"), str(folder), json.dumps(runs)]
        return subprocess.run(command, env=env, stdout=output, stderr=output).returncode


def read(folder: Path, key: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if key in line]


def groups_of(step: dict[str, Any]) -> dict[str, list[Any]]:
    groups = defaultdict(list)
    for key, *row in step["rows"]:
        uid, session, _ = key.split("_")
        groups[uid].append((int(session), *row))
    return groups


def check_updates(folder: Path, count: int) -> None:
    """Every update has 8 groups with the advantages of GRPO, and no group is lost."""
    steps = read(folder, "step")
    assert [step["step"] for step in steps] == list(range(1, count + 1))
    for number, step in enumerate(steps, 1):
        groups, metrics = groups_of(step), step["metrics"]
        assert len(groups) == 8 and (len(step["rows"]) + step["padding"]) % 48 == 0
        assert metrics["curriculum/trained"] == 8 * number and metrics["curriculum/expired"] == 0
        assert (
            metrics["curriculum/accepted"]
            == metrics["curriculum/trained"] + metrics["curriculum/ready"]
        )
        for rows in groups.values():
            rewards = [reward for _, _, reward, _, _ in rows]
            mean, spread = statistics.mean(rewards), statistics.stdev(rewards)
            for session, number_, reward, advantage, length in rows:
                assert reward == float(
                    {4: session % 2 == 0, 9: session % 4 == 1, 3: True}.get(number_ % 10, False)
                )
                assert advantage == pytest.approx((reward - mean) / (spread + 1e-6), abs=1e-4)
                assert length == 2 + (number_ + session) % 6
    assert all(line["orphans"] == [] for line in read(folder, "orphans"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verl")
    cures = {
        "steps": 10,
        "numbers": list(range(24)),
        "fails": 14,
        "sampler": {"curriculum": {"name": "cures"}},
    }
    runs = {"speed": {**SPEED, "save": 5, "validate": True}, "cures": cures}
    elsewhere = {"checkpoints": "speed", "numbers": list(range(100, 150)), **SPEED, "steps": 11}
    runs |= {name: given for name, (given, _) in REFUSED.items()} | {"elsewhere": elsewhere}
    assert start(folder, runs) == 0, (folder / "output.txt").read_text()[-4000:]
    return folder


def test_speed_trains_ten_updates_and_keeps_its_surplus(folder: Path) -> None:
    check_updates(folder / "speed", 10)
    steps = read(folder / "speed", "step")
    sessions = [
        sorted(session for session, *_ in rows)
        for step in steps
        for rows in groups_of(step).values()
    ]
    assert sessions == [list(range(6))] * 80
    last = steps[-1]["metrics"]
    assert last["curriculum/screened"] > 2 * last["curriculum/qualified"], (
        "most prompts end after two rollouts"
    )
    assert max(step["metrics"]["curriculum/ready"] for step in steps) > 0, "there was a surplus"


def test_cures_trains_groups_of_different_sizes(folder: Path) -> None:
    check_updates(folder / "cures", 10)
    groups = [rows for step in read(folder / "cures", "step") for rows in groups_of(step).values()]
    assert len({len(rows) for rows in groups}) > 2 and any(
        step["padding"] for step in read(folder / "cures", "step")
    )
    assert all(number != 14 for rows in groups for _, number, *_ in rows), (
        "a prompt on which the server fails"
    )


@pytest.mark.parametrize("name", [*REFUSED, "elsewhere"])
def test_what_does_not_fit_is_refused_in_one_sentence(folder: Path, name: str) -> None:
    (line,) = read(folder / name, "error")
    sentence = (
        REFUSED[name][1] if name in REFUSED else "The checkpoint was written with other prompts"
    )
    assert sentence in line["error"] and "\n" not in line["error"]
    assert len(read(folder / name, "step")) == 0


def test_a_method_with_other_parameters_is_refused(folder: Path) -> None:
    assert (
        "_clear_groups has other parameters than in verl 0.9.1"
        in (folder / "changed.txt").read_text()
    )


def test_the_lines_of_the_page_say_the_same() -> None:
    page = (HERE.parents[1] / "docs" / "verl.md").read_text()
    command, lines = (
        page.split(fence)[1].split("```")[0] for fence in ("```text\n", "```yaml sketch\n")
    )
    settings = dict(line.strip("'").lstrip("+").split("=", 1) for line in command.splitlines())
    for name, value in settings.items():
        tree = yaml.safe_load(lines)
        for part in name.split("."):
            tree = tree[part]
        assert tree == yaml.safe_load(value)


@pytest.mark.slow
def test_a_kill_changes_no_prompt(folder: Path, tmp_path: Path) -> None:
    run = {**SPEED, "steps": 8, "workers": 1, "save": 4}
    assert start(tmp_path, {"run": {**run, "kill": 7}}) == -signal.SIGKILL
    log, before = tmp_path / "run" / "log.jsonl", read(tmp_path / "run", "handed")
    kept = [step for step in read(tmp_path / "run", "step") if step["step"] <= 4]
    log.write_text("".join(json.dumps(step) + "\n" for step in kept))
    assert start(tmp_path, {"run": run}) == 0, (tmp_path / "output.txt").read_text()[-4000:]
    check_updates(tmp_path / "run", 8)
    runs = [read(folder / "speed", "handed"), before, read(tmp_path / "run", "handed")]
    whole, killed, resumed = (
        {line["handed"]: line["index"] for line in lines if line["handed"]} for lines in runs
    )
    assert len(resumed) > 20 and killed.keys() & resumed.keys(), (
        "what was handed out after the checkpoint comes again"
    )
    for some in (killed, resumed):
        assert all(whole.get(ticket, index) == index for ticket, index in some.items())
    assert sorted(map(int, killed | resumed)) == list(
        range(1, max(map(int, killed | resumed)) + 1)
    ), "none is left out"
