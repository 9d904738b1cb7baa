"""Exports a trained model as a clean Hugging Face folder with a model card, ready to serve or to share.

Files are copied as they are, so the export equals what was trained to the bit; only merging adapters loads weights. A
drafter that was trained beside the model is exported for the named serving engine. What a run needs to go on (state,
manifest) and anything that could run code stays behind. In the card, everything that comes from outside (names, paths,
the recipe) is escaped for its place, and paths of this machine are cut down to their last part.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import tomli_w
import torch
from safetensors import safe_open
from transformers import GenerationConfig

from whet import config, files
from whet.draft.eagle import FOLDER, check_engine, copy_drafter
from whet.errors import WhetError
from whet.learn.checkpoint import MANIFEST, verify_checkpoint
from whet.model.load import load_weights, locate_model
from whet.model.lora import WEIGHTS, base_name, is_peft_folder, load_lora, merge_lora
from whet.recipe import dump_config, load_config
from whet.report.arms import Point, evaluation_names, evaluations, number
from whet.run import CHECKPOINTS, CONFIG, best_weights, read_metrics
from whet.text import printable

MODEL_FILES = (
    *(
        "config.json",
        "generation_config.json",
        "model*.safetensors",
        "model.safetensors.index.json",
    ),
    *("adapter_config.json", "adapter_model.safetensors", "LICENSE*", "NOTICE*"),
)
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model"),
    *("chat_template.json", "*.jinja", "additional_chat_templates/*.jinja"),
)
DATA_FILES = frozenset(
    {".jsonl", ".json", ".parquet", ".csv", ".toml", ".txt", ".safetensors", ".gguf"}
)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+_-]{0,60}")
_STEP = re.compile(r"step_(\d+)")


def export_model(
    source: Path, out: Path, *, merge: bool = False, drafter: str = "", push: str = ""
) -> Path:
    """Writes `out`, whole or not at all; with `push` ("org/name") uploads it too.

    `drafter` is "vllm" or "sglang", and then the model must have one; if empty, any drafter is exported for vllm.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WhetError(f"{out} is there already and not empty; choose another folder.")
    folder, run = find_source(source)
    base = base_name(folder) if is_peft_folder(folder) else ""  # of adapters
    if merge and not base:
        raise WhetError(
            f"{folder} holds full weights and no adapters, so there is nothing to merge."
        )
    if drafter:
        check_engine(drafter)
        if not (folder / FOLDER).is_dir():
            raise WhetError(
                f"{folder} holds no {FOLDER}/: it comes from a run that drafts with eagle."
            )
    if push:
        _check_push(push, "" if merge else base)
    with files.preparing(out) as tmp:
        if merge:
            _merge(folder, tmp)
        else:
            _copy(folder, tmp, (*MODEL_FILES, *TOKENIZER_FILES))
        if (beside := folder / FOLDER).is_dir():
            for path in (beside, *beside.iterdir()):
                _refuse_outside(folder, path)
            files.write_into(
                tmp, lambda target: copy_drafter(beside, target / FOLDER, engine=drafter or "vllm")
            )
        facts = _facts(folder, run, base, tmp)
        facts |= {
            "title": out.resolve().name,
            "adapter": bool(base) and not merge,
            "repository": push,
        }
        files.write_text(tmp / "README.md", model_card(CardFacts(**facts)))
    if push:
        _push(out, push)
    return out


def find_source(path: Path) -> tuple[Path, Path | None]:
    """The model folder of a path, checked to be whole as far as its own files tell, and the run it came from."""
    is_run = (path / CONFIG).is_file()
    folder = best_weights(path) if is_run else path
    if (path / MANIFEST).is_file() and (wrong := verify_checkpoint(path)) is not None:
        raise WhetError(f"The checkpoint {path} is not whole: {wrong}.")
    beside = path.resolve().parent
    above = path.resolve().parent.parent
    above_is_run = beside.name == CHECKPOINTS and (above / CONFIG).is_file()
    run = path if is_run else above if above_is_run else None
    if not folder.is_dir():
        raise WhetError(f"There is no run, checkpoint or model folder at {path}.")
    adapter = "adapter_" if is_peft_folder(folder) else ""
    settings = f"{adapter}config.json"
    weights = f"{adapter}model"
    if not (folder / settings).is_file() or not any(folder.glob(f"{weights}*.safetensors")):
        raise WhetError(
            f"{folder} is no model folder: it wants {settings} and {weights}.safetensors."
        )
    return folder, run


