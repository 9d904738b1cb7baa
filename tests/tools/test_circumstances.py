"""What every result records: versions of what is installed, and the commit."""

from pathlib import Path

import pytest

from whet.tools import experiment


def test_versions_of_what_is_installed_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton writes the kernels, vLLM is compared with: figures hang on both."""
    assert experiment.OPTIONAL == ("triton", "vllm")
    monkeypatch.setattr(experiment, "OPTIONAL", ("pytest", "no-such-package"))
    versions = experiment.circumstances()["versions"]
    assert versions["pytest"] == pytest.__version__ and "no-such-package" not in versions


def test_outside_git_the_commit_is_what_is_given_or_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.delenv("WHET_COMMIT", raising=False)
    assert experiment._commit() == "unknown"
    monkeypatch.setenv("WHET_COMMIT", "0123abc")
    assert experiment._commit() == "0123abc"
