"""Long and structured answers, which the matcher does not read."""

import json

import pytest

from whet.tasks.matcher import read_json, same_whole

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
    assert same_whole(given, wanted, "whole") == same
    assert same_whole(f"\\boxed{{{given}}}", wanted, "auto") == same


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
