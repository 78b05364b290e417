"""The log of one process of ours: where lines go, and whether they are for people or for programs.

Owns: the format of lines, and the line that a finished call gets. Must not know: what is worth a line elsewhere.
Without ``folder`` lines go to the standard error stream, which Ray keeps in its own log folder.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import sys
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from serve_app.telemetry.record import NUM_ANSWERS_TOLD, AnswerRecord, CallRecord
from serve_app.telemetry.recorder import Tokens

CALLS = "metalslots.calls"
PACKAGES = ("engine", "serve_app", "metalslots")
_MAX_FILE_BYTES = 10 * 2**20
_NUM_FILES = 5


class LogConfig(BaseModel):
    """``calls``: a line for every finished call. ``texts``: with what was asked and answered; think of who may read it.

    ``folder``: a file there for each process, kept to a few megabytes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"
    calls: bool = True
    texts: bool = False
    folder: str | None = None


def configure_logs(config: LogConfig, name: str) -> None:
    """Set up this process's log; ``name`` is the file's, where lines go to files."""
    handler = _handler(config, name)
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    for package in PACKAGES:
        logger = logging.getLogger(package)
        for old in list(logger.handlers):
            logger.removeHandler(old)
        logger.addHandler(handler)
        logger.setLevel(config.level.upper())
        logger.propagate = False


class CallLog:
    """A sink that writes a line for every finished call."""

    def __init__(self, *, with_texts: bool) -> None:
        self._with_texts = with_texts
        self._logger = logging.getLogger(CALLS)

    def tokens(self, tokens: Tokens) -> None:
        """Nothing: there is one line for a whole call."""

    def finished(self, record: CallRecord) -> None:
        """Write the line."""
        facts = record.as_dict()
        if self._with_texts:
            facts |= {"asked": list(record.call.messages or record.call.prompts), "answered": list(record.texts)}
        self._logger.info("%s", sentence_of(record), extra={"event": "call_finished", "facts": facts})


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and what the line is about."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        value: dict[str, Any] = {
            "time": _iso_time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "event", "message"),
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            value["error"] = self.formatException(record.exc_info)
        return json.dumps(value, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """A line for people; the texts of a call, where they are logged at all, follow on lines of their own."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = f"{_iso_time(record.created)} {record.levelname:<7} {record.getMessage()}"
        facts = getattr(record, "facts", {})
        for name in ("asked", "answered"):
            if name in facts:
                line += f"\n    {name}: {json.dumps(facts[name], ensure_ascii=False, default=str)}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def sentence_of(record: CallRecord) -> str:
    """The call in one line, as one would tell a person who asks why it took so long."""
    call = record.call
    who = f" key={call.key_name}" if call.key_name else ""
    route = f" route={call.route.reason}" if call.route else ""
    place = record.replica.host or record.replica.replica_id
    where = f" on {place}" if place else ""
    parts = [f"{call.request_id}{who} {record.outcome} after {_ms(record.duration_s)}{where}{route}"]
    parts += [_answer_sentence(answer, len(record.answers)) for answer in record.answers[:NUM_ANSWERS_TOLD]]
    if len(record.answers) > NUM_ANSWERS_TOLD:
        parts.append(f"{len(record.answers)} answers in all")
    return "; ".join(parts)


def _answer_sentence(answer: AnswerRecord, num_answers: int) -> str:
    account, timeline = answer.account, answer.timeline
    number = f"answer {answer.choice} " if num_answers > 1 else ""
    waits = ", ".join(f"{reason} {_ms(seconds)}" for reason, seconds in timeline.waited_s.items())
    read = f"{account.num_prompt_tokens} tokens, {account.num_cached_tokens} cached"
    text = f"{number}waited {_ms(answer.waited_s)}{f' ({waits})' if waits else ''}"
    if answer.prefill_s is not None:
        text += f", prefill {_ms(answer.prefill_s)} ({read})"
    if answer.decode_s is not None:
        text += f", decode {_ms(answer.decode_s)} ({account.num_output_tokens} tokens)"
    if timeline.slot is not None:
        text += f", slot {timeline.slot}"
    if timeline.num_preemptions:
        text += f", preempted {timeline.num_preemptions} times"
    return f"{text}, {answer.finished_reason}"


def _handler(config: LogConfig, name: str) -> logging.Handler:
    if config.folder is None:
        return logging.StreamHandler(sys.stderr)
    folder = Path(config.folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return logging.handlers.RotatingFileHandler(
        folder / f"{name}.log", maxBytes=_MAX_FILE_BYTES, backupCount=_NUM_FILES, encoding="utf-8"
    )


def _iso_time(unix_s: float) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(unix_s))}.{int(unix_s % 1 * 1000):03d}Z"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
