"""Small tokenizers of each kind, trained here in milliseconds, and texts that are hard to stream."""

# ruff: noqa: RUF001  (the look-alike characters are the point)
from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from engine.text.parts import TokenizerParts
from engine.text.tokenizer import Tokenizer as EngineTokenizer

CORPUS = (
    "the quick brown fox jumps over the lazy dog and the cat",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "def area(width, height):\n    return width * height  # plain\n",
    "今日は天気がいいですね。你好，世界！",
    "123 456 7890 12.5 %",
)
HARD_TEXTS = (
    "",
    " ",
    " leading and trailing ",
    "no space",
    "Nejneobhospodařovávatelnějšími žluťoučkými kobylami",
    "👩\u200d👩\u200d👧\u200d👦 family, 👍🏽 skin, 🇨🇿 flag, 1\ufe0f\u20e3 key",
    "e\u0301 a\u0308 n\u0303 \u0928\u093f combining",
    "你好，世界。今日は。안녕하세요 สวัสดี မြန်မာ",
    "def f(x):\n        if x:\n\t\treturn  x   # 1234567890\n\n\n",
    "\ufeffbom, nul \x00, tab \t, \r\n, \x7f, nbsp \u00a0, replacement \ufffd",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0010ffff",
    "literal <0x41> and ## marks",
)
SPECIAL = AddedToken("<|end|>", special=True, normalized=False)
ADDED = AddedToken("<think>", special=False, normalized=False)


def byte_level() -> Tokenizer:
    """GPT-2's kind: every token is a row of bytes."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([SPECIAL, ADDED])
    return backend


def sentencepiece(*, prefix: bool = True) -> Tokenizer:
    """Llama 2's kind (``prefix``) or Gemma's: spaces as ▁, unknown characters as tokens of one byte."""
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(CORPUS[:3], trainers.BpeTrainer(vocab_size=120, show_progress=False))
    vocab = trained.get_vocab()
    words = sorted(vocab, key=vocab.__getitem__)
    merges = [
        (word[:cut], word[cut:])
        for word in words
        for cut in range(1, len(word))
        if {word[:cut], word[cut:]} <= set(words)
    ]
    tokens = ["<unk>", *bytes_, *words]
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    backend.add_tokens([SPECIAL, ADDED])
    return backend


def unigram() -> Tokenizer:
    """T5's kind: a token's text depends on whether it is the first."""
    characters = sorted(set("".join(CORPUS)) - {" "})
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁the", -1.0), ("▁quick", -1.5), *((c, -4.0) for c in characters)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_tokens([SPECIAL, ADDED])
    return backend


def wordpiece() -> Tokenizer:
    """BERT's kind: a continuing token begins with ##."""
    tokens = ["[UNK]", "the", "fox", "un", "##do", "##ing", ".", ",", *"abcdef"]
    backend = Tokenizer(models.WordPiece({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


KINDS = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece without prefix": lambda: sentencepiece(prefix=False),
    "unigram": unigram,
    "wordpiece": wordpiece,
}


@cache
def tokenizer(kind: str) -> EngineTokenizer:
    return EngineTokenizer(TokenizerParts(backend=KINDS[kind](), eos_token_ids=()))


def with_template(template: str | dict[str, str], **special_tokens: str) -> EngineTokenizer:
    templates = {"default": template} if isinstance(template, str) else template
    return EngineTokenizer(TokenizerParts(byte_level(), (), templates, special_tokens))
