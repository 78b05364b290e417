"""Writes a replica's deltas as OpenAI's answers: whole objects and chunks.

Owns: the shapes, the order of chunks, ids, indexes and finish reasons. Must not know: HTTP, or where deltas come from.
Times come in as arguments.

    role chunk per choice -> content chunks -> finish chunk per choice -> usage chunk when asked
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from serve_app.protocol import ChoiceDelta, Deltas, LogprobEntry, Timings, TokenText, ToolCallDelta, Usage

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every chunk of one answer repeats. ``counts_as_it_goes``: its usage is not null but what it is so far."""

    id: str
    model: str
    created_unix_s: int
    include_usage: bool = False
    counts_as_it_goes: bool = False


class AnswerShape(Protocol):
    """How one endpoint writes its answers.

    ``named_events``: a stream's events have names, and the last one says that it is the last; otherwise [DONE] does.
    """

    @property
    def named_events(self) -> bool:
        """Whether events are named by their ``type``."""
        ...

    def chunks(self, deltas: Deltas) -> Iterator[Json]:
        """Yield the chunks for one message, in order."""
        ...

    def whole(self, messages: Sequence[Deltas]) -> Json:
        """Return the answer object for all messages of a call."""
        ...


@dataclass(slots=True)
class _Choice:
    """One choice, put together from its deltas."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def thinking(self) -> str:
        return "".join(self.thoughts)

    def add(self, delta: ChoiceDelta) -> None:
        self.texts.append(delta.text)
        self.thoughts.append(delta.thinking)
        for call in delta.tool_calls:
            if call.id:
                self.calls.append(_call(call.id, call.name))
            self.calls[call.index]["function"]["arguments"] += call.arguments
        self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason or self.finish_reason


def gather(messages: Sequence[Deltas]) -> tuple[dict[int, _Choice], Usage]:
    """Put the messages of a finished call together: choices by index, and the usage of the last message."""
    choices: dict[int, _Choice] = {}
    for message in messages:
        for delta in message.choices:
            choices.setdefault(delta.index, _Choice()).add(delta)
    usage = messages[-1].usage if messages else None
    return dict(sorted(choices.items())), usage or Usage()


class _Counted:
    """``usage`` of a stream so far, if ``head`` wants it; None where the prompt tokens come with the last message only
    (several prompts)."""

    def __init__(self, head: AnswerHead) -> None:
        self._counts = head.counts_as_it_goes
        self.usage: Usage | None = None

    def add(self, deltas: Deltas) -> None:
        """Count one message's tokens."""
        usage = self.usage or deltas.prompt_usage
        if self._counts and usage is not None:
            num_more = sum(len(choice.token_ids) for choice in deltas.choices)
            self.usage = replace(usage, num_output_tokens=usage.num_output_tokens + num_more)


class ChatShape:
    """``chat.completion`` and ``chat.completion.chunk``."""

    named_events = False

    def __init__(self, head: AnswerHead, logprobs: bool = False) -> None:
        self._head = head
        self._logprobs = logprobs
        self._started: set[int] = set()
        self._counted = _Counted(head)

    def chunks(self, deltas: Deltas) -> Iterator[Json]:
        """Yield the chunks for one message, in order."""
        self._counted.add(deltas)
        for delta in deltas.choices:
            if delta.index not in self._started:
                self._started.add(delta.index)
                yield self._chunk(delta.index, {"role": "assistant", "content": ""})
            if delta.thinking:
                yield self._chunk(delta.index, _thinking(delta.thinking))
            if delta.text or delta.logprobs:
                yield self._chunk(delta.index, {"content": delta.text}, delta.logprobs)
            for call in delta.tool_calls:
                yield self._chunk(delta.index, {"tool_calls": [_call_delta(call)]})
            if delta.finish_reason is not None:
                yield self._chunk(delta.index, {}, finish_reason=delta.finish_reason)
        if deltas.usage is not None and self._head.include_usage:
            yield _frame(self._head, "chat.completion.chunk", [], deltas.usage) | write_timings(deltas.timings)

    def whole(self, messages: Sequence[Deltas]) -> Json:
        """Return the answer object for all messages of a call."""
        choices, usage = gather(messages)
        written = [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": self._write_logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in choices.items()
        ]
        return _frame(self._head, "chat.completion", written) | {"usage": write_usage(usage)}

    def _chunk(
        self, index: int, delta: Json, logprobs: Sequence[LogprobEntry] = (), finish_reason: str | None = None
    ) -> Json:
        written = self._write_logprobs(logprobs) if logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": written, "finish_reason": finish_reason}
        return _frame(self._head, "chat.completion.chunk", [choice], self._counted.usage)

    def _write_logprobs(self, entries: Sequence[LogprobEntry]) -> Json | None:
        if not self._logprobs:
            return None
        content = [_token(entry.chosen) | {"top_logprobs": [_token(top) for top in entry.top]} for entry in entries]
        return {"content": content, "refusal": None}


