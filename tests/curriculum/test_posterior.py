from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import SAMPLING, answers, mean_rates

from whet.curriculum.rho import Posterior
from whet.curriculum.source import Ids
from whet.errors import WhetError
from whet.types import Request


def counted(posterior: Posterior, prompt_id: str, letters: str) -> float:
    request = Request(prompt_id=prompt_id, group_id=0, n=len(letters), sampling=SAMPLING)
    posterior.count(answers(request, letters))
    return float(mean_rates(posterior, [prompt_id])[0])


def test_the_posterior_mean() -> None:
    posterior = Posterior(["a", "b"])
    assert counted(posterior, "a", "rrrw") == pytest.approx(2 / 3)
    assert counted(posterior, "a", "rrrrrwww") == pytest.approx(9 / 14)  # 1 + 3 + 5 of 2 + 4 + 8
    assert mean_rates(posterior, ["b", "a"]) == pytest.approx([0.5, 9 / 14])
    means = [counted(Posterior(["x"]), "x", "r" * k + "w" * (4 - k)) for k in range(5)]
    assert means == pytest.approx([1 / 6, 1 / 3, 1 / 2, 2 / 3, 5 / 6])


def test_a_prior_is_fitted_to_the_pass_rates_seen() -> None:
    """2 right of 4 and 0 of 4, and one more prompt of Beta(1/2, 1/2): E[p] = 1/3 and E[p^2] = (3/8 + 1/6) / 3."""
    posterior = Posterior(["a", "b", "c"])
    assert posterior.betas(np.array([2])) == [(0.5, 0.5)]
    counted(posterior, "a", "rrww")
    counted(posterior, "b", "wwww")
    # 0.1528 / 0.0694 = 2.2 in all
    assert posterior.fit_priors()[0] == pytest.approx([2.2 / 3, 2 * 2.2 / 3])
    posterior.fits = True
    posterior.settle()
    prior = np.array([2.2 / 3, 4.4 / 3])
    assert np.array(posterior.betas(np.arange(3))) == pytest.approx(
        np.array([[2, 2], [0, 4], [0, 0]]) + prior
    )


def test_prompts_that_do_not_differ_have_a_narrow_prior() -> None:
    posterior = Posterior([f"p{i}" for i in range(1000)])
    posterior.add(np.arange(1000), np.full(1000, 8.0), np.full(1000, 8.0))
    assert posterior.fit_priors().sum() == pytest.approx(100)


def test_a_level_has_a_prior_of_its_own() -> None:
    """Rates 1/2 and 0 of level 0, nothing of level 1, 3/4 of level 2, an update old, so that it counts 0.9 times."""
    posterior = Posterior("abcd", pooled=True, levels=np.array([0, 0, 1, 2]))
    counted(posterior, "d", "rrrw")
    posterior.now = 1
    counted(posterior, "a", "rrww")
    counted(posterior, "b", "wwww")
    posterior.fits = True
    posterior.settle()
    assert posterior.prior == pytest.approx(2.25 / 5)
    assert posterior.priors == pytest.approx([(0.45 + 0.5) / 3, 0.45, (0.45 + 0.9 * 0.75) / 1.9])
    assert mean_rates(posterior, "ca") == pytest.approx([0.45, (2 * 0.95 / 3 + 2) / 6])
    first = (0.5 + 0.5 + 0.675) / 3.9  # of all prompts
    second = (0.375 + 1 / 6 + 0.9 / 2) / 3.9
    strength = (first - second) / (second - first**2)
    assert posterior.fitted[1] == pytest.approx([first * strength, (1 - first) * strength])
    mine, my_second = (first + 0.5) / 3, (second + 1 / 6) / 3
    assert posterior.fitted[0].sum() == pytest.approx((mine - my_second) / (my_second - mine**2))


def test_no_verdict_is_no_evidence() -> None:
    posterior = Posterior(["a"])
    assert counted(posterior, "a", "uuu") == 0.5
    assert len(posterior.visited) == 0
    assert counted(posterior, "a", "uru") == pytest.approx(2 / 3)


def test_verdicts_count_whatever_the_reward_and_shares_of_one_may() -> None:
    """A shaped reward may lie outside 0..1; evidence does not. Who has half a right answer may say so by `add`."""
    posterior = Posterior(["a"])
    request = Request(prompt_id="a", group_id=0, n=2, sampling=SAMPLING)
    right, wrong = answers(request, "rw")
    posterior.count(
        [replace(right, score=0.995, reward=7.0), replace(wrong, score=0.4, reward=-3.0)]
    )
    assert mean_rates(posterior, ["a"]) == pytest.approx([0.5])
    posterior.add(posterior.ids.rows(["a"]), right=[0.5], wrong=[0.5])
    posterior.add(posterior.ids.rows(["a"]), right=[1.5], wrong=[0.5])
    assert mean_rates(posterior, ["a"]) == pytest.approx([(1 + 1 + 2) / (2 + 2 + 3)])


def test_other_prompts_are_passed_over() -> None:
    posterior = Posterior(["a"])
    request = Request(prompt_id="elsewhere", group_id=0, n=2, sampling=SAMPLING)
    assert len(posterior.count(answers(request, "rr"))) == 0
    assert len(posterior.visited) == 0


