"""Replaces quantised modules by dense ones, for the CPU backend.

Owns: which module becomes which. Must not know: files. Measured on the CPU: quantised products reach 3 GFLOP/s and gain
nothing from batching, dense fp32 ones 100.
"""

from __future__ import annotations

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_unflatten

from engine.mlx_backend.mlx_lm_parts import Model, QuantizedSwitchLinear, SwitchLinear

_DENSE: dict[type[Module], type[Module]] = {
    QuantizedLinear: Linear,
    QuantizedEmbedding: Embedding,
    QuantizedSwitchLinear: SwitchLinear,
}


def make_dense(model: Model, dtype: mx.Dtype) -> list[str]:
    """Dequantise ``model`` in place and cast it to ``dtype``. Returns the names of modules that had to stay packed."""
    replaced, packed = [], []
    for name, module in model.named_modules():
        if type(module) in _DENSE:
            replaced.append((name, _dense_module(module, dtype)))
        elif "scales" in module:
            packed.append(name)
    model.update_modules(tree_unflatten(replaced))
    model.set_dtype(dtype)
    return packed


def _dense_module(module: Model, dtype: mx.Dtype) -> Model:
    # Built without its constructor, which would draw random weights of full size first.
    dense_type = _DENSE[type(module)]
    dense: Model = dense_type.__new__(dense_type)
    super(dense_type, dense).__init__()
    biases = module.get("biases")
    scales = module["scales"]
    if scales.dtype != mx.uint8:  # affine: fp16 scales would round the product once more
        scales, biases = scales.astype(mx.float32), None if biases is None else biases.astype(mx.float32)
    dense.weight = mx.dequantize(module["weight"], scales, biases, module.group_size, module.bits, module.mode).astype(
        dtype
    )
    if "bias" in module:
        dense.bias = module["bias"]
    return dense
