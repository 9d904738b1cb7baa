"""A trained model as a clean Hugging Face folder with a model card, ready to serve or to share.

`whet export` calls `export_model` with a run (its best checkpoint), a checkpoint, or any model folder. Files are copied
as they are, so the export is what was trained, to the bit; only merging adapters loads weights. A drafter that was
trained beside the model is exported as `drafter/`, for the serving engine that is named. What a run needs to go
on (state, manifest) and anything that could run code stays behind. The card is `whet.tools.export`'s.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import tomli_w

from whet import config, files
from whet.errors import WhetError
from whet.learn.checkpoint import MANIFEST, verify_checkpoint
from whet.recipe import dump_config, load_config
from whet.report.curves import Point, evaluation_names, evaluations, number
from whet.run import CHECKPOINTS, CONFIG, best_checkpoint, read_metrics
from whet.text import printable

# ---- card
#
# A model card: README.md with the front matter that the hub reads, what the model learnt from, and how it did.
#
# `whet.tools.export` calls `model_card` with what it found. Everything that comes from outside (names, paths, the
# recipe) is escaped for the place it goes to, and paths of this machine are cut down to their last part. No file is
# touched here.


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
FILES = frozenset({".jsonl", ".json", ".parquet", ".csv", ".toml", ".txt", ".safetensors", ".gguf"})
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+_-]{0,60}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What a card is made of."""

    title: str
    adapter: bool
    """A peft folder, to be loaded on top of its base."""
    chat: bool
    """The tokenizer has a chat template."""
    base: str = ""
    """As the recipe or the adapter names it: a hub name or a folder; empty where it is not known."""
    base_on_hub: str = ""
    """The hub name of the base, where it has one."""
    license: str = ""
    """The base's; empty leaves it out, for it is not ours to choose."""
    settings: config.Config | None = None
    rows: Sequence[Mapping[str, Any]] = ()
    """Of metrics.jsonl."""
    step: int | None = None
    """Of the checkpoint."""
    repository: str = ""
    """Where it can be had; empty is this folder."""


def model_card(facts: CardFacts) -> str:
    parts = [_front_matter(facts), f"# {escape(facts.title)}", _summary(facts), _evaluations(facts)]
    parts += [_usage(facts), _recipe(facts)]
    return "\n\n".join(part for part in parts if part) + "\n"


def escape(text: str) -> str:
    r"""Text that stays text in Markdown, in a table too, on one line.

    >>> escape("a|b <i> [x](y) `z`")
    'a\\|b &lt;i&gt; \\[x\\](y) \\`z\\`'
    """
    visible = html.escape(printable(text, one_line=True), quote=False)
    return re.sub(r"([\\`*_\[\]|#~!])", r"\\\1", visible)


def short_name(name: str) -> str:
    """A hub name as it is; of anything else that is a path or an address, the last part.

    >>> short_name("org/name"), short_name("/home/me/models/mine"), short_name("secret/data.jsonl"), short_name("gsm8k")
    ('org/name', 'mine', 'data.jsonl', 'gsm8k')
    """
    if "/" not in name and "\\" not in name:
        return name
    hub = HUB_NAME.fullmatch(name) and PurePosixPath(name).suffix not in FILES
    if hub and not Path(name).exists():
        return name
    return PurePosixPath(name.replace("\\", "/")).name


def public_recipe(settings: config.Config) -> str:
    """The recipe as TOML, without where things lie on this machine."""
    home = str(Path.home())

    def clean(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: clean(k, v) for k, v in value.items()}
        if isinstance(value, list):
            return [clean(key, item) for item in value]
        if not isinstance(value, str):
            return value
        if key in ("name", "path", "data_folder") or re.match(r"(?:[/~\\]|[A-Za-z]:[/\\]|\w+://)\S*$", value):
            return short_name(value)
        return value.replace(home, "~") if len(home) > 1 else value

    return tomli_w.dumps(clean("", tomllib.loads(dump_config(settings))))


def license_of(readme: str) -> str:
    """What the front matter of a model card says, where it is one plain word.

    >>> license_of("---\\nlicense: apache-2.0\\n---\\n# x"), license_of("no front matter")
    ('apache-2.0', '')
    """
    told = front_matter_value(readme, "license").lower()
    return told if _LICENSE.fullmatch(told) else ""


def front_matter_value(readme: str, key: str) -> str:
    """A plain one-line value. Not YAML: what is more than that is not taken over."""
    block = re.match(r"---\r?\n(.*?)\r?\n---", readme, re.DOTALL)
    line = re.search(rf"^{re.escape(key)}:[ \t]*([^\r\n]+)$", block[1], re.MULTILINE) if block else None
    return line[1].strip().strip("\"'") if line else ""


