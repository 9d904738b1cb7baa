"""The suffix drafter learns from siblings and earlier visits, forgets old ones, and stays within its memory."""

import numpy as np

from whet.draft.base import RowView
from whet.draft.lookup import Suffix

PROMPT = np.array([90, 91, 92], np.int32)


def ints(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


class Play:
    """Rows by hand."""

    def __init__(self, **settings: int) -> None:
        self.drafter = Suffix()
        for name, value in settings.items():
            setattr(self.drafter, name, value)
        self.uid = 0

    def row(
        self, *written: int, group: int = 0, prompt: str = "p", ids: np.ndarray = PROMPT
    ) -> RowView:
        self.uid += 1
        row = RowView(self.uid, prompt, group, self.uid, ids, ints(*written))
        self.drafter.begin(row)
        return row

    def ended(self, *written: int, group: int = 0, prompt: str = "p") -> None:
        row = self.row(*written, group=group, prompt=prompt)
        self.drafter.finish(row)

    def draft(self, row: RowView, most: int = 4) -> list[int]:
        tokens, counts = self.drafter.propose([row], np.array([most]))
        return tokens[0, : counts[0]].tolist()


def test_running_and_finished_siblings() -> None:
    play = Play()
    play.ended(1, 2, 3, 4)
    running = play.row(5, 6, 7)
    one, two = play.row(8, 1, 2), play.row(8, 5, 6)
    tokens, counts = play.drafter.propose([running, one, two], np.array([0, 2, 2]))
    assert counts.tolist() == [0, 2, 1]
    assert tokens[1].tolist() == [3, 4] and tokens[2, 0] == 7


def test_the_beginning_follows_the_prompt() -> None:
    play = Play()
    play.ended(1, 2, 3, 4)
    assert play.draft(play.row()) == [1, 2, 3, 4]  # the prompt agrees
    assert play.draft(play.row(group=1)) == [1, 2, 3, 4]  # on the next visit, too
    assert play.draft(play.row(prompt="q", group=2)) == []


def test_the_prompt_itself_is_indexed() -> None:
    play = Play()
    assert play.draft(play.row(5, 90, 91)) == [92, 5, 90, 91]


def test_the_most_frequent_wins_and_the_newest_of_equals() -> None:
    play = Play()
    for third in (3, 4, 3, 5):
        play.ended(1, 2, third)
    assert play.draft(play.row(8, 1, 2), 1) == [3]
    play.ended(1, 2, 5)
    assert play.draft(play.row(8, 1, 2), 1) == [5]


def test_own_group_before_earlier_visits_unless_those_agree_for_longer() -> None:
    play = Play()
    play.ended(7, 1, 2, 3, group=0)
    play.ended(8, 1, 2, 4, group=1)
    assert play.draft(play.row(9, 1, 2, group=1), 1) == [4]
    assert play.draft(play.row(7, 1, 2, group=1), 1) == [3]


def test_a_match_is_followed_across_visits() -> None:
    play = Play()
    text = list(range(10, 40))
    play.ended(*text, group=0)
    row = play.row(group=1)
    for n in (3, 5, 9, 20):
        row.ids = ints(*text[:n])
        assert play.draft(row, 3) == text[n : n + 3]
    row.ids = ints(*text[:20], 77)
    assert play.draft(row, 3) == []
    row.ids = ints(*text[:20], 77, 12, 13)
    assert play.draft(row, 2) == [14, 15]


def test_only_the_last_visits_count() -> None:
    play = Play(earlier=2)
    play.ended(1, 2, 3, group=0)
    for group in (1, 2):
        play.ended(60, 61, group=group)
        assert play.draft(play.row(8, 1, 2, group=group), 1) == [3]
    assert play.draft(play.row(8, 1, 2, group=3), 1) == []


def test_the_window_slides_over_updates() -> None:
    play = Play(window=3)
    play.ended(1, 2, 3, group=0)
    for version in (1, 2):
        play.drafter.updated(version)
    assert play.draft(play.row(8, 1, 2, group=1), 1) == [3]
    play.drafter.updated(3)
    assert list(play.drafter.visits) == [("p", 1)]
    assert play.draft(play.row(8, 1, 2, group=2), 1) == []
    for version in (4, 5, 6):
        play.drafter.updated(version)
    assert not play.drafter.visits and not play.drafter._of and play.drafter.tokens == 0


def test_the_window_of_a_resumed_run_begins_with_it() -> None:
    """A drafter is made anew, and the first version that it hears of is a late one."""
    play = Play(window=3)
    play.ended(1, 2, 3, group=0)
    for version in (101, 102):
        play.drafter.updated(version)
        assert play.draft(play.row(8, 1, 2, group=version), 1) == [3]
    play.drafter.updated(103)
    assert ("p", 0) not in play.drafter.visits


def test_memory_is_bounded_and_running_rows_go_on() -> None:
    play = Play(capacity=1000)
    early = play.row(1, 2, 3, group=0, prompt="p0")
    for group in range(1, 50):
        play.ended(*range(100), group=group, prompt=f"p{group}")
        assert play.drafter.tokens == sum(v.tokens for v in play.drafter.visits.values()) <= 1000
    assert ("p0", 0) not in play.drafter.visits
    early.ids = ints(1, 2, 3, 1, 2)
    assert play.draft(early, 1) == [3]
    play.drafter.finish(early)
    assert play.drafter.tokens <= 1000 and not play.drafter.cursors


def test_groups_of_other_prompts_may_have_the_same_number() -> None:
    play = Play()
    play.ended(1, 2, 3, group=0)
    play.ended(1, 2, 4, group=0, prompt="q")
    assert play.draft(play.row(8, 1, 2, group=0), 1) == [3]
    assert play.draft(play.row(8, 1, 2, group=0, prompt="q"), 1) == [4]


def test_rows_not_begun_and_begun_twice_are_no_matter() -> None:
    play = Play()
    play.ended(1, 2, 3)
    stranger = RowView(999, "p", 0, 5, PROMPT, ints(8, 1, 2))
    assert play.draft(stranger, 1) == [3]
    play.drafter.begin(stranger)
    play.drafter.begin(stranger)
    assert play.draft(stranger, 1) == [3]
    play.drafter.finish(RowView(1000, "p", 0, 6, PROMPT, ints()))
    play.drafter.forget()
    assert play.draft(stranger, 1) == []
