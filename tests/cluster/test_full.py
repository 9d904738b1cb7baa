"""Processes that hold a part of every weight (`learn.shard = "full"`) train as one that has them all."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fleet_run import assert_like, fork_members, pool, pooled, run, written  # noqa: F401 (fixtures)
from safetensors.torch import load_file
from small_run import SMALL, Stop, model_folder
from team_run import CASES as TEAM
from team_run import trained
from test_deaths import Reaper
from transformers import Qwen2Config

from whet import cli
from whet.cluster.crew import Crew

pytestmark = pytest.mark.filterwarnings("ignore:larger groups weigh more")
FULL = "learn.shard=full"
SCRIPT = Path(__file__).parent / "team_run.py"
KINDS = {"weights", "gradients", "masters", "moments"}
WARM = ("warm_start.steps=3", "warm_start.batch=5")
CASES = {
    "warm start": ("steps=10", *WARM),
    # Small packs: one process has more of them than the other, which then makes idle passes.
    "kl, two updates": ("steps=10", "learn.kl_coef=0.1", "learn.updates=2", "learn.pack_tokens=20"),
    "minibatches, gradient scores": (
        "learn.minibatches=2",
        "curriculum.name=cures",
        "curriculum.cures.sigma=gradient",
    ),
    "activations again": (
        "learn.checkpoint_activations=true",
        "learn.pack_tokens=40",
        "model.layers=3",
    ),
}


@pytest.mark.wide
@pytest.mark.usefixtures("pooled")
@pytest.mark.parametrize("case", CASES)
def test_two_processes_with_half_of_each_weight_train_as_one(tmp_path: Path, case: str) -> None:
    run(tmp_path / "one", *CASES[case])
    run(tmp_path / "two", *CASES[case], FULL, gpus=2)
    assert_like(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.usefixtures("pooled")
def test_adapters_and_the_weights_below_them_are_divided(tmp_path: Path) -> None:
    sets = (
        f"model.name={model_folder(tmp_path / 'base')}",
        "model.lora.rank=2",
        "learn.kl_coef=0.1",
        "steps=10",
    )
    run(tmp_path / "one", *sets)
    run(tmp_path / "two", *sets, FULL, gpus=2)
    assert_like(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.usefixtures("pooled")
def test_in_single_precision_they_differ_by_rounding(tmp_path: Path) -> None:
    run(tmp_path / "one", "model.dtype=float32")
    run(tmp_path / "two", "model.dtype=float32", FULL, gpus=2)
    assert_like(tmp_path / "one", tmp_path / "two", close=1e-5)


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """What both ranks of a team with parts of the weights found, and what one said where its memory was full."""
    folder = tmp_path_factory.mktemp("shares")
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    starts = [
        [sys.executable, str(SCRIPT), str(rank), "2", str(folder), "full"] for rank in range(2)
    ]
    processes = [
        subprocess.Popen(start, env=own, stderr=subprocess.PIPE, text=True) for start in starts
    ]
    said = [process.communicate()[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), said
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return found, (folder / "full memory").read_text()


@pytest.mark.parametrize("case", TEAM)
def test_a_team_with_parts_of_the_weights_takes_the_steps_of_one_learner(
    case: str, shares: Any
) -> None:
    alone, (members, _) = trained(case), shares
    # packs of other sizes round differently, and later updates follow that
    rough = case == "half precision"
    close = {"rtol": 0.05, "atol": 0.05} if rough else {"rtol": 1e-8, "atol": 1e-10}
    for member in (found[case] for found in members):
        for mine, theirs in list(zip(alone["metrics"], member["metrics"], strict=True))[
            : 1 if rough else None
        ]:
            assert mine.keys() == theirs.keys()
            for name in mine:
                np.testing.assert_allclose(theirs[name], mine[name], err_msg=name, **close)
        for mine, theirs in list(zip(alone["signals"], member["signals"], strict=True))[
            : 1 if rough else None
        ]:
            assert [tuple(key) for key, _ in theirs] == [key for key, _ in mine]
            np.testing.assert_allclose(
                [value for _, value in theirs], [value for _, value in mine], **close
            )
        assert member["state"] == alone["state"]
        for name, weights in alone["weights"].items():
            np.testing.assert_allclose(member["weights"][name], weights, err_msg=name, **close)
        assert member["types"] == ["torch.float32" if rough else "torch.float64"], (
            "of masters and moments"
        )
    assert members[0][case]["weights"] == members[1][case]["weights"], (
        "engines with one model, bit for bit"
    )
    trained_numbers = sum(map(len, alone["weights"].values()))
    for kind, copies in (("masters", 1), ("moments", 2)):
        held = [member[case]["held"][kind] for member in members]
        assert sum(held) == copies * trained_numbers and max(held) < 0.6 * sum(held), (
            "no rank holds all of it"
        )


def test_a_full_gpu_ends_the_run_in_a_sentence_and_the_others_notice(shares: Any) -> None:
    members, sentence = shares
    assert sentence.startswith("The GPU was full in an update")
    assert "--set learn.pack_tokens=32 goes on" in sentence
    assert members[0]["left alone"] == "unmet"


def states_of(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    return load_file(max((folder / "checkpoints").glob("step_*")) / "state" / f"{kind}.safetensors")


@pytest.mark.usefixtures("pooled")
def test_masters_of_a_half_precision_model_are_fp32_and_whole_in_a_checkpoint(
    tmp_path: Path,
) -> None:
    sets = ("model.dtype=bfloat16", "learn.kl_coef=0.1", "steps=2", "save.every=1")
    run(tmp_path / "one", *sets)
    run(tmp_path / "two", *sets, FULL, gpus=2)
    mine, theirs = (written(tmp_path / name)["step_00000001.jsonl"] for name in ("one", "two"))
    assert mine == theirs and mine, "tokens that the first update learns from"
    for kind in ("masters", "optimizer", "reference"):
        one, two = states_of(tmp_path / "one", kind), states_of(tmp_path / "two", kind)
        assert one.keys() == two.keys() and one
        for name, tensor in one.items():
            assert two[name].shape == tensor.shape and two[name].dtype == tensor.dtype, name
            if kind == "masters":
                assert tensor.dtype == torch.float32
                torch.testing.assert_close(two[name], tensor, rtol=0.0, atol=2e-3)


@pytest.mark.usefixtures("pooled")
def test_a_run_goes_on_with_another_number_of_processes_and_another_division(
    tmp_path: Path,
) -> None:
    sets = ("steps=4", "save.every=1", "learn.kl_coef=0.1", *WARM)
    run(tmp_path / "whole", *sets)
    folder = tmp_path / "parts"
    run(folder, *sets, FULL, gpus=2, silent=Stop(1))
    run(folder, *sets, resume=True, silent=Stop(2))
    run(folder, *sets, FULL, gpus=2, resume=True, silent=Stop(3))
    run(folder, *sets, "learn.shard=optimizer", gpus=2, resume=True)
    assert_like(tmp_path / "whole", folder)


@pytest.mark.usefixtures("pooled")
def test_one_process_alone_may_divide_its_weights_by_one(tmp_path: Path) -> None:
    run(tmp_path / "one", "learn.kl_coef=0.1")
    run(tmp_path / "alone", "learn.kl_coef=0.1", FULL)
    assert_like(tmp_path / "one", tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.usefixtures("pooled")
def test_three_processes_of_which_some_hold_nothing_of_a_small_weight(tmp_path: Path) -> None:
    base = f"model.name={model_folder(tmp_path / 'base')}"
    run(tmp_path / "one", base, "model.lora.rank=2", *WARM)
    run(tmp_path / "three", base, "model.lora.rank=2", *WARM, FULL, gpus=3)
    assert_like(tmp_path / "one", tmp_path / "three")


SHAPES = {  # of Qwen2.5: width, layers, heads, heads of keys, inner width, vocabulary, tied
    "1.5B": (1536, 28, 12, 2, 8960, 151_936, True),
    "7B": (3584, 28, 28, 4, 18_944, 152_064, False),
    "14B": (5120, 48, 40, 8, 13_824, 152_064, False),
    "32B": (5120, 64, 40, 8, 27_648, 152_064, False),
}


def dry_run(monkeypatch: pytest.MonkeyPatch, capsys: Any, *sets: str) -> dict[str, float]:
    """GiB by kind, as `whet train --gpus 8 --dry-run` says it."""
    given = [
        f"--set={item}" for item in (*SMALL, "model.device=cpu", "model.dtype=bfloat16", *sets)
    ]
    monkeypatch.setattr(sys, "argv", ["whet", "train", *given, "--gpus", "8", "--dry-run"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code in (0, 2)  # a CPU has less memory than eight GPUs
    (line,) = re.findall(r"at the peak for .* packs of [\d,]+: (.*)", capsys.readouterr().out)
    units = {"GiB": 1.0, "MiB": 1 / 1024}
    return {
        name: float(size) * units[unit]
        for name, size, unit in re.findall(r"([\w ()]+?) ([\d.]+) (.iB)", line)
    }


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["none", "optimizer", "full"])
def test_the_sizes_in_the_docs_are_those_of_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, shard: str
) -> None:
    base = model_folder(tmp_path / "base")
    rows = re.findall(r"\| ([\d.]+B) \|(.*)\|\n", Path("docs/gpus.md").read_text())
    assert [name for name, _ in rows] == list(SHAPES)
    for name, cells in rows:
        hidden, layers, heads, kv_heads, inner, vocab, tied = SHAPES[name]
        Qwen2Config(
            architectures=["Qwen2ForCausalLM"],
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=inner,
            vocab_size=vocab,
            tie_word_embeddings=tied,
        ).save_pretrained(base)
        parts = dry_run(monkeypatch, capsys, f"model.name={base}", f"learn.shard={shard}")
        planned = sum(size for kind, size in parts.items() if kind.split()[-1] in KINDS)
        said = dict(zip(("none", "optimizer", "full"), map(float, cells.split("|")), strict=True))
        assert abs(planned - said[shard]) < 0.6 + 0.001 * planned, (name, parts)


class Strikes(Reaper):
    """Kills the second process a little after the n-th question of a name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, nth: int) -> None:
        super().__init__(monkeypatch, {})
        self.name, self.nth = name, nth

    def strike(self, crew: Crew, name: str) -> None:
        self.nth -= name == self.name
        if name == self.name and not self.nth:
            self.when = {self.asked + 1: (1, 0.01)}
        super().strike(crew, name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "nth"), [("step", 4), ("ask", 12), ("write_together", 2)])
def test_a_death_sends_the_run_back_to_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, nth: int
) -> None:
    sets = ("steps=6", "save.every=2", *WARM)
    run(tmp_path / "one", *sets)
    fork_members(monkeypatch)
    reaper = Strikes(monkeypatch, name, nth)
    silent = run(tmp_path / "two", *sets, FULL, gpus=2)
    reaper.finish()
    assert any(
        message.endswith("The run goes on from its last checkpoint.") for message in silent.messages
    )
    assert reaper.names == [name] and len(reaper.pids) == 4
    assert_like(tmp_path / "one", tmp_path / "two", counters=False)
