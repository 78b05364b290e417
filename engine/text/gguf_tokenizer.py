"""Builds a tokenizer from a GGUF file's metadata.

Owns: what the ``tokenizer.*`` keys mean. Must not know: the file format (gguf_metadata), tensors.

Two vocabularies are known: byte-level BPE ("gpt2") and sentencepiece BPE ("llama"). How text is split before BPE is not
in the file, only its name is; a name that is not in the table is refused, because another split gives other tokens and
quietly worse answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import UnsupportedModelError
from engine.text.gguf_metadata import read_gguf_metadata
from engine.text.parts import TokenizerParts

_FIX = "use the model's folder in mlx-lm's layout, which has a tokenizer.json, instead of the GGUF file"
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # values of tokenizer.ggml.token_type
_END_KEYS = ("eos", "eot", "eom")
_SPECIAL_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_SPACE = "\u2581"  # what sentencepiece writes for a space
# Tokens that end an answer whatever the file's keys say: many files name the document's end only, not the turn's.
_END_NAMES = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>")
)
# Phi-3's matched tokens take the white space behind them along, but for these.
_KEEPS_SPACE = frozenset(("<unk>", "<s>", "<|endoftext|>"))

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# A word in any case, cut where small letters are followed by capitals.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")


@dataclass(frozen=True, slots=True)
class _Split:
    """How byte-level BPE cuts text into words. ``pattern`` None: GPT-2's own, built into the library."""

    pattern: str | None = None
    single_digits: bool = False
    whole_words_first: bool = False
    compose: bool = False
    add_bos: bool = False


_GPT2 = _Split()
_DIGITS = _Split(single_digits=True)
_LLAMA3_PATTERN = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_LLAMA3 = _Split(_LLAMA3_PATTERN, whole_words_first=True, add_bos=True)
_QWEN2 = _Split(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}", compose=True)
_TEKKEN = _Split(rf"{'|'.join(_CASED)}|\p{{N}}|{_REST_WITH_SLASH}", whole_words_first=True, add_bos=True)
_GPT4O = _Split(
    "|".join([*(f"{word}{_CONTRACTIONS}?" for word in _CASED), rf"\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"]),
)
_SPLITS = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "phi-2"), _GPT2),
    "dbrx": _Split(_LLAMA3_PATTERN),
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
}