def test_evidence_fades_with_updates() -> None:
    """The decay of MoPPS, memory 0.5: (1, 1) -> (5, 5) after 4 of 8, -> (3 + 8, 3) after 8 of 8 one update later."""
    posterior = Posterior(["a", "b"], memory=0.5)
    assert counted(posterior, "a", "rrrrwwww") == 0.5
    posterior.now = 1
    assert counted(posterior, "a", "r" * 8) == pytest.approx(11 / 14)
    posterior.now = 3  # two updates later: (1 + 10 / 4, 1 + 2 / 4)
    assert mean_rates(posterior, ["a", "b"]) == pytest.approx([3.5 / 5, 0.5])


def test_several_calls_in_an_update_fade_once() -> None:
    posterior = Posterior(["a"], memory=0.5)
    counted(posterior, "a", "rr")
    posterior.now = 1
    counted(posterior, "a", "r")
    assert counted(posterior, "a", "w") == pytest.approx((1 + 1 + 1) / (2 + 1 + 2))


@given(
    memory=st.sampled_from([1.0, 0.9, 0.3]),
    events=st.lists(
        st.tuples(st.integers(0, 4), st.text("rwu", min_size=1, max_size=5), st.integers(0, 3))
    ),
    later=st.integers(0, 5),
)
def test_the_state_is_exact(memory: float, events: list[tuple[int, str, int]], later: int) -> None:
    ids = [f"p{i}" for i in range(5)]
    posterior = Posterior(ids, memory)
    for row, letters, passes in events:
        posterior.now += passes
        counted(posterior, ids[row], letters)
    loaded = Posterior(ids, memory)
    loaded.load_state_dict(json.loads(json.dumps(posterior.state_dict())))
    posterior.now += later
    loaded.now += later
    means = posterior.mean(np.arange(5))
    assert (loaded.mean(np.arange(5)) == means).all()
    assert ((means > 0) & (means < 1)).all()


def test_the_state_holds_visited_prompts_alone() -> None:
    ids = [f"p{i}" for i in range(50_000)]
    posterior = Posterior(ids)
    counted(posterior, "p7", "rw")
    assert len(json.dumps(posterior.state_dict())) < 300
    posterior.add(np.arange(50_000), right=np.ones(50_000), wrong=np.ones(50_000))
    assert len(json.dumps(posterior.state_dict())) < 40 * 50_000  # a million prompts take 40 MB


def test_other_prompts_are_refused() -> None:
    with pytest.raises(WhetError, match="other prompts than the 2 given now"):
        Posterior(["a", "b"]).load_state_dict(Posterior(["a", "c"]).state_dict())


def test_clear_forgets() -> None:
    posterior = Posterior(["a"])
    counted(posterior, "a", "rr")
    posterior.clear()
    assert mean_rates(posterior, ["a"]).tolist() == [0.5]


def test_a_later_stage_inherits_half_the_evidence_on_the_prompts_it_has() -> None:
    """3 right of 4 for "b": (1 + 1.5) / (2 + 2) = 0.625; what is not here, or was not seen there, is as ever."""
    ids = Ids(["a", "b", "c", "d"])
    old = Posterior(ids.some(np.array([0, 1, 3])))
    counted(old, "a", "wwww")
    counted(old, "b", "rrrw")
    old.now = 7
    new = Posterior(ids.some(np.array([1, 2, 3])))
    new.inherit(old)
    assert mean_rates(new, ["b", "c", "d"]) == pytest.approx([0.625, 0.5, 0.5])
    assert new.now == 7 and new.visited.tolist() == [0]
    whole = Posterior(ids)
    whole.inherit(old)
    assert mean_rates(whole, ["a", "b"]) == pytest.approx([0.25, 0.625])


def test_a_pooled_prior_by_hand() -> None:
    """Rates 3/4 and 0 of two prompts: m = (1 + 0.75) / 4; it moves when `settle` is called."""
    posterior = Posterior(["a", "b", "c"], pooled=True)
    assert mean_rates(posterior, "abc").tolist() == [0.5] * 3
    posterior.add(posterior.ids.rows("ab"), right=[3, 0], wrong=[1, 8])
    assert posterior.prior == 0.5
    posterior.settle()
    assert posterior.prior == 0.4375
    np.testing.assert_allclose(mean_rates(posterior, "abc"), [(0.875 + 3) / 6, 0.875 / 10, 0.4375])
    again = Posterior(["a", "b", "c"], pooled=True)
    again.load_state_dict(json.loads(json.dumps(posterior.state_dict())))
    assert (
        again.prior == 0.4375
        and mean_rates(again, "abc").tolist() == mean_rates(posterior, "abc").tolist()
    )
    again.clear()
    assert again.prior == 0.5


def test_the_paper_s_prior_stays_where_it_is() -> None:
    posterior = Posterior(["a", "b"])
    posterior.add(posterior.ids.rows("a"), right=[0], wrong=[8])
    posterior.settle()
    assert posterior.prior == 0.5
