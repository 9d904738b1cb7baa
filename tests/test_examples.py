"""The examples run as they are printed."""

import runpy
from pathlib import Path

import pytest
from small_run import even_digits

import whet
from whet.types import Prompt

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.slow
def test_custom_curriculum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)  # as `python examples/custom_curriculum.py` does
    runpy.run_path(str(EXAMPLES / "custom_curriculum.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "keeps the curriculum contract" in printed and "Three steps in" in printed


def test_custom_reward_and_train_from_python(tmp_path: Path) -> None:
    """The example's judge and problems, on a small model folder made on the spot: `whet.train` end to end."""
    from whet.model.load import tiny_model, tiny_tokenizer

    example = runpy.run_path(str(EXAMPLES / "custom_reward.py"))
    alphabet = "".join(sorted({c for text, answer in example["PROBLEMS"] for c in text + answer}))
    tokenizer = tiny_tokenizer(alphabet)
    tiny_model(len(tokenizer), hidden=16, layers=1, heads=2).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    score = example["last_word_is_right"]
    assert score(Prompt(id="a", text="", answer="7", task="t"), "It is 7.") == 1.0
    settings = {
        "steps": 2,
        "curriculum.groups": 2,
        "curriculum.rollouts": 4,
        "rollout.max_tokens": 16,
    }
    result = whet.train(
        tmp_path / "model",
        example["PROBLEMS"][:20],
        reward=even_digits,
        out=tmp_path / "run",
        settings=settings,
        quiet=True,
    )
    assert [row["step"] for row in result.metrics] == [0, 1, 2]
    assert (result.model / "config.json").is_file()
    assert (tmp_path / "run" / "prompts.jsonl").is_file()
    more = whet.train(
        reward=even_digits, out=tmp_path / "run", resume=True, settings={"steps": 3}, quiet=True
    )
    assert [row["step"] for row in more.metrics] == [0, 1, 2, 3]
