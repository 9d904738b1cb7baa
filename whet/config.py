"""Every setting of a run on one page. `recipe.py` reads them from TOML, and `whet list` prints them.

Sections are pydantic models that are frozen after reading. A value that can be derived is not a field. A [[table]] with
one entry may be written as a [table]. EVERYDAY names the settings that most users meet; the others are for experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

MOST = 10**12  # larger whole numbers are slips of the keyboard
SCREENING = ("speed", "all")  # curricula that screen prompts before they generate their groups
HELD_OUT = "held_out"  # name of the evaluation set that chooses the best checkpoint
# The settings that `whet list` shows; `whet list --all` shows every one.
_EVERYDAY = """
seed steps token_budget time_budget model.name model.dtype model.device model.lora.rank
text.system_prompt text.prompt_suffix data.path data.task data.split data.columns data.limit data.reward data.weight
eval.path eval.name eval.n eval.temperature eval.max_tokens eval.every held_out.size held_out.every
reward.name reward.weight warm_start.steps warm_start.batch warm_start.lr
rollout.mode rollout.slots rollout.context rollout.max_tokens rollout.temperature draft.drafters
curriculum.name curriculum.groups curriculum.rollouts curriculum.max_age curriculum.starvation
curriculum.speed.n_init curriculum.cures.tau curriculum.scalingrl.share
curriculum.stages.subset curriculum.stages.max_tokens curriculum.stages.steps
learn.estimator learn.lr learn.schedule learn.kl_coef learn.minibatches learn.pack_tokens
judge.timeout_s judge.workers judge.truncated save.every save.keep save.rollouts
"""
EVERYDAY = frozenset(_EVERYDAY.split())


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _plausible_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool):
            kind = cls.model_fields[info.field_name or ""].annotation
            kinds = {kind, *getattr(kind, "__args__", ())}
            if kinds & {int, float}:  # pydantic would read true as 1
                raise ValueError("it must be a number, not true or false")
        elif isinstance(value, int) and abs(value) > MOST:
            raise ValueError(f"no run needs a number beyond {MOST:,}")
        return value


class Lora(Section):
    rank: int = Field(0, ge=0)
    """The rank of the low-rank adapters that are trained while the weights stay as they are; 0 trains the weights."""
    alpha: float = Field(32.0, gt=0)
    """Adapters are scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """The layers that get adapters, by name; an empty list means every linear layer except the head."""


class Model(Section):
    name: str = "tiny"
    """The model is a Hugging Face folder, a hub name (org/name or org/name@revision), or "tiny", a small new Llama."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Weights and activations have this type."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The model runs on this device; "auto" takes a GPU if there is one."""
    hidden: int = Field(96, ge=8)
    """The tiny model has this width; other models ignore the setting."""
    layers: int = Field(2, ge=1)
    """The tiny model has this many layers."""
    heads: int = Field(3, ge=1)
    """The tiny model has this many attention heads."""
    lora: Lora = Lora()


class Text(Section):
    template: Literal["auto", "chat", "plain"] = "auto"
    """Problems are rendered by the chat template ("chat") or left as they are; "auto" is chat if the model has one."""
    system_prompt: str = ""
    """This system message comes first in every problem that has none of its own."""
    prompt_suffix: str = ""
    """This text is added to the end of every problem."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """Thinking is switched on or off in templates with enable_thinking; "auto" leaves the template's own choice."""
    max_prompt: int = Field(0, ge=0)
    """Training problems with more tokens are left out and counted; 0 keeps all."""


class ProblemSettings(Section):
    """The settings that [[data]] and [[eval]] share."""

    task: str = ""
    """The task is one of `whet list`; empty means "text" if there is a path and "chain" if not."""
    path: str = ""
    """The problems come from a JSONL, JSON or parquet file, a short name (gsm8k, math500, ...) or a `datasets` name."""
    subset: str = ""
    """The configuration of a `datasets` name."""
    split: str = ""
    """The split of a `datasets` or short name; empty means train for [[data]] and test for [[eval]]."""
    columns: dict[str, str] = {}
    """The columns of prompt, answer, id, solution and level, where they are not found: { answer = "meta.gold" }."""
    where: dict[str, Any] = {}
    """Only rows with these values, or one of a list, are kept: { in_eval = false, level = [1, 2] }."""
    limit: int = Field(0, ge=0)
    """At most this many prompts are read; 0 reads all."""
    reward: str = ""
    """Your judge is named as "module:function" and called with (prompt, response); empty means the task's own judge."""
    options: dict[str, Any] = {}
    """These keyword arguments go to the task."""

    @property
    def kind(self) -> str:
        return self.task or ("text" if self.path else "chain")


