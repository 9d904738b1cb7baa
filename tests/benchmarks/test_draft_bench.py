"""`draft_bench.py` in small, on a CPU: all rungs write the same tokens, and the figures follow from the steps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_bench import Bench, Rung, app, draft_bench, graph_plan, ladder, naive_plan, plans, show_ladder, verdict
from draft_lessons import CandidateAsked, lessons_for, prepared
from draft_split import HOST
from draft_watch import Fixed, Step, Watch, arm_shares, by_batch, chances
from tail_work import model_work, read_texts, shape_work
from typer.testing import CliRunner

from whet.draft.base import OFF, DraftArm, StepReport
from whet.draft.eagle import eagle_head
from whet.errors import WhetError
from whet.model.load import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow  # its fixture runs the whole ladder

ALPHABET = "0123456789+="


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that repeats itself: its few characters leave n-grams something to find."""
    path = tmp_path_factory.mktemp("model")
    model = tiny_model(2 + len(ALPHABET), hidden=24, layers=1, heads=2, context=512, seed=0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0)
    model.save_pretrained(path)
    tiny_tokenizer(ALPHABET).save_pretrained(path)
    lines = [json.dumps({"text": f"{i}+{i + 1}="}) for i in range(6)]
    (path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def result(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:
    out, lines = tmp_path_factory.mktemp("draft"), list[str]()
    asked = CandidateAsked(model=folder, device="cpu", rollouts=6, siblings=3, cap=60, train=1)
    model, work, head, notes = prepared(asked, out, lines.append)
    assert head is not None
    how: dict[str, Any] = {"head": head, "lessons": lessons_for(asked, model, work, head, lines.append), "notes": notes}
    found = draft_bench(out, model, work, **how, repeats=2, fixed=False, on_progress=lines.append)
    return out, found, lines


def test_the_ladder(result: tuple[Path, dict[str, Any], list[str]]) -> None:
    out, found, lines = result
    assert json.loads((out / "draft.json").read_text()) == json.loads(json.dumps(found))
    names = [
        "off",
        "elastic_ngram",
        "elastic_suffix",
        "controller",
        "elastic_eagle",
        "controller_eagle",
        "training",
        "bandit",
    ]
    assert list(found["rungs"]) == [*names, "off_again"]
    assert found["work"]["requests"] == 6 and found["circumstances"]["commit"] and found["repeats"] == 2
    for rung in found["rungs"].values():
        assert rung["same_rollouts"] == 1.0 and rung["tokens"] == found["work"]["tokens"]
        assert rung["longest"] == found["work"]["lengths"]["max"] and rung["failures"] == 0
        assert len(rung["makespan"]["all"]) == 2
        assert rung["split"].pop("measured") == HOST
        assert sum(rung["split"].values()) == pytest.approx(rung["makespan"]["all"][-1])
        assert rung["running"][0][1] == 0 and 3 <= max(n for _, n in rung["running"]) <= 6
    assert found["rungs"]["elastic_ngram"]["accept_length"] > 1
    assert found["rungs"]["elastic_ngram"]["steps"] < found["rungs"]["off"]["steps"]
    assert "eagle_4_1_5" in found["rungs"]["elastic_eagle"]["share_of_time"]
    lessons = found["rungs"]["training"]["lessons"]
    assert [lesson["round"] for lesson in lessons] == [0, 1, 2], "one before the round that warms up, too"
    assert [lesson["makespan"] for lesson in lessons[1:]] == found["rungs"]["training"]["makespan"]["all"]
    assert all(lesson["loss"] > 0 and 0 < lesson["share"] < 1 for lesson in lessons)
    assert "split_missing" not in found and found["from_scratch"] is False
    assert found["rungs"]["off"]["accept_length"] is None and found["rungs"]["off"]["share_of_time"] == {}
    assert found["verdict"]["controller"] == "controller_eagle" and found["verdict"]["off_against_off"] >= 0
    assert len(found["training"]) == 1 and (out / "drafter" / "config.json").is_file()
    assert lines[-1].startswith("round 2 of 2: off ")


def test_what_is_not_known_is_shown_so(
    result: tuple[Path, dict[str, Any], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = json.loads(json.dumps(result[1]))
    for rung in shown["rungs"].values():
        rung["split"]["draft"] = None
    show_ladder(shown | {"split_missing": {"bandit": "No step came to it."}})
    printed = capsys.readouterr().out
    assert printed.count(" - ") >= len(shown["rungs"])
    assert "bandit: how long its drafts took is not known. No step came to it." in printed
    assert printed.count("a lesson of") == 3 and "Round 2: a lesson of" in printed


def test_a_drafter_that_was_written_is_read_again(
    folder: Path, result: tuple[Path, dict[str, Any], list[str]], tmp_path: Path
) -> None:
    asked = CandidateAsked(model=folder, device="cpu", rollouts=6, siblings=3, cap=60, drafter=result[0] / "drafter")
    _, _, head, notes = prepared(asked, tmp_path, lambda line: None)
    assert head is not None and notes["drafter"] == str(result[0] / "drafter")


def test_from_scratch_there_need_be_no_drafter(folder: Path, tmp_path: Path) -> None:
    sizes = {"requests": 4, "siblings": 2, "cap": 24, "repeats": 1}
    asked = [
        "--model",
        str(folder),
        "--device",
        "cpu",
        *(part for k, v in sizes.items() for part in (f"--{k}", str(v))),
    ]
    ran = CliRunner().invoke(app, [*asked, "--no-fixed", "--from-scratch", "--out", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    assert "Rungs with a frozen EAGLE are left out: no trained drafter" in ran.output
    assert "Round 1: a lesson of" in ran.output
    found = json.loads((tmp_path / "draft.json").read_text())
    assert "training" in found["rungs"] and "controller_eagle" not in found["rungs"] and found["from_scratch"]
    assert found["verdict"]["controller"] == "controller"


def test_without_other_prompts_there_are_no_lessons(folder: Path, tmp_path: Path) -> None:
    (few := tmp_path / "few.jsonl").write_text('{"text": "1+2="}\n')
    asked = CandidateAsked(model=folder, prompts=few, device="cpu", rollouts=3, siblings=3, cap=24)
    model, work, _, _ = prepared(asked, tmp_path, lambda line: None)
    lines: list[str] = []
    head = eagle_head(model)
    assert lessons_for(asked, model, work, head, lines.append) is None
    assert len(lines) == 1 and "The rung with lessons is left out" in lines[0] and "too few prompts" in lines[0]
    assert lessons_for(replace(asked, lessons=False), model, work, head, lines.append) is None and len(lines) == 1
    with pytest.raises(WhetError, match="too few prompts"):
        lessons_for(replace(asked, from_scratch=True), model, work, head, lines.append)


def test_the_command(tmp_path: Path) -> None:
    sizes = {"requests": 4, "siblings": 2, "cap": 16, "repeats": 1}
    asked = ["--shape", "tiny", "--device", "cpu", *(part for k, v in sizes.items() for part in (f"--{k}", str(v)))]
    ran = CliRunner().invoke(app, [*asked, "--out", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    assert "Rungs with EAGLE are left out: no trained drafter" in ran.output
    assert "of the best arm's" in ran.output and "suffix_32_1_33" in ran.output
    found = json.loads((tmp_path / "draft.json").read_text())
    assert found["verdict"]["best_fixed"] in found["rungs"] and found["drafter"] is None


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (CandidateAsked(device="cpu"), "--model with a folder, or --shape"),
        (CandidateAsked(shape="tiny", device="cpu", drafter=Path("x"), train=2), "give one of them"),
        (CandidateAsked(shape="tiny", device="cpu", from_scratch=True), "--from-scratch wants --model"),
        (CandidateAsked(model=Path("x"), device="cpu", from_scratch=True, lessons=False), "--no-lessons leaves it out"),
        (CandidateAsked(shape="tiny", device="cpu", rollouts=7, siblings=2), "cannot be groups of 2"),
        (CandidateAsked(shape="tiny", device="tpu"), "no device"),
        (CandidateAsked(shape="tiny", device="cpu", dtype="int4"), "no dtype"),
        (CandidateAsked(shape="huge", device="cpu"), "no shape"),
        (CandidateAsked(shape="tiny", device="cpu", naive=True), "there are none on a CPU"),
    ],
)
def test_what_cannot_be_measured_is_said(asked: CandidateAsked, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=sentence):
        prepared(asked, tmp_path, lambda line: None)


def test_other_tokens_are_not_let_pass() -> None:
    """The promise is equal work: a rung that wrote something else is no rung."""
    model = tiny_model(20, hidden=16, layers=1, heads=2).eval()
    bench = Bench(model, shape_work(20, rollouts=4, siblings=2, cap=12, seed=0), None, seed=0)
    bench.run(Rung("off"))
    key = next(iter(bench.plain))
    bench.plain[key] = bench.plain[key] + 1
    with pytest.raises(WhetError, match=r"off wrote other tokens than plain decoding \(75.0%"):
        bench.run(Rung("off"))


def test_drafters_remember_nothing_of_the_last_round() -> None:
    """Else suffix drafts would know every token of the same work."""
    model = tiny_model(20, hidden=16, layers=1, heads=2).eval()
    bench = Bench(model, shape_work(20, rollouts=4, siblings=2, cap=24, seed=0), None, seed=0)
    bench.run(Rung("off"))
    arm = DraftArm("suffix", 4)
    rung = Rung("suffix", ("suffix",), lambda: Fixed(arm), (arm,))
    first, second = bench.run(rung), bench.run(rung)
    assert [s.accepted.tolist() for s in first.steps if s.accepted is not None] == [
        s.accepted.tolist() for s in second.steps if s.accepted is not None
    ]


def test_prompts_for_training_are_others(folder: Path) -> None:
    sizes: dict[str, Any] = {"rollouts": 6, "siblings": 3, "cap": 40}
    measured = model_work(folder, None, **sizes)
    others = model_work(folder, None, **sizes, skip=2, wrap=True)
    assert not {tuple(p) for p in measured.prompts.values()} & {tuple(p) for p in others.prompts.values()}
    assert {r.group_id for r in others.again(1)} == {2, 3} and others.again(0) == others.requests
    with pytest.raises(WhetError, match="too few prompts"):
        model_work(folder, None, **sizes, skip=5)
    (bad := folder / "bad.jsonl").write_text("[1]\n")
    with pytest.raises(WhetError, match="text"):
        read_texts(bad)


def test_figures_of_steps() -> None:
    most = np.full(4, 3)
    steps = [
        Step(OFF, 8, 1.0),
        Step(DraftArm("ngram", 3), 4, 2.0, np.array([3, 1, 0, 1]), most),
        Step(DraftArm("eagle", 3), 2, 1.0, np.array([0, 3]), most[:2]),
    ]
    assert chances(steps) == {"ngram": [0.75, 1 / 3, 1.0], "eagle": [0.5, 1.0, 1.0]}
    assert arm_shares(steps) == {"ngram_3_1_4": 0.5, "off": 0.25, "eagle_3_1_4": 0.25}
    found = by_batch(steps)
    assert found["4"] == {"steps": 1, "seconds": 2.0, "speculating": 1.0, "accept_length": 2.25}
    assert found["8"]["accept_length"] is None and list(found) == ["2", "4", "8"]
    watch = Watch(Fixed(DraftArm("ngram", 3), lambda arm, batch: batch < 8))
    assert watch.choose(8) == OFF and watch.choose(4).name == "ngram_3_1_4"
    watch.record(StepReport(OFF, 8, 1.0))
    assert [step.batch for step in watch.take()] == [8] and watch.take() == []


def test_the_controller_is_held_against_the_best_arm() -> None:
    arm = DraftArm("ngram", 2)
    rungs = [Rung("off"), Rung("controller", ("ngram",)), Rung(arm.name, ("ngram",), None, (arm,)), Rung("off_again")]
    seconds = {"off": [2.0, 2.2], "controller": [1.0, 1.2], arm.name: [1.0, 1.0], "off_again": [2.0, 2.0]}
    found = verdict(rungs, seconds)
    assert found["best_fixed"] == arm.name and found["controller_of_best_fixed"] == pytest.approx(1 / 1.1)
    assert found["off_against_off"] == pytest.approx(0.1) and found["controller_of_off"] == pytest.approx(2.05 / 1.1)


def test_graphs_are_shared() -> None:
    """128 slots: ten sizes; of 5 depths they serve 10, 9, 7, 5 and 3."""
    plan = graph_plan(ladder(tiny_model(20), 128, eagle=True, seed=0), 128)
    assert plan["graphs"] == 34 and plan["graphs_naive"] == 3 * 5 * 10
    assert plan["tokens"] < 0.5 * plan["tokens_naive"]


def test_what_the_naive_plan_captures() -> None:
    """4 slots, sizes 2 and 4. Two drafters of one depth share what verifies it; 4 rows of 200 drafts have no use."""
    arms = (DraftArm("ngram", 2), DraftArm("suffix", 2), DraftArm("ngram", 200))
    shared, naive = plans([Rung("a", arms=arms[:2]), Rung("b", arms=arms)], 4)
    assert shared == [(2, 3, ""), (4, 3, ""), (2, 201, "")]
    assert naive == [(size, arm.tokens, arm.drafter) for arm in arms for size in (2, 4)]


def test_the_memory_of_both_plans_is_shown() -> None:
    plan = {"bytes": 2**20, "bytes_naive": 4 * 2**20, "driver_bytes": 2**20, "driver_bytes_naive": 12 * 2**20}
    assert naive_plan(plan) == (
        "Graphs that verify take 1 MiB, 0.25 of those of the naive plan (0.12 with what the driver takes)."
    )
    assert naive_plan({"graphs": 3}) == ""


@pytest.mark.gpu
def test_the_memory_of_both_plans_is_measured(tmp_path: Path) -> None:
    asked = CandidateAsked(shape="tiny", device="cuda", rollouts=32, siblings=4, cap=16, naive=True)
    model, work, _, _ = prepared(asked, tmp_path, lambda line: None)
    found = draft_bench(tmp_path, model, work, repeats=1, fixed=False, naive=True)["graphs"]
    assert 0 < found["plan"]["bytes"] <= found["plan"]["bytes_naive"]
    assert found["model_free"]["graph_bytes"] > 0
    assert json.loads((tmp_path / "draft.json").read_text())["graphs"] == found


@pytest.mark.gpu
def test_drafts_on_the_device_are_timed(tmp_path: Path) -> None:
    asked = CandidateAsked(shape="tiny", device="cuda", rollouts=32, siblings=4, cap=64)
    model, work, _, _ = prepared(asked, tmp_path, lambda line: None)
    found = draft_bench(tmp_path, model, work, head=eagle_head(model), repeats=1, fixed=False)
    assert "split_missing" not in found
    for name in ("elastic_ngram", "controller", "elastic_eagle", "controller_eagle", "bandit"):
        rung = found["rungs"][name]
        assert rung["split"]["measured"] == "replayed apart"
        drafted = sum(share for arm, share in rung["share_of_time"].items() if arm != "off")
        assert rung["split"]["draft"] > 0 or not drafted
        assert rung["split"]["verify"] >= 0
