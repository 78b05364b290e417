"""Deploys the app on a running Ray and follows it until it answers.

Owns: waiting with progress, and turning a failed start into the error that caused it. Must not know: how Ray was
started or ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from serve_app.cli.console import CommandFailedError
from serve_app.trust import pinned

POLL_S = 0.2
QUESTION_TIMEOUT_S = 120.0


def deploy(start: Callable[[], Any], update: Callable[[str, float | None], None], log_folder: Path) -> None:
    """Call ``start`` (which returns when the app runs) and pass on what the loading replica reports.

    Raises the StartupError that ended the replica's loading, or CommandFailedError with Serve's own words.
    """
    import ray

    from serve_app.replica.startup_board import create_board

    board = create_board()
    outcome = _in_thread(start)
    while not outcome.done.wait(POLL_S):
        note = ray.get(board.read.remote())
        if note.error is not None:
            raise note.error
        if note.description:
            update(note.description, note.fraction)
    if outcome.error is not None:
        raise CommandFailedError(
            f"The app did not start: {outcome.error}", f"read the logs in {log_folder}"
        ) from outcome.error


class _Outcome:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None


def _in_thread(start: Callable[[], Any]) -> _Outcome:
    # A daemon thread: when loading has failed, Serve may go on retrying for minutes, and nobody waits for that.
    outcome = _Outcome()

    def run() -> None:
        try:
            start()
        except BaseException as error:
            outcome.error = error
        outcome.done.set()

    threading.Thread(target=run, name="deploy", daemon=True).start()
    return outcome


def ask(url: str, model: str, question: str, key: str = "", certificate: str = "") -> str:
    """Send one chat request as any client would and return the answer.

    ``certificate``: the file of the only one that is believed over HTTPS. Raises CommandFailedError.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 48,
        "temperature": 0,
    }
    try:
        response = httpx.post(
            f"{url}/v1/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=QUESTION_TIMEOUT_S,
            trust_env=False,
            verify=pinned(Path(certificate)) if certificate else True,
        )
        response.raise_for_status()
        return str(response.json()["choices"][0]["message"]["content"]).strip()
    except httpx.HTTPStatusError as error:
        raise CommandFailedError(
            f"The endpoint answered {error.response.status_code}: {error.response.text[:300]}",
            "run `metalslots doctor`",
        ) from error
    except httpx.HTTPError as error:
        raise CommandFailedError(f"The endpoint did not answer: {error}", "run `metalslots doctor`") from error
