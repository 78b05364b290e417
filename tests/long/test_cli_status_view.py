"""The dashboard in a terminal: everything is said in words, and nothing unknown stops it."""

from __future__ import annotations

from rich.console import Console

from serve_app.cli.status_view import lost, view
from tests.unit.test_dashboard_state import MEMORY, READING, STALLED, WRITING, Seen, picture
from tests.unit.test_dashboard_state import view as replica


def drawn(found: object) -> str:
    console = Console(width=140, color_system=None, record=True, file=None)
    with console.capture() as captured:
        console.print(found)
    return captured.get()


def test_macs_slots_and_memory_are_told_in_words() -> None:
    text = drawn(view("http://here", picture(Seen(replica(running=(READING, WRITING, STALLED), memory=MEMORY), 0.0))))
    assert "http://here: 1 of 1 replicas ready; 1 wait, a newcomer 1.5 s" in text
    assert "0 anna reads 60% of 100" in text
    assert "1 free" in text
    assert "2 ben has written 5" in text
    assert "3 dora waits for KV memory" in text
    assert "the memory guard is holding" in text
    assert "queue_full: anna on mac-1" in text
    assert "20.0 tok/s" in text


def test_a_silent_mac_and_an_empty_fleet() -> None:
    assert "silent for 4.5 s" in drawn(view("http://here", picture(Seen(replica(), 4.5))))
    assert "no replica answers; nobody waits" in drawn(view("http://here", picture()))


def test_the_last_picture_stays_when_the_endpoint_is_gone() -> None:
    text = drawn(lost(view("http://here", picture(Seen(replica(), 0.0))), "No endpoint answers at http://here."))
    assert text.startswith("No endpoint answers at http://here.")
    assert "mac-1" in text
