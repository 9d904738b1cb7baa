import random
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.errors import WhetError
from whet.tasks.base import is_held_out
from whet.tasks.operations import LARGEST, NAMES, OperationsTask, Step, all_matter, draw_problem
from whet.types import Prompt

Name = tuple[str, str]  # place, thing
Rule = tuple[str, list[int | Name]]  # operation, and its two operands

# What each sentence means, read from its words alone: operation, and where the operands stand in the match.
SENTENCES = [
    (r"The (?P<p>\w+) has (\d+) old and (\d+) new (?P<t>\w+)", "+"),
    (r"The (?P<p>\w+) had (\d+) (?P<t>\w+) and lost (\d+)", "-"),
    (r"The (?P<p>\w+) has (\d+) rows of (\d+) (?P<t>\w+)", "*"),
    (r"The (?P<p>\w+) has (\d+) more (?P<t>\w+) than the (?P<p1>\w+) has (?P<t1>\w+)", "+"),
    (r"The (?P<p>\w+) has (\d+) fewer (?P<t>\w+) than the (?P<p1>\w+) has (?P<t1>\w+)", "-"),
    (r"The (?P<p>\w+) has (\d+) times as many (?P<t>\w+) as the (?P<p1>\w+) has (?P<t1>\w+)", "*"),
    (
        r"There are as many (?P<t>\w+) in the (?P<p>\w+) as (?P<t1>\w+) in the (?P<p1>\w+) "
        r"(?P<word>plus|minus|times) (?P<t2>\w+) in the (?P<p2>\w+)",
        "word",
    ),
]
COMPUTE = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def parse(text: str) -> tuple[dict[Name, Rule], Name]:
    """The rule of each quantity and the one that is asked for, from the words of a problem."""
    *sentences, question = text.split(". ")
    rules: dict[Name, Rule] = {}
    for sentence in sentences:
        (hit, sign) = next(
            (m, sign) for form, sign in SENTENCES if (m := re.fullmatch(form, sentence))
        )
        groups = hit.groupdict()
        operands: list[int | Name] = [
            (groups[f"p{k}"], groups[f"t{k}"]) for k in "12" if f"p{k}" in groups
        ]
        # "3 fewer than": the quantity first
        operands += [int(group) for group in hit.groups() if group.isdecimal()]
        if sign == "word":
            sign = {"plus": "+", "minus": "-", "times": "*"}[groups["word"]]
        name = (groups["p"], groups["t"])
        assert name not in rules and len(operands) == 2
        rules[name] = (sign, operands)
    asked = re.fullmatch(r"How many (\w+) are in the (\w+)\?", question)
    assert asked
    return rules, (asked[2], asked[1])


def work_out(rules: dict[Name, Rule], name: Name, known: dict[Name, int]) -> int:
    """The value of a quantity; `known` gets it and all that it needs."""
    if name not in known:
        sign, operands = rules[name]
        known[name] = COMPUTE[sign](
            *(v if isinstance(v, int) else work_out(rules, v, known) for v in operands)
        )
    return known[name]


def check(text: str, answer: str, work: str, level: int, sentences: int) -> None:
    rules, asked = parse(text)
    needed: dict[Name, int] = {}
    assert str(work_out(rules, asked, needed)) == answer
    assert (len(needed), len(rules)) == (level, sentences)
    for name in rules:  # those that are not needed make sense as well
        assert 0 <= work_out(rules, name, dict(needed)) <= LARGEST
    *lines, last = work.split("\n")
    done: dict[Name, int] = {}
    for line in lines:
        place, thing, a, sign, b, value = re.fullmatch(
            r"(\w+) (\w+) = (\d+) (.) (\d+) = (\d+)", line
        ).groups()
        rule_sign, operands = rules[place, thing]
        assert [int(a), int(b)] == [v if isinstance(v, int) else done[v] for v in operands], (
            "each after what it needs"
        )
        assert (
            sign == rule_sign
            and COMPUTE[sign](int(a), int(b)) == int(value) == needed[place, thing]
        )
        assert (place, thing) not in done
        done[place, thing] = int(value)
    assert done == needed and last == f"Answer: {answer}"


