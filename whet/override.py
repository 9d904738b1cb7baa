"""One `--set a.b=c`, put into the tree of a recipe before it is read. `recipe.load_config` calls it."""

from __future__ import annotations

import tomllib
from itertools import pairwise
from typing import Any

from whet.errors import WhetError


def override(tree: dict[str, Any], item: str) -> None:
    """A value is TOML, or else a string; entries of a list go by number, and the next one may be new.

    >>> tree = {"data": [{"path": "a"}]}
    >>> override(tree, "data.1.path=b"), override(tree, "learn.lr=1e-6"), tree
    (None, None, {'data': [{'path': 'a'}, {'path': 'b'}], 'learn': {'lr': 1e-06}})
    """
    key, sep, value = item.partition("=")
    if not sep or not key.strip():
        raise WhetError(f'--set takes key=value, got "{item}"')
    _assign(tree, key.strip().split("."), _parse_value(value.strip()), item)


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a string


def _assign(tree: dict[str, Any], path: list[str], value: Any, item: str) -> None:
    node: Any = tree
    for here, following in pairwise(path):
        if isinstance(node, list):
            node = _list_item(node, here, item)
            continue
        fresh: Any = [] if following.isdigit() else {}
        node = node.setdefault(here, fresh)
        if not isinstance(node, dict | list):
            raise WhetError(f'--set {item}: "{here}" holds a value, not a section.')
    if isinstance(node, list):
        if not path[-1].isdigit():
            raise WhetError(f'--set {item}: name the entry by number, as in "{path[0]}.0.{path[-1]}".')
        _list_item(node, path[-1], item)
        node[int(path[-1])] = value
    else:
        node[path[-1]] = value


def _list_item(node: list[Any], index: str, item: str) -> Any:
    if not index.isdigit() or int(index) > len(node):
        raise WhetError(f'--set {item}: "{index}" names no entry of a list of {len(node)}.')
    if int(index) == len(node):
        node.append({})
    return node[int(index)]
