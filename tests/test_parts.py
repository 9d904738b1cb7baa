"""What a run is made of: refusals, and what a checkpoint carries across."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from small_run import even_digits, small_config

from whet.assembly import Tally, build_parts, check_run, refuse_unmet
from whet.errors import WhetError
from whet.loop import solution_batches
from whet.problems import load_problems
from whet.rollout.engine import LocalEngine
from whet.types import Request, Rollout, Sampling


def parts(*sets: str):
    return build_parts(check_run(small_config(*sets), even_digits))


def test_what_engine_or_learner_cannot_do_is_refused() -> None:
    made = parts("rollout.mode=stream")
    try:
        made.engine.can = frozenset({"keyed_noise"})
        with pytest.raises(WhetError, match="cannot do cut, stream"):
            refuse_unmet(made)
        del made.engine.can
        made.curriculum.needs = frozenset({"grad_sq"})
        with pytest.raises(WhetError, match="uniform needs grad_sq"):
            refuse_unmet(made)
    finally:
        made.close()


def test_a_card_that_is_too_small_is_told_before_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that need not be here, of which only the free bytes are asked."""

    def loaded(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("whet.model.load.pick_device", lambda model: torch.device("cuda"))
    monkeypatch.setattr("whet.model.load.load_model", loaded)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000, 2**30))
    with pytest.raises(WhetError, match=r"^This training does not fit on the GPU: it takes .* more than the 0\.0 MiB"):
        parts()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))
    with pytest.raises(AssertionError, match="weights were loaded"):
        parts()


def test_a_run_says_what_its_engine_has_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalEngine, "notes", lambda self: ["Rollouts are slow."])
    made = parts()
    made.close()
    assert made.notes == ("Rollouts are slow.",)


def test_evaluation_ids_meet_no_training_id_and_overlap_is_counted() -> None:
    settings = small_config()
    problems = load_problems(settings, even_digits)
    assert problems.overlap == {"held_out": 0}, "the built-in task holds its evaluation problems out"
    assert all(i.startswith("eval:held_out:") for i in problems.eval_by_id)
    assert not set(problems.train.ids) & set(problems.eval_by_id)


def test_rows_of_rollouts_say_what_was_asked_and_written() -> None:
    made = parts()
    try:
        made.engine.submit(made.curriculum.plan(made.clock()))
        rollouts = made.engine.collect()
        rows = made.rollout_rows(rollouts[:3])
        assert [row["response"] for row in rows] == [made.codec.decode(r.trace.ids) for r in rollouts[:3]]
        assert rows[0]["prompt"] == made.problems.lookup(rollouts[0].prompt_id).text
        assert {"phase", "verdict", "reward", "answer", "length", "finish"} <= rows[0].keys()
    finally:
        made.close()


def test_worked_solutions_of_a_file_come_in_epochs(tmp_path: Path) -> None:
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1), "solution": f"#{a + 1}"} for a in range(100, 220)]
    (tmp_path / "worked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = f"data.0={{path='{tmp_path / 'worked.jsonl'}'}}"
    made = parts(entry, "held_out.size=10", "eval=[]", "warm_start=[{steps=33, batch=10}]")
    try:
        batches = list(solution_batches(made, made.config.warm_start[0], np.random.default_rng(0)))
        drawn = [tuple(prompt) for batch in batches for prompt, _ in batch]
        trained = {tuple(made.codec.encode(p)) for p in made.problems.train}
        assert len(trained) == 110 and [len(batch) for batch in batches] == [10] * 33
        for start in (0, 110, 220):
            assert set(drawn[start : start + 110]) == trained, "each once an epoch, and none that is held out"
        assert drawn[:110] != drawn[110:220], "in another order"
    finally:
        made.close()


def test_a_tally_counts_cut_rollouts_in_full_and_a_continuation_as_no_new_visit() -> None:
    """The axis of every claim about tokens. Two prompts are visited, the first of them for 4 more rollouts later."""
    sampling = Sampling(max_tokens=8)
    asked = [
        Request(prompt_id=prompt, group_id=group, n=4, sampling=sampling, phase=phase, first_index=first)  # type: ignore[arg-type]
        for prompt, group, phase, first in (("a", 0, "screen", 0), ("b", 1, "screen", 0), ("a", 0, "train", 4))
    ]
    finished = [
        Rollout(
            prompt_id="a",
            group_id=0,
            index=index,
            phase="train",
            sampling=sampling,
            length=length,
            finish=finish,
            first_version=0,
            last_version=0,  # type: ignore[arg-type]
        )
        for index, (length, finish) in enumerate(((5, "stop"), (8, "length"), (3, "cut"), (0, "cut")))
    ]
    tally = Tally()
    tally.generated(asked, finished)
    assert (tally.prompts_seen, tally.rollouts, tally.tokens_generated) == (2, 4, 5 + 8 + 3)
