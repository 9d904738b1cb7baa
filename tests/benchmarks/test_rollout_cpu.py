"""The rollout benchmark runs, counts equal work, and writes down where it was measured."""

import json
from pathlib import Path

import pytest
import rollout_cpu


def test_writes_what_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rollout_cpu, "LONGEST", 12)
    monkeypatch.setattr(rollout_cpu, "FULL", 12)
    result = rollout_cpu.measure(tmp_path / "results", repeats=2, seed=1)
    assert json.loads((tmp_path / "results" / "rollout.json").read_text()) == result
    assert capsys.readouterr().out == ""
    assert set(result["tokens_per_second"]) == {"engine", "generate_16", "generate_64"}
    assert all(len(rates["all"]) == 2 and rates["min"] > 0 for rates in result["tokens_per_second"].values())
    assert set(result["ratio_to_generate"]) == {"generate_16", "generate_64"}
    assert result["tokens"] <= 64 * 12 and "same number" in result["same_tokens"]
    assert result["hardware"]["cores"] >= 1 and result["versions"]["torch"] and result["commit"]


def test_the_work_is_log_normal_and_the_same_for_a_seed() -> None:
    prompts, lengths = rollout_cpu._work(0)
    assert (prompts, lengths) == rollout_cpu._work(0) != rollout_cpu._work(1)
    assert len(lengths) == 64 and max(lengths) <= 512 and min(lengths) >= 1
    assert 35 < sorted(lengths)[32] < 100
    assert max(map(len, prompts)) + 512 <= rollout_cpu.CONTEXT


def test_generate_counts_only_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, _ = rollout_cpu._work(0)
    lengths = [1 + i % 5 for i in range(64)]
    from whet.model.load import tiny_model

    assert rollout_cpu._generate(tiny_model(rollout_cpu.VOCAB).eval(), prompts, 16, lengths) == sum(lengths)
