"""Trees against chains, counted: the rule by hand, and that a chain cannot beat a tree which contains it."""

import json
from pathlib import Path

import numpy as np
from draft_trees import agreed, compare, guesses, main, matches


def test_guesses_by_hand() -> None:
    """After 8 1 2, the own text has 1 2 followed by 5, the sibling 8 1 2 followed by 6: three tokens agree."""
    own, sibling = np.array([1, 2, 5, 8, 1, 2, 0]), np.array([8, 1, 2, 6, 7, 9])
    assert matches(own[:6], own[:6]).tolist() == [0, 0, 2, 0, 0, 0]
    found = [guess.tolist() for guess in guesses([own, sibling], 0, 6, depth=4)]
    assert found == [[6, 7, 9], [5, 8]]
    assert agreed(np.array([5, 8]), np.array([5, 8, 1])) == 2


def test_more_branches_of_a_depth_are_accepted_as_far_or_further(tmp_path: Path) -> None:
    found = compare(problems=2, most=120, seed=1)
    length = {name: shape["accept_length"] for name, shape in found.items()}
    assert length["1 of 8"] <= length["2 of 8"] <= length["4 of 8"]
    result = main(["--out", str(tmp_path), "--problems", "2", "--most", "120", "--seed", "1"])
    assert result["shapes"] == found
    assert json.loads((tmp_path / "draft_trees.json").read_text())["shapes"] == found
