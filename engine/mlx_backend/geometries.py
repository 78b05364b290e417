"""What a model's layers look like to the kernels.

Owns: reading layer geometries from a loaded model. Must not know: kernels beyond their ``Geometry``.
"""

from __future__ import annotations

from engine.mlx_backend.kernels.tiling import Geometry, Tuning, attends_chunks
from engine.mlx_backend.loaded_model import LoadedModel


def layer_geometries(loaded: LoadedModel, block_size: int) -> list[Geometry]:
    """What the model's layers look like, each kind once. Query heads are the configuration's, where it names them."""
    config = {**loaded.config, **(loaded.config.get("text_config") or {})}
    num_heads = int(config.get("num_attention_heads") or config.get("n_head") or 0)
    geometries = [
        Geometry(
            num_heads=num_heads if num_heads and num_heads % layer.num_kv_heads == 0 else layer.num_kv_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.k_head_dim,
            block_size=block_size,
            scale=layer.k_head_dim**-0.5,
            window=layer.window or 0,
        )
        for layer in loaded.layers
    ]
    return list(dict.fromkeys(geometries))


def pages_chunks(loaded: LoadedModel, block_size: int, tuning: Tuning) -> bool:
    """Whether prompt chunks of ``loaded`` attend by the chunk attention kernel."""
    number_bytes = loaded.compute_dtype.size
    return tuning.pages_chunks and all(
        attends_chunks(geometry, number_bytes) for geometry in layer_geometries(loaded, block_size)
    )
