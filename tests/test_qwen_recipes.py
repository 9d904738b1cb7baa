"""The recipes for Qwen2.5-0.5B: they plan a run as a user starts it, and fit the cards that they name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from string import printable

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from whet import cli
from whet.model.load import tiny_tokenizer
from whet.model.memory import SPARE, Footprint, measure
from whet.recipe import load_config, recipes

NAMES = ("qwen-gsm8k", "qwen-math")
LONGEST_PROMPT = {"qwen-gsm8k": 320, "qwen-math": 560}  # tokens, with the chat template
GIB = 2**30


def qwen_folder(path: Path) -> str:
    """A tiny Qwen2 with a chat template; no weight is read by a plan."""
    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    settings = Qwen2Config(
        vocab_size=128, intermediate_size=128, max_position_embeddings=4096, **shape
    )
    settings.architectures = ["Qwen2ForCausalLM"]
    settings.save_pretrained(path)
    tokenizer = tiny_tokenizer(printable)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    )
    tokenizer.save_pretrained(path)
    (path / "model.safetensors").write_bytes(b"no weights")
    return str(path)


def write_rows(path: Path, count: int, start: int = 0) -> None:
    """Rows as GSM8K has them, and with the levels of MATH."""
    rows = [
        {
            "question": f"Tom has {n} apples and buys 3. How many?",
            "answer": f"{n} + 3.\n#### {n + 3}",
            "level": n % 5,
        }
        for n in range(start, start + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    for name, count, start in (
        ("train_gsm8k", 600, 0),
        ("train_math", 600, 0),
        ("test_gsm8k", 60, 900),
    ):
        write_rows(tmp_path / f"{name}.jsonl", count, start)
    write_rows(tmp_path / "test_math500.jsonl", 60, 900)
    return tmp_path


def dry_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> str:
    monkeypatch.setattr("sys.argv", ["whet", "train", *words, "--dry-run"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as left:
        cli.main()
    captured = capsys.readouterr()
    assert left.value.code in (0, 2) and not captured.err, captured.err  # 2: a small machine
    return captured.out


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_for_a_folder_with_qwen(
    name: str,
    data_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = qwen_folder(data_folder / "model")
    said = dry_run(monkeypatch, capsys, name, "--model", model, "--data-folder", str(data_folder))
    assert "540 training prompts; 60 in held_out" in said.replace("; 60 in gsm8k", "").replace(
        "; 60 in math500", ""
    )
    assert " steps of 64 groups x 16 rollouts (all)" in said
    assert not re.search(r"at most \d{4}", said), "thousands have commas"
    assert "model: Qwen2ForCausalLM, " in said and "family: Qwen2, tried on real weights" in said
    assert r"put your final answer within \\boxed{}.\nassistant: " in said


def test_a_file_takes_the_place_of_gsm8k(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = qwen_folder(data_folder / "model")
    write_rows(data_folder / "mine.jsonl", 700)
    words = [
        "--model",
        model,
        "--data",
        str(data_folder / "mine.jsonl"),
        "--data-folder",
        str(data_folder),
    ]
    said = dry_run(monkeypatch, capsys, "qwen-gsm8k", *words)
    assert said.startswith("630 training prompts; 60 in gsm8k; 70 in held_out")


@pytest.mark.parametrize("name", NAMES)
def test_one_small_step_per_large_batch(name: str) -> None:
    """What collapsed took two steps at 6e-6 for half as many rollouts."""
    settings = load_config(recipes()[name].absolute())
    c, learn = settings.curriculum, settings.learn
    assert c.name == "all" and c.groups * c.rollouts >= 1000
    assert learn.lr <= 2e-6 and learn.minibatches * learn.updates == 1
    assert 768 <= settings.rollout.max_tokens <= 1024 and settings.model.dtype == "bfloat16"


@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_fits_the_cards_that_it_names(name: str) -> None:
    """Planned for the real sizes of the 0.5B: as it is on 24 GB, and as its comment says on 80 GB."""
    shape = {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    }
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(
            Qwen2Config(
                vocab_size=151_936, intermediate_size=4864, tie_word_embeddings=True, **shape
            )
        )
        network.tie_weights()
    path = recipes()[name]
    larger = re.findall(r"--set (\S+)", path.read_text())
    assert len(larger) == 2
    context = LONGEST_PROMPT[name] + load_config(path).rollout.max_tokens
    for gib, sets in ((24, []), (80, larger)):
        settings = load_config(path, [f"rollout.context={context}", *sets])
        footprint = Footprint(
            shape=measure(network), settings=settings, device=torch.device("cuda"), flash=True
        )
        within = int(0.98 * gib * GIB * (1 - SPARE))  # some is never free
        assert footprint.lay_out(within).total <= within, (
            gib,
            footprint.memory_lines(footprint.lay_out(within)),
        )
