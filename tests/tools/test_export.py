"""An export is what was trained, loads by itself, leaves the run behind, and its card cannot be broken into."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from whet import config
from whet.errors import WhetError
from whet.learn.checkpoint import save_checkpoint
from whet.model.load import tiny_model, tiny_tokenizer
from whet.recipe import dump_config, load_config, parse_config
from whet.run import Run, checkpoint_path
from whet.tools import export as card
from whet.tools.export import CardFacts, export_model, license_of, model_card, public_recipe

ALPHABET = "0123456789+-=# "
IDS = torch.tensor([[2, 5, 7, 3, 4]])


def checkpoint(path: Path, seed: int, model: Any = None) -> None:
    save_checkpoint(
        path,
        model=tiny_model(17, hidden=32, heads=2, seed=seed) if model is None else model,
        tokenizer=tiny_tokenizer(ALPHABET),
        tensors={"masters": {"w": torch.zeros(3)}},
        arrays={},
        states={"tally": {"step": seed}},
    )


def make_run(folder: Path, *sets: str, model: Any = None) -> Path:
    """Three checkpoints, of which the second is the best."""
    with Run.create(folder, dump_config(load_config(sets=["steps=3", *sets]))) as run:
        for step, accuracy in enumerate((0.1, 0.8, 0.4), 1):
            run.record(
                step, {"tokens_generated": 1234.0 * step, "eval/held_out/accuracy": accuracy}
            )
            run.save(step, lambda path, step=step: checkpoint(path, step, model), accuracy, keep=3)  # type: ignore[misc]
    return folder


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return model(IDS).logits.detach()


def front_matter(readme: str) -> dict[str, Any]:
    _, block, _ = readme.split("---\n", 2)
    loaded = yaml.safe_load(block)
    assert isinstance(loaded, dict)
    return loaded


def test_run_exports_its_best_checkpoint_and_nothing_of_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    out = export_model(run, tmp_path / "out")
    assert torch.equal(logits(out), tiny_model(17, hidden=32, heads=2, seed=2)(IDS).logits)
    names = {path.name for path in out.rglob("*")}
    assert {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    } <= names
    assert not names & {"state", "manifest.json"}
    assert (
        AutoTokenizer.from_pretrained(out)("1+2=").input_ids
        == tiny_tokenizer(ALPHABET)("1+2=").input_ids
    )
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_tied_weights_are_there_and_come_back_tied(tmp_path: Path) -> None:
    from safetensors import safe_open

    out = export_model(checkpoint_path(make_run(tmp_path / "run"), 3), tmp_path / "out")
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert {"model.embed_tokens.weight", "lm_head.weight"} & set(file.keys())
    model = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model(IDS).logits, tiny_model(17, hidden=32, heads=2, seed=3)(IDS).logits)


def test_any_model_folder_is_cleaned(tmp_path: Path) -> None:
    source = tmp_path / "model"
    checkpoint(source, 1)
    for name in (
        "pytorch_model.bin",
        "modeling_mine.py",
        "training_args.json",
        "notes.txt",
        "LICENSE",
    ):
        (source / name).write_text("x")
    (source / "manifest.json").unlink()
    (source / "README.md").write_text("---\nlicense: mit\nbase_model: org/base\n---\n")
    out = export_model(source, tmp_path / "out")
    names = {path.name for path in out.iterdir()}
    assert "LICENSE" in names and not names & {
        "pytorch_model.bin",
        "modeling_mine.py",
        "training_args.json",
        "notes.txt",
    }
    said = front_matter((out / "README.md").read_text())
    assert (said["license"], said["base_model"], said["library_name"]) == (
        "mit",
        "org/base",
        "transformers",
    )


def test_card_tells_the_training(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run",
        "curriculum.name=dapo",
        "learn.estimator=grpo",
        'data.0.path="/data/mine/sums.jsonl"',
    )
    readme = (export_model(run, tmp_path / "out") / "README.md").read_text()
    said = front_matter(readme)
    assert (
        said["tags"] == ["whet", "reinforcement-learning", "grpo"]
        and said["pipeline_tag"] == "text-generation"
    )
    assert "license" not in said and "base_model" not in said
    assert (
        "- Data: sums.jsonl" in readme
        and "- Curriculum: dapo, 16 groups of 16 rollouts per step" in readme
    )
    assert "after step 2 of 3, 2,468 tokens generated" in readme
    assert "| held\\_out | 0.100 (1) | 0.800 (2) | 0.400 (3) | 0.800 (2) |" in readme
    assert 'path = "sums.jsonl"' in readme and "/data/mine" not in readme


def test_nothing_local_leaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home" / "jane"
    monkeypatch.setenv("HOME", str(home))
    base = home / "models" / "secret_project"
    checkpoint(base, 9)
    sets = [
        f"model.name={json.dumps(str(base))}",
        f'data_folder="{home}/data"',
        f'text.system_prompt="see {home}/x"',
    ]
    run = make_run(
        home / "run",
        *sets,
        'data.0.path="../clients/acme/sums.jsonl"',
        'data.0.options={file="~/a/b.txt"}',
    )
    out = export_model(run, tmp_path / "out")
    for path in out.iterdir():
        if path.suffix in (".json", ".md", ".jinja"):
            assert "jane" not in path.read_text() and str(tmp_path) not in path.read_text(), (
                path.name
            )
    readme = (out / "README.md").read_text()
    assert "acme" not in readme and "starting from secret\\_project" in readme
    recipe = re.search(r"```toml\n(.*)\n```", readme, re.DOTALL)
    assert recipe and 'file = "b.txt"' in recipe[1] and 'name = "secret_project"' in recipe[1]


HOSTILE = (
    'x"\n---\nlicense: mit\n# big <script>alert(1)</script> | [a](javascript:b) ```\n\x1b[31m\u202e'
)


def test_hostile_names_stay_text() -> None:
    settings = parse_config(
        {
            "model": {"name": HOSTILE},
            "data": [{"path": HOSTILE, "split": HOSTILE}],
            "text": {"system_prompt": HOSTILE},
            "curriculum": {"name": HOSTILE},
        }
    )
    rows = [
        {"step": 1, "tokens_generated": "many", f"eval/{HOSTILE.replace('/', '')}/accuracy": 0.5}
    ]
    facts = CardFacts(
        title=HOSTILE,
        adapter=False,
        chat=True,
        base=HOSTILE,
        base_on_hub=HOSTILE,
        license="",
        settings=settings,
        rows=rows,
        step=1,
        repository=HOSTILE,
    )
    readme = model_card(facts)
    said = front_matter(readme)
    assert said["base_model"] == HOSTILE and set(said) == {
        "library_name",
        "pipeline_tag",
        "base_model",
        "tags",
    }
    assert "\x1b" not in readme and "\u202e" not in readme
    body = readme.split("---\n", 2)[2]
    outside = re.sub(r"^(`{3,})\w+\n.*?^\1$", "", body, flags=re.DOTALL | re.MULTILINE)
    assert "<script" not in outside and not re.search(r"(?<!\\)\]\(javascript", outside)
    assert [line for line in outside.splitlines() if line.startswith("#")] == [
        line for line in outside.splitlines() if line.startswith(("# x", "## Evaluation", "## Use"))
    ]
    table = [line for line in outside.splitlines() if line.startswith("| x")]
    assert len(table) == 1 and len(re.findall(r"(?<!\\)\|", table[0])) == 6


def test_recipe_reads_back(tmp_path: Path) -> None:
    settings = load_config(
        sets=["learn.lr=1e-5", 'data.0.path="/abs/a.jsonl"', 'model.name="org/name@rev"']
    )
    found = parse_config(tomllib.loads(public_recipe(settings)))
    assert (
        found.data[0].path == "a.jsonl"
        and found.model.name == "org/name@rev"
        and found.learn == settings.learn
    )


@pytest.mark.parametrize(
    ("readme", "license_name"),
    [
        ("---\nlicense: apache-2.0\n---\n", "apache-2.0"),
        ('---\ntags:\n- a\nlicense: "MIT"\n---\n', "mit"),
        ("---\nlicense: [a, b]\n---\n", ""),
        ("---\nlicense: evil\\n--- x\n---\n", ""),
        ("license: mit\n", ""),
    ],
)
def test_license_is_taken_over_only_where_it_is_plain(readme: str, license_name: str) -> None:
    assert license_of(readme) == license_name


def run_snippet(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card's own code, in the exported folder."""
    monkeypatch.chdir(out)
    code = re.search(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    assert code
    exec(code[1].replace("max_new_tokens=256", "max_new_tokens=2"), {})


def test_card_s_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_snippet(export_model(make_run(tmp_path / "run"), tmp_path / "out"), monkeypatch)
    assert capsys.readouterr().out


@pytest.fixture
def adapted(tmp_path: Path) -> tuple[Path, Any]:
    """A run with adapters that do something, and the live model of it."""
    pytest.importorskip("peft")
    from whet.model.load import load_weights
    from whet.model.lora import add_lora

    base = tmp_path / "base"
    checkpoint(base, 1)
    (base / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: org/base\n---\n")
    model = load_weights(base, torch.float32)
    add_lora(model, config.Lora(rank=4), str(base))
    # whatever ran before: adapters this large are at the edge of rounding
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.normal_(0, 0.3, generator=generator)
    sets = (f"model.name={json.dumps(str(base))}", "model.lora.rank=4")
    return make_run(tmp_path / "run", *sets, model=model), model


def test_adapters_alone(
    adapted: tuple[Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, model = adapted
    out = export_model(run, tmp_path / "out")
    names = {path.name for path in out.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not names & {"model.safetensors", "state", "manifest.json"}
    said = front_matter((out / "README.md").read_text())
    assert (
        said["library_name"] == "peft"
        and said["base_model"] == "org/base"
        and said["license"] == "apache-2.0"
    )
    assert str(tmp_path) not in (out / "README.md").read_text()
    from peft import AutoPeftModelForCausalLM

    loaded = AutoPeftModelForCausalLM.from_pretrained(out)
    assert torch.allclose(loaded(input_ids=IDS).logits, model(IDS).logits, atol=1e-5)
    run_snippet(out, monkeypatch)
    assert capsys.readouterr().out


def test_merged_adapters_give_the_same_logits(adapted: tuple[Path, Any], tmp_path: Path) -> None:
    run, model = adapted
    out = export_model(run, tmp_path / "out", merge=True)
    assert not list(out.glob("adapter*"))
    assert torch.allclose(logits(out), model(IDS).logits, atol=1e-5)
    assert not torch.allclose(
        logits(out), tiny_model(17, hidden=32, heads=2, seed=1)(IDS).logits, atol=1e-2
    )
    loaded = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    assert (
        loaded.lm_head.weight is loaded.model.embed_tokens.weight and loaded.dtype == torch.float32
    )
    readme = (out / "README.md").read_text()
    assert (
        front_matter(readme)["library_name"] == "transformers"
        and "LoRA adapters of rank 4" not in readme[:200]
    )
    for path in out.glob("*.json"):
        assert str(tmp_path) not in path.read_text(), path.name


def test_adapters_on_a_folder_are_not_pushed_alone(
    adapted: tuple[Path, Any], tmp_path: Path
) -> None:
    with pytest.raises(WhetError, match="--merge"):
        export_model(adapted[0], tmp_path / "out", push="org/name")
    assert not (tmp_path / "out").exists()


def test_missing_base_is_one_sentence(adapted: tuple[Path, Any], tmp_path: Path) -> None:
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(WhetError, match="stands on"):
        export_model(adapted[0], tmp_path / "out", merge=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["moved", "run"]


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("kept")
    with pytest.raises(WhetError, match="not empty"):
        export_model(run, tmp_path / "full")
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["mine"]
    with pytest.raises(WhetError, match="nothing to merge"):
        export_model(run, tmp_path / "out", merge=True)
    with pytest.raises(WhetError, match="no run, checkpoint or model"):
        export_model(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WhetError, match="no model folder"):
        export_model(tmp_path / "empty", tmp_path / "out")
    with Run.create(tmp_path / "young", "seed = 1\n"):
        pass
    with pytest.raises(WhetError, match="has no checkpoint yet"):
        export_model(tmp_path / "young", tmp_path / "out")
    damaged = checkpoint_path(run, 1)
    (damaged / "config.json").write_text("{}")
    with pytest.raises(WhetError, match=r"not whole: config.json"):
        export_model(damaged, tmp_path / "out")
    for name in ("name", "a/b/c", "org/na me", "../x/y"):
        with pytest.raises(WhetError, match="org/name"):
            export_model(run, tmp_path / "out", push=name)
    assert not (tmp_path / "out").exists()


def test_push_without_network_keeps_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(WhetError, match="not pushed to org/name") as error:
        export_model(make_run(tmp_path / "run"), tmp_path / "out", push="org/name")
    assert "\n" not in str(error.value)
    assert 'from_pretrained("org/name"' in (tmp_path / "out" / "README.md").read_text()


def test_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    from whet.tools import export

    run = make_run(tmp_path / "run")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(export.shutil, "copyfile", full)
    with pytest.raises(WhetError, match="no space"):
        export_model(run, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_fences_outgrow_their_content() -> None:
    assert card._fenced("a ```` b", "toml").startswith("`````toml\n")


def model_in(folder: Path) -> Path:
    checkpoint(folder, 1)
    return folder


def test_a_link_out_of_the_model_folder_is_not_followed(tmp_path: Path) -> None:
    model = model_in(tmp_path / "model")
    (tmp_path / "secret").write_text("a key of this machine")
    for name in ("LICENSE", "vocab.txt", "additional_chat_templates"):
        link = model / name
        link.symlink_to(tmp_path if name.startswith("additional") else tmp_path / "secret")
        (tmp_path / "x.jinja").write_text("also mine")
        with pytest.raises(WhetError, match="outside the model folder; nothing is exported"):
            export_model(model, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        link.unlink()
    (model / "drafter").symlink_to(tmp_path)
    with pytest.raises(WhetError, match="outside the model folder"):
        export_model(model, tmp_path / "out")
    (model / "drafter").unlink()
    (model / "kept").write_text("terms")
    (model / "LICENSE").symlink_to("kept")
    assert (export_model(model, tmp_path / "out") / "LICENSE").read_text() == "terms", (
        "a link inside is fine"
    )


def test_the_links_of_the_hub_s_cache_are_followed(tmp_path: Path) -> None:
    cache = tmp_path / "models--a--b"
    snapshot = model_in(cache / "snapshots" / "abc")
    (cache / "blobs").mkdir()
    for number, path in enumerate(sorted(p for p in snapshot.iterdir() if p.is_file())):
        path.rename(cache / "blobs" / str(number))
        path.symlink_to(Path("../../blobs") / str(number))
    out = export_model(snapshot, tmp_path / "out")
    assert (
        torch.equal(logits(out), logits(snapshot)) and not (out / "model.safetensors").is_symlink()
    )
