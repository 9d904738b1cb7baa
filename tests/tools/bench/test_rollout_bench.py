"""The rollout benchmark runs, counts equal work, and writes down where it was measured."""

import json
from pathlib import Path

import pytest

from whet.tools import experiment
from whet.tools.bench import rollout


def test_writes_what_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rollout, "LONGEST", 12)
    monkeypatch.setattr(rollout, "FULL", 12)
    result = rollout.rollout_bench(tmp_path / "results", repeats=2, seed=1)
    assert json.loads((tmp_path / "results" / "rollout.json").read_text()) == result
    assert capsys.readouterr().out == ""
    assert set(result["tokens_per_second"]) == {"engine", "generate_16", "generate_64"}
    assert all(len(rates["all"]) == 2 and rates["min"] > 0 for rates in result["tokens_per_second"].values())
    assert set(result["ratio_to_generate"]) == {"generate_16", "generate_64"}
    assert result["tokens"] <= 64 * 12 and "same number" in result["same_tokens"]
    assert result["hardware"]["cores"] >= 1 and result["versions"]["torch"] and result["commit"]


def test_the_work_is_log_normal_and_the_same_for_a_seed() -> None:
    prompts, lengths = rollout._work(0)
    assert (prompts, lengths) == rollout._work(0) != rollout._work(1)
    assert len(lengths) == 64 and max(lengths) <= 512 and min(lengths) >= 1
    assert 35 < sorted(lengths)[32] < 100
    assert max(map(len, prompts)) + 512 <= rollout.CONTEXT


def test_generate_counts_only_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, _ = rollout._work(0)
    lengths = [1 + i % 5 for i in range(64)]
    from whet.model.load import tiny_model

    assert rollout._generate(tiny_model(rollout.VOCAB).eval(), prompts, 16, lengths) == sum(lengths)


def test_versions_of_what_is_installed_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton writes the kernels, vLLM is compared with: figures hang on both."""
    assert experiment.OPTIONAL == ("triton", "vllm")
    monkeypatch.setattr(experiment, "OPTIONAL", ("pytest", "no-such-package"))
    versions = experiment.circumstances()["versions"]
    assert versions["pytest"] == pytest.__version__ and "no-such-package" not in versions


def test_outside_git_the_commit_is_what_is_given_or_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.delenv("WHET_COMMIT", raising=False)
    assert experiment._commit() == "unknown"
    monkeypatch.setenv("WHET_COMMIT", "0123abc")
    assert experiment._commit() == "0123abc"
