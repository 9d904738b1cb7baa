"""7,346 pairs of an answer and a response with known verdicts: no error rate may rise."""

import json
from collections import Counter
from pathlib import Path

import pytest

from whet.tasks.answers import Matcher
from whet.types import Prompt

GROUPS = [
    json.loads(line)
    for line in Path(__file__).with_name("judging_pairs.jsonl").read_text().splitlines()
]
PARTS = ("open", "held out", "math-verify", "claims", "claims, unseen", "hostile")


def errors(matcher: Matcher, groups: list[dict]) -> Counter:
    """Responses by (truth, whether the judge takes them for right)."""
    counts: Counter = Counter()
    for group in groups:
        prompt = Prompt(id="a", text=group["question"], answer=group["gold"], task="text")
        for truth in ("right", "wrong"):
            for response in group.get(truth, []):
                counts[truth, matcher.judge(prompt, response) == 1.0] += 1
    return counts


def test_each_part_has_both_kinds() -> None:
    for part in PARTS[:-1]:
        some = [group for group in GROUPS if group["part"] == part]
        assert (
            min(sum(len(group.get(truth, [])) for group in some) for truth in ("right", "wrong"))
            >= 40
        )
    assert {group["part"] for group in GROUPS} == set(PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_no_wrong_pair_is_accepted(part: str) -> None:
    """Without formulas, which are slow and accept only more; the benchmark judges all pairs with them."""
    counts = errors(Matcher("exact"), [group for group in GROUPS if group["part"] == part])
    assert counts["wrong", True] == 0


@pytest.mark.parametrize(
    ("part", "refused"), [("claims", 1), ("claims, unseen", 1), ("math-verify", 2)]
)
def test_hardly_any_right_pair_is_refused(part: str, refused: int) -> None:
    counts = errors(Matcher("math"), [group for group in GROUPS if group["part"] == part])
    assert counts["wrong", True] == 0 and counts["right", False] <= refused
