from __future__ import annotations

import json

import pytest
from scripted import SAMPLING, answers, rollout

from whet.curriculum.groups import GroupBook
from whet.types import Request


def ask(book: GroupBook, *prompts: str, n: int = 2) -> list[Request]:
    return [book.ask(prompt, n, SAMPLING, "train") for prompt in prompts]


def fill(book: GroupBook, request: Request, letters: str, version: int = 0) -> None:
    for r in answers(request, letters, version):
        book.add(r)
    book.keep(request.group_id)


def test_requests_count_up_and_carry_what_was_asked() -> None:
    book = GroupBook(next_id=5)
    a, b = ask(book, "a", "a")
    assert (a.group_id, b.group_id, book.next_id) == (5, 6, 7)
    assert (a.prompt_id, a.first_index, a.n, a.sampling, a.phase) == ("a", 0, 2, SAMPLING, "train")
    assert (book.open, book.ready, len(book), book.holds()) == (2, 0, 2, {5, 6})


def test_a_group_is_complete_when_all_asked_rollouts_came_in_any_order() -> None:
    book = GroupBook()
    (request,) = ask(book, "a", n=3)
    first, second, third = answers(request, "rwu")
    assert book.add(third) is None and book.add(second) is None
    visit = book.add(first)
    assert visit is not None and visit.tokens == 30
    # by index; the unjudged one is left out
    assert [r.index for r in visit.group.rollouts] == [0, 1]


def test_more_may_be_asked_under_the_same_id_and_place() -> None:
    book = GroupBook()
    a, b = ask(book, "a", "b")
    fill(book, b, "rw")
    for r in answers(a, "rw"):
        book.add(r)
    book.wait(a.group_id)
    assert book.open == 1 and [g.prompt_id for g in book.waiting()] == ["a"]
    assert book.first_ready(2) == []  # a was asked before b and is still open
    more = book.ask_more(a.group_id, 3, SAMPLING, "continue")
    assert (more.group_id, more.first_index, more.n, more.phase) == (0, 2, 3, "continue")
    assert book.waiting() == []
    came = [book.add(r) for r in answers(more, "wwr", version=1)]
    assert came[:2] == [None, None] and came[2] is not None
    book.keep(a.group_id)
    first = book.first_ready(2)
    assert [g.prompt_id for g in first] == ["a", "b"]
    assert (len(first[0].rollouts), first[0].oldest_version, first[0].pass_rate) == (5, 0, 0.4)


def test_ready_groups_are_taken_in_ask_order_with_nothing_open_before_them() -> None:
    book = GroupBook()
    a, b, c, d = ask(book, *"abcd")
    fill(book, d, "rw")
    fill(book, b, "rw")
    assert book.ready == 2 and book.first_ready(9) == []
    fill(book, a, "rr")
    assert [g.prompt_id for g in book.first_ready(9)] == ["a", "b"]
    assert [g.prompt_id for g in book.first_ready(1)] == ["a"]
    book.remove(c.group_id)
    assert [g.prompt_id for g in book.first_ready(9)] == ["a", "b", "d"]


def test_a_group_asked_again_takes_its_old_place() -> None:
    book = GroupBook()
    a, b = ask(book, "a", "b")
    fill(book, b, "rw")
    place = book.remove(a.group_id).place
    again = book.ask("a", 2, SAMPLING, "train", place)
    assert again.group_id == 2 and book.first_ready(2) == []
    fill(book, again, "rw")
    assert [g.group_id for g in book.first_ready(2)] == [2, 1]


def test_expiry_takes_out_ready_groups_alone() -> None:
    book = GroupBook()
    a, b, c, d = ask(book, *"abcd")
    fill(book, c, "rw", version=1)
    fill(book, b, "rw", version=0)
    fill(book, d, "rw", version=2)
    assert book.expire(0) == []
    assert sorted(v.prompt_id for v in book.expire(2)) == ["b", "c"]
    assert book.expire(2) == [] and book.holds() == {a.group_id, d.group_id}
    fill(book, a, "rw", version=1)  # becomes ready only now, and is older than all that are
    assert [v.prompt_id for v in book.expire(2)] == ["a"]
    assert [v.prompt_id for v in book.expire(3)] == ["d"]


def test_spare_groups_leave_the_line() -> None:
    book = GroupBook()
    a, b, c, d = ask(book, *"abcd", n=4)
    for request, letters in ((a, "wwww"), (b, "rwww"), (c, "rrww"), (d, "rrrr")):
        for r in answers(request, letters):
            book.add(r)
    for request in (d, c, b, a):
        book.set_aside(request.group_id)
    assert (len(book), book.open, len(book.best_spare()), book.holds()) == (0, 0, 4, {0, 1, 2, 3})
    assert [g.prompt_id for g in book.best_spare()] == ["c", "b", "a", "d"]
    book.remove(c.group_id)
    assert [g.prompt_id for g in book.best_spare()] == ["b", "a", "d"]


def test_a_rollout_that_was_not_asked_for_or_comes_twice_is_our_own_mistake() -> None:
    book = GroupBook()
    (request,) = ask(book, "a")
    book.add(rollout(request, 0, "r"))
    with pytest.raises(AssertionError, match="twice"):
        book.add(rollout(request, 0, "r"))
    with pytest.raises(AssertionError, match="never asked"):
        book.add(rollout(request, 2, "r"))


def test_a_saved_book_reads_back_equal() -> None:
    book = GroupBook(next_id=3)
    a, b, c, _ = ask(book, *"abcd")
    fill(book, b, "rw", version=4)
    for request in (a, c):
        for r in answers(request, "ru"):
            book.add(r)
    book.wait(a.group_id)
    book.set_aside(c.group_id)
    text = json.dumps(book.state_dict())
    copy = GroupBook()
    ask(copy, "x", "y")  # whatever it held before is gone
    copy.load_state_dict(json.loads(text))
    assert json.dumps(copy.state_dict()) == text
    assert (copy.next_id, copy.open, copy.ready) == (book.next_id, book.open, book.ready)
    assert copy.waiting() == book.waiting() and copy.best_spare() == book.best_spare()
    assert [v.prompt_id for v in copy.expire(5)] == ["b"]
