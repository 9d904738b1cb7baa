"""A model card: README.md with the front matter that the hub reads, what the model learnt from, and how it did.

`whet.export` calls `model_card` with what it found. Everything that comes from outside (names, paths, the recipe) is
escaped for the place it goes to, and paths of this machine are cut down to their last part. No file is touched here.
"""

from __future__ import annotations

import html
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import tomli_w

from whet import config
from whet.recipe import dump_config
from whet.report.curves import Point, evaluation_names, evaluations, number
from whet.text import printable

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
FILES = frozenset({".jsonl", ".json", ".parquet", ".csv", ".toml", ".txt", ".safetensors", ".gguf"})
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+_-]{0,60}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
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


def model_card(facts: Facts) -> str:
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


def _front_matter(facts: Facts) -> str:
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


def _summary(facts: Facts) -> str:
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
    return " + ".join(dict.fromkeys(settings.curriculum.but(entry.curriculum).name for entry in settings.data))


def _data(entry: config.Data) -> str:
    name = escape(short_name(entry.path) if entry.path else entry.kind)
    extra = [part for part in (entry.subset, entry.split) if part]
    limit = f"at most {entry.limit} prompts" if entry.limit else ""
    more = ", ".join([*map(escape, extra), *([limit] if limit else [])])
    return f"{name} ({more})" if more else name


def _spent(facts: Facts) -> str:
    row = next((row for row in facts.rows if row.get("step") == facts.step), None)
    tokens = number(row, "tokens_generated") if row is not None else None
    return f", {tokens:,.0f} tokens generated for training" if tokens is not None else ""


def _evaluations(facts: Facts) -> str:
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


def _usage(facts: Facts) -> str:
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


def _recipe(facts: Facts) -> str:
    if facts.settings is None:
        return ""
    recipe = _fenced(printable(public_recipe(facts.settings)).rstrip("\n"), "toml")
    return f"<details><summary>The recipe</summary>\n\n{recipe}\n\n</details>"


def _fenced(text: str, language: str) -> str:
    """A fence longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
