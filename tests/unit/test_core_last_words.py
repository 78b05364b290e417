"""What a dead engine process is quoted with."""

from __future__ import annotations

import pytest

from engine.core.process_transport import _describe_end

WORDS = "libc++abi: terminating due to uncaught exception: [METAL] Insufficient Memory"


@pytest.mark.parametrize(
    ("status", "lines", "text"),
    [
        (
            -6,
            ["INFO x: started", WORDS, "Fatal Python error: Aborted"],
            f"by SIGABRT. Its last words: {WORDS}",
        ),
        (-6, ["INFO x: started", "Fatal Python error: Aborted"], "by SIGABRT. Its last words: Fatal Python error: Ab"),
        (-9, ["INFO x: started"], "The engine process was killed by SIGKILL."),
        (1, ["Traceback:", "ImportError: no mlx", ""], "exited with status 1. Its last words: ImportError: no mlx"),
        (None, [], "The engine process closed its connection."),
    ],
)
def test_last_words(status: int | None, lines: list[str], text: str) -> None:
    assert text in _describe_end(status, lines)
