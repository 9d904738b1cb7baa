"""CurES inside TRL's RLOOTrainer: prompts are drawn by their estimated pass rates, and get rollouts by their spread.

Groups have different sizes, which stock TRL cannot train on; the table is written as in a recipe's [curriculum].

    pip install "whet[train,trl]"
    python examples/trl_cures.py
"""

import tempfile
from collections import Counter

from datasets import Dataset
from trl import RLOOConfig

from whet.adapters.trl import RLOOTrainer  # plain TRL: from trl import RLOOTrainer
from whet.model.load import tiny_model, tiny_tokenizer

LETTERS = "0123456789+=abcd"
SIZES: Counter[int] = Counter()


def first_letter(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """1 where the completion begins with one of the right letters."""
    return [
        float(text[:1] != "" and text[0] in right)
        for text, right in zip(completions, answer, strict=True)
    ]


class Counted(RLOOTrainer):
    """Counts the sizes of the groups that train."""

    def _next_batch(self):  # type: ignore[no-untyped-def]
        batch = super()._next_batch()
        SIZES.update(len(group.rollouts) for group in batch.groups)
        return batch


def main() -> None:
    rows = [
        {"prompt": f"{i:02d}=", "answer": LETTERS[: (0, 2, 8, 14, 16)[i % 5]]} for i in range(40)
    ]
    tokenizer = tiny_tokenizer(LETTERS)
    config = RLOOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=32,
        num_generations=8,
        gradient_accumulation_steps=2,
        max_completion_length=8,
        max_steps=10,
        learning_rate=1e-3,
        logging_steps=5,
        beta=0.0,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Counted(
        model=tiny_model(len(tokenizer), hidden=32, layers=1, heads=2, context=64),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        reward_funcs=first_letter,
        curriculum={"name": "cures"},  # the new argument, here as a table
    )
    trainer.train()
    print("Groups by their number of rollouts:", dict(sorted(SIZES.items())))


if __name__ == "__main__":
    main()