def _front_matter(facts: CardFacts) -> str:
    """JSON strings are YAML strings, so that no name can end one."""
    tags = ["whet"]
    if facts.settings is not None:
        tags += ["reinforcement-learning", facts.settings.learn.estimator.replace("_", "-")]
    if facts.adapter:
        tags.append("lora")
    lines = [f"library_name: {'peft' if facts.adapter else 'transformers'}", "pipeline_tag: text-generation"]
    lines += [f"base_model: {json.dumps(facts.base_on_hub)}"] if facts.base_on_hub else []
    lines += [f"license: {json.dumps(facts.license)}"] if facts.license else []
    return "\n".join(["---", *lines, "tags:", *(f"- {tag}" for tag in tags), "---"])


def _summary(facts: CardFacts) -> str:
    base = escape(facts.base_on_hub or short_name(facts.base))
    if facts.settings is None:
        return f"Exported by whet{f'; base model {base}' if base else ''}."
    s = facts.settings
    what = f"LoRA adapters of rank {s.model.lora.rank}" if s.model.lora.rank else "All weights"
    if base == "tiny":
        base = "a small model made for the run"
    lines = [
        f"Trained by reinforcement learning with whet, starting from {base}.",
        "",
        f"- Data: {'; '.join(_data(entry) for entry in s.data)}",
        f"- Curriculum: {escape(_curricula(s))}, {s.curriculum.groups} groups of {s.curriculum.rollouts} rollouts "
        "a step",
        f"- Estimator: {escape(s.learn.estimator)}, learning rate {s.learn.lr:g}",
        f"- Trained: {what[0].lower()}{what[1:]}, in {s.model.dtype}",
    ]
    if s.warm_start:
        steps = ", ".join(str(entry.steps) for entry in s.warm_start)
        lines.append(f"- Before that: supervised on worked solutions for {steps} updates")
    if facts.step is not None:
        lines.append(f"- This checkpoint: after step {facts.step} of {s.steps}{_spent(facts)}")
    return "\n".join(lines)


def _curricula(settings: config.Config) -> str:
    """The one, or where data entries have their own, each once."""
    return " + ".join(dict.fromkeys(settings.curriculum.override(entry.curriculum).name for entry in settings.data))


def _data(entry: config.Data) -> str:
    name = escape(short_name(entry.path) if entry.path else entry.kind)
    extra = [part for part in (entry.subset, entry.split) if part]
    limit = f"at most {entry.limit} prompts" if entry.limit else ""
    more = ", ".join([*map(escape, extra), *([limit] if limit else [])])
    return f"{name} ({more})" if more else name


def _spent(facts: CardFacts) -> str:
    row = next((row for row in facts.rows if row.get("step") == facts.step), None)
    tokens = number(row, "tokens_generated") if row is not None else None
    return f", {tokens:,.0f} tokens generated for training" if tokens is not None else ""


def _evaluations(facts: CardFacts) -> str:
    names = evaluation_names(facts.rows)
    if not names:
        return ""
    lines = ["## Evaluation", "", "Accuracy (at step).", "", "| set | first | best | last | this checkpoint |"]
    lines.append("|---|---:|---:|---:|---:|")
    for name in names:
        points = evaluations(facts.rows, name)
        if points:
            best = max(points, key=lambda point: (point.accuracy, -point.step))
            here = next((point for point in points if point.step == facts.step), None)
            cells = " | ".join(_cell(point) for point in (points[0], best, points[-1], here))
            lines.append(f"| {escape(name)} | {cells} |")
    return "\n".join(lines)


def _cell(point: Point | None) -> str:
    return "" if point is None else f"{point.accuracy:.3f} ({point.step})"


def _usage(facts: CardFacts) -> str:
    where = json.dumps(facts.repository or ".")
    if facts.adapter:
        load = ["from peft import AutoPeftModelForCausalLM", "from transformers import AutoTokenizer", ""]
        load.append(f'model = AutoPeftModelForCausalLM.from_pretrained({where}, dtype="auto")')
    else:
        load = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
        load.append(f'model = AutoModelForCausalLM.from_pretrained({where}, dtype="auto")')
    load.append(f"tokenizer = AutoTokenizer.from_pretrained({where})")
    if facts.chat:
        load.append('chat = [{"role": "user", "content": "What is 7 + 5?"}]')
        load.append("inputs = tokenizer.apply_chat_template(")
        load.append('    chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"')
        load.append(")")
    else:
        load.append('inputs = tokenizer("7+5=", return_tensors="pt")')
    load.append("out = model.generate(**inputs, max_new_tokens=256)")
    load.append('print(tokenizer.decode(out[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))')
    note = "" if facts.repository else "\n\n`.` stands for this folder."
    return f"## Use\n\n{_fenced(chr(10).join(load), 'python')}{note}"


