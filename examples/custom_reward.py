"""Train on your own problems with your own judge, from Python.

python examples/custom_reward.py MODEL_FOLDER
"""

import sys

import whet
from whet.types import Prompt

PROBLEMS = [
    (f"What is {a} + {b}? End with the number.", str(a + b))
    for a in range(2, 30)
    for b in range(2, 30)
]


def last_word_is_right(prompt: Prompt, response: str) -> float:
    """Runs in a worker process: it may raise, hang or crash, and costs its own rollout then."""
    words = response.strip().rstrip(".").split()
    return float(bool(words) and words[-1] == prompt.answer)


if __name__ == "__main__":
    result = whet.train(
        sys.argv[1],
        PROBLEMS,
        reward=last_word_is_right,
        curriculum="dapo",
        settings={"steps": 50, "learn.lr": 1e-6, "rollout.context": 512, "rollout.max_tokens": 128},
    )
    print(f"The trained model is in {result.model}")
