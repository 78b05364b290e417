"""Names for the beginnings of a prompt, from what the client sent. Pure.

Owns: how a conversation becomes a chain of hashes, and the estimate of its length. Must not know: tokenizers, replicas.

A router has no tokenizer, so it hashes what comes before tokens: tools and system messages together, then message by
message, and within a long message every ``LINK_BYTES``. The next turn of a conversation repeats the chain of this one
and goes on; two conversations over one document share the chain as far as the document goes. A replica keeps the same
hashes for what it has computed, so both sides agree without either seeing the other's text.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from serve_app.protocol import ChatMessage, GenerateCall, PrefixChain, Prompt

LINK_BYTES = 8192
# Enough for a head and for the turns since somebody branched off; each link costs 16 bytes on its way.
NUM_FIRST_LINKS = 16
NUM_LAST_LINKS = 48
# English text under the tokenizers of today's models; another language shifts every prompt of a fleet alike.
BYTES_PER_TOKEN = 4
TOKENS_PER_MESSAGE = 4
TOKEN_ID_BYTES = 4
_HASH_BYTES = 8
_HEAD_ROLES = ("system", "developer")


def prefix_of(call: GenerateCall) -> PrefixChain:
    """Return the chain of a call's prompt."""
    if call.messages:
        return chat_prefix(call.messages, call.tool_use.tools if call.tool_use else ())
    return prompts_prefix(call.prompts)


def salt_of(call: GenerateCall, *, per_user: bool) -> str:
    """Return what keeps the call's cached prompt apart from others'; empty where it is shared."""
    user = call.user if per_user else ""
    return f"{call.cache_salt}\0{user}" if call.cache_salt or user else ""


def chat_prefix(messages: Sequence[ChatMessage], tools: Sequence[Any] = ()) -> PrefixChain:
    """Return the chain of a conversation. The first link is tools and leading system messages, where there are any."""
    chain = _Chain(BYTES_PER_TOKEN)
    num_head = next((i for i, m in enumerate(messages) if m.get("role") not in _HEAD_ROLES), len(messages))
    if tools or num_head:
        chain.add(_canonical([list(tools), *messages[:num_head]]), num_head * TOKENS_PER_MESSAGE)
    conversation = chain.last
    for index, message in enumerate(messages[num_head:]):
        chain.add(_canonical(message), TOKENS_PER_MESSAGE)
        conversation = chain.last if index == 0 else conversation
    return chain.finished(conversation)


def prompts_prefix(prompts: Sequence[Prompt]) -> PrefixChain:
    """Return the chain of the first of several plain prompts; all of them count for the length."""
    chains = [_prompt_chain(prompt) for prompt in prompts]
    if not chains:
        return PrefixChain()
    return chains[0].finished(chains[0].first, sum(chain.num_tokens for chain in chains[1:]))


def salted(hashes: Sequence[int], salt: str) -> tuple[int, ...]:
    """Return other names for the same beginnings: those under which only requests with the same ``salt`` find them.

    For replicas whose engines keep a prefix cache for each user.
    """
    if not salt:
        return tuple(hashes)
    mask = int.from_bytes(blake2b(salt.encode(), digest_size=_HASH_BYTES).digest(), "little")
    return tuple(name ^ mask for name in hashes)


def place_of(session_key: str, prefix: PrefixChain) -> int:
    """Return the number that decides where a conversation that nobody knows yet is sent: the session's, or its own."""
    if not session_key:
        return prefix.conversation
    return int.from_bytes(blake2b(session_key.encode(), digest_size=_HASH_BYTES).digest(), "little")


class _Chain:
    """Hashes as they grow. A running digest's value at any point covers everything before it."""

    def __init__(self, bytes_per_token: int) -> None:
        self._digest = blake2b(digest_size=_HASH_BYTES)
        self._bytes_per_token = bytes_per_token
        self._num_bytes = 0
        self._num_extra_tokens = 0
        self._hashes: list[int] = []
        self._ends: list[int] = []

    @property
    def num_tokens(self) -> int:
        return self._num_bytes // self._bytes_per_token + self._num_extra_tokens

    def add(self, part: bytes, num_extra_tokens: int = 0) -> None:
        """Append a message, with what the chat template writes around it."""
        self._num_extra_tokens += num_extra_tokens
        for start in range(0, len(part), LINK_BYTES):
            piece = part[start : start + LINK_BYTES]
            self._digest.update(piece)
            self._num_bytes += len(piece)
            self._hashes.append(int.from_bytes(self._digest.digest(), "little"))
            self._ends.append(self.num_tokens)

    @property
    def first(self) -> int:
        return self._hashes[0] if self._hashes else 0

    @property
    def last(self) -> int:
        return self._hashes[-1] if self._hashes else 0

    def finished(self, conversation: int, num_more_tokens: int = 0) -> PrefixChain:
        """The chain; of a very long one the middle is left out."""
        hashes, ends = self._hashes, self._ends
        if len(hashes) > NUM_FIRST_LINKS + NUM_LAST_LINKS:
            hashes = hashes[:NUM_FIRST_LINKS] + hashes[-NUM_LAST_LINKS:]
            ends = ends[:NUM_FIRST_LINKS] + ends[-NUM_LAST_LINKS:]
        return PrefixChain(tuple(hashes), tuple(ends), conversation, self.num_tokens + num_more_tokens)


def _prompt_chain(prompt: Prompt) -> _Chain:
    if isinstance(prompt, str):
        chain = _Chain(BYTES_PER_TOKEN)
        chain.add(prompt.encode("utf-8", "surrogatepass"))
    else:
        chain = _Chain(TOKEN_ID_BYTES)
        chain.add(array("I", prompt).tobytes())
    return chain


def _canonical(value: Any) -> bytes:
    """The same bytes for equal values, whatever the order of their keys. JSON marks its own end."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return text.encode("utf-8", "surrogatepass")
