"""The model's tokenizer: text and chats to ids, ids to text.

Owns: one object that every thread of a process may use at once. Must not know: files' formats, requests, MLX.

Threads: padding, truncation and the treatment of special tokens are settings of the shared ``tokenizers`` object, and
``transformers`` sets them in its calls. One thread's setting then acts on another's text (or, in older releases, raises
"Already borrowed"). Here they are fixed when the tokenizer is loaded, and the object is only read afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.errors import InvalidParameterError, UnsupportedModelError
from engine.model_source import ModelSource
from engine.text.chat_template import ChatTemplate
from engine.text.folder_tokenizer import read_folder_tokenizer
from engine.text.gguf_tokenizer import read_gguf_tokenizer
from engine.text.parts import TokenizerParts
from engine.text.token_pieces import TokenPieces

_PROBE = "Ahoj, světe!  def f(x):\n    return 'naïve' + \"你好\" * 2  # 👩\u200d👩\u200d👧 e\u0301 🇨🇿"


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """Load the tokenizer of ``source``. Raises UnsupportedModelError with what would help."""
    read = read_gguf_tokenizer if source.kind == "gguf" else read_folder_tokenizer
    return Tokenizer(read(source.path))


class Tokenizer:
    """Encodes, renders and decodes. Safe to share between threads."""

    def __init__(self, parts: TokenizerParts) -> None:
        """Raises UnsupportedModelError when streaming could not give the text that decoding gives."""
        self._backend = parts.backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = False
        self._chat_template = ChatTemplate(parts.chat_templates, parts.special_tokens)
        self.eos_token_ids = parts.eos_token_ids
        self.pieces = TokenPieces(parts.backend)
        ids = self.encode(_PROBE)
        if self.decode(ids) != self._backend.decode(ids, skip_special_tokens=True):
            raise UnsupportedModelError(
                "The tokenizer's decoder does something that cannot be followed token by token.",
                "use a model with a byte-level or sentencepiece tokenizer",
            )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model may have more rows in its embedding."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether ``apply_chat_template`` can work."""
        return self._chat_template.exists

    @property
    def chat_template_source(self) -> str:
        """The text of the model's chat templates; empty without one."""
        return self._chat_template.source

    def is_special(self, token_id: int) -> bool:
        """Whether a token is left out of the text that a reader sees."""
        return self.pieces.is_special(token_id)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of ``text``; special tokens spelled in it are recognised.

        ``add_special_tokens`` puts what the model wants around a plain text (such as a beginning token).
        Raises InvalidParameterError when the text is no valid Unicode.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        """Return the ids of each text; as ``encode``, several texts in parallel."""
        try:
            # The library's encode of one text holds the GIL, for seconds if it is long. Its batch form does not.
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise InvalidParameterError(
                "The text holds half of a surrogate pair, which is no Unicode character.", "prompt"
            ) from error
        return [encoding.ids for encoding in encodings]

    def render_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """Return the prompt's text; see ``ChatTemplate.render``.

        ``RESERVED_VARIABLES`` of engine.text.chat_template are no names for ``template_kwargs``.
        """
        return self._chat_template.render(messages, tools, **template_kwargs)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Return the prompt's ids. The template writes the special tokens itself. Errors as ``ChatTemplate.render``."""
        return self.encode_chat(self.render_chat_template(messages, tools, **template_kwargs))

    def encode_chat(self, rendered: str) -> list[int]:
        """Return the ids of a rendered chat. Raises InvalidParameterError as ``encode``, naming the messages."""
        try:
            return self.encode(rendered)
        except InvalidParameterError as error:
            raise InvalidParameterError(error.message, "messages") from error

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``. Ids without a token are left out; bytes that are no UTF-8 become U+FFFD."""
        data, _ = self.pieces.join(token_ids, at_start=True, skip_special_tokens=skip_special_tokens)
        return data.decode("utf-8", "replace")

    def to_json(self) -> str:
        """Return the text of a tokenizer.json, for libraries that bring their own reader."""
        return self._backend.to_str()

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds inside a text: maybe only a part of a character, and a special token's spelling."""
        return self.pieces.inner(token_id)
