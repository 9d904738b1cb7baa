"""SPEED inside TRL's GRPOTrainer: the import and one argument differ from a script of plain TRL.

Half of the prompts are never solved and a third always. Stock GRPO spends most rollouts on them; SPEED screens each
prompt with four rollouts, and every group that trains has signal.

    pip install "whet[train,trl]"
    python examples/trl_speed.py
"""

import tempfile

from datasets import Dataset
from trl import GRPOConfig

from whet.adapters.trl import GRPOTrainer  # plain TRL: from trl import GRPOTrainer
from whet.model.load import tiny_model, tiny_tokenizer

LETTERS = "0123456789+=abcd"
SHARES = [0, 0, 0, 16, 16, 8]  # letters that are right: none, all, or half of them


def first_letter(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """1 where the completion begins with one of the right letters."""
    return [
        float(text[:1] != "" and text[0] in right)
        for text, right in zip(completions, answer, strict=True)
    ]


def main() -> None:
    rows = [
        {"prompt": f"{i:03d}=", "answer": LETTERS[: SHARES[i % len(SHARES)]]} for i in range(240)
    ]
    tokenizer = tiny_tokenizer(LETTERS)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=32,
        num_generations=16,
        gradient_accumulation_steps=2,
        max_completion_length=8,
        max_steps=5,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=tiny_model(len(tokenizer), hidden=32, layers=1, heads=2, context=64),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        reward_funcs=first_letter,
        curriculum="speed",  # the new argument
    )
    trainer.train()
    spent, trained = trainer.course.rollouts, 4 * config.max_steps
    # One prompt in six has a signal, so stock GRPO would ask six groups for each one that teaches.
    plain = config.num_generations * len(SHARES) / sum(0 < share < len(LETTERS) for share in SHARES)
    print(
        f"{trained} groups trained, all with signal, from {spent} rollouts: {spent / trained:.1f} rollouts per group. "
        f"Stock GRPO needs about {plain:.0f} for each group with signal. The reward that TRL logs is the mean of the "
        "prompts that were trained: always solved ones are left out, so it says little about progress."
    )


if __name__ == "__main__":
    main()
