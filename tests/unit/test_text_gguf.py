"""Tokenizers rebuilt from GGUF metadata, against the libraries that such files are made from."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import Qwen2Tokenizer

from engine.errors import UnsupportedModelError
from engine.text.gguf_metadata import read_gguf_metadata, read_gguf_tensors
from engine.text.gguf_tokenizer import build_gguf_tokenizer
from engine.text.tokenizer import Tokenizer
from tests.unit.text_samples import CORPUS, HARD_TEXTS, byte_level

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def build(metadata: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer(build_gguf_tokenizer({f"tokenizer.{key}": value for key, value in metadata.items()}))


def byte_level_metadata(**more: Any) -> dict[str, Any]:
    model = json.loads(byte_level().to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), "<|im_start|>", "<|im_end|>", "<think>"]
    end = len(tokens)
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "smollm",
        "ggml.tokens": tokens,
        "ggml.token_type": [NORMAL] * (end - 3) + [CONTROL, CONTROL, USER_DEFINED],
        "ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "ggml.bos_token_id": end - 3,
        "ggml.eos_token_id": end - 2,
        "chat_template": "{% for m in messages %}{{ bos_token }}{{ m.content }}{{ eos_token }}{% endfor %}",
        **{f"ggml.{key}": value for key, value in more.items()},
    }


def random_texts(seed: int) -> list[str]:
    rng = random.Random(seed)
    pieces = [*"".join(CORPUS), *"0123456789 \n\t'", "'LL", "don't", "  ", "\r\n", "e\u0301", "🙂", "你"]
    return ["".join(rng.choices(pieces, k=rng.randrange(60))) for _ in range(200)]


def path_with_contents(path: Path) -> Path:
    """A copy with room for what the head promises: the package's reader looks there."""
    whole = path.with_suffix(".whole")
    whole.write_bytes(path.read_bytes() + bytes(1024))
    return whole


def test_what_the_gguf_package_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("u32", 7)
    writer.add_int64("i64", -(2**40))
    writer.add_float32("f32", 0.5)
    writer.add_bool("flag", True)
    writer.add_string("text", "příliš 🙂")
    writer.add_array("words", ["a", "", "你好"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_tensor_info("w", (4, 8), np.dtype("float32"), 128)
    with path.open("wb"):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
    metadata = read_gguf_metadata(path)
    assert {key: metadata[key] for key in ("u32", "i64", "f32", "flag", "text", "words", "numbers")} == {
        "u32": 7,
        "i64": -(2**40),
        "f32": 0.5,
        "flag": True,
        "text": "příliš 🙂",
        "words": ["a", "", "你好"],
        "numbers": [1, -2, 3],
    }
    (tensor,) = read_gguf_tensors(path)
    assert (tensor.name, tensor.dimensions, tensor.num_values, tensor.type_number) == ("w", (8, 4), 32, 0)
    assert (tensor.path, tensor.offset) == (path, gguf.GGUFReader(path_with_contents(path)).tensors[0].data_offset)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(UnsupportedModelError, match="cannot be read as GGUF"):
            read_gguf_tensors(path)


@pytest.mark.parametrize(
    "content", [b"", b"not a model", b"GGUF\x01\0\0\0" + b"\0" * 16, b"GGUF\0\0\0\x03" + b"\0" * 16]
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError) as caught:
        read_gguf_metadata(path)
    assert caught.value.fix


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="No such file"):
        read_gguf_metadata(tmp_path / "none.gguf")


def test_digits_are_split_one_by_one() -> None:
    metadata = byte_level_metadata()
    metadata["ggml.merges"] += ["9 8", "98 7"]
    metadata["ggml.tokens"] = [*metadata["ggml.tokens"], "98", "987"]
    digits = build(metadata).encode("987")
    assert [build(metadata).token_bytes(token_id) for token_id in digits] == [b"9", b"8", b"7"]
    joined = build({**metadata, "ggml.pre": "gpt-2"}).encode("987")
    assert [build(metadata).token_bytes(token_id) for token_id in joined] == [b"987"]


def test_qwen2_equals_the_tokenizer_of_transformers() -> None:
    metadata = byte_level_metadata(pre="qwen2")
    vocab = {token: index for index, token in enumerate(metadata["ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["ggml.merges"]]
    ours, theirs = build(metadata), Qwen2Tokenizer(vocab=vocab, merges=merges, eos_token="<|im_end|>")
    for text in (*HARD_TEXTS, *random_texts(1)):
        assert ours.encode(text) == theirs.encode(text), text


def test_smollm_equals_the_split_of_its_tokenizer_json() -> None:
    metadata = byte_level_metadata()
    vocab = {token: index for index, token in enumerate(metadata["ggml.tokens"])}
    theirs = Backend(models.BPE(vocab, [tuple(merge.split(" ")) for merge in metadata["ggml.merges"]]))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ours = build(metadata)
    for text in (*HARD_TEXTS, *random_texts(2)):
        assert ours.encode(text) == theirs.encode(text).ids, text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-2", ["I", "'ll", "Ġpay", "Ġ12345", ",", "Ġ", "Ġ'", "LL", "Ċ", "x"]),
        ("smollm", ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "5", ",", "Ġ", "Ġ'", "LL", "Ċ", "x"]),
        ("llama-bpe", ["I", "'ll", "Ġpay", "Ġ", "123", "45", ",", "Ġ", "Ġ'", "LL", "Ċ", "x"]),
        ("qwen2", ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "5", ",", "Ġ", "Ġ'", "LL", "Ċ", "x"]),
        ("phi-2", ["I", "'ll", "Ġpay", "Ġ12345", ",", "Ġ", "Ġ'", "LL", "Ċ", "x"]),
        ("dbrx", ["I", "'ll", "Ġpay", "Ġ", "123", "45", ",", "Ġ", "Ġ'", "LL", "Ċ", "x"]),
        ("tekken", ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "5", ",", "Ġ", "Ġ'", "LL", "Ċ", "x"]),
        ("gpt-4o", ["I'll", "Ġpay", "Ġ", "123", "45", ",", "Ġ", "Ġ'", "LL", "Ċ", "x"]),
    ],
)
def test_words_before_bpe(name: str, words: list[str]) -> None:
    backend = build_gguf_tokenizer(
        {f"tokenizer.{key}": value for key, value in byte_level_metadata(pre=name).items()}
    ).backend
    assert backend.pre_tokenizer is not None
    assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("I'll pay 12345,  'LL\nx")] == words


