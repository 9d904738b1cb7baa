"""Whole responses against answers of real problem sets."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.errors import WhetError
from whet.tasks import verify
from whet.tasks.matcher import (
    MOST_PARTS,
    Form,
    Matcher,
    canonical,
    has_parts,
    read_form,
    read_json,
    right_answers,
    same_form,
    same_whole,
)
from whet.types import Prompt

MATH = Matcher()
EXACT = Matcher("exact")


def score(response: str, answer: str, matcher: Matcher = MATH) -> float:
    return matcher.judge(Prompt(id="a", text="?", answer=answer, task="text"), response)


@pytest.mark.parametrize(
    "response",
    [
        "The answer is 5.",
        "**Answer:** 5",
        r"$\boxed{5}$ dollars",
        r"$$\boxed{\$5}$$",
        "6 - 1 = <<6-1=5>>5\n#### 5",
        r"<think>Is it \boxed{4}? No.</think>Therefore $x = \boxed{5}$.",
        r"The final answer is: $\boxed{5}$. I hope it is correct.",
        "### Final Answer\n\nThe answer is: **5**",
        r"\boxed{x = 5}",
        r"\boxed{5.0}",
        r"\boxed{2+3=5}",
        r"\boxed{\text{5 dollars}}",
        r"\boxed{\sqrt{25}}",
        r"\boxed{\frac{10}{2}}",
    ],
)
def test_ways_to_say_five(response: str) -> None:
    assert score(response, "5") == 1.0 and score(response, "6") == 0.0


def test_what_the_problem_counts_may_stand_beside_the_number() -> None:
    """The word must be the problem's own, and must not change the number, though the problem uses it."""
    problem = "Of 30 ripe apples or a million pears half are left. How many apples are left? Not many."

    def judged(found: str) -> float:
        chat = Prompt(id="a", messages=({"role": "user", "content": problem},), answer="15", task="text")
        score = MATH.judge(Prompt(id="a", text=problem, answer="15", task="text"), found)
        assert MATH.judge(chat, found) == score
        return score

    for right in ("15 apples", r"15 \text{ ripe apples}", r"\text{15 Apples are left}"):
        assert judged(rf"\boxed{{{right}}}") == 1.0, right
    for wrong in ("15 plums", "15 million", "15 million apples", "half of 15 apples", "not 15 apples", "15 or more"):
        assert judged(rf"\boxed{{{wrong}}}") == 0.0, wrong


def test_a_problem_may_count_dozens() -> None:
    for problem, right in (("How many dozens of eggs?", 1.0), ("A dozen eggs cost $3. How many eggs?", 0.0)):
        assert MATH.judge(Prompt(id="a", text=problem, answer="7", task="text"), r"\boxed{7 dozen eggs}") == right


@pytest.mark.parametrize("found", ["18=17", "17=18=17", "17, ...", "17!", "not 17", "16 or 17", "17 dozen", "[17]^2"])
def test_what_only_ends_or_begins_like_the_answer(found: str) -> None:
    assert score(rf"\boxed{{{found}}}", "17") == 0.0


@pytest.mark.parametrize(
    "response", ["not 5", "The answer is not 5.", "The answer is 5. Wait, it is 6.", r"\boxed{5} or \boxed{6}"]
)
def test_what_is_taken_back_is_no_answer(response: str) -> None:
    assert score(response, "5") == 0.0


@pytest.mark.parametrize("response", ["B", "b", "(b)", "**B**", r"\boxed{b}", "The answer is B: 12.", "B) 12"])
def test_ways_to_choose(response: str) -> None:
    assert score(response, "B") == score(response, r"\text{(B)}") == 1.0 and score(response, "C") == 0.0


