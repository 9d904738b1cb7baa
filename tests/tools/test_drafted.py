"""The drafter as a by-product: written with every checkpoint, exported, and measured by `whet eval --draft`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_run import (
    SMALL,
    Restless,
    Silent,
    Stop,
    even_digits,
    model_folder,
    problem_file,
    small_config,
)

from whet import cli
from whet.api import run_recipe
from whet.draft.eagle import check_layout
from whet.draft.training import DrafterTrainer
from whet.errors import WhetError
from whet.learn.checkpoint import PICKLES, verify_checkpoint
from whet.model.load import tiny_model, tiny_tokenizer
from whet.problems import load_problems
from whet.recipe import load_config
from whet.rollout.engine import LocalEngine
from whet.tools.export import export_model
from whet.tools.measure import eval_entries, evaluate_model
from whet.types import Rollout

EAGLE = ('draft.drafters=["suffix", "eagle"]', "steps=4", "save.every=2")


@pytest.fixture(autouse=True)
def _restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are made whatever a clock would say of them."""
    monkeypatch.setattr("whet.draft.speculation.Controller", Restless)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps with a drafter that learns; the drafter's folder is in every checkpoint."""
    folder = tmp_path_factory.mktemp("runs") / "eagle"
    run_recipe(small_config(*EAGLE), folder, watcher=Silent(), reward=even_digits)
    return folder


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("step_*"))


def whet(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["whet", *words])
    monkeypatch.setenv("COLUMNS", "200")
    try:
        cli.main()
    except SystemExit as left:
        return int(left.code or 0)
    return 0


# ---- in a checkpoint


def test_every_checkpoint_holds_the_drafter_that_was_in_use(run: Path) -> None:
    assert len(checkpoints(run)) >= 1
    for checkpoint in checkpoints(run):
        check_layout(checkpoint / "drafter")
        assert verify_checkpoint(checkpoint) is None
        assert not [path for path in checkpoint.rglob("*") if path.suffix in PICKLES]
        listed = json.loads((checkpoint / "manifest.json").read_text())["files"]
        assert {"drafter/config.json", "drafter/model.safetensors"} <= listed.keys()
        served, state = (
            load_file(checkpoint / at)
            for at in ("drafter/model.safetensors", "state/drafter.safetensors")
        )
        assert torch.equal(served["fc.weight"], state["weight.fc"]), (
            "in fp32 what is served is the master"
        )
        assert {"exp_avg.fc", "exp_avg_sq.fc"} <= state.keys()