PUBLISHED = {  # as tokenizer.json files of these families spell them
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "dbrx": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_words_are_cut_as_the_published_pattern_says(name: str) -> None:
    metadata = byte_level_metadata(pre=name)
    theirs = Backend(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.Split(Regex(PUBLISHED[name]), behavior="isolated")
    ours = build_gguf_tokenizer({f"tokenizer.{key}": value for key, value in metadata.items()}).backend
    assert ours.pre_tokenizer is not None
    assert theirs.pre_tokenizer is not None
    for text in (*HARD_TEXTS, *random_texts(4), "camelCase HTTPServer ÉTÉ été's path/to\n//x"):
        cuts = [span for _, span in ours.pre_tokenizer.pre_tokenize_str(text)]
        assert cuts == [span for _, span in theirs.pre_tokenizer.pre_tokenize_str(text)], text


def test_whole_words_come_before_merges_in_llama_3() -> None:
    metadata = byte_level_metadata()
    metadata["ggml.tokens"] = [*metadata["ggml.tokens"], "zqx"]
    assert len(build({**metadata, "ggml.pre": "llama-bpe"}).encode("zqx")) == 1
    assert len(build({**metadata, "ggml.pre": "gpt-2"}).encode("zqx")) == 3


def test_special_tokens_and_ends() -> None:
    tokenizer = build(byte_level_metadata(eot_token_id=5))
    end = tokenizer.vocab_size
    assert tokenizer.eos_token_ids == (end - 2, 5)
    row = tokenizer.encode("a<|im_end|><think>b")
    assert row[1:3] == [end - 2, end - 1]
    assert tokenizer.decode(row) == "a<think>b"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}]) == [end - 3, row[0], end - 2]


def test_the_end_of_a_turn_ends_an_answer_whatever_the_keys_say() -> None:
    metadata = byte_level_metadata()
    metadata["ggml.tokens"] = [*metadata["ggml.tokens"], "<|end|>", "<|eom_id|>"]
    metadata["ggml.token_type"] = [*metadata["ggml.token_type"], CONTROL, NORMAL]
    end = len(metadata["ggml.tokens"])
    assert build(metadata).eos_token_ids == (end - 4, end - 2)


@pytest.mark.parametrize(
    ("more", "before", "after"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, ["<|im_start|>"], []),
        ({"add_bos_token": True, "add_eos_token": True}, ["<|im_start|>"], ["<|im_end|>"]),
        ({"pre": "llama-bpe"}, ["<|im_start|>"], []),
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
    ],
)
def test_tokens_around_a_plain_text(more: dict[str, Any], before: list[str], after: list[str]) -> None:
    tokenizer = build(byte_level_metadata(**more))
    around = tokenizer.decode(tokenizer.encode("fox", add_special_tokens=True), skip_special_tokens=False)
    assert around == "".join([*before, "fox", *after])
    assert tokenizer.decode(tokenizer.encode("fox"), skip_special_tokens=False) == "fox"