def test_a_number_with_commas_may_be_a_list_or_not() -> None:
    assert score(r"\boxed{200, 100}", "100,200") == score(r"\boxed{100200}", "100,200") == 1.0
    assert score(r"\boxed{0, 1}", "1,000") == score(r"\boxed{234, 1}", "1,234") == 0.0
    assert score(r"\boxed{16,807}", "7^5") == 1.0 and score(r"\boxed{16,808}", "7^5") == 0.0


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)"),
        (r"\{1\pm\sqrt{5},-2\}", r"-2, 1+\sqrt5, 1-\sqrt5"),
        ("$f(x)=-1$,$f(x)=x+1$", "x+1, -1"),
        (r"x \in [-2,7]", "[-2, 7]"),
        (r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty)\cup(-\infty,2)"),
        ("$(2,2,2),(3,4,3)$", "(3,4,3), (2,2,2)"),
        (r"\text{(C)}", "C"),
        (r"864 \mbox{ inches}^2", "864"),
        ("y = 2x + 3", "2x+3"),
        (r"\$32,\!348", "32348"),
        ("1, 3, 5, 15", r"x = 15 \text{ or } 1, 3, 5"),
    ],
)
def test_structures(answer: str, found: str) -> None:
    assert score(rf"\boxed{{{found}}}", answer) == 1.0


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (r"\left( 3, \frac{\pi}{2} \right)", r"(\pi/2, 3)"),
        ("(3,4]", "[3,4]"),
        ("1,-2", "1"),
        ("1,-2", "1,-2,3"),
        ("-2,-2", "-2"),
        (r"3 \pm 2 \sqrt{2}", r"3 + 2\sqrt2"),
        (r"(0,9) \cup (9,36)", "(0,36)"),
        ("6 - 5i", "6+5i"),
        ("x=5", "y=5"),
        ("1", "x = " + "1," * 140 + "1"),
        ("1", "1,1,1)"),
        ("1", "(1,1"),
        ("1", r"\{1, 1\}"),
    ],
)
def test_other_structures(answer: str, found: str) -> None:
    assert score(rf"\boxed{{{found}}}", answer) == 0.0


def test_exact_leaves_formulas_alone() -> None:
    assert score(r"\boxed{2,1}", "1,2", EXACT) == score(r"\boxed{0.5}", r"\frac12", EXACT) == 1.0
    assert score(r"\boxed{\sqrt{25}}", "5", EXACT) == 0.0


def test_thinking_counts_for_nothing() -> None:
    assert score(r"<think>\boxed{5}", "5") == score(r"<think>\boxed{5}</think>No idea.", "5") == 0.0


def test_the_data_may_hold_a_whole_solution_or_several_answers() -> None:
    assert score("The answer is 72", "She sold 48+24=72 clips.\n#### 72") == 1.0
    assert score("The answer is 72", r"so we get \boxed{72}") == 1.0
    assert right_answers('["4.4e7", "4.4 \\\\times 10^7"]') == ("4.4e7", r"4.4 \times 10^7")
    assert score(r"\boxed{6630}", '["6630.65", "6630"]') == 1.0
    assert right_answers('["broken"') == ('["broken"',) and right_answers("[1, 2]") == ("[1, 2]",)


def test_where_the_answer_stands() -> None:
    text = "Answer: 1\n<answer> 2 </answer> \\boxed{3} or 4"
    for way, answer in {"auto": "3", "boxed": "3", "tagged": "2", "marked": "1", "last_number": "4"}.items():
        assert Matcher("exact", way).judge(Prompt(id="a", text="?", answer=answer, task="text"), text) == 1.0
    assert Matcher("exact", "whole").judge(Prompt(id="a", text="?", answer="Paris", task="text"), "paris") == 1.0


def test_final_is_what_votes_count() -> None:
    assert MATH.final(r"<think>3</think>\boxed{1,234.0}") == MATH.final("#### 1234") == "1234"
    assert MATH.final("no idea") == "" and len(MATH.final("\\boxed{" + "x," * 150 + "}")) <= 300


def test_unknown_names() -> None:
    with pytest.raises(WhetError, match='no matcher "maths"; did you mean "math"'):
        Matcher("maths")
    with pytest.raises(WhetError, match='called "box"; did you mean "boxed"'):
        Matcher("exact", "box")


