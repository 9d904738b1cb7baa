"""The long-tail model: its problems are right, its lengths geometric, and a tiny one goes all the way to the file."""

import json
from pathlib import Path

import numpy as np
import pytest
from tail_model import (
    ALPHABET,
    CODES,
    EOS,
    MODULI,
    encode,
    held_out,
    is_right,
    main,
    problem,
    question,
    solution,
    worked,
)

from whet.model.load import tiny_tokenizer


def test_every_worked_line_is_true() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        a, m, r = problem(rng)
        *lines, last = solution(a, m, r, rng, 10_000).split("\n")
        assert is_right(question(a, m, r), last)
        for i, line in enumerate(lines):
            x = int(line.split()[1][:2])
            assert f": {a}*{x}={a * x}, " in line and f"={a * x - a * x % m}, left {a * x % m}, " in line
            assert line.endswith("yes") == (a * x % m == r) == (i == len(lines) - 1)


def test_encoding_is_that_of_the_tokenizer() -> None:
    text = question(7, 11, 3) + solution(7, 11, 3, np.random.default_rng(0), 500)
    assert encode(text).tolist() == tiny_tokenizer(ALPHABET)(text)["input_ids"]
    assert (CODES[[ord(c) for c in ALPHABET]] > EOS).all()


def test_trials_are_geometric() -> None:
    """The mean number of trials is the modulus: 1 / p with p = (solutions among 90 numbers) / 90."""
    rng = np.random.default_rng(0)
    for m in (5, 19):
        trials = [solution(*problem(rng, m), rng, 100_000).count("\n") for _ in range(1500)]
        assert np.mean(trials) == pytest.approx(m, rel=0.12)
        assert np.std(trials) == pytest.approx(m, rel=0.2), "the spread of a geometric number is about its mean"


def test_responses_are_cut_at_the_cap() -> None:
    rng = np.random.default_rng(0)
    pairs = [worked(rng, 300)[1] for _ in range(100)]
    assert max(map(len, pairs)) == 300
    assert all((ids[-1] == EOS) or len(ids) == 300 for ids in pairs)
    assert len({text.split(" mod ")[1].split("=")[0] for text in held_out(12, 0)}) == len(MODULI)


def test_a_tiny_one(tmp_path: Path) -> None:
    sizes = {"hidden": 16, "layers": 1, "heads": 2, "kv-heads": 1, "steps": 12, "batch": 4, "cap": 96, "lr": 0.01}
    asked = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    result = main(["--out", str(tmp_path), "--device", "cpu", *asked])
    assert json.loads((tmp_path / "tail_model.json").read_text()) == result
    assert result["own"]["samples"] == 32 and 0 < result["own"]["lengths"]["mean"] <= 96
    assert result["training"]["last_loss"] < result["training"]["first_loss"]
    assert (tmp_path / "model" / "model.safetensors").stat().st_size == pytest.approx(
        2 * result["parameters"], abs=4000
    )
    assert result["circumstances"]["commit"]
