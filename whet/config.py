"""Every knob on one page; `recipe.py` reads them from TOML.

Sections are pydantic models, frozen after reading. What can be derived is not a field. One [[table]] may be a [table].
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

HELD_OUT = "held_out"
"""The evaluation set that chooses the best checkpoint."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Lora(Section):
    rank: int = Field(0, ge=0)
    """Train low-rank adapters of this rank and leave the weights as they are; 0 trains the weights."""
    alpha: float = Field(32.0, gt=0)
    """Adapters are scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the layers that get adapters; none means every linear layer but the head."""


class Model(Section):
    name: str = "tiny"
    """A Hugging Face folder, a hub name (org/name or org/name@revision), or "tiny": a small Llama made on the spot."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    hidden: int = Field(96, ge=8)
    """Width of the tiny model; ignored for a folder."""
    layers: int = Field(2, ge=1)
    """Layers of the tiny model."""
    heads: int = Field(3, ge=1)
    """Attention heads of the tiny model."""
    lora: Lora = Lora()


class Text(Section):
    template: Literal["auto", "chat", "plain"] = "auto"
    """chat renders every problem by the model's chat template, plain leaves it as it is; auto is chat if it has one."""
    system_prompt: str = ""
    """Said first, where the problem brings no system message."""
    prompt_suffix: str = ""
    """Added to the end of every problem."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """For chat templates that can switch it (enable_thinking); auto leaves the template's own choice."""
    max_prompt: int = Field(0, ge=0)
    """Training problems of more tokens are left out, and counted; 0 keeps all."""


class Problems(Section):
    """What [[data]] and [[eval]] have in common."""

    task: str = ""
    """A task of `whet list`; empty is "text" where there is a path, else "chain"."""
    path: str = ""
    """A JSONL, JSON or parquet file, a short name (gsm8k, math500, ...) or a name for `datasets`."""
    subset: str = ""
    """Configuration of a `datasets` name."""
    split: str = ""
    """Of a `datasets` or short name; empty is train for [[data]] and test for [[eval]]."""
    columns: dict[str, str] = {}
    """Which are prompt, answer, id, solution and level, if not found by themselves: { answer = "meta.gold" }."""
    where: dict[str, Any] = {}
    """Keep the rows whose columns have these values, or one of a list: { in_eval = false, level = [1, 2] }."""
    limit: int = Field(0, ge=0)
    """At most this many prompts; 0 is all."""
    reward: str = ""
    """Your judge as "module:function", called with (prompt, response); empty takes the task's own."""
    options: dict[str, Any] = {}
    """Keyword arguments of the task."""

    @property
    def kind(self) -> str:
        return self.task or ("text" if self.path else "chain")


class Data(Problems):
    weight: float = Field(1.0, gt=0)
    """Its prompts come up so many times as often as those of an entry of weight 1."""
    curriculum: dict[str, Any] = {}
    """Settings of [curriculum] that differ for its prompts: { name = "speed", speed = { n_init = 8 } }."""


class Eval(Problems):
    name: str = ""
    """Of its metrics; empty is the short name or the file's, "held_out" where there is no path."""
    n: int = Field(1, ge=1)
    """Rollouts a prompt; more than one gives avg@n, pass@k and maj@k."""
    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int = Field(0, ge=0)
    """Response limit; 0 is rollout.max_tokens."""
    every: int = Field(10, ge=1)
    """Steps between evaluations; also before the first step and after the last."""

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
            raise ValueError(f"n = {self.n} rollouts at temperature 0 would all be the same; set a temperature")
        return self


class HeldOut(Section):
    size: int = Field(200, ge=0)
    """Training problems set aside to judge `best` by, at most a tenth of them; 0 sets none aside."""
    every: int = Field(10, ge=1)
    """Steps between evaluations on them."""


class Reward(Section):
    name: str
    """A built-in term (`whet list`), or yours as "module:function", called with (prompt, response)."""
    weight: float = 1.0
    """What one unit of the term adds to the reward; the verdict stays the judge's."""
    options: dict[str, Any] = {}
    """Keyword arguments of a built-in term."""


class WarmStart(Section):
    steps: int = Field(ge=1)
    batch: int = Field(32, ge=1)
    """Worked solutions an update."""
    lr: float = Field(2e-3, gt=0)
    """Reached after a twentieth of the steps; falls linearly to a tenth."""
    options: dict[str, Any] = {}
    """Keyword arguments of the task's worked solutions."""


