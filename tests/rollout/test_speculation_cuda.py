"""Drafts on a GPU, in captured graphs, beside plain decoding on a CPU: the same tokens."""

import warnings
from typing import Any

import pytest
import torch
from slow_engine import VOCAB, ask, make_engine, sharp_model
from test_graphs_cuda import on_cuda
from test_speculation import EOS, Whim, plain_tokens, requests, run, same

from whet.draft.base import OFF, DraftArm
from whet.draft.buffer import DataBuffer
from whet.draft.eagle import eagle_head
from whet.draft.lookup import NGram, Suffix
from whet.draft.speculation import Speculation
from whet.draft.training import DrafterTrainer
from whet.fast.graphs import GraphRunner
from whet.fast.lanes import Lanes
from whet.rollout.guesser import Guesser

from adversaries import adversaries  # isort: skip

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["ngram", "suffix", "oracle", "half_wrong", "invalid", "eagle"])
@pytest.mark.parametrize("form", [{"slots": 5}, {"slots": 5, "pages": 34}], ids=str)
def test_tokens_are_those_of_plain_decoding_on_a_cpu(name: str, form: dict[str, Any]) -> None:
    plain = run(make_engine(sharp_model(heads=6, kv_heads=2).float(), page=16, **form), requests())
    model = on_cuda(sharp_model(heads=6, kv_heads=2), torch.float32)
    known: dict[str, Any] = {d.name: d for d in adversaries(VOCAB, EOS, plain_tokens(plain))}
    known |= {"ngram": NGram(), "suffix": Suffix()}
    arms = [OFF, *(DraftArm(name, depth) for depth in (1, 4, 8))]
    speculation = Speculation([known[name]] if name in known else [], Whim(arms), vocab=VOCAB)
    eagle = eagle_head(model) if name == "eagle" else None
    engine = make_engine(model, graphs=True, page=16, speculation=speculation, eagle=eagle, **form)
    same(plain, run(engine, requests()), atol=2e-3)
    assert engine.stats()["draft/failures"] == 0
    assert isinstance(engine.runner, GraphRunner)
    assert any(new > 1 and not drafter for _, new, drafter in engine.runner.captures.graphs)


@pytest.mark.parametrize(
    ("owner", "part", "name"),
    [(Guesser, "catch_up", "eagle"), (Guesser, "round", "eagle"), (Lanes, "lookup", "suffix")],
)
def test_a_drafter_that_fails_before_a_capture_is_retired(
    owner: type, part: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graph is captured without it, and drafts nothing."""

    def breaks(*given: Any, **named: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(owner, part, breaks)
    plain = run(make_engine(sharp_model(heads=6, kv_heads=2).float(), page=16, slots=5), requests())
    model = on_cuda(sharp_model(heads=6, kv_heads=2), torch.float32)
    speculation = Speculation([Suffix()], Whim([DraftArm(name, 4)]), vocab=VOCAB)
    engine = make_engine(
        model, graphs=True, page=16, slots=5, speculation=speculation, eagle=eagle_head(model)
    )
    same(plain, run(engine, requests()), atol=2e-3)
    assert speculation.drafters[name].retired and engine.stats()["draft/failures"] == 1


def test_a_drafter_published_in_place_drafts_better() -> None:
    """Captured graphs see its new weights; the target's are untouched, and so are the tokens."""
    model, buffer = (
        on_cuda(sharp_model(heads=6, kv_heads=2), torch.float32),
        DataBuffer(50_000, device="cuda"),
    )
    head = eagle_head(model)
    asked = [ask(i, n=4, group=1000 + i, max_tokens=40, temperature=0.3) for i in range(30)]
    whim = Whim([DraftArm("eagle", 4)])
    speculation = Speculation([], whim, vocab=VOCAB)
    engine = make_engine(
        model, graphs=True, slots=8, speculation=speculation, eagle=head, buffer=buffer
    )
    before = run(engine, asked)
    first, whim.accepted = whim.accepted, 0
    trainer = DrafterTrainer(head, buffer, pack=256, lr=3e-3)
    trainer.run(30_000)
    head.take(trainer.head)
    same(before, run(engine, asked), atol=2e-3)
    assert whim.accepted > 2 * first + 50


def test_rows_come_and_go_without_waiting_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are under way then: a copy that waits for them would leave the device idle afterwards."""
    model, buffer = (
        on_cuda(sharp_model(heads=6, kv_heads=2), torch.float32),
        DataBuffer(50_000, device="cuda"),
    )
    speculation = Speculation(
        [Suffix()], Whim([OFF, DraftArm("suffix", 4), DraftArm("eagle", 3)]), vocab=VOCAB
    )
    engine = make_engine(
        model,
        graphs=True,
        slots=8,
        speculation=speculation,
        eagle=eagle_head(model),
        buffer=buffer,
        mode="stream",
    )
    calls: dict[str, int] = {}

    def unwaiting(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def watched(*given: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it warns that it is a prototype
                torch.cuda.set_sync_debug_mode("error")
                try:
                    return call(*given)
                finally:
                    torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(owner, name, watched)

    for owner, name in (
        (engine, "_retire"),
        (engine.runner.lanes, "enter"),
        (engine.runner.lanes, "newest"),
    ):
        unwaiting(owner, name)
    engine.submit([ask(i, n=3, max_tokens=6 + i % 9, stop_ids=(EOS,)) for i in range(12)])
    done = 0
    while not engine.idle:
        done += len(engine.collect())
    assert done == len(buffer.entries) == 36
    assert calls.keys() == {"_retire", "enter", "newest"}
