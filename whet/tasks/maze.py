"""Task "maze": find the goal in a grid with walls by a search that is written out cell by cell.

A cell is two letters, its column and its row: "cB" is the third cell of the second row. A problem lists the free cells,
then the start and the goal: "aAbAaBbB>aAbB:". A response names one cell after another, from the start to the goal; each
step goes to a free neighbour, and a search that turns back writes the cells it returns through. With `slack` a response
must also be short: it may name at most slack times the cells of the shortest way. The level of a problem is the side of
its grid.

The worked solutions search depth first and try the neighbours in random order, so a model that imitates them finds the
goal by luck. Which neighbour is best to try is a skill that only a reward can teach: a search that heads for the goal
needs far fewer cells, and a limit makes that count. The skill is the same on every side: what small grids teach opens
larger ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from string import ascii_lowercase, ascii_uppercase
from typing import Any, NamedTuple

import numpy as np

from whet.errors import WhetError
from whet.tasks.base import (
    PromptTable,
    check_range,
    is_held_out,
    parse_range,
    read_options,
    spread_levels,
)
from whet.types import Prompt

SMALLEST, LARGEST = 3, 26  # side of a grid: a letter per column and row
MOST_WALLS = 0.4  # share of the cells; with more the free cells fall apart into small islands
ROUNDS = 400  # grids drawn in place of one that has no way, before the options are refused
BARREN = 10  # rounds in a row without a new problem before the options are refused
CHUNK = 2048  # mazes drawn at once, which bounds the memory

# Shapes: M mazes in one array, W = LARGEST + 2 (a frame of walls), cells numbered row * W + column from 0 to W * W - 1.
W = LARGEST + 2
ROW, COLUMN = np.divmod(np.arange(W * W), W)
STEPS = np.array([1, -1, W, -W])  # to the four neighbours
NAMES = np.full(W * W, "??", "S2")
for _row, _letter in enumerate(ascii_uppercase, 1):
    NAMES[_row * W + 1 : _row * W + W - 1] = [column + _letter for column in ascii_lowercase]
CELLS = {name.decode(): cell for cell, name in enumerate(NAMES) if name != b"??"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MazeOptions:
    train_count: int = 20_000
    # Share of the training prompts for each range of sides; inside a range the sides get equal shares.
    mix: Mapping[str, float] = field(default_factory=lambda: {"4-5": 0.4, "6-8": 0.2, "9-12": 0.4})
    eval_count: int = 400
    eval_range: str = "4-9"
    walls: float = 0.25  # share of the cells that are walls
    # cells that a response may name, relative to the shortest way; 0 sets no limit
    slack: float = 0.0

    def __post_init__(self) -> None:
        check_range("Task maze", "train_count", self.train_count, 1, 1_000_000)
        check_range("Task maze", "eval_count", self.eval_count, 1, 100_000)
        check_range("Task maze", "walls", self.walls, 0, MOST_WALLS)
        check_range("Task maze", "slack", self.slack or 1, 1, 1000)
        parse_range("Task maze", self.eval_range, SMALLEST, LARGEST)
        spread_levels("Task maze", self.mix, 1, SMALLEST, LARGEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class MazeSolutions:
    sides: str = "4-12"
    toward_goal: float = 0.0  # share of the steps that try the neighbour nearest to the goal first
    max_cells: int = 1000  # longer searches are left out

    def __post_init__(self) -> None:
        parse_range("Task maze", self.sides, SMALLEST, LARGEST)
        check_range("The worked solutions of task maze", "toward_goal", self.toward_goal, 0, 1)
        check_range("The worked solutions of task maze", "max_cells", self.max_cells, 2, 10_000)


class MazeTask:
    """
    >>> task = MazeTask(train_count=1)
    >>> prompt = Prompt(id="a", text="aAbAaBbB>aAbB:", answer="bB", task="maze")
    >>> [task.judge(prompt, way) for way in ("aAbAbB", "aAaBaAbAbB", "aAbB", "aAbA", "bB")]
    [1.0, 1.0, 0.0, 0.0, 0.0]
    """

    alphabet = ascii_lowercase + ascii_uppercase + ">:"

    def __init__(self, name: str = "maze", **options: Any) -> None:
        self.name = name
        self.options = read_options(MazeOptions, options, "Task maze")

    def prompts(self, split: str, seed: int) -> PromptTable:
        held_out = split == "eval"
        rng = np.random.default_rng([seed, int(held_out)])
        options = self.options
        mix, count = (
            ({options.eval_range: 1.0}, options.eval_count)
            if held_out
            else (options.mix, options.train_count)
        )
        sides = rng.permutation(spread_levels("Task maze", mix, count, SMALLEST, LARGEST))
        texts, answers = self._draw(rng, sides, held_out)
        return PromptTable(texts, answers, self.name, meta={"level": sides.tolist()})

    def judge(self, prompt: Prompt, response: str) -> float:
        """Whether the cells lead from the start by legal steps to the goal, end there, and are not too many."""
        cells, _, ends = prompt.text.partition(">")
        # "bB", or "bB12" with a limit of 12 cells
        goal, most = prompt.answer[:2], prompt.answer[2:]
        too_long = bool(most) and len(response) > 2 * int(most)
        if too_long or response[:2] != ends[:2] or response[-2:] != goal or len(response) % 2:
            return 0.0
        at = CELLS[ends[:2]]
        # it ends at the first wrong step, however long the rest is
        for i in range(2, len(response), 2):
            name = response[i : i + 2]
            # A small and a large letter stand together in `cells` for a free cell only. 0 is next to no cell.
            cell = CELLS.get(name, 0) if name in cells else 0
            if abs(cell - at) not in (1, W):
                return 0.0
            at = cell
        return 1.0

    def final(self, response: str) -> str:
        """The cell in which a response ends."""
        return response[-2:]

    def solutions(
        self, rng: np.random.Generator, count: int, **options: Any
    ) -> list[tuple[Prompt, str]]:
        """Searches of new problems that are not held out; the options are `MazeSolutions`."""
        chosen = read_options(MazeSolutions, options, "The worked solutions of task maze")
        low, high = parse_range("Task maze", chosen.sides, SMALLEST, LARGEST)
        pairs: list[tuple[Prompt, str]] = []
        barren = 0
        while len(pairs) < count and barren < BARREN:
            sides = rng.integers(low, high + 1, size=min(CHUNK, (count - len(pairs)) * 5 // 4 + 16))
            mazes = draw_mazes(rng, sides, self.options.walls)
            before = len(pairs)
            for text, cells in zip(
                write_mazes(mazes), search(rng, mazes, chosen.toward_goal), strict=True
            ):
                if not is_held_out(text) and len(cells) <= chosen.max_cells:
                    prompt = Prompt(
                        id=str(len(pairs)), text=text, answer=text[-3:-1], task=self.name
                    )
                    pairs.append((prompt, NAMES[cells].tobytes().decode()))
            barren = barren + 1 if len(pairs) == before else 0
        if len(pairs) < count:
            raise WhetError(
                f"Task maze: too few searches of sides {chosen.sides} fit max_cells = {chosen.max_cells}."
            )
        return pairs[:count]

    def _draw(
        self, rng: np.random.Generator, sides: np.ndarray, held_out: bool
    ) -> tuple[list[str], list[str]]:
        """A problem and its answer per side; problems that are held out are all different."""
        texts = [""] * len(sides)
        answers = [""] * len(sides)
        seen = {""}
        todo = np.arange(len(sides))
        barren = 0  # rounds in a row that brought nothing new
        while todo.size and barren < 2 * BARREN:
            # the last few
            some = todo[:CHUNK] if barren < BARREN else np.resize(todo, min(CHUNK, 64 * todo.size))
            mazes = draw_mazes(rng, sides[some], self.options.walls)
            for place, text, way in zip(
                some.tolist(), write_mazes(mazes), mazes.way.tolist(), strict=True
            ):
                if (
                    not texts[place]
                    and is_held_out(text) == held_out
                    and not (held_out and text in seen)
                ):
                    seen.add(text)
                    limit = str(int(self.options.slack * way + 1e-9)) if self.options.slack else ""
                    texts[place], answers[place] = text, text[-3:-1] + limit
            left = todo[:CHUNK][[not texts[place] for place in todo[:CHUNK].tolist()]]
            barren = barren + 1 if left.size == len(todo[:CHUNK]) else 0
            todo = np.concatenate([todo[CHUNK:], left])
        if todo.size:
            raise WhetError(
                f"Task maze: grids of side {sides[todo[0]]} hold too few problems; lower eval_count."
            )
        return texts, answers


# ---- mazes


class Mazes(NamedTuple):
    free: np.ndarray  # [M, W*W] bool
    start: np.ndarray  # [M]
    goal: np.ndarray  # [M]
    way: np.ndarray  # [M]; cells of the shortest way, both ends counted


def draw_mazes(rng: np.random.Generator, sides: np.ndarray, walls: float) -> Mazes:
    """A grid per side, with a way from start to goal.

    The two are at least half a side apart, counted in steps as if there were no walls.
    """
    free = np.zeros((len(sides), W * W), bool)
    start, goal, way = (np.zeros(len(sides), int) for _ in range(3))
    todo = np.arange(len(sides))
    for _ in range(ROUNDS):
        side = sides[todo, None]
        inside = (np.minimum(ROW, COLUMN) >= 1) & (np.maximum(ROW, COLUMN) <= side)
        free[todo] = inside & (rng.random((todo.size, W * W)) >= walls)
        start[todo] = (rng.random((todo.size, W * W)) * free[todo]).argmax(1)
        far = free[todo] & (distance(np.arange(W * W), start[todo, None]) >= side // 2)
        goal[todo] = (rng.random((todo.size, W * W)) * far).argmax(1)
        found = far[np.arange(todo.size), goal[todo]]
        way[todo] = np.where(found, shortest_way(free[todo], start[todo], goal[todo]), 0)
        todo = todo[way[todo] == 0]
        if not todo.size:
            return Mazes(free, start, goal, way)
    raise WhetError(
        f"Task maze: a grid of side {sides[todo[0]]} with walls = {walls:g} has no way; lower walls."
    )


def shortest_way(free: np.ndarray, start: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """[M]: cells of the shortest way from start to goal, 0 for none. All cells k steps away are found in round k."""
    way = np.where(start == goal, 1, 0)
    rows = np.flatnonzero(way == 0)  # the mazes in which the goal may still be found
    free = free[rows]
    goal = goal[rows]
    found = np.zeros((rows.size, W * W), bool)
    found[np.arange(rows.size), start[rows]] = True
    cells = 1
    while rows.size:
        cells += 1
        near = np.zeros_like(found)
        for step in (1, W):  # the frame is never free, so that no step leads round the end of a row
            near[:, step:] |= found[:, :-step]
            near[:, :-step] |= found[:, step:]
        new = near & free & ~found
        there = new[np.arange(rows.size), goal]
        way[rows[there]] = cells
        on = ~there & new.any(1)
        rows = rows[on]
        free = free[on]
        goal = goal[on]
        found = (found | new)[on]
    return way


def search(rng: np.random.Generator, mazes: Mazes, toward_goal: float) -> list[np.ndarray]:
    """The cells of a depth-first search in each maze, those of turning back among them."""
    free, start, goal, _ = mazes
    closed = ~free
    # the way from the start to where a search is
    path = np.zeros((len(free), int(free.sum(1).max())), int)
    path[:, 0] = start
    depth = np.zeros(len(free), int)
    cells = [start]
    turns = [np.arange(len(free))]
    closed[turns[0], start] = True
    rows = turns[0]
    while rows.size:
        near = path[rows, depth[rows], None] + STEPS
        rank = rng.random(near.shape)
        heading = rng.random(rows.size) < toward_goal
        rank[heading] += distance(near[heading], goal[rows[heading], None])
        rank[closed[rows[:, None], near]] = np.inf
        chosen = near[np.arange(rows.size), rank.argmin(1)]
        on = np.isfinite(rank.min(1))  # else every neighbour was visited, and the search turns back
        depth[rows] += np.where(on, 1, -1)
        path[rows[on], depth[rows[on]]] = chosen[on]
        closed[rows[on], chosen[on]] = True
        at = path[rows, depth[rows]]
        cells.append(at)
        turns.append(rows)
        rows = rows[at != goal[rows]]
    # by maze, each in the order of its search
    order = np.argsort(np.concatenate(turns), kind="stable")
    ends = np.cumsum(np.bincount(np.concatenate(turns), minlength=len(free)))
    return np.split(np.concatenate(cells)[order], ends[:-1])


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.abs(ROW[a] - ROW[b]) + np.abs(COLUMN[a] - COLUMN[b])


def write_mazes(mazes: Mazes) -> list[str]:
    """The text of each problem: its free cells row by row, start and goal."""
    ends = zip(mazes.free, NAMES[mazes.start], NAMES[mazes.goal], strict=True)
    return [
        f"{NAMES[cells].tobytes().decode()}>{first.decode()}{last.decode()}:"
        for cells, first, last in ends
    ]
