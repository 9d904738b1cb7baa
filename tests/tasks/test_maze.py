import random
import sys
from collections import deque

import numpy as np
import pytest

from whet.errors import WhetError
from whet.tasks.base import is_held_out
from whet.tasks.maze import CELLS, LARGEST, MazeTask, W, draw_mazes, search, write_mazes
from whet.types import Prompt

#   a b c
# A . . #      the short way from aA to cC: aA bA bB bC cC, five cells
# B # . #
# C . . .
GRID = "aAbAbBaCbCcC>aAcC:"


def prompt(answer: str = "cC", text: str = GRID) -> Prompt:
    return Prompt(id="a", text=text, answer=answer, task="maze")


def shortest(text: str) -> int:
    """Breadth-first search over names, apart from the arrays of the task: cells of the shortest way, 0 for none."""
    cells, _, ends = text.partition(">")
    free = {CELLS[cells[i : i + 2]] for i in range(0, len(cells), 2)}
    start, goal = CELLS[ends[:2]], CELLS[ends[2:4]]
    queue, far = deque([start]), {start: 1}
    while queue:
        at = queue.popleft()
        for near in (at + 1, at - 1, at + W, at - W):
            if near in free and near not in far:
                far[near] = far[at] + 1
                queue.append(near)
    return far.get(goal, 0)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("aAbAbBbCcC", 1.0),
        ("aAbAbBbCaCbCcC", 1.0),  # a dead end, and back
        ("aAbAbBbCcCbCcC", 1.0),  # past the goal and back to it
        ("aAbAbBbC", 0.0),  # stops before the goal
        ("bAbBbCcC", 0.0),  # does not begin at the start
        ("aAbBbCcC", 0.0),  # a diagonal step
        ("aAbAcAcBcC", 0.0),  # through walls
        ("aAcC", 0.0),  # claims the goal
        ("aAaAbAbBbCcC", 0.0),  # stands still
        ("aAbAbBbCcCz", 0.0),  # half a cell
        ("aAbAbBbCcC ", 0.0),
        ("AabAbBbCcC", 0.0),
        ("aA  bAbBbCcC", 0.0),
        ("", 0.0),
        ("aA", 0.0),
        ("aAbAbBbCcDcC", 0.0),  # out of the grid
    ],
)
def test_only_legal_steps_to_the_goal_are_right(response: str, score: float) -> None:
    assert MazeTask().judge(prompt(), response) == score


def test_a_limit_counts_cells() -> None:
    task = MazeTask()
    assert task.judge(prompt("cC5"), "aAbAbBbCcC") == 1.0
    assert task.judge(prompt("cC6"), "aAbAbBbCaCbCcC") == 0.0  # seven cells
    assert task.judge(prompt("cC7"), "aAbAbBbCaCbCcC") == 1.0


def test_the_edge_of_the_grid_is_no_way_round() -> None:
    """The cells of one row's end and the next row's begin are neighbours in memory, with the frame between them."""
    last = "abcdefghijklmnopqrstuvwxyz"[LARGEST - 1]
    text = f"{last}AaB>{last}AaB:"
    assert MazeTask().judge(prompt("aB", text), f"{last}AaB") == 0.0


def test_the_judge_ends_at_the_first_wrong_step_of_a_hostile_response() -> None:
    draw = random.Random(0)
    text = write_mazes(draw_mazes(np.random.default_rng(0), np.array([LARGEST]), 0.1))[0]
    problem = prompt(text[-3:-1], text)
    for response in (
        "aA" * 100_000,
        text[:2] * 100_000,
        "".join(draw.choices("aAbB>", k=200_000)),
        "\x00" * 200_000,
    ):
        assert _lines_run(problem, response) < LARGEST**2 * 2  # a time would hang on the machine
        ends = problem.text.partition(">")[2]
        assert _lines_run(problem, ends[:2] + response + problem.answer) < LARGEST**2 * 2