def test_a_drafter_that_was_changed_is_a_checkpoint_that_was_changed(
    run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "step"
    shutil.copytree(checkpoints(run)[-1], copy)
    with (copy / "drafter/model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert "drafter/model.safetensors" in str(verify_checkpoint(copy))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, stopped after two steps."""
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    run_recipe(small_config(*EAGLE), folder, watcher=Stop(after=2), reward=even_digits)
    return folder


@pytest.mark.parametrize("lessons", [True, False])
def test_a_resumed_run_writes_the_drafter_on(
    stopped: Path, tmp_path: Path, lessons: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without lessons it writes what it has read; with them it learns on."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    before = load_file(checkpoints(tmp_path)[-1] / "drafter/model.safetensors")
    if not lessons:
        run = DrafterTrainer.run
        monkeypatch.setattr(
            DrafterTrainer, "run", lambda self, budget, **rest: run(self, 0, **rest)
        )
    run_recipe(small_config(*EAGLE), tmp_path, watcher=Silent(), reward=even_digits, resume=True)
    newest = checkpoints(tmp_path)[-1]
    check_layout(newest / "drafter")
    assert newest.name.endswith("4") and verify_checkpoint(newest) is None
    after = load_file(newest / "drafter/model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before) != lessons


def test_no_drafter_no_folder(tmp_path: Path) -> None:
    run_recipe(
        small_config('draft.drafters=["ngram"]', "steps=1"),
        tmp_path,
        watcher=Silent(),
        reward=even_digits,
    )
    assert not (checkpoints(tmp_path)[-1] / "drafter").exists()


def test_adapters_have_a_drafter_too(tmp_path: Path) -> None:
    base, tokenizer = (
        tmp_path / "base",
        tiny_tokenizer(load_problems(small_config(), even_digits).alphabet),
    )
    tiny_model(len(tokenizer), hidden=16, layers=1, heads=2, context=64, seed=5).save_pretrained(
        base
    )
    tokenizer.save_pretrained(base)
    sets = (*EAGLE, "steps=1", f"model.name='{base}'", "model.lora.rank=4", "model.dtype=bfloat16")
    run_recipe(small_config(*sets), tmp_path / "run", watcher=Silent(), reward=even_digits)
    check_layout(checkpoints(tmp_path / "run")[-1] / "drafter")
    assert evaluate_model(str(tmp_path / "run"), draft=True)["eval/held_out/draft/rollouts"] == 12
    merged = export_model(tmp_path / "run", tmp_path / "out", merge=True)
    served = load_file(merged / "drafter/model.safetensors")
    assert {tensor.dtype for tensor in served.values()} == {torch.bfloat16}


# ---- in an export


def test_an_export_has_the_drafter_beside_the_model(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoints(run)[-1]
    assert whet(monkeypatch, "export", str(source), str(tmp_path / "v")) == 0
    assert f"{tmp_path / 'v' / 'drafter'}, for vllm" in capsys.readouterr().out
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "v/drafter" / name).read_bytes() == (
            source / "drafter" / name
        ).read_bytes()
    assert whet(monkeypatch, "export", str(source), str(tmp_path / "s"), "--drafter", "sglang") == 0
    check_layout(tmp_path / "s/drafter")
    assert json.loads((tmp_path / "s/drafter/config.json").read_text())["architectures"] == [
        "LlamaForCausalLMEagle"
    ]
    export_model(tmp_path / "s", tmp_path / "again")  # an export is a model folder like any other
    assert (tmp_path / "again/drafter/config.json").read_bytes() == (
        source / "drafter/config.json"
    ).read_bytes()


def test_a_drafter_that_is_not_there_or_broken_is_one_sentence(run: Path, tmp_path: Path) -> None:
    model = Path(model_folder(tmp_path / "model"))
    with pytest.raises(WhetError, match="holds no drafter/"):
        export_model(model, tmp_path / "out", drafter="vllm")
    with pytest.raises(WhetError, match="vllm or sglang"):
        export_model(run, tmp_path / "out", drafter="trt")
    (model / "drafter").mkdir()
    (model / "drafter/config.json").write_text("{}")
    with pytest.raises(WhetError, match="is not the config of a drafter"):
        export_model(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing is left behind"


# ---- measured


def test_a_run_is_evaluated_twice_and_writes_the_same(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "eval"
    assert whet(monkeypatch, "eval", str(run), "--draft", f"--out={out}") == 0
    printed = capsys.readouterr().out
    assert "accept length" in printed and "0 of 12" in printed and "time in " in printed
    assert printed.count("held_out") == 2, "one table of the set, one of its drafts"
    assert "tokens per second, plain" in printed and "tokens per second, drafted" in printed
    stored = json.loads((out / "eval.json").read_text())
    at = "eval/held_out/draft/"
    assert stored[at + "differ"] == 0 and stored[at + "rollouts"] == 12
    assert stored[at + "accept_length"] >= 1 and stored[at + "failures"] == 0
    assert min(stored[at + "plain_tokens_per_s"], stored[at + "tokens_per_s"]) > 0
    shares = {key: value for key, value in stored.items() if key.startswith(at + "share_")}
    assert sum(shares.values()) == pytest.approx(1)
    assert stored[at + "drafted_accuracy"] == stored["eval/held_out/accuracy"]
    assert len((out / "responses.jsonl").read_text().splitlines()) == 12, "of one pass"
    plain = evaluate_model(str(run))
    assert plain["eval/held_out/accuracy"] == stored["eval/held_out/accuracy"]
    assert not [key for key in plain if "/draft/" in key]


def test_plainly_first_and_then_with_what_eagle_has_learnt(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[LocalEngine] = []
    drafting: list[bool] = []
    generate = LocalEngine.generate

    def watched(self: LocalEngine, *asked: Any) -> list[Rollout]:
        engines.append(self)
        drafting.append(self.speculation is not None)
        return generate(self, *asked)

    monkeypatch.setattr(LocalEngine, "generate", watched)
    checkpoint = checkpoints(run)[-1]
    evaluate_model(str(checkpoint), draft=True, sets=['draft.drafters=["eagle"]'])
    assert drafting == [False, False, True], "to warm up, plain, drafted"
    engine = engines[0]
    assert engine.buffer is None, "an evaluation is not learnt from"
    assert engine.guesser is not None
    learnt = load_file(checkpoint / "drafter/model.safetensors")["fc.weight"]
    assert torch.equal(engine.guesser.head.fc, learnt)


def test_any_model_on_any_problems_greedy_or_sampled(tmp_path: Path) -> None:
    """Without a recipe: n-gram and suffix; and eagle where the folder has one."""
    model, data = model_folder(tmp_path / "model"), problem_file(tmp_path / "sums.jsonl", 12)
    greedy = evaluate_model(model, entries=eval_entries([data], max_tokens=40), draft=True)
    assert greedy["eval/sums/draft/differ"] == 0 and greedy["eval/sums/draft/accept_length"] > 1
    entries = eval_entries([data], max_tokens=24, n=3, temperature=1.0)
    sampled = evaluate_model(model, entries=entries, draft=True, sets=["draft.chooser=bandit"])
    assert sampled["eval/sums/draft/differ"] == 0 and sampled["eval/sums/draft/rollouts"] == 36
    arms = {
        key.rpartition("share_")[2].partition("_")[0]
        for key in (*greedy, *sampled)
        if "/share_" in key
    }
    assert {"off", "ngram", "suffix"} >= arms and arms - {"off"}


def test_an_exported_drafter_drafts(run: Path, tmp_path: Path) -> None:
    out = export_model(run, tmp_path / "out", drafter="sglang")
    lines: list[str] = []
    sets = [
        'draft.drafters=["eagle"]',
        "eval.0.options={eval_count=60}",
        "eval.0.limit=12",
        "rollout.context=48",
    ]
    (tmp_path / "recipe.toml").write_text("steps = 1\n")
    found = evaluate_model(
        str(out),
        recipe=tmp_path / "recipe.toml",
        sets=[*(item for item in SMALL if not item.startswith("model.")), *sets],
        draft=True,
        say=lines.append,
    )
    assert found["eval/held_out/draft/differ"] == 0
    assert any("share_eagle" in key for key in found)


def test_what_cannot_be_drafted_for_is_one_sentence_before_any_weight_is_loaded(
    run: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    with pytest.raises(WhetError, match=r"held_out is sampled with top_p = 0\.9"):
        evaluate_model(
            str(run),
            draft=True,
            sets=["eval.0.top_p=0.9", "eval.0.temperature=1"],
            say=lines.append,
        )
    model, data = model_folder(tmp_path / "model"), problem_file(tmp_path / "sums.jsonl", 4)
    with pytest.raises(WhetError, match="holds no drafter/"):
        evaluate_model(
            model,
            entries=eval_entries([data]),
            draft=True,
            sets=['draft.drafters=["eagle"]'],
            say=lines.append,
        )
    assert not [line for line in lines if line.startswith("Loading")]


def test_a_run_from_before_its_drafter_was_written(run: Path, tmp_path: Path) -> None:
    """Its recipe drafts with eagle: refused with --draft, and evaluated as ever without."""
    old = tmp_path / "old"
    shutil.copytree(run, old)
    checkpoint = checkpoints(old)[-1]
    shutil.rmtree(checkpoint / "drafter")
    with pytest.raises(WhetError, match="holds no drafter/"):
        evaluate_model(str(checkpoint), draft=True)
    assert "eval/held_out/accuracy" in evaluate_model(str(checkpoint))


def test_problems_that_were_trained_on_are_left_out(tmp_path: Path) -> None:
    data = problem_file(tmp_path / "train.jsonl", 40)
    base = model_folder(tmp_path / "model")
    sets = [
        f"model.name='{base}'",
        f"data.0={{path='{data}'}}",
        "eval=[]",
        "held_out.size=0",
        "rollout.context=0",
    ]
    kept = [
        item
        for item in SMALL
        if not item.startswith(("model.", "data.", "eval.", "rollout.context"))
    ]
    run_recipe(
        load_config(sets=[*kept, *sets, "steps=1"]),
        tmp_path / "run",
        watcher=Silent(),
        reward=even_digits,
    )
    lines: list[str] = []
    more = problem_file(tmp_path / "more.jsonl", 50)
    entries = eval_entries([more], max_tokens=8)
    found = evaluate_model(str(tmp_path / "run"), entries=entries, draft=True, say=lines.append)
    assert found["eval/more/draft/rollouts"] == 10
    assert "40 of the 50 problems of more were trained on and are left out." in lines
    with pytest.raises(WhetError, match="All problems of train were trained on"):
        evaluate_model(
            str(tmp_path / "run"), entries=eval_entries([data], max_tokens=8), draft=True
        )
    Path(data).unlink()
    found = evaluate_model(str(tmp_path / "run"), entries=entries, draft=True, say=lines.append)
    assert found["eval/more/draft/rollouts"] == 50 and "is not known" in lines[-2]
