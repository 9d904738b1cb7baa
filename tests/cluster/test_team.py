"""Learners that train together: two or three processes over gloo take the steps of one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from team_run import CASES, MIXED, encode, gives_up, make_batch, taught, trained

from whet.learn.base import Team, share_of
from whet.learn.losses import ESTIMATORS
from whet.learn.samples import make_samples

SCRIPT = Path(__file__).parent / "team_run.py"
pytestmark = pytest.mark.filterwarnings("ignore:larger groups weigh more")


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def teams(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank of a team found, for all cases."""
    folder, size = tmp_path_factory.mktemp("team"), request.param
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    starts = [
        [sys.executable, str(SCRIPT), str(rank), str(size), str(folder)] for rank in range(size)
    ]
    processes = [
        subprocess.Popen(start, env=own, stderr=subprocess.PIPE, text=True) for start in starts
    ]
    said = [process.communicate()[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.parametrize("case", CASES)
def test_a_team_takes_the_steps_of_one_learner(case: str, teams: list[dict[str, Any]]) -> None:
    alone = trained(case)
    # packs of other sizes round differently, and later updates follow that
    rough = case == "half precision"
    close = {"rtol": 0.05, "atol": 0.05} if rough else {"rtol": 1e-8, "atol": 1e-10}
    for member in (found[case] for found in teams):
        for mine, theirs in list(zip(alone["metrics"], member["metrics"], strict=True))[
            : 1 if rough else None
        ]:
            assert mine.keys() == theirs.keys()
            for name in mine:
                np.testing.assert_allclose(theirs[name], mine[name], err_msg=name, **close)
        for mine, theirs in list(zip(alone["signals"], member["signals"], strict=True))[
            : 1 if rough else None
        ]:
            assert [tuple(key) for key, _ in theirs] == [key for key, _ in mine]
            np.testing.assert_allclose(
                [value for _, value in theirs], [value for _, value in mine], **close
            )
        assert member["state"] == alone["state"]
        for name, weights in alone["weights"].items():
            np.testing.assert_allclose(member["weights"][name], weights, err_msg=name, **close)
    assert all(found[case]["weights"] == teams[0][case]["weights"] for found in teams), (
        "one model, bit for bit"
    )
    if case == "not finite":
        assert alone["state"]["skipped"] == 1


def test_a_team_is_taught_as_one_learner(teams: list[dict[str, Any]]) -> None:
    alone = taught()
    for member in (found["warm start"] for found in teams):
        np.testing.assert_allclose(member["losses"], alone["losses"], rtol=1e-10)
        for name, weights in alone["weights"].items():
            np.testing.assert_allclose(member["weights"][name], weights, rtol=1e-8, atol=1e-10)
        assert member["weights"] == teams[0]["warm start"]["weights"]


@pytest.mark.filterwarnings("ignore:LlamaForCausalLM is trained without")
def test_what_one_learner_gives_up_all_give_up(teams: list[dict[str, Any]]) -> None:
    """Compiled forms, graphs that hold memory, and packs of the full size; the numbers stay."""
    alone = gives_up()
    for member in (found["gives up"] for found in teams):
        assert [row[:2] for row in member] == [
            ["whole", True],
            ["", True],
            ["", False],
            ["", False],
        ]
        assert [row[3] for row in member] == [0, 0, 1, 2] and member[3][2] < member[2][2]
        assert member == teams[0]["gives up"]
        np.testing.assert_allclose([row[4] for row in member], [row[4] for row in alone], rtol=1e-8)


def test_groups_stay_whole_and_shares_are_even() -> None:
    samples, _ = make_samples(make_batch(MIXED * 5), encode, ESTIMATORS["grpo"], "batch_tokens")
    ranks = share_of(samples, 4)
    groups = {sample.key[0]: rank for sample, rank in zip(samples, ranks, strict=True)}
    assert all(groups[sample.key[0]] == rank for sample, rank in zip(samples, ranks, strict=True))
    loads = [
        sum(s.response.size for s, rank in zip(samples, ranks, strict=True) if rank == one)
        for one in range(4)
    ]
    assert max(loads) < 1.5 * min(loads)
    assert Team().divide(samples) is samples


def test_the_shares_of_all_ranks_are_the_whole() -> None:
    samples, _ = make_samples(make_batch(MIXED), encode, ESTIMATORS["grpo"], "batch_tokens")

    class Fourth(Team):
        size = 4

        def __init__(self, rank: int) -> None:
            self.rank = rank

    shares = [Fourth(rank).divide(samples) for rank in range(4)]
    assert sorted(s.key for share in shares for s in share) == sorted(s.key for s in samples)
    assert all(share == [s for s in samples if s in share] for share in shares), "in their order"
