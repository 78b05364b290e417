"""Tiny random-weight instances of mlx-lm's model modules: every one that a small configuration can describe.

Owns: the configurations. Windows are shorter than the sequences that tests run through them, and weights that a model
starts as zeros or ones are drawn at random, so that sinks, norms, biases and routers all count.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_map

from engine.mlx_backend.device import use_backend
from engine.mlx_backend.mlx_lm_parts import Model

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
    "num_shared_experts": 1,
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

_YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "mscale": 1.0, "mscale_all_dim": 1.0}
_LONGROPE = {
    "type": "longrope",
    "original_max_position_embeddings": 256,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}
_ROPES = {
    "full_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_attention": {"rope_theta": 5000.0, "rope_type": "default"},
}
_LLAMA4_ROPE = {
    "rope_theta": 10000.0,
    "rope_type": "default",
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 8,
}
_KDA = {"kda_layers": [1, 3], "full_attn_layers": [2], "num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4}
_LONGCAT: dict[str, Any] = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 96,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "zero_expert_num": 1,
    "num_layers": 2,
    "q_lora_rank": 24,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_LFM2: dict[str, Any] = {
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "num_dense_layers": 1,
    "use_expert_bias": True,
    "layer_types": ["conv", "full_attention", "conv"],
}
_MAMBA2 = {
    "n_groups": 2,
    "ssm_state_size": 32,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "time_step_limit": [0.001, 100.0],
}
_INDEXER = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 8, "q_lora_rank": 24}

# What a module needs beyond CONFIG, or otherwise.
CHANGES: dict[str, dict[str, Any]] = {
    "afm7": {"hidden_dim": 64, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [1], "conv_window": 2},
    "bailing_hybrid": {"layer_group_size": 3, "group_norm_size": 2},
    "bailing_moe": {},
    "bailing_moe_linear": {"layer_group_size": 3, "group_norm_size": 2},
    "bailing_moe_v3": {"layer_group_size": 3, "q_lora_rank": 24},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 3,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": _YARN, "q_lora_rank": 24, "topk_method": "greedy"},
    "deepseek_v32": _INDEXER,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2},
    "exaone": {"num_layers": 3},
    "exaone4": {"sliding_window_pattern": "LLG"},
    "exaone_moe": {"is_moe_layer": [False, True, True]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 32},
    "gear": {"layer_types": ["conv_mixer", "sliding_attention", "full_attention"]},
    "gemma3n": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 200,
        "hidden_size_per_layer_input": 16,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "altup_num_inputs": 2,
        "altup_coef_clip": 100.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
        "intermediate_size": [96] * 4,
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 200,
        "hidden_size_per_layer_input": 16,
        "global_head_dim": 32,
    },
    "glm_moe_dsa": {**_INDEXER, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "gpt_bigcode": {"n_inner": 96},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_proj_bias": False,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_n_groups": 2,
        "mamba_conv_bias": True,
    },
    "hunyuan": {
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "num_hidden_layers": 4,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 3,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
    },
    "kimi_k3": {
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "linear_attn_config": _KDA,
        "q_lora_rank": 24,
        "attn_res_block_size": 2,
        "num_experts_per_token": 2,
    },
    "kimi_linear": {"linear_attn_config": _KDA, "model_max_length": 512},
    "lfm2": _LFM2,
    "lfm2-vl": _LFM2,
    "lfm2_moe": _LFM2,
    "lille-130m": {"block_size": 512, "n_kv_heads": 2},
    "llama4": {
        "num_hidden_layers": 4,
        "attention_chunk_size": 8,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 96,
        "floor_scale": 8,
        "num_experts_per_tok": 1,
    },
    "llama4_text": {"intermediate_size_mlp": 96},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {**_LONGCAT, "ngram_vocab_size_ratio": 3, "emb_neighbor_num": 3, "emb_split_num": 2},
    "mamba": {"state_size": 16, "conv_kernel": 4, "use_conv_bias": True, "time_step_rank": 4, "intermediate_size": 128},
    "mamba2": {**_MAMBA2, "num_heads": 4, "state_size": 32, "time_step_rank": "auto", "intermediate_size": 64},
    "mellum": {"rope_parameters": _ROPES},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0],
        "moe_layer_freq": [0, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 12,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 5000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 16,
        "swa_v_head_dim": 8,
        "v_head_dim": 8,
    },
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2.0},
    "minicpm3": {
        "dim_model_base": 32,
        "scale_depth": 1.4,
        "scale_emb": 2.0,
        "q_lora_rank": 24,
        "rope_scaling": _LONGROPE,
    },
    "minimax": {"shared_intermediate_size": 32, "rotary_dim": 8},
    "minimax_m3_vl": {
        "moe_layer_freq": [0, 1, 1],
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 32,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 3,
        "sparse_attention_freq": [0, 1, 1],
        "layer_types": None,
    },
    "ministral3": {"rope_parameters": _LLAMA4_ROPE},
    "mistral3": {},
    "mistral4": {"rope_parameters": {**_LLAMA4_ROPE}, "q_lora_rank": 24},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
        ]
    },
    "nemotron_h": {
        **_MAMBA2,
        "layer_types": None,
        "hybrid_override_pattern": ["M", "*", "E", "M"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo_hybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_allow_neg_eigval": True,
    },
    "openelm": {
        "num_transformer_layers": 3,
        "model_dim": 64,
        "ffn_dim_divisor": 8,
        "num_query_heads": [4, 4, 4],
        "num_kv_heads": [2, 2, 1],
        "ffn_multipliers": [1.0, 1.5, 2.0],
    },
    "phixtral": {"num_vocab": 200, "model_dim": 64, "num_heads": 4, "num_layers": 3, "rotary_dim": 8},
    "plamo": {"n_shared_head": 2},
    "plamo2": {"hidden_size_per_head": 16, "mamba_num_heads": 4, "mamba_d_state": 16, "num_hidden_layers": 4},
    "qwen": {"kv_channels": 16},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 12,
        "block_types": ["recurrent", "recurrent", "attention"],
        "intermediate_size": 128,
    },
    "rwkv7": {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
    "spark2_5": {"rope_parameters": _ROPES, "hidden_act": "gelu"},
    "step3p5": {
        "num_attention_groups": 2,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 32,
        "attention_other_setting": {"num_attention_heads": 2, "num_attention_groups": 1},
    },
    "talkie": {},
}
# Modules whose language part is another module's, found under ``text_config``.
TEXT_MODULE = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "mistral3": "llama",
    "pixtral": "llama",
    "lfm2-vl": "lfm2",
    "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
# Modules that hold their language part under ``text_config`` themselves.
_WRAPPED = {"gemma3n", "kimi_k3", "llama4", "minimax_m3_vl", "qwen3_5", "qwen3_5_moe"}
# Modules that cannot be made here, and why.
NOT_BUILT = {
    "bitnet": "its linear layers are a Metal kernel",
    "deepseek_v41": "sparse compressed caches of its own kind; no small configuration was found",
    "muse_spark": "its norms are a Metal kernel",
    "olmo": "needs the package ai2-olmo",
    "phi3small": "mlx-lm's own code gives NaN or ends the process on the CPU",
    "prism_hadamard_qwen35": "only from its own packed 2-bit files",
}
_HELPERS = {
    "activations",
    "base",
    "bitlinear_layers",
    "cache",
    "gated_delta",
    "mla",
    "pipeline",
    "rope_utils",
    "ssm",
    "switch_layers",
}


def module_names() -> list[str]:
    """All model modules of the installed mlx-lm."""
    folder = Path(next(iter(mlx_lm.models.__path__)))
    return sorted(
        (path.stem for path in folder.glob("*.py") if path.stem not in _HELPERS | {"__init__"}), key=str.lower
    )


def built_names() -> Iterator[str]:
    """Modules of which an instance can be made here."""
    return (name for name in module_names() if name not in NOT_BUILT)


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """The tiny configuration of a module."""
    text = TEXT_MODULE.get(name, name)
    config = {**CONFIG, **CHANGES.get(text, {}), **CHANGES.get(name, {}), "model_type": name, **changes}
    return {**config, "text_config": {**config, "model_type": text}} if name != text or name in _WRAPPED else config


def build(name: str, **changes: Any) -> tuple[Model, dict[str, Any]]:
    """An evaluated random model and its configuration."""
    use_backend("cpu")
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = config_of(name, **changes)
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.eval()
    model.update(tree_map(_stirred, model.parameters()))
    mx.eval(model.parameters())
    return model, config


def _stirred(array: mx.array) -> mx.array:
    """The weight, with noise where it was constant."""
    if array.size > 1 and mx.issubdtype(array.dtype, mx.floating) and (array == array.reshape(-1)[0]).all():
        return array + mx.random.normal(array.shape, scale=0.1).astype(array.dtype)
    return array