def test_named_chat_templates() -> None:
    named = {"tokenizer.chat_template.tool_use": "{{ messages[0].content }} with tools"}
    metadata = {f"tokenizer.{key}": value for key, value in byte_level_metadata().items()}
    assert set(build_gguf_tokenizer({**metadata, **named}).chat_templates) == {"default", "tool_use"}


@pytest.mark.parametrize(
    "more",
    [
        {"model": "bert"},
        {"model": None},
        {"pre": "default"},
        {"pre": None},
        {"pre": "a-new-one"},
        {"tokens": []},
        {"tokens": ["a", "a"]},
        {"merges": ["a b c"]},
    ],
)
def test_what_is_not_known_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        build(byte_level_metadata(**more))
    assert "mlx-lm" in caught.value.fix


GEMMA_SYMBOLS = ("\u2581\u2581", "\u2581\u2581\u2581", "\n\n", "\t")
SYMBOLS = frozenset(("<think>", *GEMMA_SYMBOLS))


def sentencepiece_model(*, prefix: bool = True, user_defined: tuple[str, ...] = ("<think>",)) -> Any:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 4),
        model_writer=model,
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        user_defined_symbols=list(user_defined),
        character_coverage=0.99,
        minloglevel=3,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(model: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    ids = range(model.get_piece_size())
    marks = ((UNKNOWN, model.is_unknown), (CONTROL, model.is_control), (BYTE, model.is_byte))
    kinds = [next((kind for kind, is_of_kind in marks if is_of_kind(i)), NORMAL) for i in ids]
    kinds = [USER_DEFINED if model.id_to_piece(i) in SYMBOLS else kind for i, kind in zip(ids, kinds, strict=True)]
    return {
        "ggml.model": "llama",
        "ggml.tokens": [model.id_to_piece(i) for i in ids],
        "ggml.scores": [model.get_score(i) for i in ids],
        "ggml.token_type": kinds,
        "ggml.unknown_token_id": model.unk_id(),
        "ggml.bos_token_id": model.bos_id(),
        "ggml.eos_token_id": model.eos_id(),
    }


def test_sentencepiece_equals_the_sentencepiece_library() -> None:
    model = sentencepiece_model()
    tokenizer = build(sentencepiece_metadata(model))
    for text in (*HARD_TEXTS, *random_texts(3)):
        row = model.encode(text)
        assert tokenizer.encode(text) == row, text
        assert tokenizer.decode(row) == model.decode(row), text
    assert tokenizer.encode("fox", add_special_tokens=True) == [model.bos_id(), *model.encode("fox")]


@pytest.mark.parametrize("spelled_with", ["\u2581", " "])
def test_gemmas_runs_of_spaces_and_lines_are_tokens_of_their_own(spelled_with: str) -> None:
    model = sentencepiece_model(prefix=False, user_defined=GEMMA_SYMBOLS)
    metadata = sentencepiece_metadata(model) | {"ggml.add_space_prefix": False}
    tokens, kinds = metadata["ggml.tokens"], metadata["ggml.token_type"]
    metadata["ggml.tokens"] = [
        token.replace("\u2581", spelled_with) if kind == USER_DEFINED else token
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    tokenizer = build(metadata)
    for text in (*HARD_TEXTS, *random_texts(5), "a  b   c    d\n\ne\n\n\nf\tg", "  ", "\n\n\n"):
        row = model.encode(text)
        assert tokenizer.encode(text) == row, text
        assert tokenizer.decode(row) == model.decode(row), text


def test_phi_3s_marks_take_the_space_behind_them_along() -> None:
    metadata = sentencepiece_metadata(sentencepiece_model())
    end = len(metadata["ggml.tokens"])
    metadata["ggml.tokens"] = [*metadata["ggml.tokens"], "<|user|>", "<|endoftext|>"]
    metadata["ggml.scores"] = [*metadata["ggml.scores"], 0.0, 0.0]
    metadata["ggml.token_type"] = [*metadata["ggml.token_type"], CONTROL, CONTROL]
    settings = {f"tokenizer.{key}": value for key, value in metadata.items()}
    phi, llama = (
        Tokenizer(build_gguf_tokenizer({**settings, "general.architecture": name})) for name in ("phi3", "llama")
    )
    assert phi.encode("<|user|>\nfox") == [end, *llama.encode("fox")]
    assert llama.encode("<|user|>\nfox") != phi.encode("<|user|>\nfox")
    assert phi.encode("<|endoftext|>\nfox") == llama.encode("<|endoftext|>\nfox")


def test_sentencepiece_without_scores_is_refused() -> None:
    metadata = sentencepiece_metadata(sentencepiece_model())
    with pytest.raises(UnsupportedModelError, match="0 scores"):
        build({**metadata, "ggml.scores": []})
