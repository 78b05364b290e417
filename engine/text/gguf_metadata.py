"""Reads the head of a GGUF file: its key-value section and the list of its tensors.

Owns: that part of the format. Must not know: tensor contents, and what any key means.

The ``gguf`` package's reader makes a NumPy view of every single array element, which takes seconds for a vocabulary;
``mx.load`` would bring MLX into processes that run no model. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import UnsupportedModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Number of the value type in the file -> struct's letter for it.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
_ALIGNMENT_KEY, _ALIGNMENT = "general.alignment", 32
_SPLIT_COUNT_KEY = "split.count"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's entry: name, dimensions (fastest first), the number of its value type in ggml, the file that holds
    its contents and the byte at which they begin."""

    name: str
    dimensions: tuple[int, ...]
    type_number: int
    path: Path
    offset: int

    @property
    def num_values(self) -> int:
        """How many values it holds."""
        return math.prod(self.dimensions)


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Return all keys: numbers, booleans, strings, and lists of these.

    Raises UnsupportedModelError when the file is no little-endian GGUF of version 2 or 3, or is cut short.
    """
    with _section(path) as section:
        return section.read()


def read_gguf_tensors(path: Path) -> list[GgufTensor]:
    """Return the entries of all tensors, those of a split model's further files included.

    Raises UnsupportedModelError as ``read_gguf_metadata`` does, and when a further file is missing.
    """
    with _section(path) as section:
        metadata = section.read()
        tensors = section.tensors(path, metadata.get(_ALIGNMENT_KEY, _ALIGNMENT))
    for further in _further_files(path, metadata.get(_SPLIT_COUNT_KEY, 1)):
        with _section(further) as section:
            alignment = section.read().get(_ALIGNMENT_KEY, _ALIGNMENT)
            tensors += section.tensors(further, alignment)
    return tensors


def _further_files(path: Path, count: int) -> list[Path]:
    """The second to last file of a model in ``count`` parts, named as ggml's split tool names them."""
    if count <= 1:
        return []
    first = f"-00001-of-{count:05d}.gguf"
    if not path.name.endswith(first):
        raise UnsupportedModelError(f"{path} is one of {count} files of a model.", f"name the one that ends in {first}")
    stem = path.name.removesuffix(first)
    return [path.with_name(f"{stem}-{index:05d}-of-{count:05d}.gguf") for index in range(2, count + 1)]


@contextmanager
def _section(path: Path) -> Iterator[_Section]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            yield _Section(buffer)
    except (OSError, ValueError, struct.error) as error:
        raise UnsupportedModelError(
            f"{path} cannot be read as GGUF: {error}.", "fetch the file again, or use the model's mlx-lm folder"
        ) from error


class _Section:
    """A cursor over the mapped file."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self._position = 0
        self._num_tensors = 0

    def read(self) -> dict[str, Any]:
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin with the GGUF mark")
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version field is {version}, not one of {_VERSIONS}")
        self._num_tensors = self._number("Q")
        return dict(self._pair() for _ in range(self._number("Q")))

    def tensors(self, path: Path, alignment: int) -> list[GgufTensor]:
        """The list that follows the keys; call ``read`` first."""
        entries = [self._tensor() for _ in range(self._num_tensors)]
        start = -(-self._position // alignment) * alignment
        return [GgufTensor(name, shape, kind, path, start + offset) for name, shape, kind, offset in entries]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = tuple(self._number("Q") for _ in range(self._number("I")))
        return name, dimensions, self._number("I"), self._number("Q")

    def _pair(self) -> tuple[str, Any]:
        key = self._string()
        return key, self._value(self._number("I"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._number("I"), self._number("Q"))
        return self._number(self._letter(kind))

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self._value(_ARRAY) for _ in range(count)]
        letter = self._letter(kind)
        return list(struct.unpack(f"<{count}{letter}", self._take(count * struct.calcsize(f"<{letter}"))))

    def _strings(self, count: int) -> list[str]:
        # One flat loop over local names: a vocabulary and its merges are some 100,000 to 500,000 strings.
        buffer, position, unpack = self._buffer, self._position, _LENGTH.unpack_from
        strings = []
        for _ in range(count):
            (length,) = unpack(buffer, position)
            position += 8
            strings.append(buffer[position : position + length].decode())
            position += length
        self._position = position
        self._take(0)  # slices beyond the end are short, not an error
        return strings

    def _string(self) -> str:
        return self._take(self._number("Q")).decode()

    def _number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}")))[0]

    def _take(self, length: int) -> bytes:
        start, self._position = self._position, self._position + length
        if self._position > len(self._buffer):
            raise ValueError("it is cut short")
        return self._buffer[start : self._position]

    @staticmethod
    def _letter(kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"it holds a value of unknown type {kind}")
        return _SCALARS[kind]