class Data(ProblemSettings):
    weight: float = Field(1.0, gt=0)
    """Prompts of this entry come up this many times as often as those of an entry with weight 1."""


class Eval(ProblemSettings):
    name: str = ""
    """The metrics carry this name; empty means the name of the data, or "held_out" without a path."""
    n: int = Field(1, ge=1)
    """Each prompt gets this many rollouts; more than one gives avg@n, pass@k and maj@k."""
    temperature: float = Field(0.0, ge=0)
    """Responses are drawn at this temperature; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Responses are drawn from the smallest set of tokens with this probability."""
    max_tokens: int = Field(0, ge=0)
    """A response has at most this many tokens; 0 means rollout.max_tokens."""
    every: int = Field(10, ge=1)
    """The set is evaluated every so many steps, before the first step and after the last."""

    @model_validator(mode="before")
    @classmethod
    def _named_after_its_file(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and not value.get("name"):
            path = str(value.get("path") or "")
            return {**value, "name": Path(path).name.split(".")[0] if path else HELD_OUT}
        return value

    @model_validator(mode="after")
    def _several_need_noise(self) -> Eval:
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n = {self.n} rollouts at temperature 0 would all be the same; set a temperature"
            )
        return self


class HeldOut(Section):
    size: int = Field(200, ge=0)
    """This many training problems, at most a tenth, are set aside to choose the best checkpoint; 0 sets none aside."""
    every: int = Field(10, ge=1)
    """The held-out problems are evaluated every so many steps."""


class Reward(Section):
    name: str
    """The term is built in (`whet list`) or yours as "module:function", called with (prompt, response)."""
    weight: float = 1.0
    """One unit of the term adds this much to the reward; the verdict stays the judge's."""
    options: dict[str, Any] = {}
    """These keyword arguments go to a built-in term."""


class WarmStart(Section):
    steps: int = Field(ge=1)
    """The warm start makes this many supervised updates."""
    batch: int = Field(32, ge=1)
    """Each update trains on this many worked solutions."""
    lr: float = Field(2e-3, gt=0)
    """The learning rate is reached after a twentieth of the steps and falls linearly to a tenth."""
    options: dict[str, Any] = {}
    """These keyword arguments go to the task's worked solutions."""


class RolloutSettings(Section):
    engine: Literal["native", "vllm"] = "native"
    """Rollouts are decoded on the learner's own weights ("native") or by an installed vLLM on a copy of them."""
    mode: Literal["barrier", "stream"] = "barrier"
    """A "barrier" finishes all requests before judging; a "stream" returns what finished and keeps the batch full."""
    slots: int = Field(64, ge=1)
    """This many rollouts are decoded at once."""
    page: int = Field(0, ge=0)
    """A KV page holds this many tokens; 0 means 64 with graphs, else one page per slot, which is fastest on a CPU."""
    pages: int = Field(0, ge=0)
    """The pool has this many KV pages; 0 means enough for every slot at full context."""
    graphs: bool = True
    """A GPU decodes by captured graphs over Triton kernels if they support the model, else by plain calls."""
    context: int = Field(0, ge=0)
    """Prompt and response have at most this many tokens; 0 means longest prompt plus largest response limit."""
    max_tokens: int = Field(1024, ge=1)
    """A training response has at most this many tokens."""
    temperature: float = Field(1.0, gt=0)
    """Training responses are drawn at this temperature."""
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """A response ends after any of these strings."""
    on_update: Literal["", "cut", "recompute", "keep"] = ""
    """A weight update cuts, recomputes or keeps running rollouts (stream); empty keeps them if max_age allows it."""
    ordered: bool = True
    """Verdicts are taken in the order of the requests, so that a run repeats exactly; false never waits for a judge."""


class Draft(Section):
    drafters: tuple[Literal["ngram", "suffix", "eagle"], ...] = ()
    """These drafters guess tokens ahead, and the model checks the guesses at once; no token changes. Empty is off."""
    chooser: Literal["controller", "bandit"] = "controller"
    """The "controller" picks drafter and depth by measured time and acceptance, the "bandit" picks them as TLT does."""
    eagle: str = ""
    """The eagle drafter starts from this folder, as a run or `whet export` has written it; "" is random weights."""
    train: float = Field(0.2, ge=0, le=1)
    """The eagle drafter trains on this share of a step's tokens, after it; where several decode, when they are idle."""


