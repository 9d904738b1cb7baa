"""The rollout grid in small, on a CPU: all peers except vLLM, figures that follow from the seconds, results kept."""

import json
import os
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from measured_dims import QWEN25_15B, SMOLLM2_135M
from rich.console import Console
from typer.testing import CliRunner

from whet.cli import app
from whet.errors import WhetError
from whet.estimate import attainable_step, dims_of
from whet.model.memory import measure
from whet.tools import bench as cli_bench
from whet.tools.bench import rollout as decode
from whet.tools.bench.peers import PEERS, Apart, PeerFailed, Whet, _serve, missing, shape_model
from whet.tools.bench.rollout import (
    CELLS,
    DecodeCell,
    ShapeBench,
    decode_bench,
    log_prob_gap,
    ratios,
)

SMALL = {
    cell.name: cell
    for cell in (
        DecodeCell(name="b4_p8", batch=4, prompt=8, new=6, group=0),
        DecodeCell(name="b1_c512", batch=1, prompt=13, new=6, group=0, decode_only=True),
        DecodeCell(name="tail", batch=12, prompt=8, new=24, group=0, tail=True),
        DecodeCell(name="b2_c4k", batch=2, prompt=29, new=6, group=1, decode_only=True),
    )
}


@pytest.fixture(scope="module", autouse=True)
def small_grid() -> Iterator[None]:
    """The grid in small, for a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "CELLS", SMALL)
        yield


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:
    out, lines = tmp_path_factory.mktemp("grid"), list[str]()
    return (
        out,
        decode_bench(out, device="cpu", shapes=["tiny"], repeats=2, on_progress=lines.append),
        lines,
    )


@pytest.mark.slow
def test_all_peers_run_the_grid(grid: tuple[Path, dict[str, Any], list[str]]) -> None:
    out, result, lines = grid
    assert json.loads((out / "rollout_grid_cpu.json").read_text()) == result
    cells = result["shapes"]["tiny"]["cells"]
    assert list(cells) == list(SMALL) and result["shapes"]["tiny"]["skipped"] == []
    for cell in cells.values():
        assert set(cell["peers"]) == {"whet", "generate"}
        assert not [found["failed"] for found in cell["peers"].values() if "failed" in found]
        assert cell["peers"]["whet"]["tokens_per_second"]["min"] > 0
    assert (
        cells["tail"]["peers"]["whet"]["repeats"] == 2
        and cells["tail"]["peers"]["generate"]["repeats"] == 1
    )
    assert len(lines) == 1 + len(SMALL) and "vLLM" in lines[0]
    assert len(result["shapes"]["tiny"]["startup_seconds"]["whet"]) == 2, (
        "made anew for longer contexts"
    )
    run = result["runs"][0]
    assert (
        run["hardware"]["cores"] >= 1
        and run["commit"]
        and run["peers"] == [n for n in PEERS if n != "vllm"]
    )


@pytest.mark.slow
def test_recorded_log_probs_are_those_of_the_plain_model(
    grid: tuple[Path, dict[str, Any], list[str]],
) -> None:
    gap = grid[1]["shapes"]["tiny"]["log_probs"]
    assert (
        gap["tokens"] == 8 * 6
        and gap["max"] < 1e-5
        and gap["mean"] <= gap["max"]
        and gap["kl"] < 1e-9
    )


def test_a_wrong_log_prob_is_seen() -> None:
    peer = Whet("tiny", "cpu")
    peer.prepare(2, 32)
    prompts = [[3, 4, 5], [6, 7]]
    rollouts = peer.rollouts(prompts, [4, 4])
    assert rollouts[0].trace is not None
    rollouts[0].trace.log_probs[1] += 0.5
    gap = log_prob_gap(peer.model, prompts, rollouts)
    assert gap["max"] == pytest.approx(0.5, abs=1e-4) and gap["mean"] == pytest.approx(
        0.5 / 8, abs=1e-4
    )
    assert gap["kl"] == pytest.approx((np.exp(-0.5) - 1 + 0.5) / 8, abs=1e-4)


@pytest.mark.slow
def test_a_later_run_adds_cells_and_replaces_those_measured_again(tmp_path: Path) -> None:
    common: dict[str, Any] = {"device": "cpu", "shapes": ["tiny"], "peers": ["whet"], "repeats": 1}
    decode_bench(tmp_path, cells=["b4_p8", "tail"], **common)
    result = decode_bench(tmp_path, cells=["tail", "b2_c4k"], **common)
    cells = result["shapes"]["tiny"]["cells"]
    assert {name: cell["run"] for name, cell in cells.items()} == {
        "b4_p8": 0,
        "tail": 1,
        "b2_c4k": 1,
    }


def test_what_time_was_not_left_for_is_said(tmp_path: Path) -> None:
    lines: list[str] = []
    result = decode_bench(
        tmp_path,
        device="cpu",
        shapes=["tiny"],
        peers=["whet"],
        seconds=0,
        on_progress=lines.append,
        cells=["tail"],
    )
    assert (
        result["shapes"]["tiny"]["skipped"] == ["tail"] and result["shapes"]["tiny"]["cells"] == {}
    )
    assert lines == ["tiny: no time was left for tail."]
    assert json.loads((tmp_path / "rollout_grid_cpu.json").read_text()) == result


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"shapes": ["70b"]}, 'no shape "70b"'),
        ({"shapes": ["tiny"], "cells": ["b9"]}, 'no cell "b9"'),
        ({"shapes": ["tiny"], "peers": ["tgi"]}, 'no peer "tgi"'),
    ],
)
def test_names_that_are_not_there(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(WhetError, match=said):
        decode_bench(tmp_path / "out", device="cpu", **given)
    assert not list(tmp_path.iterdir())


class Ghost:
    """Gives the seconds that are set for it."""

    def __init__(self, seconds: Iterator[float]) -> None:
        self.seconds = seconds
        self.asked: list[int] = []

    def timed(self, prompts: Any, lengths: list[int]) -> float:
        self.asked.append(max(lengths))
        return next(self.seconds)


def test_figures_follow_from_the_seconds() -> None:
    """64 x 128 tokens in 1.0 s of which 0.365 s are prefill: 5 ms for each of 127 steps, 12,800 tokens a second."""
    lines: list[str] = []
    cell = CELLS["b64_c512"]
    bench = ShapeBench("1.5b", torch.device("cpu"), [cell], 2, 0, float("inf"), lines.append)
    bench.stands["whet"] = Ghost(iter([9.0, 1.0, 0.365, 1.2, 0.565]))  # type: ignore[assignment]
    found = bench.measure(cell)["peers"]["whet"]
    assert found["tokens_per_second"]["all"] == pytest.approx([8192.0, 8192 / 1.2])
    assert found["ms_a_step"]["median"] == pytest.approx(5.0)
    assert found["decode_tokens_per_second"]["median"] == pytest.approx(12_800)
    assert found["share_of_attainable"]["paper"] == pytest.approx(
        200 * attainable_step(QWEN25_15B, 64, 512)
    )
    assert found["warmup_seconds"] == 9.0


@pytest.mark.parametrize(
    ("name", "asked"),
    [("whet", [8, 128, 1]), ("vllm", [8, 128, 1]), ("generate", [32, 32, 1])],
)
def test_a_slow_peer_makes_few_tokens_and_warms_up_with_all_of_them(
    name: str, asked: list[int]
) -> None:
    """Steps of the first whole call of `generate` took up to four times as long as those after it."""
    cell = CELLS["b64_c512"]
    bench = ShapeBench("1.5b", torch.device("cpu"), [cell], 1, 0, float("inf"), lambda line: None)
    ghost = Ghost(iter([9.0, 1.0, 0.5]))
    bench.stands[name] = ghost  # type: ignore[assignment]
    bench.measure(cell)
    assert ghost.asked == asked


def test_the_stored_file_is_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds several runs, and a cell whose name is in no grid: the long-tailed workload with `generate`."""
    stored = json.loads(
        (Path(__file__).parents[3] / "benchmarks" / "results" / "rollout_gpu.json").read_text()
    )
    console = Console(file=StringIO(), width=200)
    monkeypatch.setattr(cli_bench, "out_console", console)
    cli_bench.show_grid(stored)
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    for found in stored["shapes"].values():
        assert not set(found["skipped"]) & set(found["cells"]), "what was measured after all"
        assert all(name in shown for name in found["cells"])
        assert {cell["run"] for cell in found["cells"].values()} <= set(range(len(stored["runs"])))
    assert "tail_generate" in shown and "tail_generate" not in CELLS


