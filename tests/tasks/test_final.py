r"""Where an answer is found, and that looking for it costs linear time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.tasks.final import ANSWERS, LONGEST, after_thinking, auto, boxed, last_number, marked, tagged


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
    assert after_thinking(r"\boxed{1}</think> so</think>2") == "2", "templates write the opening tag themselves"
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
    assert tagged("<answer>1") == tagged("1</answer>") == boxed("3") == marked("3") == last_number("three") == ""


def test_long_answers_are_none() -> None:
    assert boxed("\\boxed{" + "x" * LONGEST + "}") == "x" * LONGEST
    long = "x" * (LONGEST + 1)
    assert boxed(f"\\boxed{{{long}}}") == tagged(f"<answer>{long}</answer>") == ANSWERS["whole"](long) == ""
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
