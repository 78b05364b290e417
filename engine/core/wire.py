"""Messages as bytes: a length, then a pickle.

Owns: the framing between the front and the engine process. Both ends are the same code on the same machine, joined by a
socket pair that has no name others could open; that is what makes unpickling safe here. Must not know: what messages
mean.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

_LENGTH = struct.Struct("<I")


def encode(message: object) -> bytes:
    """One message as a frame."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Take what arrived; return the messages that are complete, oldest first."""
        self._buffer += data
        messages = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (num_bytes,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + num_bytes
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(memoryview(self._buffer)[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return messages
