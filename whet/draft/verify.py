"""Which of the tokens a target drew at the places of a draft are kept. Pure; called by the engine after each forward.

The rule: the target draws one token at every place of the draft, each from its own distribution there. Walk from the
root: the token drawn is written; if the draft has it as a child, go on there. Every token written was drawn from the
target's distribution after the tokens before it, whatever the draft was: exact for any draft that does not know the
noise, no draft probabilities needed (TLT's "target-only" rule, one draw instead of one coin a child). With noise keyed
by position the draw is the one plain decoding makes, so the very same tokens come out.
"""

from __future__ import annotations

import numpy as np


def walk(drafted: np.ndarray, counts: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """Tokens written by each row of chains: those that agree with the draft, and the one after, int32 [B].

    `drafted` [B, K] counts up to `counts` [B]; `sampled` [B, K + 1] was drawn after the newest token and after each
    drafted one. Row b writes sampled[b, :n].

    >>> walk(np.array([[5, 6, 7], [5, 6, 7]]), np.array([3, 1]), np.array([[5, 6, 9, 1], [5, 6, 7, 8]])).tolist()
    [3, 2]
    """
    depth = drafted.shape[1]
    agree = (drafted == sampled[:, :depth]) & (np.arange(depth) < counts[:, None])
    return (np.logical_and.accumulate(agree, axis=1).sum(1) + 1).astype(np.int32)


def walk_tree(parent: np.ndarray, tokens: np.ndarray, sampled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nodes visited by each row, [B, T] in order and -1 behind them, and how many, int32 [B].

    All arguments [B, T]. Node 0 is the newest token, its parent -1; parents come before children; any other node with
    parent -1 is padding. `sampled` was drawn at each node. Row b writes sampled[b, nodes[b, :n]].

    >>> parent, tokens = np.array([[-1, 0, 0, 2]]), np.array([[0, 5, 6, 7]])  # 5 or 6; after 6, 7
    >>> nodes, counts = walk_tree(parent, tokens, np.array([[6, 1, 7, 9]]))
    >>> nodes[0].tolist(), counts.tolist()  # draws 6, there 7, there 9
    ([0, 2, 3, -1], [3])
    """
    batch, width = parent.shape
    rows = np.arange(batch)
    at = np.zeros(batch, np.int64)
    live = np.ones(batch, bool)
    nodes = np.full((batch, width), -1, np.int64)
    for depth in range(width):
        nodes[live, depth] = at[live]
        child = (parent == at[:, None]) & (tokens == sampled[rows, at][:, None]) & live[:, None]
        child[:, 0] = False
        live = child.any(1)
        if not live.any():
            break
        at = np.where(live, child.argmax(1), at)
    return nodes, (nodes >= 0).sum(1).astype(np.int32)


def truncate(
    counts: np.ndarray, written: np.ndarray, stops: np.ndarray, room: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What remains of a run when a stop id or the limit falls inside it: counts [B], stopped [B], full [B].

    `written` [B, W] holds `counts` tokens a row, `stops` [B, S] stop ids (-1: none), `room` [B] tokens left to the
    limit. The stop id is written, too; a stop goes before the limit, as in plain decoding.

    >>> runs = np.array([[4, 2, 7], [4, 5, 7], [4, 5, 2]])
    >>> truncate(np.array([3, 3, 3]), runs, np.array([[2], [2], [2]]), np.array([9, 2, 3]))
    (array([2, 2, 3], dtype=int32), array([ True, False,  True]), array([False,  True, False]))
    """
    place = np.arange(written.shape[1])
    kept = np.minimum(counts, room)
    hits = (written[:, :, None] == stops[:, None, :]).any(2) & (written >= 0) & (place < kept[:, None])
    stopped = hits.any(1)
    kept = np.where(stopped, hits.argmax(1) + 1, kept)
    return kept.astype(np.int32), stopped, ~stopped & (kept >= room)
