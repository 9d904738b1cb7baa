r"""Where an answer is found, and that looking for it costs linear time."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.errors import WhetError
from whet.tasks import formulas
from whet.tasks.answers import (
    ANSWERS,
    LONGEST,
    Matcher,
    after_thinking,
    auto,
    boxed,
    last_number,
    marked,
    read_json,
    right_answers,
    same_whole,
    tagged,
)
from whet.types import Prompt


@pytest.mark.parametrize(
    ("response", "found"),
    [
        (r"So \boxed{42}.", "42"),
        (r"First \boxed{1}, then \boxed{2} and 3.", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {5}", "5"),
        (r"\fbox{3} \fboxed{5}", "5"),
        ("5 + 5\n#### 10", "10"),
        ("+5=8*2=6-7=9#869", "869"),
        ("The answer is 12.", "12."),
        ("The final answer is: 12. I checked it twice on 3 sheets.", "12"),
        ("Answer: **12**", "12"),
        ("**Answer:** 12", "12"),
        ("Answer:\n12", "12"),
        ("The answer is:\n\\[\n\\frac{3}{10}\n\\]", "\\frac{3}{10}"),
        ("The answer is\n$$\n7\n$$", "7"),
        ("answer is 3, no, the answer is 4", "4"),
        ("The answer is 5. Wait, it is 6.", "6"),
        ("The answer is 5, no, 6.", "6"),
        ("The answer is not 5 but 6.", "6."),
        ("The answer is 6, not 5.", "6"),
        ("The answer is 6, which is even.", "6"),
        ("The answer is $ax+b$, where $b=1$", "ax+b$, where $b=1$"),
        ("The answer is not 5.", "not 5."),
        ("not 5", "not 5"),
        ("It isn't 5", "n't 5"),
        ("It is 5 million.", "5 million"),
        ("The answer is 12!", "12"),
        ("The final answer is **12**.", "12"),
        ("Final Answer: The largest n is 34. I hope so.", "34"),
        ("The correct option is (B).", "(B)."),
        (r"**Final Answer:** $11,\! 111$", r"11,\! 111$"),
        ("B", "B"),
        ("(b)", "(b)"),
        ("**C**", "C"),
        ("So it is (A).", "(A)"),
        ("A farmer has apples", ""),
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"\boxed{1} \quad \text{or} \quad \boxed{2}", "1, 2"),
        (r"First \boxed{1}. Then \boxed{2}", "2"),
        (r"\boxed{2}, \boxed{2}", "2"),
        ("#### Step 3\nwe add\nThe answer is 5", "5"),
        ("### Answer\nIt costs 42 dollars", "42"),
        ("we get 3 and 1,234.5 in the end", "1,234.5"),
        ("10-7", "7"),
        ("it is -7", "-7"),
        ("about 3/4 of it", "3/4"),
        ("I took 3, 4, 5, and left", "5"),
        (r"not closed: \boxed{5", ""),
        (r"The answer is 4: \boxed{5", ""),
        (r"\boxed{}", ""),
        ("no idea", ""),
        ("", ""),
        ("the answer is", ""),
    ],
)
def test_auto(response: str, found: str) -> None:
    assert auto(response) == found


def test_thinking_is_dropped() -> None:
    assert after_thinking(r"<think>\boxed{1}</think>\boxed{2}") == r"\boxed{2}"
    assert after_thinking(r"\boxed{1}</think> so</think>2") == "2", (
        "templates write the opening tag themselves"
    )
    assert after_thinking(r"<think>\boxed{1}") == "", "still thinking"
    assert after_thinking(r"<think>a</think>1 <think>\boxed{1}") == ""


def test_each_way_finds_its_own() -> None:
    text = "Answer: 1\n<answer> 2 </answer> \\boxed{3} or 4"
    found = {name: find(text) for name, find in ANSWERS.items()}
    assert found == {
        "auto": "3",
        "boxed": "3",
        "tagged": "2",
        "marked": "1",
        "last_number": "4",
        "whole": text.strip(),
    }
    assert (
        tagged("<answer>1")
        == tagged("1</answer>")
        == boxed("3")
        == marked("3")
        == last_number("three")
        == ""
    )


def test_long_answers_are_none() -> None:
    assert boxed("\\boxed{" + "x" * LONGEST + "}") == "x" * LONGEST
    long = "x" * (LONGEST + 1)
    assert (
        boxed(f"\\boxed{{{long}}}")
        == tagged(f"<answer>{long}</answer>")
        == ANSWERS["whole"](long)
        == ""
    )
    assert marked(f"answer is {long}") == last_number("9" * (LONGEST + 1)) == ""


@given(st.text(max_size=300), st.sampled_from(sorted(ANSWERS)))
def test_never_raises(text: str, way: str) -> None:
    assert len(ANSWERS[way](after_thinking(text))) <= LONGEST


@pytest.mark.wide
@pytest.mark.parametrize("way", sorted(ANSWERS))
@pytest.mark.parametrize(
    "response",
    [
        "\\boxed{" * 200_000,
        "{" * 1_000_000 + "\\boxed{" + "{" * 1_000_000,
        "\\boxed {" * 100_000,
        "9" * 1_000_000,
        "1," * 1_000_000,
        "#" * 1_000_000,
        "# " * 1_000_000,
        "answer is " * 200_000,
        "answer" + " " * 1_000_000 + "is 41",
        "answer:" + " " * 1_000_000 + "x",
        "-" * 1_000_000,
        "1/" * 1_000_000,
        "." * 1_000_000 + "1",
        "<answer>" * 100_000,
        "<think>" * 100_000 + "</think>" * 100_000,
        "answer is not " * 100_000,
        "wait, " * 200_000 + "answer is 5. " + "wait, " * 200_000,
        "not " * 250_000 + "5",
        "\\boxed{1} and " * 60_000,
        "(A)" * 300_000,
        "\u00bd" * 200_000,
    ],
    ids=lambda text: text[:16],
)
def test_long_responses_are_cheap(response: str, way: str) -> None:
    """Each takes milliseconds; quadratic patterns would take hours, which no one would miss in this suite."""
    assert len(ANSWERS[way](after_thinking(response))) <= LONGEST


# ---- whole responses against answers of real problem sets

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
    problem = (
        "Of 30 ripe apples or a million pears half are left. How many apples are left? Not many."
    )

    def judged(found: str) -> float:
        chat = Prompt(
            id="a", messages=({"role": "user", "content": problem},), answer="15", task="text"
        )
        score = MATH.judge(Prompt(id="a", text=problem, answer="15", task="text"), found)
        assert MATH.judge(chat, found) == score
        return score

    for right in ("15 apples", r"15 \text{ ripe apples}", r"\text{15 Apples are left}"):
        assert judged(rf"\boxed{{{right}}}") == 1.0, right
    for wrong in (
        "15 plums",
        "15 million",
        "15 million apples",
        "half of 15 apples",
        "not 15 apples",
        "15 or more",
    ):
        assert judged(rf"\boxed{{{wrong}}}") == 0.0, wrong


def test_a_problem_may_count_dozens() -> None:
    for problem, right in (
        ("How many dozens of eggs?", 1.0),
        ("A dozen eggs cost $3. How many eggs?", 0.0),
    ):
        assert (
            MATH.judge(
                Prompt(id="a", text=problem, answer="7", task="text"), r"\boxed{7 dozen eggs}"
            )
            == right
        )


@pytest.mark.parametrize(
    "found", ["18=17", "17=18=17", "17, ...", "17!", "not 17", "16 or 17", "17 dozen", "[17]^2"]
)
def test_what_only_ends_or_begins_like_the_answer(found: str) -> None:
    assert score(rf"\boxed{{{found}}}", "17") == 0.0


@pytest.mark.parametrize(
    "response",
    ["not 5", "The answer is not 5.", "The answer is 5. Wait, it is 6.", r"\boxed{5} or \boxed{6}"],
)
def test_what_is_taken_back_is_no_answer(response: str) -> None:
    assert score(response, "5") == 0.0


@pytest.mark.parametrize(
    "response", ["B", "b", "(b)", "**B**", r"\boxed{b}", "The answer is B: 12.", "B) 12"]
)
def test_ways_to_choose(response: str) -> None:
    assert (
        score(response, "B") == score(response, r"\text{(B)}") == 1.0
        and score(response, "C") == 0.0
    )


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
    for way, answer in {
        "auto": "3",
        "boxed": "3",
        "tagged": "2",
        "marked": "1",
        "last_number": "4",
    }.items():
        assert (
            Matcher("exact", way).judge(Prompt(id="a", text="?", answer=answer, task="text"), text)
            == 1.0
        )
    assert (
        Matcher("exact", "whole").judge(
            Prompt(id="a", text="?", answer="Paris", task="text"), "paris"
        )
        == 1.0
    )


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
        "from whet.tasks.answers import Matcher\n"
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
@given(
    st.text(max_size=60),
    st.sampled_from(["42", r"\frac{\pi}{2}", "1,2", "[0,1)", "x^2+1", r"\text{east}"]),
)
def test_judging_never_raises(text: str, answer: str) -> None:
    for response in (text, f"\\boxed{{{text}}}", f"<answer>{text}</answer>"):
        assert score(response, answer) in (0.0, 1.0)
    assert isinstance(MATH.final(text), str)


def test_what_comparing_formulas_needs_is_loaded_before_judges_are_forked() -> None:
    Matcher("math")
    assert formulas.warm.cache_info().currsize == 1


# ---- long and structured answers, compared whole


HOUSES = [
    {"house": i, "owner": f"Person {i}", "drink": "tea" if i % 2 else "milk {hot}"}
    for i in range(12)
]
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
    assert same_whole(two, ZEBRA, "auto") and same_whole(two, changed, "auto") is False, (
        "one guess: the last"
    )
    assert not same_whole(f"{ZEBRA} \\boxed{{1}}", ZEBRA, "auto"), (
        "where there is a box, it is the answer"
    )
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
    assert same_whole(f"\\boxed{{{spaced}}}", STORY, "auto") and same_whole(
        f"#### {spaced}", STORY, "marked"
    )
    assert same_whole(spaced, STORY, "whole")
    assert not same_whole(f"\\boxed{{{spaced} And more.}}", STORY, "auto")
    assert not same_whole(f"\\boxed{{{spaced}", STORY, "auto"), "not closed"
    assert not same_whole(STORY.replace("fox", "dog", 1), STORY, "whole")
    assert not same_whole("", STORY, "whole")


def test_short_answers_are_for_the_matcher() -> None:
    assert not same_whole("72", "72", "whole") and not same_whole(
        '["1", "2"]', '["1", "2"]', "whole"
    )
    assert read_json("[0, 1)") is None and read_json("\\{1, 2\\}") is None


def test_hostile_responses_cost_little() -> None:
    for text in (
        "```\n" * 50_000,
        "\\boxed{" * 50_000,
        "#### " * 50_000,
        "answer " * 50_000,
        "{" * 200_000,
    ):
        assert not same_whole(text, ZEBRA, "auto") and not same_whole(text, STORY, "auto")