class SpeedSettings(Section):
    n_init: int = Field(4, ge=2)
    """This many rollouts screen a prompt before the rest of its group is generated."""
    low: float = Field(0.0, ge=0, lt=1)
    """A prompt is continued if low < pass rate < high in its screening, both exclusive."""
    high: float = Field(1.0, gt=0, le=1)
    """The upper bound of the screening's pass rate, exclusive."""
    use_screening: bool = True
    """Screening rollouts are trained on as well; false only gates by them, which leaves the gradient unbiased."""


class CuresSettings(Section):
    tau: float = Field(0.1, gt=0)
    """The temperature of the choice of prompts: large is uniform, small takes those nearest to half solved."""
    minimum: int = Field(2, ge=2)
    """A chosen prompt gets at least this many rollouts."""
    probe: int = Field(0, ge=0)
    """Every prompt of a subset is probed by this many rollouts first; 0 learns from training rollouts alone."""
    subsets: int = Field(1, ge=1)
    """The data is divided into this many parts for `subset_steps` updates each; estimates are reset in between."""
    subset_steps: int = Field(10, ge=1)
    """Each part of the data is trained on for this many updates."""
    memory: float = Field(1.0, gt=0, le=1)
    """Each update keeps this share of earlier evidence, because the policy drifts; 1 forgets nothing."""
    prior: Literal["even", "pool", "level"] = "level"
    """An unseen prompt counts as the average so far, of its level if there are levels, of all, or as half solved."""
    sigma: Literal["rate", "gradient"] = "rate"
    """Rollouts are divided by the spread of a prompt's verdicts or of its gradients (eq. 21; one more head pass)."""


class ScalingRL(Section):
    weights: tuple[float, float, float] = (0.4, 0.3, 0.3)
    """Difficulty, complexity and adaptability have these weights in the score."""
    adaptive: bool = False
    """The weights follow the progress that each part predicted."""
    select: Literal["gumbel_topk", "des_threshold", "rel_threshold", "random", "fixed"] = (
        "gumbel_topk"
    )
    """The score chooses prompts in this way; random (each epoch) and fixed (once) are controls of equal size."""
    share: float = Field(0.18, gt=0, le=1)
    """This share of all prompts is in the active set of an epoch (gumbel_topk)."""
    threshold: float = Field(0.6, gt=0, lt=1)
    """A prompt is active from this score on (des_threshold) or from this share of the best chance (rel_threshold)."""
    new: float = Field(0.2, ge=0, le=1)
    """At least this share of the active set was never seen before."""
    old: float = Field(0.1, ge=0, le=1)
    """At least this share of the active set was solved before."""


class Stage(Section):
    subset: Literal["all", "short", "long"] = "all"
    """The stage trains on all prompts, on those up to the mean length, or on the longer rest."""
    by: Literal["characters", "responses"] = "characters"
    """Length means the prompt's own characters or its responses so far."""
    tasks: tuple[str, ...] = ()
    """Only prompts of these tasks are used; an empty list means all."""
    max_tokens: int = Field(0, ge=0)
    """A response has at most this many tokens; 0, here and in the next four settings, keeps the recipe's value."""
    groups: int = Field(0, ge=0)
    """Each update trains on this many groups."""
    rollouts: int = Field(0, ge=0)
    """A group has this many rollouts."""
    minibatches: int = Field(0, ge=0)
    """A pass has this many optimiser steps."""
    temperature: float = Field(0.0, ge=0)
    """Responses are drawn at this temperature."""
    kl_coef: float | None = Field(None, ge=0)
    """The KL term has this weight; unset keeps the recipe's value."""
    entropy_coef: float | None = Field(None, ge=0)
    """The entropy term has this weight; unset keeps the recipe's value."""
    steps: int = Field(0, ge=0)
    """The stage ends after this many updates; 0 sets no limit. The first limit ends it; the last stage never ends."""
    epochs: float = Field(0.0, ge=0)
    """The stage ends after this many passes over its prompts; 0 sets no limit."""
    truncated: float = Field(0.0, ge=0, le=1)
    """The stage ends when the smoothed share of truncated responses falls to this; 0 sets no limit."""
    plateau: int = Field(0, ge=0)
    """The stage ends when the smoothed reward gains less than 0.01 over this many updates; 0 sets no limit."""
    reset_reference: bool = True
    """The reference policy is reset when the stage begins."""
    reset_optimizer: bool = False
    """The optimiser's moments are reset when the stage begins."""


