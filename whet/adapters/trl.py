"""TRL's GRPOTrainer and RLOOTrainer with a curriculum: `from whet.adapters.trl import GRPOTrainer`.

TRL asks for the rows of a generation batch in `_generate_and_score_completions`. Here the curriculum is asked instead:
it plans requests, an engine answers them, TRL's own `_calculate_rewards` judges them, and the batch that the curriculum
emits becomes the rows that TRL scores, logs and trains on. Its tokens are handed out by `_generate_single_turn`, its
rewards by `_calculate_rewards`, so that no reward function is called twice. Every rank plays the same curriculum on
the verdicts of all ranks; only requests and judging are divided. Evaluation stays TRL's.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from whet import config
from whet.adapters.course import ADVANTAGES, Course, Row, parts, row_factors, rows_of, with_reward
from whet.curriculum.build import resets_of
from whet.curriculum.stages import named_in
from whet.errors import Starved, WhetError, WrongArgument
from whet.fast.fused import share_storage
from whet.fast.graphs import GraphRunners
from whet.model.twin import changed
from whet.recipe import parse_config
from whet.rollout.engine import LocalEngine
from whet.types import Batch, Request, Rollout, Sampling, Trace

WANTED = "whet.adapters.trl needs TRL 1.15 or 1.16"
try:
    import trl
    from accelerate.utils import gather, gather_object
    from datasets import Dataset
    from transformers import Trainer, TrainerCallback
    from trl.chat_template_utils import parse_response
    from trl.data_utils import is_conversational
    from trl.trainer.grpo_trainer import GRPOTrainer as StockGRPO
    from trl.trainer.rloo_trainer import RLOOTrainer as StockRLOO
    from trl.trainer.utils import is_async_callable
except ImportError as error:
    raise WhetError(
        f'{WANTED}, and importing it failed: {error}; pip install "whet[trl]".'
    ) from error

HINT = 'set engine="trl"'
LEAST_SCREENING = 2  # rollouts of a screening: fewer cannot be right and wrong
BY_THEMSELVES = {
    "tools": "are called while a completion is written",
    "rollout_func": "writes completions by itself",
    "environment_factory": "writes completions by itself",
}
# losses that are a mean over rows; the others are over tokens
BY_ROW = {"grpo", "sapo", "dr_grpo", "luspo", "rloo"}
USED = {  # methods of TRL that are overridden or called, with their leading arguments
    "_generate_and_score_completions": ("inputs",),
    "_generate_single_turn": ("prompt_ids", "images", "multimodal_fields"),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_tokenize_prompts": ("prompts",),
    "_save_checkpoint": ("model", "trial"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
}


def check_version(version: str, trainers: Sequence[type]) -> None:
    """Refuse another TRL than the two that this was written for, or one whose methods were changed."""
    if version.split(".")[:2] not in (["1", "15"], ["1", "16"]):
        raise WhetError(f"{WANTED}, and {version} is installed.")
    for trainer in trainers:
        for name, wanted in USED.items():
            method = getattr(trainer, name, None)
            found = tuple(inspect.signature(method).parameters)[1:] if method else ()
            if found[: len(wanted)] != wanted:
                there = f"{trainer.__name__}.{name} takes ({', '.join(found)}) in place of ({', '.join(wanted)}, ...)"
                raise WhetError(f"{WANTED}, and in this one ({version}) {there}.")


check_version(trl.__version__, (StockGRPO, StockRLOO))


# ---- what the trainers are given


def settings_of(
    curriculum: str | Mapping[str, Any] | None, rollouts: int, groups: int
) -> config.CurriculumSettings:
    """The settings of a name or a table like [curriculum]; what TRL's config says is refused there."""
    if curriculum is None:
        curriculum = "speed" if rollouts > LEAST_SCREENING else "dapo"
    table: dict[str, Any] = (
        {"name": curriculum} if isinstance(curriculum, str) else dict(curriculum)
    )
    for name, theirs in (
        ("rollouts", "num_generations"),
        ("groups", "generation_batch_size / num_generations"),
    ):
        if name in table:
            raise WrongArgument(f"curriculum.{name} is {theirs} of TRL's config; leave it out.")
    if table.get("name") in config.SCREENING:
        table["speed"] = screening_of(dict(table.get("speed") or {}), rollouts)
    settings = parse_config(
        {"curriculum": {**table, "rollouts": rollouts, "groups": groups}}
    ).curriculum
    alone = (
        "groups",
        "rollouts",
        "minibatches",
        "temperature",
        "kl_coef",
        "entropy_coef",
        "reset_optimizer",
    )
    if given := [name for stage in settings.stages for name in named_in(stage, alone)]:
        raise WrongArgument(
            f"A stage sets {given[0]}, which TRL takes from its config alone; leave it out."
        )
    return settings


