"""Entries for saved recurrent states: found by hash, evicted in order, never while pinned or pending."""

from __future__ import annotations

import random

from engine.memory.state_book import StateBook


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def save(book: StateBook, number: int) -> int:
    entry = book.reserve()
    assert entry is not None
    book.commit(entry, name(number))
    return entry


def test_entries_begin_behind_the_slots() -> None:
    book = StateBook(first_entry=4, num_entries=2)
    assert sorted([save(book, 1), save(book, 2)]) == [4, 5]


def test_a_state_is_found_once_its_step_is_over() -> None:
    book = StateBook(0, 2)
    entry = book.reserve()
    assert entry is not None
    assert not book.knows(name(1))
    book.commit(entry, name(1))
    assert book.pin(name(1)) == entry


def test_the_least_recently_used_goes_first() -> None:
    book = StateBook(0, 2)
    save(book, 1)
    save(book, 2)
    book.unpin(book.pin(name(1)))
    save(book, 3)
    assert [book.knows(name(n)) for n in (1, 2, 3)] == [True, False, True]


def test_pinned_and_pending_entries_are_not_given_away() -> None:
    book = StateBook(0, 2)
    save(book, 1)
    pinned = book.pin(name(1))
    pending = book.reserve()
    assert pending is not None
    assert book.reserve() is None
    book.forget(name(1))
    assert book.knows(name(1))
    book.unpin(pinned)
    assert book.reserve() == pinned


def test_an_equal_state_is_kept_once() -> None:
    book = StateBook(0, 2)
    save(book, 1)
    save(book, 1)
    assert book.num_saved == 1
    book.check_invariants()


def test_without_entries_nothing_is_saved() -> None:
    assert StateBook(8, 0).reserve() is None


def test_anything_in_any_order() -> None:
    draw, book = random.Random(0), StateBook(3, 5)
    pending: list[int] = []
    pinned: list[int] = []
    for _ in range(3000):
        number = draw.randrange(9)
        move = draw.randrange(6)
        if move == 0 and (entry := book.reserve()) is not None:
            pending.append(entry)
        elif move == 1 and pending:
            book.commit(pending.pop(draw.randrange(len(pending))), name(number))
        elif move == 2 and pending:
            book.release(pending.pop())
        elif move == 3 and book.knows(name(number)) and len(pinned) < 3:
            pinned.append(book.pin(name(number)))
        elif move == 4 and pinned:
            book.unpin(pinned.pop(draw.randrange(len(pinned))))
        elif move == 5:
            book.forget(name(number))
        book.check_invariants()