def _lines_run(problem: Prompt, response: str) -> int:
    """The lines that the judge runs, its loops included."""
    task, lines = MazeTask(), 0

    def trace(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        assert task.judge(problem, response) == 0.0
    finally:
        sys.settrace(before)
    return lines


def test_every_problem_has_a_way_and_its_limit() -> None:
    task = MazeTask(train_count=300, mix={"3-5": 0.5, "9-12": 0.5}, slack=1.5)
    for problem in task.prompts("train", 3):
        way = shortest(problem.text)
        assert way and problem.answer[2:] == str(int(1.5 * way))
        assert problem.answer[:2] == problem.text[-3:-1]
        assert problem.text[-5:-3] in problem.text[: problem.text.index(">")]


def test_levels_are_sides_in_the_shares_of_the_mix() -> None:
    table = MazeTask(train_count=100, mix={"4": 0.3, "6-7": 0.7}).prompts("train", 0)
    levels = [problem.meta["level"] for problem in table]
    assert (levels.count(4), levels.count(6), levels.count(7)) == (30, 35, 35)
    for problem in table:
        cells = problem.text[: problem.text.index(">")]
        assert max("abcdefg".index(letter) for letter in cells[::2]) < problem.meta["level"]


def test_start_and_goal_are_far_apart() -> None:
    mazes = draw_mazes(np.random.default_rng(1), np.full(200, 9), 0.25)
    rows = np.abs(mazes.start // W - mazes.goal // W) + np.abs(mazes.start % W - mazes.goal % W)
    assert rows.min() == 4 and rows.max() > 8


def test_eval_and_train_share_no_problem() -> None:
    task = MazeTask(train_count=500, eval_count=200, eval_range="3-4", mix={"3-4": 1.0})
    train, held_out = ({p.text for p in task.prompts(split, 5)} for split in ("train", "eval"))
    assert len(held_out) == 200 and not train & held_out
    assert all(map(is_held_out, held_out)) and not any(map(is_held_out, train))
    assert not any(is_held_out(p.text) for p, _ in task.solutions(np.random.default_rng(0), 50))


def test_the_same_seed_gives_the_same_problems() -> None:
    one, two, other = (MazeTask(train_count=50).prompts("train", seed) for seed in (7, 7, 8))
    assert list(one.ids) == list(two.ids) != list(other.ids)


def test_solutions_are_right_and_turn_back() -> None:
    task = MazeTask()
    pairs = task.solutions(np.random.default_rng(2), 200, sides="5-8", max_cells=40)
    assert len(pairs) == 200 and all(task.judge(problem, text) == 1.0 for problem, text in pairs)
    assert max(len(text) for _, text in pairs) <= 80
    assert any(
        len({text[i : i + 2] for i in range(0, len(text), 2)}) < len(text) // 2 for _, text in pairs
    )


def test_a_search_visits_no_cell_twice_except_to_turn_back() -> None:
    rng = np.random.default_rng(3)
    mazes = draw_mazes(rng, np.full(50, 7), 0.25)
    for cells in search(rng, mazes, 0.0):
        path: list[int] = []
        seen: set[int] = set()
        for cell in cells.tolist():
            if cell in seen:
                path.pop()
                assert path[-1] == cell  # back to where it came from
            else:
                path.append(cell)
            seen.add(cell)


def test_heading_for_the_goal_is_shorter() -> None:
    rng = np.random.default_rng(4)
    mazes = draw_mazes(rng, np.full(300, 10), 0.25)
    lengths = [
        np.mean([len(cells) for cells in search(rng, mazes, share)]) for share in (0.0, 0.5, 1.0)
    ]
    assert lengths[0] > 1.5 * lengths[1] and lengths[1] > 1.2 * lengths[2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"walls": 0.6}, "walls = 0.6 is wrong: it should be from 0 to 0.4"),
        ({"slack": 0.5}, "slack = 0.5 is wrong"),
        ({"train_count": 0}, "train_count = 0 is wrong"),
        ({"eval_range": "2-4"}, "within 3 to 26"),
        ({"mix": {"4-30": 1.0}}, "within 3 to 26"),
        ({"mix": {"4": 0.5}}, "must add up to 1"),
        ({"mix": {"4": -0.5, "5": 1.5}}, "a share is a number"),
        ({"sides": 4}, 'no option "sides"'),
    ],
)
def test_an_option_out_of_range_gets_one_sentence(options: dict[str, object], words: str) -> None:
    with pytest.raises(WhetError, match=words.replace(".", r"\.")):
        MazeTask(**options)


def test_solutions_that_cannot_be_drawn_get_one_sentence() -> None:
    with pytest.raises(WhetError, match="fit max_cells = 2"):
        MazeTask().solutions(np.random.default_rng(0), 5, sides="20", max_cells=2)
    with pytest.raises(WhetError, match="within 3 to 26"):
        MazeTask().solutions(np.random.default_rng(0), 5, sides="1-4")


def test_a_few_held_out_problems_are_always_found() -> None:
    """One problem in eight is held out: ten draws for the last place would fail for one seed in four."""
    for seed in range(30):
        assert len(MazeTask(eval_count=3, eval_range="9").prompts("eval", seed)) == 3


def test_too_many_held_out_problems_get_one_sentence() -> None:
    with pytest.raises(WhetError, match="side 3 hold too few problems; lower eval_count"):
        MazeTask(eval_count=20_000, eval_range="3", walls=0.0).prompts("eval", 0)
