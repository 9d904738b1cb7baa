"""What a run draws of itself: hand-counted steps, and the pictures of whole runs."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from small_run import Restless, Silent, even_digits, read_pictures, small_config

from whet import api, pictures
from whet.model.load import tiny_tokenizer
from whet.pictures import Pictures, by_level, flow, machine, pass_rates, token_rows
from whet.problems import fingerprint, load_problems
from whet.report.arms import read_run
from whet.run import read_metrics, read_rollouts
from whet.text import Codec
from whet.types import Group, Prompt, Request, Rollout, Sampling, Trace

SAMPLING = Sampling(max_tokens=8)
BASE = Rollout(
    prompt_id="a",
    group_id=0,
    index=0,
    phase="train",
    sampling=SAMPLING,
    length=4,
    finish="stop",
    first_version=0,
    last_version=0,
    verdict="right",
    score=1.0,
    reward=1.0,
)


def rollouts(group_id: int, right: int, wrong: int, **changes: object) -> list[Rollout]:
    verdicts = ["right"] * right + ["wrong"] * wrong
    made = (
        dataclasses.replace(BASE, group_id=group_id, index=i, verdict=v)
        for i, v in enumerate(verdicts)
    )
    return [dataclasses.replace(rollout, **changes) for rollout in made]  # type: ignore[arg-type]


def test_groups_by_pass_rate() -> None:
    """1 of 32 is 0.03, and not the same as never: only the ends have no signal."""
    seen = [
        *rollouts(0, 0, 4),
        *rollouts(1, 1, 31),
        *rollouts(2, 2, 2),
        *rollouts(3, 31, 1),
        *rollouts(4, 4, 0),
        *rollouts(5, 8, 0),
    ]
    assert pass_rates(seen) == [1, 1, 0, 0, 0, 1, 0, 0, 0, 1, 2]


def test_flow_of_a_step() -> None:
    names = ("rejected_easy", "rejected_hard", "cut", "expired")
    before = {f"curriculum/{name}": 10.0 for name in names}
    after = dict(zip(before, (13.0, 17.0, 10.0, 12.0), strict=True)) | {"curriculum/ready": 5.0}
    asked = {"asked": 20, "screen": 20, "continue": 8}
    assert flow(asked, before, after, 6) == {
        "asked": 20,
        "screened": 20,
        "continued": 8,
        "too_easy": 3,
        "too_hard": 7,
        "stale": 2,
        "trained": 6,
        "spare": 5,
    }
    assert flow({"asked": 3, "probe": 2}, {}, {}, 1) == {"asked": 1, "probed": 2, "trained": 1}, (
        "no such counters"
    )


def test_rollouts_by_level() -> None:
    prompts = {
        "a": Prompt(id="a", text="?", answer="", task="t", meta={"level": 2}),
        "b": Prompt(id="b", text="?", answer="", task="t", meta={"level": "hard"}),
        "c": Prompt(id="c", text="?", answer="", task="t"),
    }
    seen = [
        *rollouts(0, 1, 3),
        *rollouts(1, 2, 0),
        *rollouts(2, 0, 5, prompt_id="b"),
        *rollouts(3, 1, 0, prompt_id="c"),
    ]
    assert by_level(seen, prompts.__getitem__) == {"2": [6, 3], "hard": [5, 0]}


def test_a_step_is_gathered() -> None:
    """Counters are those of the run, and times those of a clock: a step has its own share of both."""

    class Told:
        def pictures(self) -> dict[str, object]:
            return {"posterior": {"counts": [1]}}

    class Engine:
        def pictures(self) -> dict[str, object]:
            return {"running": [(made.start - 1.0, 1), (made.start + 0.5, 7)]}

    made, plain = (
        Pictures({"curriculum/rejected_hard": 3.0}),
        Prompt(id="a", text="?", answer="", task="t"),
    )
    request = Request(prompt_id="a", group_id=0, n=2, sampling=SAMPLING)
    for counted, hard in ((5.0, 2), (5.0, 0), (9.0, 4)):
        made.begin()
        made.observe([request, dataclasses.replace(request, first_index=2, phase="continue")])
        made.note(Engine(), Told())
        group = Group(prompt_id="a", group_id=0, rollouts=tuple(rollouts(0, 1, 1)))
        cut = dataclasses.replace(BASE, group_id=1, finish="cut")
        metrics = {
            "draft/share_off": 0.2,
            "draft/share_eagle": 0.8,
            "curriculum/rejected_hard": counted,
        }
        assert made.drawn([*group.rollouts, cut], [group], metrics, lambda prompt_id: plain) == {
            "pass_rates": [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0],
            "flow": {"asked": 1, "continued": 1, "too_hard": hard, "trained": 1},
            "arm": "eagle",
            "running": [[0.0, 1], [0.5, 7]],
            "posterior": {"counts": [1]},
        }


def test_tokens_of_the_first_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Codec(tiny_tokenizer("0123456789"), 1)
    ids = np.array([*codec.encode_response("407")], np.int32)
    assert ids[-1] in codec.stop_ids
    trace = Trace(
        ids=ids, log_probs=np.array([-0.123, -1.0, -0.0049, -2.5]), versions=np.zeros(4, np.int32)
    )
    marked = dataclasses.replace(trace, guessed=np.array([False, True, True, False]))
    seen = [
        dataclasses.replace(BASE, index=i, trace=t) for i, t in enumerate((trace, marked, trace))
    ]
    monkeypatch.setattr(pictures, "DETAILED", 8)
    plain = {"pieces": ["4", "0", "7", ""], "log_probs": [-0.12, -1.0, -0.0, -2.5]}
    known = {(0, 1): np.array([0.5, 0.251, 0.0, 1.0], np.float32)}
    assert token_rows(seen, codec, known) == [
        plain,
        plain | {"drafted": "0110", "entropies": [0.5, 0.25, 0.0, 1.0]},
        {},
    ]


def test_machine() -> None:
    found = machine("NVIDIA H200", 2, "gsm8k")
    assert (
        found["hardware"] == "2 x NVIDIA H200"
        and found["recipe"] == "gsm8k"
        and found["started"].endswith("Z")
    )
    assert "core" in machine("", 1, "")["hardware"]


def test_a_run_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything at once: screening, allocation, a moving pool, speculation, and tokens one by one."""
    monkeypatch.setattr("whet.draft.speculation.Controller", Restless)
    sets = (
        "curriculum.name=all",
        "curriculum.max_age=0",
        "curriculum.rollouts=6",
        "curriculum.speed.n_init=2",
        'draft.drafters=["suffix"]',
    )
    recipe = small_config(*sets, "rollout.max_tokens=30", "steps=4")
    api.run_recipe(recipe, tmp_path / "a", watcher=Silent(), reward=even_digits, name="mine")
    about = json.loads((tmp_path / "a" / "machine.json").read_text())
    assert about["recipe"] == "mine"
    prompts = load_problems(small_config()).evals["held_out"]
    assert (
        about["prompts"]
        == {"held_out": fingerprint(prompts)}
        != {"held_out": fingerprint(prompts[1:])}
    )
    assert fingerprint(prompts[::-1]) == fingerprint(prompts)
    assert read_run("a", tmp_path / "a").prompts == about["prompts"]
    drawn, rows = read_pictures(tmp_path / "a"), read_metrics(tmp_path / "a")[1:]
    assert [picture["step"] for picture in drawn] == [1, 2, 3, 4]
    counted = {
        "asked": "asked",
        "too_hard": "rejected_hard",
        "too_easy": "rejected_easy",
        "trained": "trained",
    }
    for mine, counter in counted.items():
        assert (
            sum(picture["flow"][mine] for picture in drawn) == rows[-1][f"curriculum/{counter}"]
        ), mine
    for picture, row in zip(drawn, rows, strict=True):
        written = [
            r for r in read_rollouts(tmp_path / "a", picture["step"]) if r["phase"] != "eval"
        ]
        judged = [r for r in written if r["verdict"] != "unjudged"]
        assert sum(picture["pass_rates"]) == len({r["group_id"] for r in judged})
        assert sum(count for count, _ in picture["levels"].values()) == len(judged)
        assert sum(picture["posterior"]["counts"]) == row["curriculum/prompts"]
        times = [at for at, _ in picture["running"]]
        assert 0 < len(times) <= 60 and times == sorted(times) and max(times) <= row["time/total"]
        assert max(count for _, count in picture["running"]) <= recipe.rollout.slots
        drafts, accepted = (
            sum(of[i] for of in picture.get("accepts", {}).get("rows", [])) for i in (1, 2)
        )
        assert accepted == row["draft/saved"]
        assert row["draft/accept_length"] == pytest.approx(1 + accepted / max(1, drafts))
        for r in written:
            assert (
                "".join(r["pieces"]) == r["response"]
                and len(r["pieces"]) == len(r["log_probs"]) == r["length"]
            )
            assert r["level"] in (1, 2, 3, 4)
            # A stop in the midst of a draft ends it: then the last token was drafted, too.
            assert r.get("drafted", "").count("1") - r["accepted"] in (0, 1)
        assert any("entropies" in r for r in written)
    assert (
        "scores" in drawn[0] and sum(drawn[0]["scores"]["active"]) == rows[0]["curriculum/active"]
    )
    assert any("1" in r.get("drafted", "") for r in read_rollouts(tmp_path / "a")), (
        "some drafts were accepted"
    )
