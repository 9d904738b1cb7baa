"""Which prompts a stage trains on: by length of the problem, of its responses so far, or by task. Pure functions.

FastCuRL (arXiv 2503.17287) takes the length of a problem as a cheap sign of how long its answer will be: L1 is what is
not longer than the mean, L3 the rest, L2 everything. Called by `stages.py`; nothing here knows a stage or an id.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def short_by_characters(characters: np.ndarray) -> np.ndarray:
    """True where length <= floor(mean), the rule the published files of FastCuRL follow (24,976 of 40,315 problems).

    Never all False: the shortest is at most the mean. All True where all are alike.

    >>> short_by_characters(np.array([10, 12, 15])).tolist()  # mean 12.33
    [True, True, False]
    """
    lengths = np.asarray(characters, np.int64)
    return lengths <= lengths.sum() // max(1, len(lengths))


def short_by_responses(characters: np.ndarray, tokens: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """True where the mean response of a prompt is not longer than the mean over all prompts that have any. OURS.

    `tokens` is the sum over the `seen` responses of each prompt. A prompt without a response goes by its
    characters, against all others' characters: the two units are never compared with each other.

    >>> short_by_responses(np.array([9, 9, 1, 5]), np.array([40, 20, 0, 0]), np.array([4, 1, 0, 0])).tolist()
    [True, False, True, True]
    """
    visited = np.asarray(seen) > 0
    short = short_by_characters(characters)
    if visited.any():
        means = np.asarray(tokens)[visited] / np.asarray(seen)[visited]
        short[visited] = means <= means.mean()
    return short


def of_tasks(tasks: Sequence[str] | np.ndarray, wanted: Sequence[str]) -> np.ndarray:
    """True where a prompt's task is wanted.

    >>> of_tasks(["chain", "text", "chain"], ["chain"]).tolist()
    [True, False, True]
    """
    return np.isin(np.asarray(tasks, dtype=str), list(wanted))
