"""A curriculum of your own in a dozen lines, put through the contract, then trained with.

python examples/custom_curriculum.py
"""

from whet.curriculum.gate import Admission, Gate
from whet.curriculum.source import UniformSource
from whet.testing import check_contract
from whet.types import Group, Sampling


class Band(Gate):
    """Trains only on groups of medium difficulty."""

    def admit(self, group: Group) -> Admission:
        return "keep" if 0.2 <= group.pass_rate <= 0.8 else "drop"


def main() -> None:
    check_contract(
        lambda ids, seed: Band(
            UniformSource(ids, seed), sampling=Sampling(max_tokens=32), rollouts=4, max_age=1
        ),
        rollouts=4,
        max_age=1,
    )
    print("Band keeps the curriculum contract.")

    import whet

    # The same name works in a recipe (curriculum.name) and for `whet train --curriculum` in this folder.
    settings = {
        "steps": 3,
        "curriculum.groups": 4,
        "curriculum.starvation": "partial",
        "warm_start.steps": 150,
    }
    result = whet.train("tiny", curriculum="custom_curriculum:Band", settings=settings, quiet=True)
    dropped = result.metrics[-1]["curriculum/rejected_hard"]
    print(f"Three steps in {result.folder}; {dropped:.0f} groups were too hard and dropped.")


if __name__ == "__main__":
    main()