class Rollout(Section):
    mode: Literal["barrier", "stream"] = "barrier"
    """barrier drains every request before judging; stream hands out what finished and keeps the batch full."""
    slots: int = Field(64, ge=1)
    """Rollouts that decode at once."""
    page: int = Field(0, ge=0)
    """Tokens a KV page; 0 is 64 by graphs, and else a page for each slot, the fast form on a CPU."""
    pages: int = Field(0, ge=0)
    """KV pages in the pool; 0 is enough for every slot at full context."""
    graphs: bool = True
    """On a GPU: decode by captured graphs over Triton kernels, where they can serve the model; else by plain calls."""
    context: int = Field(0, ge=0)
    """Tokens of prompt and response together; 0 is the longest prompt and the largest response limit."""
    max_tokens: int = Field(1024, ge=1)
    """Tokens of a response at most."""
    temperature: float = Field(1.0, gt=0)
    stop_strings: tuple[str, ...] = ()
    on_update: Literal["", "cut", "recompute", "keep"] = ""
    """What becomes of running rollouts at a weight update (stream); empty keeps them where curriculum.max_age allows
    it, and else cuts them."""
    ordered: bool = True
    """Wait for the judges in engine order, so that a stream run repeats exactly; false never waits."""


class Draft(Section):
    drafters: tuple[Literal["ngram", "suffix", "eagle"], ...] = ()
    """Who guesses tokens ahead, which the model then checks at once; none: nobody. No token is changed by it."""
    chooser: Literal["controller", "bandit"] = "controller"
    """Picks drafter and depth of a step by measured time and acceptance, or as TLT does."""
    budgets: bool = False
    """Rows that will end soon are drafted for less, by the lengths of those that have ended."""
    train: float = Field(0.2, ge=0, le=1)
    """Tokens eagle is trained on after a step, as a share of the step's."""


class Speed(Section):
    n_init: int = Field(4, ge=2)
    """Rollouts that screen a prompt before the rest of its group is paid for."""
    low: float = Field(0.0, ge=0, lt=1)
    """A prompt goes on if low < pass rate < high in the screening, both exclusive."""
    high: float = Field(1.0, gt=0, le=1)
    use_screening: bool = True
    """Train on the screening rollouts, too; false makes them a gate alone, which leaves the gradient unbiased."""


class Cures(Section):
    tau: float = Field(0.1, gt=0)
    """Temperature of the choice of prompts: large is uniform, small takes those nearest to half solved."""
    minimum: int = Field(2, ge=2)
    """Rollouts a chosen prompt gets at least."""
    probe: int = Field(0, ge=0)
    """Rollouts that probe every prompt of a subset before it is trained on; 0 learns from training rollouts alone."""
    subsets: int = Field(1, ge=1)
    """Parts the data is divided into, each for `subset_steps` updates; what is known is forgotten in between."""
    subset_steps: int = Field(10, ge=1)
    memory: float = Field(1.0, gt=0, le=1)
    """What an update leaves of the evidence before it, for a policy that drifts; 1 forgets nothing."""
    prior: Literal["even", "pool"] = "even"
    """What a prompt never met is taken for: half solved, or as those met so far are on average."""
    sigma: Literal["rate", "gradient"] = "rate"
    """Rollouts are divided by the spread of a prompt's verdicts, or of its gradients (eq. 21; one more head pass)."""


class ScalingRL(Section):
    weights: tuple[float, float, float] = (0.4, 0.3, 0.3)
    """Of difficulty, complexity and adaptability in the score."""
    adaptive: bool = False
    """Let the weights follow what has paid."""
    select: Literal["gumbel_topk", "des_threshold", "rel_threshold", "random", "fixed"] = "gumbel_topk"
    """How the score chooses; random (each epoch) and fixed (once) are controls of equal size that do not look at it."""
    share: float = Field(0.18, gt=0, le=1)
    """Of all prompts, in the active set of an epoch (gumbel_topk)."""
    threshold: float = Field(0.6, gt=0, lt=1)
    """Score from which a prompt is active (des_threshold), or its share of the best chance (rel_threshold)."""
    floor: float = Field(0.4, ge=0, lt=1)
    """Prompts that score below take no part in gumbel_topk."""
    new: float = Field(0.2, ge=0, le=1)
    """Least share of the active set that was never seen."""
    old: float = Field(0.1, ge=0, le=1)
    """Least share that was once solved."""


