"""What a replica remembers of the prompts it has computed, in the names that routers use. Pure.

Owns: which beginnings of prompts are probably still in the engine's prefix cache. Must not know: the cache itself. The
engine names blocks of tokens and routers name messages, and neither can be turned into the other; so this follows the
cache by size: it lets go of the longest unused beginnings when all that it remembers would no longer fit the KV pool,
as the cache does with blocks. An error costs one prompt's reading, never a wrong answer.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from serve_app.protocol import PrefixChain
from serve_app.routing.keys import salted

# A report goes to every router every second: 8 bytes each.
MAX_REPORTED = 512


class PrefixMemory:
    """Beginnings of prompts with their share of tokens, those not used for longest first."""

    def __init__(self, num_tokens_kept: int) -> None:
        """``num_tokens_kept``: what the engine's KV pool holds. With 0 nothing is ever remembered."""
        self._num_tokens_kept = num_tokens_kept
        self._num_tokens = 0
        self._share: OrderedDict[int, int] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Estimated tokens of everything remembered; beginnings that several prompts share count once."""
        return self._num_tokens

    def remember(self, prefix: PrefixChain, salt: str = "") -> None:
        """``prefix`` has been computed, or was found in the cache, just now."""
        before = 0
        shares = []
        for name, end in zip(salted(prefix.hashes, salt), prefix.num_tokens, strict=True):
            shares.append((name, end - before))
            before = end
        # The end of a prompt is of no use without its beginning, so the beginning is the last to go.
        for name, share in reversed(shares):
            self._num_tokens += share - self._share.pop(name, 0)
            self._share[name] = share
        self._forget_what_does_not_fit()

    def num_cached_tokens(self, prefix: PrefixChain, salt: str = "") -> int:
        """Return how much of the prompt is remembered: up to the end of its longest known beginning."""
        ends = zip(salted(prefix.hashes, salt), prefix.num_tokens, strict=True)
        return max((end for name, end in ends if name in self._share), default=0)

    def resize(self, num_tokens_kept: int) -> None:
        """The engine's cache holds another amount now."""
        self._num_tokens_kept = num_tokens_kept
        self._forget_what_does_not_fit()

    def forget_all(self) -> None:
        """The engine has started anew, with an empty cache."""
        self._share.clear()
        self._num_tokens = 0

    def newest(self, limit: int = MAX_REPORTED) -> frozenset[int]:
        """Return the beginnings used last, ``limit`` at most."""
        return frozenset(islice(reversed(self._share), limit))

    def _forget_what_does_not_fit(self) -> None:
        while self._share and self._num_tokens > self._num_tokens_kept:
            _, share = self._share.popitem(last=False)
            self._num_tokens -= share