class CompletionShape:
    """``text_completion``, whole and as chunks."""

    named_events = False

    def __init__(self, head: AnswerHead, logprobs: bool = False) -> None:
        self._head = head
        self._logprobs = logprobs
        self._num_characters: dict[int, int] = {}
        self._counted = _Counted(head)

    def chunks(self, deltas: Deltas) -> Iterator[Json]:
        """Yield the chunks for one message, in order."""
        self._counted.add(deltas)
        for delta in deltas.choices:
            if delta.text or delta.logprobs or delta.finish_reason is not None:
                yield self._chunk(delta)
        if deltas.usage is not None and self._head.include_usage:
            yield _frame(self._head, "text_completion", [], deltas.usage) | write_timings(deltas.timings)

    def whole(self, messages: Sequence[Deltas]) -> Json:
        """Return the answer object for all messages of a call."""
        choices, usage = gather(messages)
        written = [
            {
                "index": index,
                "text": choice.text,
                "logprobs": self._write_logprobs(choice.logprobs, 0),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in choices.items()
        ]
        return _frame(self._head, "text_completion", written) | {"usage": write_usage(usage)}

    def _chunk(self, delta: ChoiceDelta) -> Json:
        start = self._num_characters.get(delta.index, 0)
        self._num_characters[delta.index] = start + sum(len(entry.chosen.text) for entry in delta.logprobs)
        choice = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._write_logprobs(delta.logprobs, start) if delta.logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        return _frame(self._head, "text_completion", [choice], self._counted.usage)

    def _write_logprobs(self, entries: Sequence[LogprobEntry], start: int) -> Json | None:
        if not self._logprobs:
            return None
        offsets = []
        for entry in entries:
            offsets.append(start)
            start += len(entry.chosen.text)
        return {
            "tokens": [entry.chosen.text for entry in entries],
            "token_logprobs": [entry.chosen.logprob for entry in entries],
            "top_logprobs": [{top.text: top.logprob for top in entry.top} for entry in entries],
            "text_offset": offsets,
        }


def _message(choice: _Choice) -> Json:
    message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        message |= {"content": choice.text or None, "tool_calls": choice.calls}
    return message | (_thinking(choice.thinking) if choice.thinking else {})


def _thinking(text: str) -> Json:
    # Both names are read by clients in use.
    return {"reasoning_content": text, "reasoning": text}


def _call(call_id: str, name: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}


def _call_delta(call: ToolCallDelta) -> Json:
    if call.id:
        return {"index": call.index, **_call(call.id, call.name)}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def write_usage(usage: Usage) -> Json:
    """OpenAI's token counts."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.num_thinking_tokens},
    }


def write_timings(timings: Timings | None) -> Json:
    """Return ``timings`` for a stream's usage chunk: a stream's headers are long gone when they are known."""
    return {} if timings is None else {"timings": asdict(timings)}


def _frame(head: AnswerHead, kind: str, choices: list[Json], usage: Usage | None = None) -> Json:
    frame: Json = {
        "id": head.id,
        "object": kind,
        "created": head.created_unix_s,
        "model": head.model,
        "choices": choices,
    }
    if head.include_usage:
        frame["usage"] = write_usage(usage) if usage is not None else None
    return frame


def _token(token: TokenText) -> Json:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.raw)}