class Stage(Section):
    subset: Literal["all", "short", "long"] = "all"
    """Of the prompts, by `by`: all, those up to the mean, or the rest."""
    by: Literal["characters", "responses"] = "characters"
    """The prompt's own length, or that of its responses so far."""
    tasks: tuple[str, ...] = ()
    """Only prompts of these tasks; none means all."""
    max_tokens: int = Field(0, ge=0)
    """Response limit; 0 is rollout.max_tokens. So for the next four: 0 leaves what the recipe says."""
    groups: int = Field(0, ge=0)
    rollouts: int = Field(0, ge=0)
    minibatches: int = Field(0, ge=0)
    temperature: float = Field(0.0, ge=0)
    kl_coef: float | None = Field(None, ge=0)
    entropy_coef: float | None = Field(None, ge=0)
    steps: int = Field(0, ge=0)
    """Ends after so many updates; 0 sets no limit. A stage ends at the first of its limits, the last one never."""
    epochs: float = Field(0.0, ge=0)
    """Ends after so many passes over its prompts; 0 sets no limit."""
    truncated: float = Field(0.0, ge=0, le=1)
    """Ends when the share of truncated responses, smoothed, falls to this; 0 sets no limit."""
    plateau: int = Field(0, ge=0)
    """Ends when the smoothed reward gained less than 0.01 over so many updates; 0 sets no limit."""
    reset_reference: bool = True
    """At its beginning."""
    reset_optimizer: bool = False


class Curriculum(Section):
    name: str = "uniform"
    """Which prompts and groups train: uniform, dapo, speed, cures, scalingrl, stages or all."""
    source: Literal["", "uniform", "kimi", "cures", "scalingrl", "cures over scalingrl"] = ""
    """Where prompts come from; empty is the curriculum's own choice."""
    solved: float = Field(0.0, ge=0, le=1)
    """Prompts that were right so often are not asked again (0.9 in ScaleRL); 0 asks all."""
    tokens: int = Field(0, ge=0)
    """An update ends with the group that reaches so many tokens (C3PO); 0 counts groups alone."""
    reset_every: int = Field(0, ge=0)
    """Updates between resets of reference and optimiser (ProRL); 0 never resets."""
    reset_plateau: int = Field(0, ge=0)
    """Resets them, too, when the reward gained less than 0.01 over so many updates; 0 does not look."""
    groups: int = Field(16, ge=1)
    """Groups an update."""
    rollouts: int = Field(16, ge=2)
    """Rollouts a group, on average where a curriculum divides a budget."""
    max_age: int = Field(0, ge=0)
    """Versions a trained token may lag behind; 0 is strictly on-policy."""
    look_ahead: float = Field(1.0, ge=0)
    """Groups asked beyond the batch, as a share of it, up to max_age: under stream, and by speed in screening ahead."""
    starvation: Literal["raise", "relax", "partial"] = "raise"
    """When no batch can be filled: stop, train on groups without signal, or on fewer groups."""
    patience: int = Field(20, ge=1)
    """A batch starves once this many times its groups were asked in vain."""
    speed: Speed = Speed()
    cures: Cures = Cures()
    scalingrl: ScalingRL = ScalingRL()
    stages: tuple[Stage, ...] = ()
    """Around whatever `name` says; none is one stage of everything."""

    def override(self, own: Mapping[str, Any]) -> Curriculum:
        """The same with other settings where `own` has them, put to the same tests."""
        return Curriculum.model_validate(merged(self.model_dump(), own))

    @model_validator(mode="after")
    def _in_order(self) -> Curriculum:
        if self.speed.low >= self.speed.high:
            raise ValueError(f"speed.low = {self.speed.low} must be below speed.high = {self.speed.high}")
        if self.name in ("speed", "all") and self.speed.n_init >= self.rollouts:
            raise ValueError(f"speed.n_init = {self.speed.n_init} leaves none to continue: rollouts = {self.rollouts}")
        return self