def prompt(answer: str) -> Prompt:
    return Prompt(id="a", text="?", answer=answer, task="operations")


def test_the_parser_of_this_file_by_hand() -> None:
    text = (
        "The hall has 2 times as many hats as the attic has cups. The barn had 9 keys and lost 4. "
        "There are as many toys in the yard as hats in the hall minus keys in the barn. "
        "The attic has 3 rows of 4 cups. The mill has 6 fewer keys than the hall has hats. "
        "How many toys are in the yard?"
    )
    rules, asked = parse(text)
    needed: dict[Name, int] = {}
    assert work_out(rules, asked, needed) == 19
    assert needed == {
        ("attic", "cups"): 12,
        ("hall", "hats"): 24,
        ("barn", "keys"): 5,
        ("yard", "toys"): 19,
    }
    assert work_out(rules, ("mill", "keys"), {}) == 18


@pytest.mark.wide
@pytest.mark.parametrize("level", range(1, 21))
def test_answer_level_and_work_are_right(level: int) -> None:
    """The answer by an evaluator of its own; the level by the graph that it reads; every line of the work."""
    rng = random.Random(level)
    for i in range(200):
        extra = i % 4 * level // 2
        check(*draw_problem(rng, level, extra), level, level + extra)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**63), st.integers(1, 20), st.integers(0, 80))
def test_any_problem_is_right(seed: int, level: int, extra: int) -> None:
    check(*draw_problem(random.Random(seed), level, extra), level, level + extra)


def test_the_answer_does_not_need_the_distractors() -> None:
    """Without their sentences the problem can still be worked out, and every other sentence is needed for it."""
    rng = random.Random(0)
    for _ in range(200):
        text, answer, _ = draw_problem(rng, 5, 5)
        rules, asked = parse(text)
        needed: dict[Name, int] = {}
        work_out(rules, asked, needed)
        assert len(rules) == 10 and len(needed) == 5
        assert str(work_out({name: rules[name] for name in needed}, asked, {})) == answer
        for name in needed.keys() - {asked}:
            with pytest.raises(KeyError):
                work_out({other: rule for other, rule in rules.items() if other != name}, asked, {})


@pytest.mark.parametrize("level", [2, 3, 6, 12, 20])
def test_every_needed_quantity_changes_the_answer(level: int) -> None:
    """Another value in its place gives another answer; three are tried, since one may come out the same by chance."""
    rng = random.Random(level)
    for _ in range(100):
        rules, asked = parse(draw_problem(rng, level, 0).text)
        needed: dict[Name, int] = {}
        answer = work_out(rules, asked, needed)
        for name in needed.keys() - {asked}:
            assert {work_out(rules, asked, {name: needed[name] + more}) for more in (1, 7, 50)} != {
                answer
            }


def test_what_cancels_out_does_not_matter() -> None:
    """x = 3 * 4 = 12, y = x + 5 = 17, z = y - x = 5 whatever x is; z = y + x = 29 = 2 * x + 5 needs it."""
    x, y = Step("*", 3, 4, 12, []), Step("+", 12, 5, 17, [0])
    assert not all_matter([x, y, Step("-", 17, 12, 5, [1, 0])])
    assert all_matter([x, y, Step("+", 17, 12, 29, [1, 0])])
    assert all_matter([x, Step("*", 12, 2, 24, [0]), Step("-", 24, 12, 12, [1, 0])])  # 2 * x - x


def test_sentences_come_in_any_order() -> None:
    """The asked quantity is defined anywhere, and its inputs are as often after it as before it."""
    rng, places, later = random.Random(1), Counter[int](), 0
    for _ in range(600):
        rules, asked = parse(draw_problem(rng, 3, 0).text)
        order = list(rules)
        places[order.index(asked)] += 1
        source = next(v for v in rules[asked][1] if not isinstance(v, int))
        later += order.index(source) > order.index(asked)
    assert all(150 < places[place] < 250 for place in range(3)) and 240 < later < 360