def read_gguf_tokenizer(path: Path) -> TokenizerParts:
    """Read ``path``. Raises UnsupportedModelError for a vocabulary or a split that is not known."""
    return build_gguf_tokenizer(read_gguf_metadata(path))


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Build from metadata as ``read_gguf_metadata`` returns it. Raises UnsupportedModelError."""
    kind = _ggml(metadata, "model")
    if kind not in _BUILDERS:
        raise UnsupportedModelError(f"The GGUF file's tokenizer is of kind {kind!r}; known: gpt2, llama.", _FIX)
    kinds: list[int] = _ggml(metadata, "token_type") or []
    tokens = _as_written(_ggml(metadata, "tokens") or [], kinds, kind)
    if len(set(tokens)) != len(tokens) or not tokens:
        raise UnsupportedModelError("The GGUF file's vocabulary is empty or lists a token twice.", _FIX)
    backend, adds_bos = _BUILDERS[kind](metadata, tokens)
    takes_space = kind == "llama" and metadata.get("general.architecture") == "phi3"
    _add_matched_tokens(backend, tokens, kinds, takes_space)
    _add_begin_and_end(backend, metadata, tokens, adds_bos)
    ends = [_ggml(metadata, f"{name}_token_id") for name in _END_KEYS]
    ends += [index for index in _matched(tokens, kinds) if tokens[index] in _END_NAMES]
    return TokenizerParts(
        backend=backend,
        eos_token_ids=tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None)),
        chat_templates=_chat_templates(metadata),
        special_tokens={
            name: tokens[token_id]
            for key, name in _SPECIAL_NAMES.items()
            if (token_id := _ggml(metadata, f"{key}_token_id")) is not None
        },
    )


def _as_written(tokens: list[str], kinds: list[int], kind: str) -> list[str]:
    """User-defined tokens are found in the text itself: in a sentencepiece vocabulary they may be spelled otherwise."""
    if kind != "llama":
        return tokens
    written = list(tokens)
    for index, token_kind in enumerate(kinds[: len(tokens)]):
        if token_kind == _USER_DEFINED:
            written[index] = tokens[index].replace(_SPACE, " ")
    return written


def _ggml(metadata: Mapping[str, Any], name: str) -> Any:
    return metadata.get(f"tokenizer.ggml.{name}")


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    name = _ggml(metadata, "pre")
    if name not in _SPLITS:
        raise UnsupportedModelError(f"The GGUF file splits text by {name!r}, which is not known here.", _FIX)
    split = _SPLITS[name]
    merges = [tuple(merge.split(" ")) for merge in _ggml(metadata, "merges") or []]
    if any(len(merge) != 2 for merge in merges):
        raise UnsupportedModelError("A merge rule in the GGUF file does not have two parts.", _FIX)
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[(left, right) for left, right in merges],
            ignore_merges=split.whole_words_first,
        )
    )
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    prefix = bool(_ggml(metadata, "add_space_prefix"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=split.pattern is None))
    if split.compose:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    kinds = _ggml(metadata, "token_type") or []
    unknown = _ggml(metadata, "unknown_token_id")
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_merges_from_scores(tokens, _ggml(metadata, "scores") or [], kinds),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in kinds,
        )
    )
    prefix = _ggml(metadata, "add_space_prefix") is not False
    replace = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend, True


def _merges_from_scores(tokens: list[str], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """Sentencepiece joins the pair whose joined piece scores highest: every such pair, best first."""
    if len(scores) != len(tokens):
        raise UnsupportedModelError(f"The GGUF file has {len(scores)} scores for {len(tokens)} tokens.", _FIX)
    unjoined = {_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE}
    joinable = {
        token: score
        for index, (token, score) in enumerate(zip(tokens, scores, strict=True))
        if index >= len(kinds) or kinds[index] not in unjoined
    }
    merges = []
    for token in sorted(joinable, key=joinable.__getitem__, reverse=True):
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += [pair for pair in pairs if pair[0] in joinable and pair[1] in joinable]
    return merges


def _matched(tokens: list[str], kinds: list[int]) -> list[int]:
    return [index for index, kind in enumerate(kinds[: len(tokens)]) if kind in (_CONTROL, _USER_DEFINED)]


def _add_matched_tokens(backend: Tokenizer, tokens: list[str], kinds: list[int], takes_space: bool) -> None:
    """Tokens found in the text before BPE: control tokens (left out when decoding) and user-defined ones (kept)."""
    backend.add_tokens(
        [
            AddedToken(
                tokens[index],
                special=kinds[index] == _CONTROL,
                normalized=False,
                rstrip=takes_space and tokens[index] not in _KEEPS_SPACE,
            )
            for index in _matched(tokens, kinds)
        ]
    )


def _add_begin_and_end(backend: Tokenizer, metadata: Mapping[str, Any], tokens: list[str], adds_bos: bool) -> None:
    asked = {"bos": _ggml(metadata, "add_bos_token"), "eos": _ggml(metadata, "add_eos_token")}
    wanted = {"bos": adds_bos if asked["bos"] is None else asked["bos"], "eos": bool(asked["eos"])}
    ids = {name: _ggml(metadata, f"{name}_token_id") for name in wanted if wanted[name]}
    used = {name: (tokens[token_id], token_id) for name, token_id in ids.items() if token_id is not None}
    if not used:
        return
    backend.post_processor = processors.TemplateProcessing(
        single=[*([used["bos"][0]] if "bos" in used else []), "$A", *([used["eos"][0]] if "eos" in used else [])],
        special_tokens=list(used.values()),
    )


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    named = {key[len(prefix) + 1 :]: metadata[key] for key in metadata if key.startswith(f"{prefix}.")}
    return {**named, "default": metadata[prefix]} if prefix in metadata else named


_BUILDERS: dict[str, Callable[[Mapping[str, Any], list[str]], tuple[Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
