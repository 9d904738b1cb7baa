"""Recipes: TOML becomes a Config and a Config becomes TOML. A wrong setting gives one sentence.

`--set a.b=c` overrides the file. `config.py` says what the settings are and mean.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from whet.config import Config, Section
from whet.errors import WhetError

# Settings of earlier versions that are gone, and what to do instead.
RETIRED = {
    "data.curriculum": "all data shares [curriculum] now; weight says how often an entry comes up",
    "curriculum.solved": "the source cures seldom draws solved prompts by itself",
    "curriculum.reset_every": "a stage with reset_reference = true starts reference and optimiser anew",
}
# Settings and flags of whet, each with the names that TRL, verl and OpenRLHF have for them.
OTHER_NAMES = {
    "--gpus": "n_gpus_per_node nproc_per_node num_processes actor_num_gpus_per_node",
    "--log": "report_to use_wandb",
    "--out": "output_dir default_local_dir save_path ckpt_path",
    "curriculum.groups": "batch_size train_batch_size per_device_train_batch_size rollout_batch_size",
    "curriculum.rollouts": "num_generations n n_samples_per_prompt group_size",
    "data.columns": "input_key label_key prompt_key",
    "data.path": "dataset_name train_files prompt_data",
    "eval.path": "val_files eval_dataset",
    "held_out.every": "eval_steps test_freq eval_every",
    "learn.aggregate": "loss_agg_mode",
    "learn.checkpoint_activations": "gradient_checkpointing enable_gradient_checkpointing",
    "learn.clip_high": "epsilon_high clip_ratio_high eps_clip clip_ratio",
    "learn.clip_low": "epsilon clip_ratio_low",
    "learn.entropy_coef": "entropy_coeff entropy_loss_coef",
    "learn.estimator": "adv_estimator advantage_estimator loss_type",
    "learn.grad_clip": "max_grad_norm max_norm",
    "learn.kl_coef": "beta kl_loss_coef init_kl_coef",
    "learn.lr": "learning_rate actor_learning_rate lr",
    "learn.minibatches": "ppo_mini_batch_size steps_per_generation",
    "learn.pack_tokens": "gradient_accumulation_steps micro_train_batch_size micro_batch_size"
    " ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu",
    "learn.schedule": "lr_scheduler_type lr_scheduler",
    "learn.shard": "deepspeed zero_stage fsdp fsdp_config",
    "learn.updates": "num_iterations ppo_epochs max_epochs",
    "learn.warmup": "warmup_steps lr_warmup_steps",
    "model.dtype": "bf16 fp16 torch_dtype",
    "model.lora.rank": "lora_rank lora_r use_peft",
    "model.name": "model_name_or_path model_name pretrain",
    "rollout.engine": "use_vllm",
    "rollout.max_tokens": "max_completion_length max_response_length max_new_tokens generate_max_len",
    "save.every": "save_steps save_freq",
    "save.keep": "save_total_limit max_ckpt_num",
    "steps": "max_steps epochs num_train_epochs total_epochs num_episodes total_training_steps",
    "text.max_prompt": "max_prompt_length prompt_max_len",
}
# What pydantic found wrong -> what the value must be; {words} come from the error's context.
MUST_BE = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a table",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt:,.10g}",
    "greater_than_equal": "at least {ge:,.10g}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than": "less than {lt:,.10g}",
    "less_than_equal": "at most {le:,.10g}",
    "literal_error": "{expected}",
    "model_type": "a table",
    "string_too_short": "a text that is not empty",
    "string_type": "a text in quotes",
    "tuple_type": "a list",
}
# Lists of tables ([[data]], ...), each with the setting that comes first in an entry.
TABLES = {
    "data": "path",
    "eval": "path",
    "reward": "name",
    "warm_start": "steps",
    "stages": "max_tokens",
}


def override(tree: dict[str, Any], item: str) -> None:
    """Write one `--set a.b=c` into the tree of a recipe. The value is TOML or a string; list entries go by number.

    >>> tree = {"data": [{"path": "a"}]}
    >>> override(tree, "data.1.path=b"), override(tree, "learn.lr=1e-6"), tree
    (None, None, {'data': [{'path': 'a'}, {'path': 'b'}], 'learn': {'lr': 1e-06}})
    """
    key, sep, value = item.partition("=")
    if not sep or not key.strip():
        raise WhetError(f'--set takes key=value, got "{item}"')
    parsed: Any = value.strip()
    with suppress(tomllib.TOMLDecodeError):  # a bare word is a string
        parsed = tomllib.loads(f"v = {parsed}")["v"]
    path = key.strip().split(".")
    node: Any = tree
    for here, following in zip_longest(path, path[1:]):
        spot: Any = here
        if isinstance(node, list):
            if not here.isdigit():
                raise WhetError(
                    f'--set {item}: name the entry by number, as in "{path[0]}.0.{path[-1]}".'
                )
            spot = int(here)
            if spot > len(node):
                raise WhetError(f'--set {item}: "{here}" names no entry of a list of {len(node)}.')
            node += [{}] * (spot == len(node))
        elif not isinstance(node, dict):
            raise WhetError(f'--set {item}: "{here}" lies below a value, not a section.')
        if following is None:
            node[spot] = parsed
        else:
            node = (
                node[spot]
                if isinstance(node, list)
                else node.setdefault(here, [] if following.isdigit() else {})
            )


def load_config(
    path: Path | None = None, sets: Iterable[str] = (), base: Mapping[str, Any] | None = None
) -> Config:
    """Read a recipe file (or `base`) and apply the overrides in order. Raise WhetError with one sentence."""
    tree: dict[str, Any] = dict(base or {})
    if path is not None:
        tree = read_toml(find_recipe(path))
    for item in sets:
        override(tree, item)
    return parse_config(tree)


def find_recipe(path: Path) -> Path:
    """Return the file itself, or the recipe of that name that comes with whet: chain, gsm8k, papers/speed-rloo, ...

    Its path in a checkout names it, too: recipes/chain.toml.
    """
    if path.exists() and not path.is_dir():  # a folder gsm8k, of data, does not hide the recipe
        return path
    known = recipes()
    name = path.as_posix()
    if name.startswith("recipes/"):
        name = name.removeprefix("recipes/").removesuffix(".toml")
    if name in known or path.suffix or len(path.parts) > 1:
        return known.get(name, path)
    near = difflib.get_close_matches(path.name, known, n=1, cutoff=0.6)
    advice = f'did you mean "{near[0]}"?' if near else f"by name there are {', '.join(known)}."
    raise WhetError(f'There is no recipe "{path}", as a file or by name; {advice}')


def recipes() -> dict[str, Path]:
    """Map names to the recipes that come with whet: beside the package in a checkout, inside it in a wheel."""
    here = Path(__file__).parent
    for folder in (here / "recipes", here.parent / "recipes"):
        if folder.is_dir():
            return {
                f.relative_to(folder).with_suffix("").as_posix(): f
                for f in sorted(folder.rglob("*.toml"))
            }
    return {}


def parse_config(tree: Mapping[str, Any]) -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise WhetError(_one_sentence(error)) from None


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise WhetError(f"There is no recipe at {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise WhetError(f"The recipe {path} cannot be read: {error}.") from None
    except tomllib.TOMLDecodeError as error:
        raise WhetError(f"The recipe {path} is not TOML: {error}.") from None


def dump_config(config: Config) -> str:
    """Return TOML that reads back to an equal Config."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _one_sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    value = first["input"]
    kind = first["type"]
    loc = [str(part) for part in first["loc"]]
    where = ".".join(loc)
    said = first["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        unnumbered = ".".join(part for part in loc if not part.isdigit())
        if advice := RETIRED.get(unnumbered):
            return f'The setting "{where}" is gone: {advice}.'
        return f'There is no setting "{where}"{_nearest(loc, value)}'
    if kind == "missing":
        return f"{where} is missing."
    if not where:
        return f"{said}."
    if kind == "model_type" and isinstance(value, list):
        return f"There is only one {where}: write [{where}], not [[{where}]]."
    if kind == "value_error" and isinstance(value, Mapping):  # its settings contradict each other
        return f"{where}: {said}."
    if kind == "tuple_type" and loc[-1] in TABLES:
        said = f"write [[{where}]], and {TABLES[loc[-1]]} = ... below it"
    elif kind == "model_type":
        header = f"[[{'.'.join(loc[:-1])}]]" if loc[-1].isdigit() else f"[{where}]"
        said = f"write {header}, and its settings below it"
    elif kind in MUST_BE:
        said = "it must be " + MUST_BE[kind].format(**first.get("ctx", {}))
    shown = (
        str(value)
        if isinstance(value, float)
        else json.dumps(value, default=str, ensure_ascii=False)
    )
    return f"{where} = {shown} is wrong: {said[0].lower()}{said[1:]}."


def _nearest(loc: list[str], value: Any) -> str:
    """Name the closest key of the same section, else the setting that another trainer calls so, else the closest key
    of any section; else list the section's keys."""
    *parents, last = loc
    keys = [name for name, _, _ in describe()]
    prefix = "".join(f"{p}." for p in parents if not p.isdigit())
    siblings = {key.removeprefix(prefix).split(".")[0] for key in keys if key.startswith(prefix)}
    inner = last
    # of verl's actor.optim.lr the end tells most
    while isinstance(value, Mapping) and len(value) == 1:
        ((inner, value),) = value.items()
    theirs = [name for name, others in OTHER_NAMES.items() if inner in others.split()]
    leaves = {key.rsplit(".", 1)[-1]: key for key in keys}
    if typo := difflib.get_close_matches(last, siblings, n=1, cutoff=0.75):
        near = prefix + typo[0]
    elif theirs:
        near = theirs[0]
    elif like := difflib.get_close_matches(last, siblings, n=1, cutoff=0.5):
        near = prefix + like[0]
    elif like := difflib.get_close_matches(last, leaves, n=1, cutoff=0.6):
        near = leaves[like[0]]
    else:
        return f"; known are {', '.join(sorted(siblings))}."
    return f'; did you mean "{near}"?'


def describe(section: type[Section] = Config, prefix: str = "") -> list[tuple[str, str, str]]:
    """Return (dotted name, default, meaning) of every setting; list sections have no number in their names."""
    rows = []
    for name, info in section.model_fields.items():
        kinds = (info.annotation, *getattr(info.annotation, "__args__", ()))
        inner = next(
            (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None
        )
        if inner is not None:
            rows += describe(inner, f"{prefix}{name}.")
        else:
            default = "required" if info.is_required() else repr(info.default)
            rows.append((prefix + name, default, (info.description or "") + _values(info)))
    return rows


def _values(info: FieldInfo) -> str:
    """The values of a setting that takes a few words, unless its meaning names them all."""
    words = [word for word in get_args(info.annotation) if isinstance(word, str) and word]
    if all(word in (info.description or "") for word in words):
        return ""
    return f" Values: {', '.join(words)}."