def test_no_answer_is_common_and_all_forms_occur() -> None:
    """A guess pays little on any level, and values do not grow with the level."""
    rng, means = random.Random(2), {}
    for level in (3, 8, 20):
        answers = [int(draw_problem(rng, level, 0).answer) for _ in range(1500)]
        assert Counter(answers).most_common(1)[0][1] < 0.05 * 1500
        means[level] = np.mean(answers)
    assert max(means.values()) < 1.3 * min(means.values())
    sentences = [s for _ in range(100) for s in draw_problem(rng, 12, 3).text.split(". ")[:-1]]
    matched = Counter(form for s in sentences for form, _ in SENTENCES if re.fullmatch(form, s))
    assert len(matched) == len(SENTENCES) and matched.total() == len(sentences)
    assert {word for s in sentences for word in ("plus", "minus", "times") if f" {word} " in s} >= {
        "plus",
        "minus",
    }


def test_levels_come_in_the_shares_of_the_mix() -> None:
    table = OperationsTask(train_count=100, mix={"2": 0.3, "4-5": 0.7}, distractors=0.5).prompts(
        "train", 0
    )
    levels = [problem.meta["level"] for problem in table]
    assert (levels.count(2), levels.count(4), levels.count(5)) == (30, 35, 35)
    extra = Counter[tuple[int, int]]()
    for problem in table:
        rules, asked = parse(problem.text)
        needed: dict[Name, int] = {}
        assert str(work_out(rules, asked, needed)) == problem.answer
        assert len(needed) == problem.meta["level"]
        extra[len(needed), len(rules) - len(needed)] += 1
    # Half a sentence per needed one; the half of level 5 is rounded up or down by chance.
    assert extra.keys() == {(2, 1), (4, 2), (5, 2), (5, 3)} and extra[2, 1] == 30


def test_eval_and_train_share_no_problem() -> None:
    task = OperationsTask(
        train_count=3000, eval_count=500, eval_range="1-2", mix={"1-2": 1.0}, distractors=0.0
    )
    train, held_out = ({p.text for p in task.prompts(split, 5)} for split in ("train", "eval"))
    assert len(held_out) == 500 and not train & held_out
    assert all(map(is_held_out, held_out)) and not any(map(is_held_out, train))
    assert not any(is_held_out(p.text) for p, _ in task.solutions(np.random.default_rng(0), 100))


def test_the_same_seed_gives_the_same_problems() -> None:
    one, two, other = (OperationsTask(train_count=50).prompts("train", seed) for seed in (7, 7, 8))
    assert list(one.ids) == list(two.ids) != list(other.ids)


def test_solutions_are_right_and_of_the_wanted_levels() -> None:
    task = OperationsTask(distractors=1.0)
    pairs = task.solutions(np.random.default_rng(2), 300, operations="2-4")
    assert len(pairs) == 300 and all(task.judge(problem, work) == 1.0 for problem, work in pairs)
    assert {work.count("\n") for _, work in pairs} == {2, 3, 4}
    for problem, work in pairs:
        check(problem.text, problem.answer, work, work.count("\n"), 2 * work.count("\n"))
        assert set(problem.text + work) <= set(task.alphabet)
    assert task.solutions(np.random.default_rng(2), 0) == []


def test_problems_are_short() -> None:
    """Four characters are about a token: a problem of six operations has 150 tokens, its solution 100."""
    rows = [draw_problem(random.Random(seed), 6, 0) for seed in range(300)]
    assert max(len(row.text) for row in rows) <= 600 and max(len(row.work) for row in rows) <= 400