def test_ratios_are_of_the_same_round() -> None:
    peers: dict[str, dict[str, Any]] = {
        "whet": {"tokens_per_second": {"all": [300.0, 100.0, 500.0]}},
        "vllm": {"tokens_per_second": {"all": [100.0, 50.0, 100.0]}},
        "generate": {"failed": "out of GPU memory"},
    }
    found = ratios(peers)
    assert list(found) == ["vllm"] and found["vllm"]["tokens_per_second"]["all"] == [3.0, 2.0, 5.0]
    assert found["vllm"]["tokens_per_second"]["median"] == 3.0


def test_the_grid_is_the_one_asked_for() -> None:
    sizes = {(c.batch, c.context) for c in CELLS.values() if c.decode_only}
    assert sizes == {(b, c) for b in (1, 8, 64, 256) for c in (512, 4096)} | {(8, 16384)}
    assert {c.batch for c in CELLS.values() if (c.prompt, c.new) == (128, 128)} == {1, 8, 64, 256}
    assert [c.group for c in CELLS.values()] == sorted(c.group for c in CELLS.values())
    prompts, lengths = CELLS["tail"].work(1000, 0, 1)
    assert (
        len(lengths) == 256
        and max(lengths) == 2048
        and min(lengths) >= 1
        and len(prompts[0]) == 128
    )
    assert 200 < sorted(lengths)[128] < 320
    again, same = CELLS["tail"].work(1000, 0, 2)
    assert same == lengths and again != prompts, "new prompts, so that no peer can have them cached"
    shapes = {"135m": SMOLLM2_135M, "1.5b": QWEN25_15B}
    assert all(dims_of(measure(shape_model(name, "meta"))) == dims for name, dims in shapes.items())
    assert [name for name in PEERS if not CELLS["b64_p128"].new_of(name)] == ["generate"]


