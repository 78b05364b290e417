"""Turns the tokens of one answer into the deltas a caller sees.

Owns: per answer, the incremental text, the stop strings and the counts. Must not know: how tokens arrive, MLX.
"""

from __future__ import annotations

from dataclasses import replace

from engine.core.generation import GenerationDelta, GenerationRequest
from engine.request import FinishReason, Timeline, TokenOutput
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.stop_strings import StopMatcher
from engine.text.tokenizer import Tokenizer


class AnswerProcessor:
    """One answer of one request, from its first token to its end."""

    def __init__(self, request: GenerationRequest, index: int, tokenizer: Tokenizer) -> None:
        self._request = request
        self._index = index
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, continues_text=request.continues_text, shown=frozenset(request.shown_token_ids)
        )
        self._stop = StopMatcher(request.stop) if request.stop else None
        self._num_output_tokens = 0
        self._num_cached_tokens = 0
        self._timeline = Timeline(request.received_s)
        self._finished = False

    @property
    def finished(self) -> bool:
        """Whether the last delta has been made."""
        return self._finished

    def process(self, output: TokenOutput, now_s: float) -> GenerationDelta:
        """The delta for ``output``, which is no error.

        When a stop string is complete the delta is the last one although ``output`` was not: whoever feeds the engine
        then has to cancel the sequence.
        """
        assert not self._finished, "output after the end"
        assert output.error is None
        self._note_times(output, now_s)
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        text, num_used = self._read(output)
        matched = self._stop.matched if self._stop else None
        self._num_output_tokens += num_used
        self._finished = matched is not None or output.finish_reason is not None
        return GenerationDelta(
            request_id=self._request.request_id,
            index=self._index,
            text=text,
            token_ids=output.token_ids[:num_used],
            logprobs=output.logprobs[:num_used],
            finish_reason=FinishReason.STOP if matched is not None else output.finish_reason,
            stop_reason=matched if matched is not None else self._stop_token(output),
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_output_tokens=self._num_output_tokens,
            num_cached_tokens=self._num_cached_tokens,
            timeline=replace(self._timeline, finished_s=self._timeline.finished_s or now_s) if self._finished else None,
        )

    def _read(self, output: TokenOutput) -> tuple[str, int]:
        """New text and how many of the output's tokens belong to the answer."""
        token_ids = output.token_ids
        ended = output.finish_reason is not None
        # The token that ended the answer is the model's sign, not part of what it says.
        visible = token_ids[:-1] if output.finish_reason is FinishReason.STOP else token_ids
        if self._stop is None:
            text = self._detokenizer.add(visible)
            return (text + self._detokenizer.finish() if ended else text), len(token_ids)
        text = ""
        for num_read, token_id in enumerate(visible, 1):
            text += self._stop.feed(self._detokenizer.add((token_id,)))
            if self._stop.matched is not None:
                return text, num_read
        if ended:
            text += self._stop.feed(self._detokenizer.finish())
            if self._stop.matched is None:
                text += self._stop.finish()
        return text, len(token_ids)

    def _stop_token(self, output: TokenOutput) -> int | None:
        if output.finish_reason is not FinishReason.STOP or not output.token_ids:
            return None
        last = output.token_ids[-1]
        return last if last in self._request.sampling.stop_token_ids else None

    def _note_times(self, output: TokenOutput, now_s: float) -> None:
        if output.timeline is not None:
            self._timeline = output.timeline
        elif output.token_ids and self._timeline.first_token_s is None:
            self._timeline = replace(self._timeline, first_token_s=now_s)
