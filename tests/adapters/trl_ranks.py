"""A run with TRL that says what it trained on; as a program, one process of it: python trl_ranks.py FOLDER JSON OUT."""

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    warnings.filterwarnings("ignore")

import torch
from trl_parts import logged, model, trainer

from whet.adapters.trl import GRPOTrainer, RLOOTrainer


def run(folder: Path, plan: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A trainer after its run, and what it did. plan: kind, curriculum, args, resume (a checkpoint), kill (a round in
    whose middle the process kills itself)."""
    kind = {"grpo": GRPOTrainer, "rloo": RLOOTrainer}[plan.get("kind", "grpo")]
    own = {"curriculum": plan["curriculum"], "args": plan.get("args", {})}
    # float64: the same tokens in any company
    trained = trainer(kind, folder, network=model(torch.float64), **own)
    batches: list[list[tuple[str, int]]] = []
    following, judged = trained._next_batch, trained._judged

    def watched() -> Any:
        batch = following()
        batches.append([(group.prompt_id, len(group.rollouts)) for group in batch.groups])
        return batch

    def deadly(rollouts: Any) -> Any:
        if len(batches) == plan.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        return judged(rollouts)

    trained._next_batch, trained._judged = watched, deadly
    trained.train(resume_from_checkpoint=plan.get("resume"))
    found = {
        name: logged(trained, name)
        for name in ("loss", "reward", "rollouts", "completions/max_length")
    }
    total = sum(parameter.double().abs().sum().item() for parameter in trained.model.parameters())
    return trained, {
        **found,
        "batches": batches,
        "weights": total,
        "world": trained.accelerator.num_processes,
    }


if __name__ == "__main__":
    trained, found = run(Path(sys.argv[1]), json.loads(sys.argv[2]))
    if trained.accelerator.is_main_process:
        Path(sys.argv[3]).write_text(json.dumps(found))
