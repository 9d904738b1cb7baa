import itertools

import pytest

from whet.eval import EvalSet, eval_metrics, pass_at_k
from whet.types import Prompt, Rollout, Sampling

SAMPLING = Sampling(max_tokens=8)


def rollout(group: int, index: int, verdict: str, length: int = 4, finish: str = "stop") -> Rollout:
    return Rollout(
        prompt_id=str(group), group_id=group, index=index, phase="eval", sampling=SAMPLING, length=length,
        finish=finish, first_version=0, last_version=0, verdict=verdict,  # type: ignore[arg-type]
    )  # fmt: skip


def test_hand_counted_set() -> None:
    prompts = tuple(Prompt(id=str(i), text="x", answer="1", task="t", meta={"level": i // 2}) for i in range(4))
    eval_set = EvalSet(name="s", prompts=prompts, n=2, sampling=SAMPLING, every=1)
    verdicts = ["right", "right", "right", "wrong", "wrong", "unjudged", "wrong", "wrong"]
    rollouts = [
        rollout(i // 2, i % 2, v, length=i, finish="length" if i == 7 else "stop") for i, v in enumerate(verdicts)
    ]
    metrics = eval_metrics(eval_set, rollouts)
    assert metrics["eval/s/accuracy"] == 3 / 8
    assert metrics["eval/s/pass@2"] == 0.5
    assert metrics["eval/s/level/0"] == 0.75 and metrics["eval/s/level/1"] == 0.0
    assert (
        metrics["eval/s/length"] == 3.5 and metrics["eval/s/truncated"] == 1 / 8 and metrics["eval/s/unjudged"] == 1 / 8
    )


@pytest.mark.parametrize(("n", "right", "k"), [(4, 1, 2), (5, 2, 3), (6, 0, 4), (6, 6, 1), (5, 4, 2)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n: int, right: int, k: int) -> None:
    subsets = list(itertools.combinations([True] * right + [False] * (n - right), k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))