def merged(tree: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with what `own` says, tables inside tables likewise."""
    both = [k for k, v in own.items() if isinstance(v, Mapping) and isinstance(tree.get(k), Mapping)]
    return {**tree, **own, **{k: merged(tree[k], own[k]) for k in both}}


class Learn(Section):
    estimator: Literal["reinforce", "rloo", "grpo", "dr_grpo", "dapo", "reinforce_pp", "gspo", "cispo"] = "rloo"
    aggregate: Literal["published", "sequence", "group_tokens", "constant", "batch_tokens"] = "published"
    """How token losses become one number; "published" is the estimator's own way."""
    lr: float = Field(0.0, ge=0)
    """0 is by the model: 2e-4 for adapters and tiny models, 1e-5 to 1e-6 for all weights of a larger one."""
    warmup: int = Field(5, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)
    """DAPO's clip-higher is clip_high = 0.28."""
    importance_cap: float = Field(2.0, ge=1)
    """C of w = min(pi_old / pi_behaviour, C)."""
    updates: int = Field(1, ge=1)
    """Passes over a batch, an optimiser step each."""
    minibatches: int = Field(1, ge=1)
    """Parts that a pass is divided into, an optimiser step each instead."""
    kl_coef: float = Field(0.0, ge=0)
    entropy_coef: float = Field(0.0, ge=0)
    overlong: int = Field(0, ge=0)
    """DAPO's soft penalty over the last so many tokens before the limit; 0 is off."""
    pack_tokens: int = Field(4096, ge=16)
    """Tokens a micro-batch; halved when memory runs out."""
    checkpoint_activations: bool = False
    compile: bool = True
    """On a GPU in bfloat16: compile the layers and the head, once, before the first batch."""


class Judge(Section):
    workers: int = Field(0, ge=0)
    """Judge processes; 0 is one less than there are cores, at least 1 and at most 8."""
    timeout_s: float = Field(5.0, gt=0)
    """A judge that takes longer is killed; its rollout stays unjudged."""
    memory_mb: int = Field(2048, ge=64)
    pass_at: float = Field(0.99, gt=0, le=1)
    """A score from here on is a right answer."""
    weight: float = Field(1.0, ge=0)
    """Of the judge's score in the reward, beside the [[reward]] terms."""
    truncated: Literal["judge", "wrong", "mask"] = "judge"
    """A training response cut at the limit is judged like any other, wrong, or masked (left out of pass rate, loss)."""


class Save(Section):
    every: int = Field(20, ge=1)
    """Steps between checkpoints; also after the last step."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept, besides the best."""
    rollouts: int = Field(64, ge=0)
    """Rollouts of a step, and of an evaluation, written to RUN/rollouts."""


class Config(Section):
    seed: int = Field(0, ge=0, lt=2**31)
    """All other seeds derive from it."""
    steps: int = Field(100, ge=0)
    """Optimiser updates at most."""
    token_budget: int = Field(0, ge=0)
    """Stop after the step that passes so many generated tokens; 0 is no limit."""
    time_budget: float = Field(0.0, ge=0)
    """Stop after the step that passes so many seconds of training, evaluations not counted; 0 is no limit."""
    data_folder: str = ""
    """Where short names of data are looked for before `datasets` is asked; empty is $WHET_DATA."""
    model: Model = Model()
    text: Text = Text()
    data: tuple[Data, ...] = (Data(),)
    eval: tuple[Eval, ...] = ()
    held_out: HeldOut = HeldOut()
    reward: tuple[Reward, ...] = ()
    warm_start: tuple[WarmStart, ...] = ()
    rollout: Rollout = Rollout()
    draft: Draft = Draft()
    curriculum: Curriculum = Curriculum()
    learn: Learn = Learn()
    judge: Judge = Judge()
    save: Save = Save()

    @field_validator("data", "eval", "reward", "warm_start", mode="before")
    @classmethod
    def _one_table_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, Mapping) else value

    @property
    def on_update(self) -> Literal["cut", "recompute", "keep"]:
        """What becomes of running rollouts at an update, as the recipe says or else by what may train."""
        return self.rollout.on_update or ("keep" if self.curriculum.max_age > 0 else "cut")

    @property
    def runs_on(self) -> bool:
        """Whether rollouts go on over an update with what the cache holds of them."""
        return self.rollout.mode == "stream" and self.on_update == "keep"

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        context, limits = self.rollout.context, {"rollout.max_tokens": self.rollout.max_tokens}
        limits |= {f"curriculum.stages.{i}.max_tokens": s.max_tokens for i, s in enumerate(self.curriculum.stages)}
        limits |= {f"eval.{i}.max_tokens": e.max_tokens for i, e in enumerate(self.eval)}
        for key, limit in limits.items():
            if 0 < context <= limit:
                raise ValueError(f"{key} = {limit} leaves no room for a prompt in rollout.context = {context}")
        if len({e.name for e in self.eval}) < len(self.eval):
            raise ValueError(f"eval names must differ, got {', '.join(e.name for e in self.eval)}")
        if self.rollout.mode == "stream" and self.on_update != "cut" and self.curriculum.max_age == 0:
            raise ValueError(
                f'rollout.on_update = "{self.rollout.on_update}" carries tokens over an update, '
                "which curriculum.max_age = 0 forbids; set curriculum.max_age to 1 or more"
            )
        return self
