"""Turns the tokens of one answer into the deltas a caller sees.

Owns: per answer, the incremental text, the stop strings, the counts and the account of its end. Must not know: how
tokens arrive, MLX.
"""

from __future__ import annotations

from dataclasses import replace

from engine.core.generation import AnswerAccount, GenerationDelta, GenerationRequest
from engine.request import FinishReason, Timeline, TokenOutput
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.stop_strings import StopMatcher
from engine.text.tokenizer import Tokenizer


class AnswerProcessor:
    """One answer of one request, from its first token to its end.

    A stop string completes the text at once; the last delta follows when the engine, told so, has given its account.
    ``is_told``: it has, in whichever way the answer ended.
    """

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
        self._finish_reason: FinishReason | None = None
        self.is_told = False

    @property
    def finished(self) -> bool:
        """Whether the last delta has been made."""
        return self._finish_reason is not None

    @property
    def text_complete(self) -> bool:
        """Whether a stop string has come: whatever the engine still computes is not part of the answer."""
        return self._stop is not None and self._stop.matched is not None

    def process(self, output: TokenOutput, now_s: float) -> GenerationDelta | None:
        """The delta for ``output``, which is no error; None when nothing of it is for the caller.

        When it completes a stop string, ``text_complete`` turns true: whoever feeds the engine then has to tell it,
        unless the engine ended the answer itself.
        """
        assert not self.finished, "output after the end"
        assert output.error is None
        was_complete = self.text_complete
        self.note_account(output)
        if was_complete:
            return self.finish(now_s) if output.finish_reason is not None else None
        if output.token_ids and self._timeline.first_token_s is None:
            self._timeline = replace(self._timeline, first_token_s=now_s)
        text, num_used = self._read(output)
        self._num_output_tokens += num_used
        if output.finish_reason is not None:
            self._finish_reason = FinishReason.STOP if self.text_complete else output.finish_reason
        return self._delta(now_s, output, text, num_used)

    def finish(self, now_s: float) -> GenerationDelta:
        """The last delta of an answer whose text is complete. Without the engine's account its times stay unknown."""
        assert self.text_complete
        self._finish_reason = FinishReason.STOP
        return self._delta(now_s)

    def note_account(self, output: TokenOutput) -> None:
        """Take in what the engine tells of times and cached tokens, and whether it is done."""
        if output.timeline is not None:
            self._timeline = output.timeline
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        self.is_told = self.is_told or output.finish_reason is not None

    def account(self, default: FinishReason, now_s: float) -> AnswerAccount:
        """How the answer ended; ``default`` is the reason of one that did not end by itself."""
        return AnswerAccount(
            index=self._index,
            finish_reason=self._finish_reason or (FinishReason.STOP if self.text_complete else default),
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_output_tokens=self._num_output_tokens,
            num_cached_tokens=self._num_cached_tokens,
            timeline=replace(self._timeline, finished_s=self._timeline.finished_s or now_s),
        )

    def _delta(
        self, now_s: float, output: TokenOutput | None = None, text: str = "", num_used: int = 0
    ) -> GenerationDelta:
        ended = self.finished
        return GenerationDelta(
            request_id=self._request.request_id,
            index=self._index,
            text=text,
            token_ids=output.token_ids[:num_used] if output else (),
            logprobs=output.logprobs[:num_used] if output else (),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason(output) if ended else None,
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_output_tokens=self._num_output_tokens,
            num_cached_tokens=self._num_cached_tokens,
            timeline=replace(self._timeline, finished_s=self._timeline.finished_s or now_s) if ended else None,
            made_s=now_s,
            embedding=None if output is None else output.embedding,
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

    def _stop_reason(self, output: TokenOutput | None) -> str | int | None:
        if self._stop is not None and self._stop.matched is not None:
            return self._stop.matched
        if output is None or output.finish_reason is not FinishReason.STOP or not output.token_ids:
            return None
        last = output.token_ids[-1]
        return last if last in self._request.sampling.stop_token_ids else None
