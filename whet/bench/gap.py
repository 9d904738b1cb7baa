"""How far recorded log-probs are from those of a teacher-forced forward of the plain model: max, mean and KL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from whet.types import Rollout


@torch.inference_mode()
def log_prob_gap(
    model: PreTrainedModel, prompts: Mapping[str, Sequence[int]], rollouts: Sequence[Rollout]
) -> dict[str, float]:
    """Over all tokens of rollouts at temperature 1, with d = plain - recorded: max |d|, mean |d|, and the mean of
    exp(d) - 1 - d, which estimates KL(engine || plain) as the tokens were drawn by the engine."""
    gaps = []
    for rollout in rollouts:
        assert rollout.trace is not None
        prompt = list(prompts[rollout.prompt_id])
        ids = torch.tensor([prompt + rollout.trace.ids.tolist()], device=model.device)
        logits = model(ids[:, :-1], use_cache=False, logits_to_keep=rollout.length).logits[0].float()
        plain = torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
        gaps.append(plain.double().cpu().numpy() - rollout.trace.log_probs)
    d = np.concatenate(gaps)
    return {
        "tokens": float(d.size),
        "max": float(np.abs(d).max()),
        "mean": float(np.abs(d).mean()),
        "kl": float(np.mean(np.exp(d) - 1 - d)),
    }
