import json
from pathlib import Path

import numpy as np
import pytest

from whet.errors import WhetError
from whet.problems import choose_held_out, key_of, load_problems
from whet.recipe import parse_config


def write(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def words(start: int, stop: int, **more) -> list[dict]:
    return [
        {"prompt": f"Problem number {i}?", "answer": str(i), **more} for i in range(start, stop)
    ]


def load(**tree):
    return load_problems(parse_config(tree))


@pytest.fixture
def file(tmp_path):
    return lambda rows, name="p.jsonl": write(tmp_path / name, rows)


def test_a_slice_is_set_aside(file) -> None:
    problems = load(data={"path": file(words(0, 600))}, held_out={"size": 50})
    held = problems.evals["held_out"]
    assert len(held) == 50 and len(problems.train) == 550 and problems.shares == ((550, 1.0),)
    assert all(p.id.startswith("eval:held_out:") and problems.lookup(p.id) is p for p in held)
    assert not {p.text for p in held} & set(problems.train.problems)
    assert {p.id.removeprefix("eval:held_out:") for p in held}.isdisjoint(problems.train.ids)
    assert problems.notes == (), "no held-out problem is trained on"


def test_an_entry_may_have_no_prompts_left(file) -> None:
    """Its one problem is held out, and the other entry keeps its share when long prompts are left out."""
    rows = words(0, 300)
    held = load(data={"path": file(rows)}, held_out={"size": 20}).evals["held_out"]
    one = [row for row in rows if row["prompt"] == held[0].text]
    entries = [{"path": file(one, "one.jsonl")}, {"path": file(rows)}]
    problems = load(data=entries, held_out={"size": 20})
    assert problems.shares == ((0, 1.0), (280, 1.0))
    assert problems.keep(np.arange(280) > 9).shares == ((0, 1.0), (270, 1.0))


def test_the_slice_is_a_tenth_at_most(file) -> None:
    assert len(load(data={"path": file(words(0, 300))}).evals["held_out"]) == 30


def test_the_slice_depends_on_the_problems_alone(file) -> None:
    def held(rows, seed=0) -> set[str]:
        problems = load(data={"path": file(rows)}, held_out={"size": 20}, seed=seed)
        return {p.text for p in problems.evals["held_out"]}

    rows = words(0, 300)
    assert held(rows) == held(rows[::-1]) == held(rows, seed=7)
    grown = held(words(0, 330))
    assert len(grown & held(rows)) >= 14, "a few new ones have smaller keys"
    assert grown & {row["prompt"] for row in rows} <= held(rows), (
        "no old problem comes in when data is added"
    )


def test_repeats_leave_with_the_problem(file) -> None:
    rows = words(0, 200)
    again = [{**row, "prompt": row["prompt"].upper().replace(" ", "  ")} for row in rows]
    problems = load(data={"path": file(rows + again)})
    held = {key_of(p) for p in problems.evals["held_out"]}
    assert len(held) == len(problems.evals["held_out"]) == 20
    assert len(problems.train) == 360 and not held & {key_of(p) for p in problems.train}
    assert problems.notes == (
        "20 more training rows repeat one of the 20 held-out problems, so they are left out of training, too.",
        "With 20 problems, the accuracy on held_out may be off by 22 points; 50 or more would choose the best "
        "checkpoint better.",
        "180 of the 360 training rows repeat a problem; each counts as a prompt of its own.",
    )


def test_few_held_out_problems_are_told(file) -> None:
    """Also where they are an evaluation set of the recipe; 50 are enough."""
    path = file(words(0, 300))
    for count, warned in ((49, 1), (50, 0)):
        own = file(words(500, 500 + count), f"e{count}.jsonl")
        notes = load(data={"path": path}, eval={"path": own, "name": "held_out"}).notes
        assert (
            sum(
                note.startswith(f"With {count} problems, the accuracy on held_out")
                for note in notes
            )
            == warned
        )
    other = load(
        data={"path": path}, eval={"path": file(words(500, 510), "e.jsonl")}, held_out={"size": 0}
    )
    assert other.notes == (), "another set chooses nothing"


def test_too_few_for_a_slice(file) -> None:
    problems = load(data={"path": file(words(0, 99))})
    assert "held_out" not in problems.evals and len(problems.train) == 99
    assert problems.notes[0].startswith("99 training problems are too few to set some aside")
    assert len(load(data={"path": file(words(0, 99))}, held_out={"size": 5}).evals["held_out"]) == 5


def test_no_slice_where_none_is_wanted(file) -> None:
    path = file(words(0, 200))
    none = load(data={"path": path}, held_out={"size": 0})
    own = load(
        data={"path": path}, eval={"path": file(words(500, 560), "e.jsonl"), "name": "held_out"}
    )
    assert len(none.train) == len(own.train) == 200 and none.notes == own.notes == ()
    assert none.evals == {} and len(own.evals["held_out"]) == 60


def test_a_task_that_makes_its_problems_is_sliced_too() -> None:
    problems = load(data={"options": {"train_count": 1000, "mix": {"1": 0.5, "6": 0.5}}})
    held = {key_of(p) for p in problems.evals["held_out"]}
    assert len(held) >= 50 and not held & {key_of(p) for p in problems.train}
    assert len(problems.train) == problems.shares[0][0] < 1000
    pairs = problems.solutions(np.random.default_rng(0), 2000, {"max_level": 1})
    assert len(pairs) == 2000 and not held & {key_of(p) for p, _ in pairs}, (
        "what is held out is not imitated either"
    )
    assert len({key_of(p) for p in problems.train}) < len(problems.train)
    assert problems.notes == (), "generated problems repeat by design"


def test_held_out_solutions_are_not_imitated(file) -> None:
    problems = load(data={"path": file([{**row, "solution": "so"} for row in words(0, 100)])})
    seen = {p.text for p, _ in problems.solutions(np.random.default_rng(0), 300, {})}
    assert len(seen) == 90 and not seen & {p.text for p in problems.evals["held_out"]}


def test_overlap_is_counted_for_each_set(file) -> None:
    shown = [
        {"prompt": "PROBLEM NUMBER $7$ ?", "answer": "7"},
        {"prompt": "problem number 8", "answer": "8"},
    ]
    problems = load(
        data={"path": file(words(0, 50))},
        eval=[
            {"path": file(shown + words(900, 903), "a.jsonl"), "name": "a"},
            {"path": file(words(800, 805), "b.jsonl"), "name": "b"},
        ],
    )
    (note,) = [note for note in problems.notes if "also trained on" in note]
    assert note.startswith("2 of the 5 problems of a are also trained on")


def test_shares_limits_and_weights(file) -> None:
    problems = load(
        data=[
            {"path": file(words(0, 100), "a.jsonl"), "limit": 40},
            {"path": file(words(200, 260), "b.jsonl"), "weight": 2.5},
            {"options": {"train_count": 50}, "limit": 30},
        ],
        held_out={"size": 0},
    )
    assert problems.shares == ((40, 1.0), (60, 2.5), (30, 1.0)) and len(problems.train) == 130
    assert [p.task for p in problems.train][::64] == ["text", "text", "chain"]


def test_entries_with_different_judges(file) -> None:
    path, other = file(words(0, 3)), file(words(10, 13), "o.jsonl")
    problems = load(data=[{"path": path}, {"path": other, "options": {"answer": "boxed"}}])
    first, last = problems.train.at(0), problems.train.at(5)
    score = {p.task: problems.judges[p.task](p, f"It is {p.answer}.") for p in (first, last)}
    assert {task: judgement.score for task, judgement in score.items()} == {
        "text": 1.0,
        "text:2": 0.0,
    }
    assert score["text"].final == "0"


def test_a_callable_judges_everything(file) -> None:
    settings = parse_config(
        {"data": {"path": file(words(0, 3))}, "eval": {"path": file(words(5, 7), "e.jsonl")}}
    )
    problems = load_problems(settings, lambda prompt, response: 0.25)
    assert [
        problems.judges[p.task](p, "").score for p in (problems.train.at(0), problems.evals["e"][0])
    ] == [0.25] * 2


def test_reward_terms_are_in_the_judgement(file) -> None:
    problems = load(data={"path": file(words(0, 3))}, reward={"name": "boxed", "weight": 0.1})
    prompt = problems.train.at(0)
    assert problems.judges["text"](prompt, "\\boxed{0}").terms == {"boxed": 1.0}


def test_left_out_rows_are_told(file) -> None:
    blank = [{"prompt": "a", "answer": answer} for answer in (None, "", float("nan"))]
    problems = load(data={"path": file([*words(0, 500), *blank])})
    (note,) = problems.notes
    assert (
        note.startswith("3 of the 503 rows") and "no answer (empty, null or NaN): left out." in note
    )


def test_short_names_are_found_in_the_data_folder(tmp_path) -> None:
    write(tmp_path / "train_gsm8k.jsonl", words(0, 3))
    write(tmp_path / "eval_gsm8k.jsonl", words(3, 5))
    problems = load(data={"path": "gsm8k"}, eval={"path": "gsm8k"}, data_folder=str(tmp_path))
    assert len(problems.train) == 3 and [p.answer for p in problems.evals["gsm8k"]] == ["3", "4"]


def test_a_reserved_id(file) -> None:
    rows = [{**row, "id": f"eval:e:{i}"} for i, row in enumerate(words(0, 3))]
    ids = [{**row, "id": i} for i, row in enumerate(words(5, 7))]
    with pytest.raises(WhetError, match='The training id "eval:e:0" is reserved for evaluation'):
        load(data={"path": file(rows)}, eval={"path": file(ids, "e.jsonl")})


def test_choosing() -> None:
    keys = [5, 3, 3, 9, 1] * 40 + list(range(100, 400))
    assert choose_held_out(keys, 200) == {1, 3, 5, 9, *range(100, 126)}, (
        "a tenth of the 304 different problems"
    )
    assert choose_held_out(keys, 12) == {1, 3, 5, 9, *range(100, 108)}
    assert (
        choose_held_out(keys, 0)
        == choose_held_out([], 10)
        == choose_held_out(range(99), 10)
        == frozenset()
    )