def screening_of(speed: dict[str, Any], rollouts: int) -> dict[str, Any]:
    """The table [curriculum.speed], whose screening must leave some rollouts of a group to continue."""
    if rollouts <= LEAST_SCREENING:
        raise WrongArgument(
            f'num_generations = {rollouts} leaves none to screen with; use curriculum="dapo".'
        )
    wanted = speed.get("n_init")
    if wanted is None:
        usual = config.SpeedSettings().n_init
        return {**speed, "n_init": max(LEAST_SCREENING, min(usual, rollouts // 2))}
    if isinstance(wanted, int) and wanted >= rollouts:
        raise WrongArgument(
            f"speed.n_init = {wanted} leaves none to continue: num_generations = {rollouts}."
        )
    return speed


@contextmanager
def judging(name: str) -> Iterator[None]:
    """Turn what a reward function raises into one sentence."""
    try:
        yield
    except WhetError:
        raise
    except Exception as error:
        raise WrongArgument(
            f"The reward function {name} failed with {type(error).__name__}: {error}."
        ) from error


def guarded(function: Any, name: str) -> Any:
    """The same reward function; an exception, or a number that is not finite, becomes one sentence. None stays None."""

    def finite(values: Any) -> list[float | None]:
        values = list(values)
        if wrong := [value for value in values if value is not None and not math.isfinite(value)]:
            raise WrongArgument(
                f"The reward function {name} gave {wrong[0]}; give None for what cannot be judged."
            )
        return values

    async def awaited(**columns: Any) -> list[float | None]:
        with judging(name):
            return finite(await function(**columns))

    def called(**columns: Any) -> list[float | None]:
        with judging(name):
            return finite(function(**columns))

    if isinstance(function, torch.nn.Module):
        return function
    return awaited if is_async_callable(function) else called


class Rounds(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Lets a save in the middle of a generation round wait for its end, and notices an adapter that was bypassed."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.owed = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.trainer.played:
            raise WrongArgument(
                f"{type(self.trainer).__name__} trained a step without its curriculum: it was bypassed."
            )
        over = self.trainer._step % (args.steps_per_generation * self.trainer.num_iterations) == 0
        self.owed |= control.should_save
        control.should_save = self.owed and (over or state.global_step >= state.max_steps)
        self.owed &= not control.should_save


# ---- the trainers


class CurriculumTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """What both trainers have in common; it comes before TRL's class among the bases."""

    rloo = False  # which of the two it is

    def __init__(
        self,
        *args: Any,
        curriculum: str | Mapping[str, Any] | None = None,
        engine: Literal["whet", "trl"] = "whet",
        pass_at: float = config.JudgeSettings().pass_at,
        **kwargs: Any,
    ) -> None:
        """curriculum: a name of `whet list`, or a table like [curriculum]; None is speed, or dapo for groups of two.
        engine: "whet" decodes on the trainer's own weights, "trl" as TRL's config says.
        pass_at: a completion whose reward reaches this is right."""
        if engine not in ("whet", "trl"):
            raise WrongArgument(f'engine = "{engine}" is unknown; it is "whet" or "trl".')
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        for name, what in BY_THEMSELVES.items():
            if given.get(name) is not None:
                raise WrongArgument(
                    f"{name} {what}, which no curriculum can ask for; leave it out."
                )
        data = given.get("train_dataset")
        if data is None:
            super().__init__(*args, **kwargs)  # which refuses that in TRL's own words
        if not isinstance(data, Dataset):
            raise WrongArgument(
                f"A curriculum sees all rows: train_dataset is a datasets.Dataset, not {type(data).__name__}."
            )
        if pictures := {"image", "images"} & set(data.column_names):
            raise WrongArgument(
                f"The training data has a column {pictures.pop()}; curricula are for text alone."
            )
        if engine == "whet" and getattr(given.get("args"), "use_vllm", False):
            raise WrongArgument(
                f'use_vllm=True and engine="whet" are two engines; {HINT} or leave use_vllm out.'
            )
        super().__init__(*args, **kwargs)
        self.played = 0
        self.pass_at = pass_at
        self.has_verdict = False  # whether any reward function has given a number
        self.world, self.rank = self.accelerator.num_processes, self.accelerator.process_index
        # rows of a rank
        self.at_once = self.args.per_device_train_batch_size * self.args.steps_per_generation
        # rows that TRL scores now, and which are this rank's
        self.serving: tuple[list[Row], slice] | None = None
        settings = settings_of(
            curriculum, self.num_generations, self.at_once * self.world // self.num_generations
        )
        if engine == "trl" and not self.use_vllm and settings.max_age is None:
            # generate gives no log-probs, which age needs
            settings = settings.model_copy(update={"max_age": 0})
        self._refuse(settings, engine)
        limit = self.max_completion_length
        top_k = self.top_k or 0
        stop = tuple(self.eos_token_ids)
        drawn = Sampling(
            max_tokens=limit,
            temperature=self.temperature,
            top_k=top_k,
            top_p=self.top_p,
            stop_ids=stop,
        )
        self.course = Course(data, settings, drawn, self.args.seed)
        if missing := self.course.curriculum.needs:
            raise WrongArgument(
                f"The curriculum {settings.name} needs {', '.join(missing)}, which TRL does not give."
            )
        self.reward_funcs: list[Any] = list(map(guarded, self.reward_funcs, self.reward_func_names))
        self.terms = [f"{number} {name}" for number, name in enumerate(self.reward_func_names)]
        self.engine = self._build_engine() if engine == "whet" else None
        self.add_callback(Rounds(self))

    def _refuse(self, settings: config.CurriculumSettings, engine: str) -> None:
        """Refuse what TRL or the engine cannot follow, before the first step."""
        if (
            getattr(self, "multi_objective_aggregation", "sum_then_normalize")
            != "sum_then_normalize"
        ):
            raise WrongArgument(
                "multi_objective_aggregation = normalize_then_sum needs groups of one size; leave it out."
            )
        for name, optimizer in resets_of(settings):
            if optimizer:
                raise WrongArgument(
                    f"curriculum.{name} resets reference and optimiser, which TRL cannot do; leave it out."
                )
            if self.beta:
                raise WrongArgument(
                    "TRL cannot reset its reference where a stage begins; set reset_reference = false."
                )
        if engine == "trl":
            if settings.max_age and not self.use_vllm:
                raise WrongArgument(
                    'curriculum.max_age needs log-probs, which generate does not give; set engine="whet".'
                )
            return
        deepspeed = self.accelerator.state.deepspeed_plugin
        if self.is_fsdp_enabled or (deepspeed is not None and deepspeed.zero_stage == 3):
            raise WrongArgument(
                f'engine="whet" needs whole weights; FSDP and DeepSpeed 3 divide them: {HINT}.'
            )
        neutral: dict[str, Any] = {"min_p": 0.0, "repetition_penalty": 1.0, "generation_kwargs": {}}
        neutral |= {"cast_lm_head_to_fp32": False, "use_transformers_continuous_batching": False}
        for name, fine in neutral.items():
            if getattr(self.args, name, None) not in (None, fine):
                raise WrongArgument(
                    f'engine="whet" does not know {name}; {HINT} or leave {name} out.'
                )

    # ---- the methods in which TRL asks for rows, their tokens and their rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        course = self.course
        course.progress = min(1.0, self.state.global_step / max(1, self.state.max_steps))
        batch = self._next_batch()
        rows = rows_of(batch, self.world * self.args.steps_per_generation)
        each = len(rows) // self.world
        own = slice(self.rank * each, (self.rank + 1) * each)
        # TRL would reshape the rows to groups of one size. As one single group they keep their rewards' differences.
        meanwhile: list[tuple[str, Any]] = [
            ("num_generations", len(rows)),
            ("serving", (rows, own)),
        ]
        meanwhile += [("normalize_advantages", False)] if self.rloo else []
        with changed(*((self, name, value) for name, value in meanwhile)):
            out = super()._generate_and_score_completions(
                [course.row(row.rollout.prompt_id) for row in rows[own]]
            )
        self._weigh(out, batch, rows, own)
        self._use_own_log_probs(out, rows[own])
        course.updated()
        self.played += 1
        counted = {"rollouts": course.rollouts, "tokens_generated": course.tokens}
        for name, value in (course.curriculum.metrics() | counted).items():
            self._metrics["train"][name].append(value)
        return out

    def _generate_single_turn(self, prompt_ids: Any, images: Any, *rest: Any, **named: Any) -> Any:
        if self.serving is None:
            return super()._generate_single_turn(prompt_ids, images, *rest, **named)
        rows, own = self.serving
        traces: list[Any] = [row.rollout.trace for row in rows[own]]
        ids = [trace.ids.tolist() for trace in traces]
        log_probs = [trace.log_probs.tolist() for trace in traces]
        return (
            ids
            if self.rloo
            else (ids, log_probs if self.engine is not None or self.use_vllm else None)
        )

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Any:
        if self.serving is None:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        rows, own = self.serving
        extras = [self.course.extras.get(row.rollout.key, {}) for row in rows]
        for column in {column for extra in extras for column in extra}:
            self._pending_extra_logs[column] = [extra.get(column) for extra in extras[own]]
        table = [[row.rollout.terms.get(name, math.nan) for name in self.terms] for row in rows]
        return torch.tensor(table, dtype=torch.float32, device=self.accelerator.device)

    # ---- what TRL returned, made right for groups of any size

    def _weigh(self, out: dict[str, Any], batch: Batch, rows: list[Row], own: slice) -> None:
        """Advantages by group, rows of weight 0 that weigh nothing, and the table and the share that TRL logs."""
        owner = np.array([row.group for row in rows])
        real = owner >= 0
        if self.rloo:
            # The rewards with TRL's clipping and KL penalty, but for a constant that every advantage takes away: over
            # one group of n rewards TRL's advantage is r_i - (S - r_i) / (n - 1) = (n r_i - S) / (n - 1).
            rewards = gather(out["advantages"]).double().cpu().numpy() * (
                1 - 1 / max(1, real.sum())
            )
        else:
            rewards = np.array([row.rollout.reward or 0.0 for row in rows])
        groups = [rewards[owner == number] for number in range(len(batch.groups))]
        found = ADVANTAGES[self.normalize_advantages if self.rloo else self.scale_rewards](groups)
        factors = row_factors(batch.groups, len(rows), self.rloo or self.loss_type in BY_ROW)
        advantages = np.zeros(len(rows))
        weighed = np.zeros(len(rows))
        for number, of_group in enumerate(found):
            advantages[owner == number], weighed[owner == number] = (
                of_group,
                of_group * factors[number],
            )
        out["advantages"] = torch.as_tensor(weighed[own]).to(out["advantages"])
        mask = out["completion_mask"]
        mask *= torch.as_tensor(real[own]).to(mask.device)[:, None]
        if self.rloo:
            out["old_logps"] = out["old_logps"] * mask[:, 0]
        else:
            out["num_items_in_batch"] = gather(mask.sum()).sum()
        logged = self._logs["advantages"]
        for _ in range(min(len(rows), len(logged))):
            logged.pop()
        logged.extend(advantages.tolist())
        flat = sum(group.size for group in groups if group.size and group.min() == group.max())
        self._metrics["train"]["frac_reward_zero_std"][-1] = flat / max(1, int(real.sum()))

    def _use_own_log_probs(self, out: dict[str, Any], rows: Sequence[Row]) -> None:
        """Tokens of older weights, and rows that several updates use, need the log-probs under which they were drawn:
        TRL would take stale tokens for on-policy ones. Rows of one update by the weights of now need none."""
        several = (
            self.args.gradient_accumulation_steps
            % (self.args.steps_per_generation * self.num_iterations)
            != 0
        )
        stale = any(row.rollout.first_version < self.course.rounds for row in rows)
        if self.engine is None or not (several or any(gather_object([stale]))):
            return
        if self.rloo:
            drawn = [
                row.rollout.trace.log_probs.sum() for row in rows if row.rollout.trace is not None
            ]
            out["old_logps"] = (
                torch.tensor(drawn).to(out["old_logps"]) * out["completion_mask"][:, 0]
            )
        else:
            out["old_per_token_logps"] = out["sampling_per_token_logps"]

    # ---- the loop: plan, generate, judge, observe, until the curriculum emits a batch

    def _next_batch(self) -> Batch:
        course = self.course
        still = 0
        if self.engine is not None:
            # the weights are the trainer's: only the version moves
            self.engine.update(course.rounds)
        while (batch := self._emitted()) is None:
            asked = course.curriculum.plan(course.clock)
            finished = {
                rollout.key: rollout for rollout in reversed(gather_object(self._rollouts(asked)))
            }
            course.observe(self._judged([finished[key] for key in sorted(finished)]))
            still = 0 if asked else still + 1
            # `plan` may lead a curriculum to apply its starvation policy at the next `emit`
            if still == 2:
                remedy = 'set starvation = "relax" or "partial" in curriculum=, or lower generation_batch_size'
                raise Starved(f"The curriculum asks for nothing and no batch is full; {remedy}.")
        if batch.reset_optimizer or (batch.reset_reference and self.beta and course.rounds):
            raise WrongArgument(
                "The curriculum wants reference or optimiser reset, which TRL cannot do within a run."
            )
        return course.store.attach(batch)

    def _emitted(self) -> Batch | None:
        """The curriculum's next batch. A curriculum starves where the reward functions never give a number."""
        try:
            return self.course.curriculum.emit(self.course.clock)
        except Starved as error:
            if self.has_verdict:
                raise
            raise WrongArgument(
                f"No reward function gave a number for any of the {self.course.rollouts} completions so far: each gave "
                "None. Return a number for what can be judged."
            ) from error

    def _rollouts(self, asked: Sequence[Request]) -> list[Rollout]:
        """The rollouts of this rank's share of the requests."""
        if self.engine is not None:
            self.engine.submit(asked[self.rank :: self.world])
            return list(self.engine.collect())
        out: list[Rollout] = []
        for limit in sorted({request.sampling.max_tokens for request in asked}):
            wanted = [
                (r, r.first_index + k)
                for r in asked
                if r.sampling.max_tokens == limit
                for k in range(r.n)
            ]
            for _, own in parts(wanted, self.at_once, self.rank, self.world):
                out += self._rollouts_by_trl(own, limit)
        return out

    def _rollouts_by_trl(
        self, wanted: Sequence[tuple[Request, int]], limit: int
    ) -> Iterator[Rollout]:
        """One call of TRL's generation, as its config says, with this limit of new tokens."""
        holder = self.generation_config
        name = "max_new_tokens"
        if self.use_vllm:
            holder = self.vllm_generation
            name = "max_completion_length"
        ids = self._tokenize_prompts(
            [self.course.row(request.prompt_id)["prompt"] for request, _ in wanted]
        )[0]
        with changed((holder, name, limit), (self, "num_generations", 1)):
            # 1: num_generations
            drawn = super()._generate_single_turn(ids, None, {}, *(() if self.rloo else (1,)))
        texts, log_probs = (drawn, None) if self.rloo else drawn
        version = self.course.rounds
        for number, (request, index) in enumerate(wanted):
            tokens = np.array(texts[number], np.int32)
            # None becomes NaN
            known = np.array(log_probs[number] if log_probs else [None] * tokens.size, np.float32)
            yield Rollout.of(
                request,
                index,
                length=tokens.size,
                finish="stop" if tokens[-1] in self.eos_token_ids else "length",
                first_version=version,
                last_version=version,
                trace=Trace(
                    ids=tokens, log_probs=known, versions=np.full(tokens.size, version, np.int32)
                ),
            )

    def _judged(self, rollouts: list[Rollout]) -> list[Rollout]:
        """All of these with their rewards. Each rank calls the reward functions for its share, and TRL gathers them."""
        out = []
        for part, own in parts(rollouts, self.at_once, self.rank, self.world):
            rows = [self.course.row(r.prompt_id) for r in own]
            ids = [r.trace.ids.tolist() for r in own]
            prompts = [row["prompt"] for row in rows]
            scores = super()._calculate_rewards(rows, prompts, self._completions(prompts, ids), ids)
            totals = (scores * self.reward_weights.to(scores.device)).nansum(1).double().tolist()
            extras = gather_object(self._extras(len(own)))
            for rollout, terms, total, extra in zip(
                part, scores.double().tolist(), totals, extras, strict=False
            ):
                self.course.extras |= {rollout.key: extra} if extra else {}
                known = {
                    name: term
                    for name, term in zip(self.terms, terms, strict=True)
                    if not math.isnan(term)
                }
                out.append(with_reward(rollout, known, total, self.pass_at))
                self.has_verdict = self.has_verdict or bool(known)
        return out

    def _extras(self, rows: int) -> list[dict[str, Any]]:
        """What the reward functions wrote by log_extra, by row. It is logged with the rows that train."""
        full = {
            column: values
            for column, values in self._pending_extra_logs.items()
            if len(values) == rows
        }
        self._pending_extra_logs.clear()
        return [{column: values[row] for column, values in full.items()} for row in range(rows)]

    def _completions(self, prompts: list[Any], ids: list[list[int]]) -> list[Any]:
        """Texts, or messages where the prompts are messages, as TRL hands them to reward functions."""
        chat = is_conversational({"prompt": prompts[0]})
        tokenizer = self._tokenizer
        described = getattr(tokenizer, "response_template", None) or getattr(
            tokenizer, "response_schema", None
        )
        if chat and described is not None and not self.rloo:  # RLOO does not parse responses
            begun = self._tokenize_prompts(prompts)[0]
            return [
                [parse_response(tokenizer, own, prefix=begun[i], tools=[])]
                for i, own in enumerate(ids)
            ]
        texts: list[str] = self.processing_class.batch_decode(ids, skip_special_tokens=True)
        return [[{"role": "assistant", "content": text}] for text in texts] if chat else texts

    # ---- whet's engine, and the checkpoint

    def _build_engine(self) -> Any:
        """A `LocalEngine` on the trainer's own Parameters; what it refuses is refused before the first step."""
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        encoded: dict[str, Any] = {}
        for names, _ in parts(self.course.ids, 1000):
            ids = self._tokenize_prompts([self.course.row(name)["prompt"] for name in names])[0]
            encoded |= {
                name: np.asarray(own, np.int32) for name, own in zip(names, ids, strict=True)
            }
        if on_gpu := model.device.type == "cuda":
            share_storage(model)  # the last time that weights move: the optimiser is made later
        longest = max(own.size for own in encoded.values())
        try:
            engine = LocalEngine(
                model,
                encode=encoded.__getitem__,
                decode=self._tokenizer.decode,
                seed=self.args.seed,
                slots=max(config.RolloutSettings().slots, self.at_once),
                context=longest + self.max_completion_length,
                runners=GraphRunners() if on_gpu else None,
            )
            engine.begin()
        except WhetError as error:  # a model that whet's engine cannot serve
            raise WrongArgument(f"{str(error).rstrip('.')}; {HINT}.") from error
        return engine

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.args.should_save:  # first, so that a checkpoint which TRL completed never lacks it
            self.course.save(
                Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            )
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.course.load(Path(checkpoint))


class GRPOTrainer(CurriculumTrainer, StockGRPO):  # type: ignore[misc, unused-ignore]
    """`trl.GRPOTrainer` with `curriculum=` and `engine=`; every other argument is TRL's."""


class RLOOTrainer(CurriculumTrainer, StockRLOO):  # type: ignore[misc, unused-ignore]
    """`trl.RLOOTrainer` with `curriculum=` and `engine=`; every other argument is TRL's."""

    rloo = True
