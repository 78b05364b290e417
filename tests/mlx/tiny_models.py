"""Tiny random models of many architectures, in fp32 on the CPU."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.mlx_backend.device import use_backend
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.loader import describe_model
from engine.mlx_backend.mlx_lm_parts import Model
from engine.model_source import ModelSource

# One dictionary for all: every architecture takes the keys that it knows.
CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 200,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
    "hidden_act": "silu",
    "eos_token_id": [3, 4],
    # sliding windows
    "sliding_window": 12,
    "sliding_window_pattern": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "rope_local_base_freq": 10000.0,
    "rope_global_base_freq": 10000.0,
    "query_pre_attn_scalar": 16,
    "max_window_layers": 3,
    "use_sliding_window": False,
    "no_rope_layers": [1, 1, 0],
    "no_rope_layer_interval": 3,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "swiglu_limit": 7.0,
    # multi-head latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # the rest
    "partial_rotary_factor": 0.5,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "layer_norm_eps": 1e-5,
    "norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "qkv_bias": False,
    "logit_scale": 0.5,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
    "original_max_position_embeddings": 512,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "n_ctx": 512,
    # recurrent state
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


def build(architecture: str, **changes: Any) -> tuple[Model, dict[str, Any]]:
    """An evaluated random model and its configuration."""
    use_backend("cpu")
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    config = {**CONFIG, "model_type": architecture, **changes}
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.eval()
    mx.eval(model.parameters())
    return model, config


@cache
def tiny_model(architecture: str = "llama", **changes: Any) -> LoadedModel:
    """A loaded random model, one per architecture and set of changes in the whole test run."""
    model, config = build(architecture, **changes)
    source = ModelSource(f"tiny-{architecture}", "folder", Path("nowhere"), "r0")
    return describe_model(model, config, source, "cpu")
