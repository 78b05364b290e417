"""A model folder that loads in no time: a random Llama of two small layers, with a tokenizer of bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN = 64
HEADS = 4
INNER = 96
LAYERS = 2
END = "<|end|>"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


def make_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Write the model into ``folder``, which is made; returns it."""
    folder.mkdir(parents=True)
    tokenizer = _tokenizer()
    vocab_size = tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE},
    )
    _write_json(folder / "config.json", _config(vocab_size, tokenizer.token_to_id(END)))
    save_file(_weights(np.random.default_rng(seed), vocab_size), folder / "model.safetensors", {"format": "mlx"})
    return folder


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer


def _config(vocab_size: int, end_id: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "head_dim": HIDDEN // HEADS,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab_size,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "eos_token_id": end_id,
        "torch_dtype": "float32",
    }


def _weights(random: np.random.Generator, vocab_size: int) -> dict[str, np.ndarray[Any, Any]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (vocab_size, HIDDEN),
        "model.norm": (HIDDEN,),
        "lm_head": (vocab_size, HIDDEN),
    }
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        shapes |= {
            f"{layer}.self_attn.q_proj": (HIDDEN, HIDDEN),
            f"{layer}.self_attn.k_proj": (HIDDEN // 2, HIDDEN),
            f"{layer}.self_attn.v_proj": (HIDDEN // 2, HIDDEN),
            f"{layer}.self_attn.o_proj": (HIDDEN, HIDDEN),
            f"{layer}.mlp.gate_proj": (INNER, HIDDEN),
            f"{layer}.mlp.up_proj": (INNER, HIDDEN),
            f"{layer}.mlp.down_proj": (HIDDEN, INNER),
            f"{layer}.input_layernorm": (HIDDEN,),
            f"{layer}.post_attention_layernorm": (HIDDEN,),
        }
    return {
        f"{name}.weight": random.normal(0, 0.1, shape).astype(np.float32) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values))