def _copy(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    """Copies the files that match; links are followed inside the folder and to the blobs of the hub's cache."""

    def fill(folder: Path) -> None:
        for pattern in patterns:
            for path in source.glob(pattern):
                if path.is_file():
                    _refuse_outside(source, path)
                    (folder / path.relative_to(source)).parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, folder / path.relative_to(source))

    files.write_into(target, fill)


def _refuse_outside(source: Path, path: Path) -> None:
    """A model folder of unknown origin must not add files of this machine to what is shared."""
    folder = source.resolve()
    target = path.resolve()
    homes = (
        [folder, folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [folder]
    )
    if not any(target.is_relative_to(home) for home in homes):
        raise WhetError(
            f"{path} is a link to {target}, outside the model folder; nothing is exported: put the file itself there."
        )


def _merge(adapter: Path, target: Path) -> None:
    """Writes the merged model, summed in fp32 (fp64 for fp64), in the precision of the adapters."""
    base = locate_model(str(adapter)).folder
    with safe_open(adapter / WEIGHTS, framework="pt") as file:
        dtype = file.get_tensor(next(iter(file.keys()))).dtype
    merged = merge_adapters(base, adapter, torch.promote_types(dtype, torch.float32), dtype)
    files.write_into(target, merged.save_pretrained)
    own_tokenizer = (adapter / "tokenizer_config.json").is_file()
    _copy(base, target, ("generation_config.json", "LICENSE*", "NOTICE*"))
    _copy(adapter if own_tokenizer else base, target, TOKENIZER_FILES)


def merge_adapters(base: Path, adapter: Path, precision: torch.dtype, dtype: torch.dtype) -> Any:
    """W + (alpha / rank) B A, summed in one precision and rounded to the other, ready to be saved."""
    model: Any = load_weights(base, precision)
    load_lora(model, adapter)
    merged = merge_lora(model).to(dtype)
    merged.generation_config = GenerationConfig()  # the file of the base is copied, unchecked
    return merged


def _facts(folder: Path, run: Path | None, base: str, written: Path) -> dict[str, Any]:
    """What the files tell about a model, for its card; `written` is its export."""
    facts: dict[str, Any] = {
        "chat": any((written / f"chat_template.{end}").is_file() for end in ("jinja", "json"))
    }
    with suppress(OSError, ValueError, AttributeError):
        facts["chat"] |= bool(
            json.loads((written / "tokenizer_config.json").read_bytes()).get("chat_template")
        )
    if run is not None:
        if step := _STEP.fullmatch(folder.resolve().name):
            facts["step"] = int(step[1])
        # a recipe that this version cannot read does not prevent an export
        with suppress(WhetError):
            settings = load_config(run / CONFIG)
            base = base or settings.model.name
            facts |= {"rows": read_metrics(run), "settings": settings}
    on_hub, license_name = _lineage(base, folder)
    return facts | {"base": base, "base_on_hub": on_hub, "license": license_name}


def _lineage(base: str, folder: Path) -> tuple[str, str]:
    """(hub name of the base, its licence), as far as names and the cards in local folders tell."""
    if base == "tiny":
        return "", ""
    local = Path(base).expanduser() if base else folder
    if not local.is_dir():
        return (base.partition("@")[0], "") if HUB_NAME.fullmatch(base) else ("", "")
    try:
        readme = (local / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", ""
    named = front_matter_value(readme, "base_model")
    return (named if HUB_NAME.fullmatch(named) else ""), license_of(readme)


def _check_push(name: str, base: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    fine = False
    with suppress(HFValidationError):
        validate_repo_id(name)
        fine = name.count("/") == 1
    if not fine:
        raise WhetError(f'"{name}" is no name of a hub repository; give it as org/name.')
    if base and Path(base).expanduser().is_dir():
        raise WhetError(
            f"The adapters stand on {base}, a folder that only this machine has; push them merged, with --merge."
        )


def _push(folder: Path, name: str) -> None:
    """Uploads the folder; an existing repository is added to and stays as public or private as it was."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    kept = f"The model is in {folder}, but was not pushed to {name}"
    try:
        api = HfApi(library_name="whet")
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Export from whet")
    except Exception as error:  # the network, the hub and its storage fail in many ways
        response = error.response if isinstance(error, HfHubHTTPError) else None
        status = response.status_code if response is not None else None
        if isinstance(error, LocalTokenNotFoundError) or status in (401, 403):
            raise WhetError(
                f"{kept}: run `hf auth login` with a token that may write there."
            ) from error
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WhetError(
            f"{kept}: {first.rstrip('.')}; `hf upload {name} {folder}` tries again."
        ) from error


# ---- the model card, from given facts: no file is touched here

PLAIN = 'inputs = tokenizer("7+5=", return_tensors="pt")'
CHAT = """chat = [{"role": "user", "content": "What is 7 + 5?"}]
inputs = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    title: str
    adapter: bool  # a peft folder, to be loaded on top of its base
    chat: bool  # the tokenizer has a chat template
    # as the recipe or the adapter names it: a hub name or a folder; empty if unknown
    base: str = ""
    base_on_hub: str = ""  # the hub name of the base, if it has one
    license: str = ""  # of the base; if empty it is left out, because it is not ours to choose
    settings: config.Config | None = None
    rows: Sequence[Mapping[str, Any]] = ()  # of metrics.jsonl
    step: int | None = None  # of the checkpoint
    repository: str = ""  # the hub repository it is pushed to; empty is this folder


def model_card(facts: CardFacts) -> str:
    parts = [
        _front_matter(facts),
        f"# {escape(facts.title)}",
        _summary(facts),
        _evaluations(facts),
        _usage(facts),
    ]
    if facts.settings is not None:
        recipe = _fenced(printable(public_recipe(facts.settings)).rstrip("\n"), "toml")
        parts.append(f"<details><summary>The recipe</summary>\n\n{recipe}\n\n</details>")
    return "\n\n".join(part for part in parts if part) + "\n"


def escape(text: str) -> str:
    r"""Text that stays text in Markdown, also in a table, on one line.

    >>> escape("a|b <i> [x](y) `z`")
    'a\\|b &lt;i&gt; \\[x\\](y) \\`z\\`'
    """
    visible = html.escape(printable(text, one_line=True), quote=False)
    return re.sub(r"([\\`*_\[\]|#~!])", r"\\\1", visible)


def short_name(name: str) -> str:
    """A hub name unchanged; the last part of anything else that is a path or an address.

    >>> short_name("org/name"), short_name("/home/me/models/mine"), short_name("secret/data.jsonl"), short_name("gsm8k")
    ('org/name', 'mine', 'data.jsonl', 'gsm8k')
    """
    if "/" not in name and "\\" not in name:
        return name
    hub = HUB_NAME.fullmatch(name) and PurePosixPath(name).suffix not in DATA_FILES
    if hub and not Path(name).exists():
        return name
    return PurePosixPath(name.replace("\\", "/")).name


def public_recipe(settings: config.Config) -> str:
    """The recipe as TOML, without the paths of this machine."""
    home = str(Path.home())

    def clean(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: clean(k, v) for k, v in value.items()}
        if isinstance(value, list):
            return [clean(key, item) for item in value]
        if not isinstance(value, str):
            return value
        if key in ("name", "path", "data_folder") or re.match(
            r"(?:[/~\\]|[A-Za-z]:[/\\]|\w+://)\S*$", value
        ):
            return short_name(value)
        return value.replace(home, "~") if len(home) > 1 else value

    return tomli_w.dumps(clean("", tomllib.loads(dump_config(settings))))


def license_of(readme: str) -> str:
    """The licence in the front matter of a model card, if it is one plain word."""
    named = front_matter_value(readme, "license").lower()
    return named if _LICENSE.fullmatch(named) else ""


def front_matter_value(readme: str, key: str) -> str:
    """A plain one-line value; YAML that is more than that is ignored."""
    block = re.match(r"---\r?\n(.*?)\r?\n---", readme, re.DOTALL)
    line = (
        re.search(rf"^{re.escape(key)}:[ \t]*([^\r\n]+)$", block[1], re.MULTILINE)
        if block
        else None
    )
    return line[1].strip().strip("\"'") if line else ""


def _front_matter(facts: CardFacts) -> str:
    """Names are written as JSON strings, which are YAML strings, so that no name can end one."""
    tags = ["whet"]
    if facts.settings is not None:
        tags += ["reinforcement-learning", facts.settings.learn.estimator.replace("_", "-")]
    if facts.adapter:
        tags.append("lora")
    lines = [
        f"library_name: {'peft' if facts.adapter else 'transformers'}",
        "pipeline_tag: text-generation",
    ]
    lines += [f"base_model: {json.dumps(facts.base_on_hub)}"] if facts.base_on_hub else []
    lines += [f"license: {json.dumps(facts.license)}"] if facts.license else []
    return "\n".join(["---", *lines, "tags:", *(f"- {tag}" for tag in tags), "---"])


def _summary(facts: CardFacts) -> str:
    base = escape(facts.base_on_hub or short_name(facts.base))
    s = facts.settings
    if s is None:
        return f"Exported by whet{f'; base model {base}' if base else ''}."
    what = f"LoRA adapters of rank {s.model.lora.rank}" if s.model.lora.rank else "all weights"
    if base == "tiny":
        base = "a small model made for the run"
    lines = [
        f"Trained by reinforcement learning with whet, starting from {base}.\n",
        f"- Data: {'; '.join(map(_data, s.data))}",
        f"- Curriculum: {escape(s.curriculum.name)}, {s.curriculum.groups} groups of {s.curriculum.rollouts} "
        "rollouts per step",
        f"- Estimator: {escape(s.learn.estimator)}, learning rate {s.learn.lr:g}",
        f"- Trained: {what}, in {s.model.dtype}",
    ]
    if s.warm_start:
        steps = ", ".join(str(entry.steps) for entry in s.warm_start)
        lines.append(f"- Before that: supervised on worked solutions for {steps} updates")
    if facts.step is not None:
        row = next((row for row in facts.rows if row.get("step") == facts.step), {})
        tokens = number(row, "tokens_generated")
        spent = f", {tokens:,.0f} tokens generated for training" if tokens is not None else ""
        lines.append(f"- This checkpoint: after step {facts.step} of {s.steps}{spent}")
    return "\n".join(lines)


def _data(entry: config.Data) -> str:
    name = escape(short_name(entry.path) if entry.path else entry.kind)
    more = [escape(part) for part in (entry.subset, entry.split) if part]
    more += [f"at most {entry.limit} prompts"] if entry.limit else []
    return f"{name} ({', '.join(more)})" if more else name


def _evaluations(facts: CardFacts) -> str:
    def cell(point: Point | None) -> str:
        return "" if point is None else f"{point.accuracy:.3f} ({point.step})"

    head = "## Evaluation\n\nAccuracy (at step).\n\n| set | first | best | last | this checkpoint |"
    lines = [head, "|---|---:|---:|---:|---:|"]
    for name in evaluation_names(facts.rows):
        if points := evaluations(facts.rows, name):
            best = max(points, key=lambda point: (point.accuracy, -point.step))
            here = next((point for point in points if point.step == facts.step), None)
            lines.append(
                f"| {escape(name)} | {' | '.join(map(cell, (points[0], best, points[-1], here)))} |"
            )
    return "\n".join(lines) if lines[2:] else ""


def _usage(facts: CardFacts) -> str:
    where = json.dumps(facts.repository or ".")
    kind = "AutoModelForCausalLM"
    imports = "from transformers import AutoModelForCausalLM, AutoTokenizer"
    if facts.adapter:
        kind = "AutoPeftModelForCausalLM"
        imports = f"from peft import {kind}\nfrom transformers import AutoTokenizer"
    code = f"""{imports}

model = {kind}.from_pretrained({where}, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained({where})
{CHAT if facts.chat else PLAIN}
out = model.generate(**inputs, max_new_tokens=256)
print(tokenizer.decode(out[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))"""
    note = "" if facts.repository else "\n\n`.` stands for this folder."
    return f"## Use\n\n{_fenced(code, 'python')}{note}"


def _fenced(text: str, language: str) -> str:
    """Fences text with more backticks than any run of them in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
