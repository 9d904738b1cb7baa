"""The grid with forced acceptance: drafts are right as often as is set, and every cell is written."""

import json
from pathlib import Path

import numpy as np
import pytest
from draft_grid import Forced, expected_length, main, seconds_a_step, table
from draft_watch import Step

from whet.draft.base import OFF, RowView


def test_forced_drafts_are_right_as_often_as_asked() -> None:
    plain = np.random.default_rng(0).integers(0, 50, (3, 4000)).astype(np.int32)
    forced = Forced(50)
    forced.know(plain, 0.6, 8, seed=1)
    row = RowView(uid=0, prompt_id="1", group_id=1, index=0, prompt=np.array([1]), ids=plain[1, :7])
    tokens, counts = forced.propose([row], np.array([8]))
    assert counts.tolist() == [8] and tokens.shape == (1, 8)
    assert (forced.guesses[:, :4000] == plain).mean() == pytest.approx(0.6, abs=0.02)
    assert (tokens[0] == forced.guesses[1, 7:15]).all()


def test_time_of_a_step_is_from_one_to_the_next() -> None:
    at = [0.0, 1.0, 3.0, 4.0, 9.0]
    steps = [Step(OFF, 2, 0.5, at=moment) for moment in at] + [Step(OFF, 1, 0.5, at=50.0)]
    assert seconds_a_step(steps, 2) == 1.5


def test_a_tiny_grid(tmp_path: Path) -> None:
    sizes = "--shape tiny --device cpu --batch 1 3 --verify 2 5 --accept 0.5 1 --context 24 --new 24 --repeats 1"
    result = main(["--out", str(tmp_path), *sizes.split()])
    assert json.loads((tmp_path / "draft_grid_tiny.json").read_text()) == result
    cells = {(c["batch"], c["verify"], c["accept"]): c for c in result["cells"]}
    assert len(cells) == 8 and result["skipped"] == 0
    for (batch, verify, accept), cell in cells.items():
        assert cell["same_rollouts"] == 1.0 and cell["speed_up"] > 0
        assert cell["expected_length"] == expected_length(accept, verify - 1)
        if accept == 1:
            assert cell["accept_length"] == verify, "what is always right is always accepted"
        elif batch == 3:
            assert cell["accept_length"] == pytest.approx(cell["expected_length"], rel=0.35)
    assert table(result).count("\n") == 4