def test_without_math_verify() -> None:
    """One sentence before any work; the exact matcher does not need it, and neither loads torch."""
    code = (
        "import sys\n"
        "sys.modules['math_verify'] = None\n"
        "from whet.errors import WhetError\n"
        "from whet.tasks.matcher import Matcher\n"
        "Matcher('exact')\n"
        "try:\n    Matcher('math')\n"
        "except WhetError as error:\n    assert 'whet[train]' in str(error)\n"
        "else:\n    raise AssertionError\n"
        "del sys.modules['math_verify']\n"
        "Matcher('math')\n"
        "assert 'math_verify' in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=60), st.sampled_from(["42", r"\frac{\pi}{2}", "1,2", "[0,1)", "x^2+1", r"\text{east}"]))
def test_never_raises(text: str, answer: str) -> None:
    for response in (text, f"\\boxed{{{text}}}", f"<answer>{text}</answer>"):
        assert score(response, answer) in (0.0, 1.0)
    assert isinstance(MATH.final(text), str)


def test_what_comparing_formulas_needs_is_loaded_before_judges_are_forked() -> None:
    Matcher("math")
    assert verify.warm.cache_info().currsize == 1


# ---- answers of several parts, with plain text equality of parts


def same_parts(found: str, gold: str) -> bool:
    return same_form(found, gold, lambda a, b: canonical(a) == canonical(b))


@pytest.mark.parametrize(
    ("text", "kind", "parts"),
    [
        ("1, 2", "list", ("1", "2")),
        (r"1 \text{ and } 2", "list", ("1", "2")),
        ("$69$,$84$", "list", ("69", "84")),
        (r"\{1, 2\}", "set", ("1", "2")),
        ("[0, 1)", "[)", ("0", "1")),
        (r"\left(-\infty, 3\right]", "(]", (r"-\infty", "3")),
        (r"x \in [0, 1]", "[]", ("0", "1")),
        ("(1,2),(3,4)", "list", ("(1,2)", "(3,4)")),
        (r"(0,9) \cup (9,36)", "union", ("(0,9)", "(9,36)")),
        (r"1 \pm \sqrt{2}", "list", (r"1 + \sqrt{2}", r"1 - \sqrt{2}")),
        ("1,234, 5", "list", ("1234", "5")),
    ],
)
def test_forms(text: str, kind: str, parts: tuple[str, ...]) -> None:
    assert read_form(text) == Form(kind, parts)


@pytest.mark.parametrize(
    "text", ["5", "1,234", "(5)", "x+1", "f(x, y)", "", "(1,2", "1,2)", "(" * 13 + "1,2" + ")" * 13]
)
def test_single_values(text: str) -> None:
    assert read_form(text) is None


def test_thousands_may_be_a_list() -> None:
    assert has_parts("100,200") and same_parts("200,100", "100,200") and same_parts("1,234 and 5", "1234, 5")


@pytest.mark.parametrize(
    ("found", "gold"),
    [
        ("2, 1", "1,2"),
        (r"\{2, 1\}", "1,2"),
        ("1,2", "(1,2)"),
        ("(1,2)", "1,2"),
        ("(3,4), (1,2)", "(1,2),(3,4)"),
        ("(9,36)\\cup(0,9)", r"(0,9) \cup (9,36)"),
        (r"\{5\}", "5"),
        ("[ 0 , 1 )", "[0,1)"),
    ],
)
def test_same_form(found: str, gold: str) -> None:
    assert same_parts(found, gold)


@pytest.mark.parametrize(
    ("found", "gold"),
    [
        ("2, 1", "(1,2)"),
        ("(2,1)", "(1,2)"),
        ("(2,1)", "1,2"),
        ("[0,1]", "[0,1)"),
        ("(0,1)", "[0,1)"),
        ("1", "1,1"),
        ("1,1", "1,2"),
        ("1,2,3", "1,2"),
        ("(1,2)", r"\{1,2\}"),
        ("(2,1),(3,4)", "(1,2),(3,4)"),
        (r"(0,9) \cup (9,35)", r"(0,9) \cup (9,36)"),
        ("5", "6"),
    ],
)
def test_different_form(found: str, gold: str) -> None:
    assert not same_parts(found, gold)


def test_what_a_vote_counts() -> None:
    for equal in (
        {"1,234.0", "1234", "$1,234$", "x = 1234", "1234 apples"},
        {r"\dfrac{1}{2}", r"\frac12", "1/2", "0.5", r"y = \frac{1}{2}"},
        {"2, 1", "1,2", r"\{1, 2\}", r"x = 1 \text{ or } x = 2"},
        {"[0, 1)", r"\left[0,1\right)"},
        {r"\text{East}", "east", "**east**"},
    ):
        assert len({canonical(text) for text in equal}) == 1, equal
    assert canonical("(1,2)") != canonical("(2,1)") and canonical("") == ""


def test_more_parts_than_anyone_means() -> None:
    many = ",".join(str(n) for n in range(MOST_PARTS + 1))
    assert has_parts(many) and same_parts(many, many) and not same_parts(many[2:] + ",0", many)


@given(st.text(alphabet="()[]{}\\,12 +-=pmx", max_size=300), st.text(alphabet="()[],12 ", max_size=60))
def test_forms_never_raise(found: str, gold: str) -> None:
    assert same_parts(found, gold) in (True, False) and isinstance(canonical(found), str)


@pytest.mark.parametrize("unit", ["\\pm ", "1\\pm", "(1,234,", "((1,2),", "\\cup", "1,", "\\{", "x=", " or "])
def test_bombs_of_structure(unit: str) -> None:
    """Two readings a level would be 2^12 of them."""
    text = (unit * 300)[:300]
    assert not same_parts(text, "42") and not same_parts(text, "(1,2),(3,4)")


# ---- long and structured answers, compared whole


HOUSES = [{"house": i, "owner": f"Person {i}", "drink": "tea" if i % 2 else "milk {hot}"} for i in range(12)]
ZEBRA = json.dumps({"header": ["house", "owner"], "rows": HOUSES})
STORY = "The fox said nothing at all. " * 20


def test_json_is_read_and_compared() -> None:
    other_way = json.dumps(json.loads(ZEBRA), indent=4, sort_keys=True)
    changed = ZEBRA.replace("Person 7", "Person 8")
    assert len(ZEBRA) > 300
    for where, written in {
        "auto": "So it is \\boxed{%s}.",
        "boxed": "\\boxed{ %s }",
        "tagged": "I think <answer>%s</answer>",
        "marked": "Work.\n#### %s",
        "whole": "```json\n%s\n```",
    }.items():
        assert same_whole(written % other_way, ZEBRA, where), where
        assert not same_whole(written % changed, ZEBRA, where), where
        assert not same_whole("<think>" + written % ZEBRA, ZEBRA, where), "still thinking"
    assert same_whole(f"Here it is:\n```json\n{other_way}\n```\nDone.", ZEBRA, "auto")
    assert not same_whole(f"\\boxed{{{ZEBRA}, or another}}", ZEBRA, "auto"), "the box holds more"
    two = f"```json\n{changed}\n```\nThe answer is {ZEBRA}"
    assert same_whole(two, ZEBRA, "auto") and same_whole(two, changed, "auto") is False, "one guess: the last"
    assert not same_whole(f"{ZEBRA} \\boxed{{1}}", ZEBRA, "auto"), "where there is a box, it is the answer"
    assert not same_whole(ZEBRA, ZEBRA, "last_number")


@pytest.mark.parametrize(
    ("given", "wanted", "same"),
    [
        ('{"a": 1.0}', '{"a": 1}', True),
        ('{"a": true}', '{"a": 1}', False),
        ('{"a": "1"}', '{"a": 1}', False),
        ("[[0, 1], [1, 0]]", "[[0,1],[1,0]]", True),
        ("[[0, 1], [0, 1]]", "[[0,1],[1,0]]", False),
        ('{"a": 1', '{"a": 1}', False),
        ("[" * 100_000, "[[1]]", False),
        ("[" + "9" * 5000 + "]", "[[1]]", False),
    ],
)
def test_what_json_is_equal(given: str, wanted: str, same: bool) -> None:
    assert bool(same_whole(given, wanted, "whole")) == same
    assert bool(same_whole(f"\\boxed{{{given}}}", wanted, "auto")) == same


def test_long_texts_differ_in_white_space_alone() -> None:
    spaced = STORY.replace(". ", ".\n\n ")
    assert len(STORY) > 300
    assert same_whole(f"\\boxed{{{spaced}}}", STORY, "auto") and same_whole(f"#### {spaced}", STORY, "marked")
    assert same_whole(spaced, STORY, "whole")
    assert not same_whole(f"\\boxed{{{spaced} And more.}}", STORY, "auto")
    assert not same_whole(f"\\boxed{{{spaced}", STORY, "auto"), "not closed"
    assert not same_whole(STORY.replace("fox", "dog", 1), STORY, "whole")
    assert not same_whole("", STORY, "whole")


def test_short_answers_are_for_the_matcher() -> None:
    assert not same_whole("72", "72", "whole") and not same_whole('["1", "2"]', '["1", "2"]', "whole")
    assert read_json("[0, 1)") is None and read_json("\\{1, 2\\}") is None


def test_hostile_responses_cost_little() -> None:
    for text in ("```\n" * 50_000, "\\boxed{" * 50_000, "#### " * 50_000, "answer " * 50_000, "{" * 200_000):
        assert not same_whole(text, ZEBRA, "auto") and not same_whole(text, STORY, "auto")