@pytest.mark.parametrize(
    ("response", "final"),
    [
        ("hall cups = 3 + 4 = 7\nAnswer: 7", "7"),
        ("Answer: 7.", "7"),
        ("Answer:7", "7"),
        ("Answer: **7**\n\n", "7"),
        ("Answer: 3 + 4 = 7", "7"),
        ("Answer: 8\nNo, that is wrong.\nAnswer: 7", "7"),
        ("Answer: 7\nAnswer: 8", "8"),
        ("Answer: 7 or 8", "8"),
        ("Answer: -7", "-7"),
        ("Answer: 3.7", "3.7"),
        ("Answer: 7.0", "7.0"),
        ("Answer: 1/7", "1/7"),
        ("Answer: 1,7", "1,7"),
        ("Answer: 07", "07"),
        ("Answer: x7", "x7"),
        ("Answer: ٧", ""),  # a digit, but none of ours
        ("Answer: seven", ""),
        ("Answer: 7\nAnswer:", ""),
        ("answer: 7", ""),
        ("7", ""),
        ("Answer:", ""),
        ("", ""),
        ("Answer: 7" + " " * 999, ""),  # 1001 characters after the mark
        ("Answer: 7" + " " * 998, "7"),
    ],
)
def test_the_last_number_after_the_last_mark_counts(response: str, final: str) -> None:
    task = OperationsTask()
    assert task.final(response) == final
    assert task.judge(prompt("7"), response) == float(final == "7")


def test_a_hostile_response_is_wrong() -> None:
    """Responses so long that a test with quadratic work would not end."""
    task, draw = OperationsTask(), random.Random(0)
    for response in (
        "Answer: " * 1_000_000,
        "Answer" * 1_000_000,
        "nswer:" * 1_000_000,
        "Answer: " + "7" * 1_000_000,
        "Answer: " + "7 " * 1_000_000,
        "Answer: " + "-.,/" * 2500_000,
        "Answer: " + "7" * 900,
        "7" * 1_000_000,
        "\x00\ud800" * 500_000,
        "".join(draw.choices("Answer: 7\n", k=1_000_000)) + "x",
    ):
        assert task.judge(prompt("7"), response) == 0.0
        assert len(task.final(response)) <= 21


@given(st.text(alphabet="Answer: 0123456789.-\n"))
def test_a_final_answer_is_within_the_response(response: str) -> None:
    final = OperationsTask().final(response)
    assert final in response and (not final or final[-1].isdecimal())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train_count": 0}, "train_count = 0 is wrong"),
        ({"eval_count": 100_001}, "eval_count = 100001 is wrong"),
        ({"distractors": -0.1}, "distractors = -0.1 is wrong: it should be from 0 to 4"),
        ({"distractors": float("nan")}, "distractors = nan is wrong"),
        ({"eval_range": "0-4"}, "within 1 to 20"),
        ({"eval_range": "5-2"}, '"5-2" is no range of levels'),
        ({"mix": {"4-30": 1.0}}, "within 1 to 20"),
        ({"mix": {"4": 0.5}}, "must add up to 1"),
        ({"mix": {"4": -0.5, "5": 1.5}}, "a share is a number"),
        ({"train_count": "many"}, "it should be a whole number"),
        ({"distractor": 1.0}, 'no option "distractor"; did you mean "distractors"?'),
    ],
)
def test_a_bad_option_gets_one_sentence(options: dict[str, object], words: str) -> None:
    with pytest.raises(WhetError, match=re.escape(words)) as error:
        OperationsTask(**options)
    assert "\n" not in str(error.value)


def test_a_bad_option_of_the_solutions_gets_one_sentence() -> None:
    for options, words in (
        ({"operations": "1-21"}, 'solutions of task operations: "1-21" is no range'),
        ({"levels": "1"}, 'no option "levels"'),
    ):
        with pytest.raises(WhetError, match=words):
            OperationsTask().solutions(np.random.default_rng(0), 5, **options)


def test_too_many_held_out_problems_get_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two names level 1 has 2 * (361 + 361 + 64) problems, of which one in eight is held out."""
    monkeypatch.setattr("whet.tasks.operations.NAMES", NAMES[:2])
    task = OperationsTask(eval_count=400, eval_range="1", distractors=0.0)
    with pytest.raises(WhetError, match="too few problems have level 1; lower eval_count"):
        task.prompts("eval", 0)
