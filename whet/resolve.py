"""A run, checked before anything is started: `check_run` returns a `RunPlan`.

Everything that needs no weights is built here, and whatever is wrong is refused before a run folder is made or a
weight is loaded. Functions that need torch import it, so that a wrong path is found without waiting for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whet import config
from whet.curriculum.base import Curriculum
from whet.curriculum.build import build_curriculum, find_plan, notes_of
from whet.errors import WhetError
from whet.estimate import Imitation, budget_lines, counted, dims_of, estimate_lines, workloads
from whet.findings import machine_of, model_findings, size_up_here
from whet.model.names import check_name
from whet.problems import (
    EncodedPrompts,
    JudgeFunction,
    Problems,
    anchor_paths,
    check_answers,
    check_judges,
    load_problems,
)
from whet.rollout.vllm_fit import check_vllm, drafter_of
from whet.text import Codec
from whet.types import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from whet.learn.samples import Encode
    from whet.model.memory import Finding, Footprint, Room

MEASURED = 64  # worked solutions whose mean length is that of a warm start
SHOWN = 600  # characters of the first prompt that a dry run shows


@dataclass(kw_only=True)
class Basis:
    """What a model, its engine and its learner are built from. A process that has no data needs no more."""

    # with rollout.context, learn.lr and data_folder filled in, and with absolute paths
    settings: config.Config
    codec: Codec
    encoded: Encode
    network: PreTrainedModel  # without weights
    processes: int = 1  # that train it together
    role: str = "both"  # of this process: "worker", which only decodes, "learner", or both
    share: float = 1.0  # of a GPU, which others may use, too

    @cached_property
    def footprint(self) -> Footprint:
        return replace(
            size_up_here(self.network, self.settings), processes=self.processes, role=self.role
        )

    @cached_property
    def room(self) -> Room | None:
        """How rollouts and updates share the memory of a GPU; None on a CPU. A training that cannot fit is refused."""
        import torch

        from whet.model.memory import free_memory

        device = self.footprint.device
        if device.type != "cuda":
            return None
        return self.footprint.room(
            min(free_memory(device) or 0, int(self.share * torch.cuda.mem_get_info(device)[1]))
        )


@dataclass(kw_only=True)
class RunPlan(Basis):
    """A run that is checked and not started: what `check_run` found and built, to be used by one run."""

    problems: Problems
    encoded: EncodedPrompts
    curriculum: Curriculum | None  # None where nothing is trained
    notes: tuple[str, ...]  # sentences for the user, each shown once

    @cached_property
    def imitations(self) -> list[Imitation]:
        """The work of each [[warm_start]] entry, by some of its solutions."""
        works = []
        for entry in self.settings.warm_start:
            pairs = self.problems.solutions(np.random.default_rng(0), MEASURED, entry.options)
            prompts = self.codec.encode_all([prompt for prompt, _ in pairs])
            solutions = [self.codec.encode_response(text) for _, text in pairs]
            tokens = sum(map(len, [*prompts, *solutions])) / len(pairs)
            works.append(Imitation(updates=entry.steps, batch=entry.batch, tokens=tokens))
        return works

    def findings(self, response: float | None = None) -> list[Finding]:
        """Model, path, memory and time on this machine; `response`: its mean tokens, where a run has measured them."""
        prompt = float(self.encoded.train_lengths.mean())
        works = workloads(self.footprint.settings, self.problems, prompt, response)
        machine = machine_of(self.footprint.device)
        dims = dims_of(self.footprint.shape)
        lines = estimate_lines(
            works, dims, machine, known=response is not None, imitations=self.imitations
        )
        return [
            *model_findings(self.network, self.footprint),
            *(("time", line, True) for line in lines),
        ]

    def describe(self, response: float | None = None) -> list[str]:
        """What a run would do, in lines: problems, budget, cost, what the model reads, and what ends a response."""
        problems = self.problems
        codec = self.codec
        r = self.settings.rollout
        lengths = self.encoded.train_lengths
        low, high = np.percentile(lengths, (50, 99))
        stops = ", ".join(f"{number} {token}" for number, token in codec.stop_tokens()) or "none"
        first = codec.render(problems.train.at(0))
        return [
            f"{counted(len(problems.train), 'training prompt')}; "
            + (
                "; ".join(f"{len(p):,} in {name}" for name, p in problems.evals.items())
                or "no evaluation set"
            ),
            *budget_lines(self.settings),
            *(f"{what}: {found}" for what, found, _ in self.findings(response)),
            f"prompts of {low:,.0f} tokens (median), {high:,.0f} (99%), {lengths.max():,} (longest); "
            f"context {r.context:,}",
            f"a response ends at: {stops}" + "".join(f", {text!r}" for text in r.stop_strings),
            f"the first prompt as the model reads it: {first[:SHOWN]!r}"
            + (" ..." if len(first) > SHOWN else ""),
            *self.notes,
        ]


def check_run(
    settings: config.Config, reward: JudgeFunction | None = None, *, training: bool = True
) -> RunPlan:
    """Check a recipe and its data, and fill in what the recipe left to be derived. `reward` judges every prompt."""
    if training and not settings.data:
        raise WhetError("There is nothing to train on: name the problems by [[data]] or --data.")
    find_plan(settings.curriculum.name)
    check_name(settings.model.name)  # before the data, which may come over the network
    settings = anchor_paths(settings)
    settings, vllm_notes = check_vllm(settings)
    problems = load_problems(settings, reward)
    tried = check_judges(settings, problems, given=reward is not None)
    for entry in settings.warm_start:
        problems.solutions(np.random.default_rng(0), 1, entry.options)
    from whet.model.load import check_model, eos_of, load_tokenizer

    network = check_model(settings.model)
    codec = Codec(
        load_tokenizer(settings.model, problems.alphabet), eos_of(settings.model), settings.text
    )
    check_drafter(settings, network or tiny_skeleton(settings, len(codec.tokenizer)))
    encoded = EncodedPrompts(problems, codec)
    problems, left_out = encoded.leave_out_long(problems, settings.text.max_prompt)
    notes = [*vllm_notes, *problems.notes, *check_answers(settings, problems), *tried, *left_out]
    built = None
    if training:  # refuses thresholds, budgets and subsets that cannot be met
        sampling = training_sampling(settings, codec)
        facts = problems.facts()
        built = build_curriculum(
            settings.curriculum, facts=facts, sampling=sampling, seed=settings.seed
        )
        notes += notes_of(settings.curriculum, facts)
    settings, chosen = _with_context(settings, problems, encoded, network)
    notes += chosen
    if training and not settings.learn.lr:
        settings, sentence = _with_lr(settings, network)
        notes.append(sentence)
    return RunPlan(
        settings=settings,
        problems=problems,
        codec=codec,
        encoded=encoded,
        network=network or tiny_skeleton(settings),
        curriculum=built,
        notes=tuple(notes),
    )


def check_drafter(settings: config.Config, network: PreTrainedModel) -> None:
    """Refuse a model that no EAGLE drafter can be made for, and a trained drafter of another model."""
    named = settings.draft.eagle
    if "eagle" not in settings.draft.drafters:
        if named:
            raise WhetError(
                f'draft.eagle = "{named}" has no use: draft.drafters does not name "eagle".'
            )
        return
    from whet.draft.eagle import eagle_head, read_drafter, refuse_undraftable

    refuse_undraftable(network)
    if named or settings.rollout.engine == "vllm":
        read_drafter(drafter_of(settings), eagle_head(network))


def _with_context(
    settings: config.Config,
    problems: Problems,
    encoded: EncodedPrompts,
    network: PreTrainedModel | None,
) -> tuple[config.Config, list[str]]:
    """rollout.context, by default just enough for the longest prompt of each kind with its response, where it fits."""
    r = settings.rollout
    name = settings.model.name
    positions = (
        getattr(network.config, "max_position_embeddings", None) if network is not None else None
    )
    context = r.context
    notes = []
    if not context:
        stages = settings.curriculum.stages
        limits = {entry.name: entry.max_tokens or r.max_tokens for entry in settings.eval}
        wanted = max(encoded.train_lengths, default=0) + max(
            [r.max_tokens, *(stage.max_tokens for stage in stages)]
        )
        for kind, prompts in problems.evals.items():
            longest = max((len(encoded(p.id)) for p in prompts), default=0)
            wanted = max(wanted, longest + limits.get(kind, r.max_tokens))
        context = int(min(wanted, positions or wanted))
        if context < wanted:
            few = f"{name} has {context} positions, fewer than the {wanted} of the longest prompt with its response"
            remedy = "a lower rollout.max_tokens or text.max_prompt avoids it"
            notes.append(f"{few}: such responses are cut there; {remedy}.")
    elif positions and context > positions:
        raise WhetError(
            f"rollout.context = {context} is more than the {positions} positions of {name}; leave it out."
        )
    encoded.refuse_long(context)
    return settings.model_copy(update={"rollout": r.model_copy(update={"context": context})}), notes


def _with_lr(settings: config.Config, network: PreTrainedModel | None) -> tuple[config.Config, str]:
    from whet.learn.optimizer import TINY_MODEL, default_lr
    from whet.model.lora import is_peft_folder

    adapted = settings.model.lora.rank > 0 or is_peft_folder(Path(settings.model.name).expanduser())
    size = (
        sum(p.numel() for p in network.parameters()) if network is not None and not adapted else 0
    )
    learn = settings.learn.model_copy(update={"lr": default_lr(size)})
    trained = (
        f"all {size / 1e6:,.0f}M weights"
        if size > TINY_MODEL
        else "adapters"
        if adapted
        else "a tiny model"
    )
    return settings.model_copy(
        update={"learn": learn}
    ), f"learn.lr = {learn.lr:g}, chosen for {trained}."


def tiny_skeleton(settings: config.Config, vocabulary: int = 64) -> PreTrainedModel:
    """The built-in model without weights; the vocabulary is of about the size that tasks need."""
    import torch

    from whet.model.load import tiny_model
    from whet.model.memory import CONTEXT

    model = settings.model
    context = settings.rollout.context or CONTEXT
    with torch.device("meta"):
        return tiny_model(
            vocabulary, hidden=model.hidden, layers=model.layers, heads=model.heads, context=context
        )


def training_sampling(settings: config.Config, codec: Codec) -> Sampling:
    """No top-k or top-p: the learner could not follow the distribution they leave."""
    return Sampling(
        max_tokens=settings.rollout.max_tokens,
        temperature=settings.rollout.temperature,
        stop_ids=codec.stop_ids,
        stop_strings=settings.rollout.stop_strings,
    )
