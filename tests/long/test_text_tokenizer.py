"""The tokenizer as a whole: folders, the demo model, many threads."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from engine.errors import InvalidParameterError, ModelNotFoundError, UnsupportedModelError
from engine.model_source import ModelSource, resolve_model
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.parts import TokenizerParts
from engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.text_samples import HARD_TEXTS, byte_level, sentencepiece, tokenizer

NUM_THREADS = 64
CHAT = [{"role": "user", "content": "Kolik je 12 + 30? 🙂"}]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    try:
        return load_tokenizer(resolve_model("demo"))
    except ModelNotFoundError:
        pytest.skip("the demo model is not installed")


def folder(path: Path, backend: Backend | None = None, **files: Any) -> ModelSource:
    """Write a model folder; ``files`` are JSON contents by name without suffix."""
    path.mkdir(exist_ok=True)
    (backend or byte_level()).save(str(path / "tokenizer.json"))
    defaults = {
        "config": {"model_type": "llama"},
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"},
    }
    for name, content in {**defaults, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return ModelSource("test", "folder", path, "0")


def test_demo_prompt(demo: Tokenizer) -> None:
    text = demo.render_chat_template([{"role": "user", "content": "Hi 123"}])
    assert text.endswith("<|im_start|>user\nHi 123<|im_end|>\n<|im_start|>assistant\n")
    row = demo.apply_chat_template([{"role": "user", "content": "Hi 123"}])
    assert row[:3] == [1, 9690, 198]
    assert [demo.token_bytes(token_id) for token_id in demo.encode("Hi 123")] == [b"Hi", b" ", b"1", b"2", b"3"]
    assert (demo.vocab_size, demo.eos_token_ids, demo.has_chat_template) == (49152, (2, 0), True)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_demo_streams_what_it_decodes(demo: Tokenizer, text: str) -> None:
    row = demo.encode(text)
    detokenizer = IncrementalDetokenizer(demo)
    assert "".join([*(detokenizer.add([token_id]) for token_id in row), detokenizer.finish()]) == text


def test_threads_may_share_a_tokenizer(demo: Tokenizer) -> None:
    expected = demo.apply_chat_template(CHAT), demo.encode("x" * 2000), demo.decode(range(17, 400))
    start = Barrier(NUM_THREADS)

    def work(_: int) -> None:
        start.wait()
        for _ in range(10):
            assert demo.apply_chat_template(CHAT) == expected[0]
            assert demo.encode("x" * 2000) == expected[1]
            assert demo.decode(range(17, 400)) == expected[2]
            assert len(demo.encode_batch(["a", "b"], add_special_tokens=True)) == 2

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(work, range(NUM_THREADS)))


def test_padding_and_truncation_of_the_files_are_not_applied(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=8)
    loaded = load_tokenizer(folder(tmp_path, backend))
    assert loaded.encode("the quick fox") == byte_level().encode("the quick fox").ids
    assert [len(row) for row in loaded.encode_batch(["a", "the the the"])] == [1, 3]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (340,)),
        ({"config": {"model_type": "llama", "eos_token_id": 7}}, (7, 340)),
        (
            {"config": {"model_type": "llama", "eos_token_id": 7}, "generation_config": {"eos_token_id": [8, 9]}},
            (8, 9, 340),
        ),
        ({"config": {"model_type": "llama", "text_config": {"eos_token_id": [7, 340]}}}, (7, 340)),
        ({"generation_config": {"eos_token_id": None}}, (340,)),
    ],
)
def test_ends_of_a_folder(tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert byte_level().token_to_id("<|end|>") == 340
    assert load_tokenizer(folder(tmp_path, **files)).eos_token_ids == expected


JINJA = "{{ messages[0].content }}{{ eos_token }}"


@pytest.mark.parametrize("place", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_chat_template_of_a_folder(tmp_path: Path, place: str) -> None:
    source = folder(tmp_path)
    path = tmp_path / place
    if place.endswith(".jinja"):
        path.write_text(JINJA)
    else:
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), "chat_template": JINJA}))
    loaded = load_tokenizer(source)
    assert loaded.has_chat_template
    assert loaded.render_chat_template(CHAT) == CHAT[0]["content"] + "<|end|>"


def test_a_folder_without_a_chat_template(tmp_path: Path) -> None:
    assert not load_tokenizer(folder(tmp_path)).has_chat_template


def test_sentencepiece_folder_streams(tmp_path: Path) -> None:
    loaded = load_tokenizer(folder(tmp_path, sentencepiece()))
    assert loaded.decode(loaded.encode("the fox 🙂")) == "the fox 🙂"


@pytest.mark.parametrize("broken", ["nothing", "no json", "config"])
def test_a_broken_folder_is_refused_with_a_remedy(tmp_path: Path, broken: str) -> None:
    source = folder(tmp_path)
    if broken == "config":
        (tmp_path / "generation_config.json").write_text("{")
    elif broken == "no json":
        (tmp_path / "tokenizer.json").write_text("{")
    else:
        (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModelError) as caught:
        load_tokenizer(source)
    assert caught.value.fix


@pytest.mark.parametrize("decoder", [decoders.CTC(), decoders.BPEDecoder()])
def test_decoders_that_look_at_neighbours_are_refused(decoder: decoders.Decoder) -> None:
    backend = byte_level()
    backend.decoder = decoder
    with pytest.raises(UnsupportedModelError, match=type(decoder).__name__):
        Tokenizer(TokenizerParts(backend, ()))


def test_a_decoder_that_cannot_be_followed_is_refused() -> None:
    backend = Backend(models.BPE({character: index for index, character in enumerate("def(x):")}, []))
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("de", "x")])
    with pytest.raises(UnsupportedModelError, match="cannot be followed"):
        Tokenizer(TokenizerParts(backend, ()))


def test_bytes_of_tokens() -> None:
    byte_tokens = tokenizer("sentencepiece")
    assert [byte_tokens.token_bytes(token_id) for token_id in byte_tokens.encode("🙂")[-4:]] == [
        b"\xf0",
        b"\x9f",
        b"\x99",
        b"\x82",
    ]
    assert byte_tokens.token_bytes(byte_tokens.encode("the")[0]) == b" the"
    levels = tokenizer("byte-level")
    assert b"".join(levels.token_bytes(token_id) for token_id in levels.encode("kůň<|end|>")) == "kůň<|end|>".encode()
    assert levels.token_bytes(10**6) == b""


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="surrogate"):
        tokenizer("byte-level").encode("\ud83d")