@pytest.mark.slow
def test_a_peer_in_a_process_of_its_own_fails_without_the_others() -> None:
    stand = Apart("generate", "tiny", "cpu")
    try:
        assert stand.prepare(2, 32) >= 0
        assert stand.timed([[3, 4, 5], [6, 7]], [4, 2]) > 0
        with pytest.raises(PeerFailed, match="ValueError"):
            stand.timed([], [])
        assert stand.timed([[3, 4]], [3]) > 0, "it goes on after a failure"
        with pytest.raises(PeerFailed, match="no answer in 0 s"):
            stand._ask(time.sleep, 600, seconds=0.1)
        with pytest.raises(PeerFailed, match="died"):
            stand.timed([[3]], [1])
    finally:
        stand.close()
    with pytest.raises(ProcessLookupError):
        os.kill(stand.process, 0)


def test_a_peer_that_cannot_be_made_says_why() -> None:
    with pytest.raises(PeerFailed, match="KeyError: 'unknown'"):
        _serve("make", "unknown", "tiny", "cpu")


def test_our_engine_is_made_anew_after_a_failure() -> None:
    stand = Whet("tiny", "cpu")
    stand.prepare(2, 64)
    with pytest.raises(PeerFailed, match="WhetError"):
        stand.timed([[3] * 400], [4])
    assert stand.timed([[3, 4]] * 3, [3, 4, 5]) > 0
    stand.close()


def test_a_peer_that_makes_too_few_tokens_has_failed() -> None:
    stand = Whet("tiny", "cpu")
    stand.prepare(1, 64)
    with pytest.raises(PeerFailed, match="tokens were made"):
        stand.timed([[3] * 60], [40])  # the context ends it


def test_vllm_is_left_out_with_a_line() -> None:
    assert missing("vllm", "cpu") and missing("whet", "cpu") is None


def test_the_command_shows_a_table(tmp_path: Path) -> None:
    given = [
        "bench",
        "rollout",
        "--device",
        "cpu",
        "--shape",
        "tiny",
        "--cells",
        "b4_p8",
        "--peers",
        "whet,generate",
    ]
    done = CliRunner().invoke(app, [*given, "--repeats", "1", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "b4_p8" in done.output and "x)" in done.output and "KL" in done.output
    assert (tmp_path / "rollout_grid_cpu.json").is_file()


@pytest.mark.gpu
def test_the_grid_on_a_gpu(tmp_path: Path) -> None:
    result = decode_bench(
        tmp_path, shapes=["tiny"], cells=["b4_p8"], peers=["whet", "generate"], repeats=1
    )
    peers = result["shapes"]["tiny"]["cells"]["b4_p8"]["peers"]
    assert all(found["tokens_per_second"]["min"] > 0 for found in peers.values())
    assert (tmp_path / "rollout_gpu.json").is_file()