class CurriculumSettings(Section):
    name: str = "uniform"
    """The curriculum is uniform, dapo, speed, cures, scalingrl, stages, all, or your own as "module:Class"."""
    source: Literal["", "uniform", "cures", "scalingrl", "cures over scalingrl"] = ""
    """Prompts come from this source; empty means the curriculum's own choice."""
    groups: int = Field(16, ge=1)
    """Each update trains on this many groups."""
    rollouts: int = Field(16, ge=2)
    """A group has this many rollouts, or this many on average where a curriculum divides a budget."""
    max_age: int | None = Field(None, ge=0)
    """A trained token may be this many policy versions old; 0 is strictly on-policy; unset is 2 for speed and all."""
    look_ahead: float = Field(1.25, ge=0)
    """This share of a batch is requested ahead, up to max_age batches: under stream, and by speed and all."""
    starvation: Literal["raise", "relax", "partial"] = "raise"
    """If no batch can be filled, the run stops, trains on groups without signal, or trains on fewer groups."""
    patience: int = Field(20, ge=1)
    """A batch starves after this many times its groups were requested without success."""
    speed: SpeedSettings = SpeedSettings()
    cures: CuresSettings = CuresSettings()
    scalingrl: ScalingRL = ScalingRL()
    stages: tuple[Stage, ...] = ()
    """The stages wrap the named curriculum; [] is one with everything, but stages and all then measure; [{}] is one."""

    @property
    def age_bound(self) -> int:
        """`max_age`, or what it is where it is unset: so much that screening and continuation share engine calls."""
        return self.max_age if self.max_age is not None else 2 if self.name in SCREENING else 0

    @model_validator(mode="after")
    def _in_order(self) -> CurriculumSettings:
        if self.speed.low >= self.speed.high:
            raise ValueError(
                f"speed.low = {self.speed.low} must be below speed.high = {self.speed.high}"
            )
        if self.name in SCREENING and self.speed.n_init >= self.rollouts:
            raise ValueError(
                f"speed.n_init = {self.speed.n_init} leaves none to continue: rollouts = {self.rollouts}"
            )
        return self


