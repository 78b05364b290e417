"""Puts the engine's deltas of one call together into the protocol's messages.

Owns: choice numbers, token texts of logprobs, usage and timings. Must not know: Ray, when a message is sent
(stream.py), or what is in a text (reading.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.generation import GenerationDelta
from engine.request import FinishReason, Timeline, TokenLogprobs
from engine.text.tokenizer import Tokenizer
from serve_app.protocol import ChoiceDelta, Deltas, LogprobEntry, Timings, TokenText, Usage
from serve_app.replica.reading import AnswerReader, Read, Reading


class CallFolder:
    """One call's deltas, folded. ``fold`` is given what came since the last time, as (prompt number, delta)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_prompts: int,
        n: int,
        echo: Sequence[str] = (),
        reading: Reading | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._readers = [AnswerReader(reading or Reading()) for _ in range(num_prompts * n)]
        self._n = n
        self._echo = {p * n + i: text for p, text in enumerate(echo) for i in range(n)}
        self._num_unfinished = num_prompts * n
        self._num_prompts = num_prompts
        self._num_thinking_tokens = 0
        self._last: dict[int, GenerationDelta] = {}

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return self._num_unfinished == 0

    def fold(self, arrived: Iterable[tuple[int, GenerationDelta]]) -> Deltas:
        """Return one message with everything that arrived; the call's last one carries usage and timings."""
        is_first = not self._last
        by_choice: dict[int, list[GenerationDelta]] = {}
        for prompt, delta in arrived:
            by_choice.setdefault(prompt * self._n + delta.index, []).append(delta)
        choices = tuple(self._fold_choice(index, deltas) for index, deltas in by_choice.items())
        prompt_usage = self._prompt_usage() if is_first and self._num_prompts == 1 else None
        if not self.finished:
            return Deltas(choices, prompt_usage=prompt_usage)
        return Deltas(choices, self._usage(), self._timings(), prompt_usage)

    def _fold_choice(self, index: int, deltas: Sequence[GenerationDelta]) -> ChoiceDelta:
        last = self._last[index] = deltas[-1]
        self._num_unfinished -= last.finish_reason is not None
        read = self._read(index, deltas)
        return ChoiceDelta(
            index=index,
            text=self._echo.pop(index, "") + read.text,
            thinking=read.thinking,
            tool_calls=read.tool_calls,
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            logprobs=tuple(self._entry(logprobs) for delta in deltas for logprobs in _visible_logprobs(delta)),
            finish_reason=self._finish_reason(index, last),
            stop_reason=last.stop_reason,
        )

    def _read(self, index: int, deltas: Sequence[GenerationDelta]) -> Read:
        reader, read, last = self._readers[index], Read(), deltas[-1]
        for delta in deltas:
            thought = reader.thinks
            read += reader.feed(delta.text)
            if thought or reader.thinks:
                self._num_thinking_tokens += len(delta.token_ids)
        return read if last.finish_reason is None else read + reader.finish(whole=_ended_by_itself(last))

    def _finish_reason(self, index: int, last: GenerationDelta) -> str | None:
        if last.finish_reason is FinishReason.STOP and self._readers[index].num_calls:
            return "tool_calls"
        return None if last.finish_reason is None else str(last.finish_reason)

    def _entry(self, logprobs: TokenLogprobs) -> LogprobEntry:
        top = tuple(self._token(token_id, logprob) for token_id, logprob in logprobs.top)
        return LogprobEntry(self._token(logprobs.token_id, logprobs.logprob), top)

    def _token(self, token_id: int, logprob: float) -> TokenText:
        raw = self._tokenizer.token_bytes(token_id)
        return TokenText(raw.decode("utf-8", "replace"), raw, logprob)

    def _usage(self) -> Usage:
        # The answers of one prompt share it, so the first one speaks for all.
        firsts = [last for index, last in self._last.items() if index % self._n == 0]
        return Usage(
            num_prompt_tokens=sum(last.num_prompt_tokens for last in firsts),
            num_output_tokens=sum(last.num_output_tokens for last in self._last.values()),
            num_cached_tokens=sum(last.num_cached_tokens for last in firsts),
            num_thinking_tokens=self._num_thinking_tokens,
        )

    def _prompt_usage(self) -> Usage:
        first = next(iter(self._last.values()))
        return Usage(num_prompt_tokens=first.num_prompt_tokens, num_cached_tokens=first.num_cached_tokens)

    def _timings(self) -> Timings:
        timelines = [last.timeline for last in self._last.values() if last.timeline is not None]
        if not timelines:
            return Timings()
        first = timelines[0]
        waited_s: dict[str, float] = {}
        for timeline in timelines:
            for reason, seconds in timeline.waited_s.items():
                waited_s[str(reason)] = waited_s.get(str(reason), 0.0) + seconds
        return Timings(
            queued_s=_since_received(first, first.admitted_s),
            prefill_started_s=_since_received(
                first, min((t.prefill_started_s for t in timelines if t.prefill_started_s), default=None)
            ),
            first_token_s=_since_received(
                first, min((t.first_token_s for t in timelines if t.first_token_s), default=None)
            ),
            total_s=_since_received(first, max((t.finished_s for t in timelines if t.finished_s), default=None)),
            num_preemptions=sum(timeline.num_preemptions for timeline in timelines),
            waited_s=waited_s,
        )


def _visible_logprobs(delta: GenerationDelta) -> Sequence[TokenLogprobs]:
    """The token that ended the answer is no part of its text; a stop string's tokens came from the text."""
    return delta.logprobs[:-1] if _ended_by_itself(delta) else delta.logprobs


def _ended_by_itself(delta: GenerationDelta) -> bool:
    return delta.finish_reason is FinishReason.STOP and not isinstance(delta.stop_reason, str)


def _since_received(timeline: Timeline, mark_s: float | None) -> float | None:
    return None if mark_s is None else mark_s - timeline.received_s