def _recipe(facts: CardFacts) -> str:
    if facts.settings is None:
        return ""
    recipe = _fenced(printable(public_recipe(facts.settings)).rstrip("\n"), "toml")
    return f"<details><summary>The recipe</summary>\n\n{recipe}\n\n</details>"


def _fenced(text: str, language: str) -> str:
    """A fence longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "LICENSE*",
    "NOTICE*",
)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "chat_template.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
)
_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSource:
    """What is exported, and the run it came from, if any."""

    folder: Path
    run: Path | None
    adapter: bool
    base: str
    """What the adapters stand on; empty for a full model."""


def export_model(
    source: Path, out: Path, *, merge: bool = False, drafter: str = "", push: str = "", private: bool = True
) -> Path:
    """Writes `out`, whole or not at all; with `push` ("org/name") uploads it too.

    `drafter`: "vllm" or "sglang", and there must be one; empty is vllm, where there is one.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WhetError(f"{out} is there already and not empty; choose another folder.")
    found = find_source(source)
    if merge and not found.adapter:
        raise WhetError(f"{found.folder} holds full weights and no adapters, so there is nothing to merge.")
    if drafter:
        _check_drafter(found, drafter)
    if push:
        _check_push(push, found, merge)
    tmp = files.temporary(out)
    files.remove_tree(tmp)
    files.make_folder(tmp)
    try:
        if merge:
            _merge(found, tmp)
        else:
            _copy(found.folder, tmp, (*MODEL_FILES, *TOKENIZER_FILES))
        _copy_drafter(found, tmp, drafter or "vllm")
        facts = _facts(found, tmp, title=out.resolve().name, merged=merge, push=push)
        files.write_text(tmp / "README.md", model_card(facts))
        files.publish(tmp, out)
    finally:
        files.remove_tree(tmp)
    if push:
        _push(out, push, private)
    return out


def find_source(path: Path) -> ExportSource:
    """The model folder in question, known to be whole as far as its own files tell."""
    from whet.model.lora import base_name, is_peft_folder

    if (path / CONFIG).is_file():
        best = best_checkpoint(path)
        if best is None:
            raise WhetError(f"The run {path} has no whole checkpoint to export yet.")
        folder, run = best, path
    else:
        folder, run = path, None
        if path.resolve().parent.name == CHECKPOINTS and (path.resolve().parent.parent / CONFIG).is_file():
            run = path.resolve().parent.parent
        if (path / MANIFEST).is_file() and (wrong := verify_checkpoint(path)) is not None:
            raise WhetError(f"The checkpoint {path} is not whole: {wrong}.")
    if not folder.is_dir():
        raise WhetError(f"There is no run, checkpoint or model folder at {path}.")
    adapter = is_peft_folder(folder)
    weights, settings = ("adapter_model", "adapter_config.json") if adapter else ("model", "config.json")
    if not (folder / settings).is_file() or not any(folder.glob(f"{weights}*.safetensors")):
        raise WhetError(f"{folder} is no model folder: it wants {settings} and {weights}.safetensors.")
    return ExportSource(folder=folder, run=run, adapter=adapter, base=base_name(folder) if adapter else "")


def _copy(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    """Links are followed inside the folder, and to the blobs of the hub's cache, which is made of them."""

    def fill(folder: Path) -> None:
        for pattern in patterns:
            for path in source.glob(pattern):
                if path.is_file():
                    _refuse_outside(source, path)
                    (folder / path.relative_to(source)).parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, folder / path.relative_to(source))

    files.write_into(target, fill)