def merged(tree: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tree` with the values of `own`. Tables are merged key by key, also a table with a list of one table."""
    both = {**tree, **own}
    for key, value in own.items():
        old = tree.get(key)
        if isinstance(value, Mapping) and isinstance(old, list) and len(old) == 1:
            both[key] = [merged(old[0], value)]
        elif isinstance(value, Mapping) and isinstance(old, Mapping):
            both[key] = merged(old, value)
    return both


class Learn(Section):
    estimator: Literal[
        "reinforce", "rloo", "grpo", "dr_grpo", "dapo", "reinforce_pp", "gspo", "cispo"
    ] = "rloo"
    """The policy-gradient estimator."""
    aggregate: Literal["published", "sequence", "group_tokens", "constant", "batch_tokens"] = (
        "published"
    )
    """Token losses become one number in this way; "published" is the estimator's own way."""
    lr: float = Field(0.0, ge=0)
    """The learning rate; 0 means 2e-4 for adapters and tiny models, 1e-5 to 1e-6 for all weights of a larger one."""
    warmup: int = Field(5, ge=0)
    """The learning rate rises linearly over this many steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate stays constant after the warm-up, or falls to 0 at the end of the run."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW decays the weights at this rate."""
    grad_clip: float = Field(1.0, gt=0)
    """The gradient's norm is clipped at this value."""
    clip_low: float = Field(0.2, gt=0)
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio is clipped above 1 + clip_high; DAPO's clip-higher uses 0.28."""
    updates: int = Field(1, ge=1)
    """Each batch is passed over this many times, with one optimiser step per pass."""
    minibatches: int = Field(1, ge=1)
    """A pass is divided into this many parts, with one optimiser step per part."""
    kl_coef: float = Field(0.0, ge=0)
    """The KL divergence to the reference policy has this weight in the loss."""
    entropy_coef: float = Field(0.0, ge=0)
    """The entropy of the policy has this weight in the loss."""
    overlong: int = Field(0, ge=0)
    """DAPO's soft length penalty covers the last so many tokens before the limit; 0 switches it off."""
    pack_tokens: int = Field(4096, ge=16)
    """A micro-batch has this many tokens; it is halved when memory runs out."""
    checkpoint_activations: bool = False
    """Activations are computed again in the backward pass, which saves memory and costs time."""
    shard: Literal["none", "optimizer", "full"] = "none"
    """With --gpus, GPUs share masters and moments ("optimizer"), and gradients and the learner's weights ("full")."""
    compile: bool = True
    """On a GPU in bfloat16 the layers and the head are compiled once, before the first batch."""


class JudgeSettings(Section):
    where: Literal["driver", "workers"] = "driver"
    """Judges run beside the driver of a run, or on the nodes of its workers (cluster.workers)."""
    workers: int = Field(0, ge=0)
    """This many processes judge responses; 0: one less than the cores, 1 to 8, or as many as cluster.workers there."""
    timeout_s: float = Field(5.0, gt=0)
    """A judge that takes longer than this is killed, and its rollout stays unjudged."""
    memory_mb: int = Field(2048, ge=64)
    """A judge process may use this much memory, in MiB."""
    pass_at: float = Field(0.99, gt=0, le=1)
    """A score of at least this is a right answer."""
    weight: float = Field(1.0, ge=0)
    """The judge's score has this weight in the reward, beside the [[reward]] terms."""
    truncated: Literal["judge", "wrong", "mask"] = "judge"
    """A truncated training response is judged as usual, counts as wrong, or is masked from pass rate and loss."""


class Save(Section):
    every: int = Field(20, ge=1)
    """A checkpoint is written every so many steps, after the best evaluation so far, and after the last step."""
    keep: int = Field(2, ge=1)
    """This many of the newest checkpoints are kept, besides the best."""
    rollouts: int = Field(64, ge=0)
    """This many rollouts per step and per evaluation are written to RUN/rollouts."""


class Cluster(Section):
    workers: int = Field(0, ge=0)
    """This many Ray actors decode rollouts; 0 means that the run needs no Ray."""
    gpus_per_worker: float = Field(1.0, gt=0)
    """Each worker has this many GPUs, or this share of one; on a CPU it has a core."""
    placement: Literal["split", "colocated"] = "split"
    """Learners have their own GPUs (--gpus), or each worker trains, too ("colocated")."""
    min_workers: int = Field(1, ge=1)
    """The run needs at least this many; it waits where fewer are left, and then saves and ends."""
    timeout_s: float = Field(300.0, gt=0)
    """A worker that says nothing, or gets no weights, for this many seconds is started again."""


class Config(Section):
    seed: int = Field(0, ge=0, lt=2**31)
    """All other seeds derive from this one."""
    steps: int = Field(100, ge=0, le=10_000_000)
    """The run makes at most this many optimiser updates."""
    token_budget: int = Field(0, ge=0)
    """The run stops after the step that passes this many generated tokens; 0 sets no limit."""
    time_budget: float = Field(0.0, ge=0)
    """The run stops after the step that passes this many seconds of training, without evaluations; 0 sets no limit."""
    data_folder: str = ""
    """Short names of data are looked for in this folder before `datasets`; empty means $WHET_DATA."""
    model: Model = Model()
    text: Text = Text()
    data: tuple[Data, ...] = (Data(),)
    eval: tuple[Eval, ...] = ()
    held_out: HeldOut = HeldOut()
    reward: tuple[Reward, ...] = ()
    warm_start: tuple[WarmStart, ...] = ()
    rollout: RolloutSettings = RolloutSettings()
    draft: Draft = Draft()
    curriculum: CurriculumSettings = CurriculumSettings()
    learn: Learn = Learn()
    judge: JudgeSettings = JudgeSettings()
    save: Save = Save()
    cluster: Cluster = Cluster()

    @field_validator("data", "eval", "reward", "warm_start", mode="before")
    @classmethod
    def _one_table_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, Mapping) else value

    @property
    def on_update(self) -> Literal["cut", "recompute", "keep"]:
        """What happens to running rollouts at an update: the recipe's choice, or what curriculum.max_age allows."""
        if self.rollout.on_update:
            return self.rollout.on_update
        return "keep" if self.curriculum.age_bound > 0 else "cut"

    @property
    def runs_on(self) -> bool:
        """Whether rollouts continue over an update with their cached keys and values."""
        return self.rollout.mode == "stream" and self.on_update == "keep"

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        context = self.rollout.context
        limits = {"rollout.max_tokens": self.rollout.max_tokens}
        limits |= {
            f"curriculum.stages.{i}.max_tokens": s.max_tokens
            for i, s in enumerate(self.curriculum.stages)
        }
        limits |= {f"eval.{i}.max_tokens": e.max_tokens for i, e in enumerate(self.eval)}
        for key, limit in limits.items():
            if 0 < context <= limit:
                raise ValueError(
                    f"{key} = {limit} leaves no room for a prompt in rollout.context = {context}"
                )
        if len({e.name for e in self.eval}) < len(self.eval):
            raise ValueError(f"eval names must differ, got {', '.join(e.name for e in self.eval)}")
        runs_on = self.rollout.mode == "stream" and self.rollout.on_update in ("keep", "recompute")
        if runs_on and self.curriculum.age_bound == 0:
            remedy = "which curriculum.max_age = 0 forbids; set curriculum.max_age to 1 or more"
            raise ValueError(
                f'rollout.on_update = "{self.rollout.on_update}" carries tokens over an update, {remedy}'
            )
        return self
