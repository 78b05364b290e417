"""What a tokenizer is made of, whatever kind of files it came from.

Owns: the value that the readers (folder, GGUF) hand to the tokenizer. Must not know: files, or how the parts are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tokenizers


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """``chat_templates`` are Jinja texts by name; "default" is used unless tools call for "tool_use".

    ``special_tokens`` ("bos_token" and so on) are what templates see under these names.
    """

    backend: tokenizers.Tokenizer
    eos_token_ids: tuple[int, ...]
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