def _refuse_outside(source: Path, path: Path) -> None:
    """A model folder of unknown origin must not bring files of this machine into what is shared."""
    folder, target = source.resolve(), path.resolve()
    homes = [folder, folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [folder]
    if not any(target.is_relative_to(home) for home in homes):
        raise WhetError(
            f"{path} is a link to {target}, outside the model folder; nothing is exported: put the file itself there."
        )


def _check_drafter(source: ExportSource, engine: str) -> None:
    from whet.draft.export import FOLDER, check_engine

    check_engine(engine)
    if not (source.folder / FOLDER).is_dir():
        raise WhetError(f"{source.folder} holds no {FOLDER}/: it comes from a run that drafts with eagle.")


def _copy_drafter(source: ExportSource, target: Path, engine: str) -> None:
    from whet.draft.export import FOLDER, copy_drafter

    mine = source.folder / FOLDER
    if mine.is_dir():
        for path in (mine, *mine.iterdir()):
            _refuse_outside(source.folder, path)
        files.write_into(target, lambda folder: copy_drafter(mine, folder / FOLDER, engine=engine))


def _merge(source: ExportSource, target: Path) -> None:
    """W + (alpha / rank) B A, summed in fp32 (fp64 for fp64) and written in the adapters' own precision."""
    import torch
    from safetensors import safe_open
    from transformers import GenerationConfig

    from whet.model.load import load_weights, locate_model
    from whet.model.lora import WEIGHTS, load_lora, merge_lora

    place = locate_model(str(source.folder))
    with safe_open(source.folder / WEIGHTS, framework="pt") as file:
        dtype = file.get_tensor(next(iter(file.keys()))).dtype
    model: Any = load_weights(place.folder, torch.promote_types(dtype, torch.float32))
    load_lora(model, source.folder)
    merged = merge_lora(model).to(dtype)
    merged.generation_config = GenerationConfig()  # the base's own is copied, whatever transformers thinks of it
    files.write_into(target, lambda folder: merged.save_pretrained(folder))
    own_tokenizer = (source.folder / "tokenizer_config.json").is_file()
    _copy(place.folder, target, ("generation_config.json", "LICENSE*", "NOTICE*"))
    _copy(source.folder if own_tokenizer else place.folder, target, TOKENIZER_FILES)


def _facts(source: ExportSource, folder: Path, *, title: str, merged: bool, push: str) -> CardFacts:
    settings, rows = _training(source.run)
    step = _STEP.fullmatch(source.folder.resolve().name)
    base = source.base or (settings.model.name if settings is not None else "")
    on_hub, license_name = _lineage(base, source.folder)
    return CardFacts(
        title=title,
        adapter=source.adapter and not merged,
        chat=_has_chat_template(folder),
        base=base,
        base_on_hub=on_hub,
        license=license_name,
        settings=settings,
        rows=rows,
        step=int(step[1]) if step and source.run is not None else None,
        repository=push,
    )


def _training(run: Path | None) -> tuple[config.Config | None, list[dict[str, Any]]]:
    """Recipe and metrics; a recipe that this version cannot read is no reason not to export."""
    if run is None:
        return None, []
    try:
        return load_config(run / CONFIG), read_metrics(run)
    except WhetError:
        return None, []


def _lineage(base: str, folder: Path) -> tuple[str, str]:
    """(the base's hub name, its licence) as far as names and the cards in the folders at hand tell."""
    if base == "tiny":
        return "", ""
    local = Path(base).expanduser() if base else folder
    if not local.is_dir():
        return (base.partition("@")[0], "") if HUB_NAME.fullmatch(base) else ("", "")
    try:
        readme = (local / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", ""
    told = front_matter_value(readme, "base_model")
    return (told if HUB_NAME.fullmatch(told) else ""), license_of(readme)


def _has_chat_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_bytes()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def _check_push(name: str, source: ExportSource, merge: bool) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
        fine = name.count("/") == 1
    except HFValidationError:
        fine = False
    if not fine:
        raise WhetError(f'"{name}" is no name of a hub repository; give it as org/name.')
    if source.adapter and not merge and Path(source.base).expanduser().is_dir():
        raise WhetError(
            f"The adapters stand on {source.base}, a folder that nobody else has; push them merged, with --merge."
        )


def _push(folder: Path, name: str, private: bool) -> None:
    """A repository that is there already is added to, and stays as public or private as it was."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    kept = f"The model is in {folder}, but was not pushed to {name}"
    try:
        api = HfApi(library_name="whet")
        api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Export from whet")
    except Exception as error:  # the network, the hub and its storage fail in many ways
        response = error.response if isinstance(error, HfHubHTTPError) else None
        status = response.status_code if response is not None else None
        if isinstance(error, LocalTokenNotFoundError) or status in (401, 403):
            raise WhetError(f"{kept}: run `hf auth login` with a token that may write there.") from error
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WhetError(f"{kept}: {first.rstrip('.')}; `hf upload {name} {folder}` tries again.") from error
