"""Recipes: TOML becomes a Config and a Config becomes TOML. A wrong setting gives one sentence.

`--set a.b=c` overrides the file. `config.py` says what the settings are and mean.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from whet.config import Config, Section
from whet.errors import WhetError


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
                raise WhetError(f'--set {item}: name the entry by number, as in "{path[0]}.0.{path[-1]}".')
            spot = int(here)
            if spot > len(node):
                raise WhetError(f'--set {item}: "{here}" names no entry of a list of {len(node)}.')
            node += [{}] * (spot == len(node))
        elif not isinstance(node, dict):
            raise WhetError(f'--set {item}: "{here}" lies below a value, not a section.')
        if following is None:
            node[spot] = parsed
        else:
            node = node[spot] if isinstance(node, list) else node.setdefault(here, [] if following.isdigit() else {})


def load_config(path: Path | None = None, sets: Iterable[str] = (), base: Mapping[str, Any] | None = None) -> Config:
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
            return {f.relative_to(folder).with_suffix("").as_posix(): f for f in sorted(folder.rglob("*.toml"))}
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
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        *parents, last = (str(part) for part in first["loc"])
        return f'There is no setting "{where}"{_nearest(parents, last)}'
    message = first["msg"].removeprefix("Value error, ")
    if not where:
        return f"{message}."
    if isinstance(first["input"], Mapping):  # settings of this table contradict each other
        return f"{where}: {message}."
    return f"{where} = {first['input']!r} is wrong: {message[0].lower()}{message[1:]}."


def _nearest(parents: list[str], last: str) -> str:
    """Name the closest key of the same section, else of any section, else list the section's keys."""
    keys = [name for name, _, _ in describe()]
    prefix = "".join(f"{p}." for p in parents if not p.isdigit())
    siblings = {key.removeprefix(prefix).split(".")[0]: key for key in keys if key.startswith(prefix)}
    leaves = {key.rsplit(".", 1)[-1]: key for key in keys}
    for cutoff, names in ((0.5, siblings), (0.6, leaves)):
        near = difflib.get_close_matches(last, names, n=1, cutoff=cutoff)
        if near:
            return f'; did you mean "{prefix + near[0] if names is siblings else names[near[0]]}"?'
    return f"; known are {', '.join(sorted(siblings))}."


def describe(section: type[Section] = Config, prefix: str = "") -> list[tuple[str, str, str]]:
    """Return (dotted name, default, meaning) of every setting; list sections have no number in their names."""
    rows = []
    for name, info in section.model_fields.items():
        kinds = (info.annotation, *getattr(info.annotation, "__args__", ()))
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
        if inner is not None:
            rows += describe(inner, f"{prefix}{name}.")
        else:
            rows.append(
                (prefix + name, "required" if info.is_required() else repr(info.default), info.description or "")
            )
    return rows
