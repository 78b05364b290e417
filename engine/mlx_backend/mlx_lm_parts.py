"""The one place that imports mlx-lm, and what is used of it.

Owns: importing mlx-lm without its side effect on the process: it lowers the limit of open files, for good, to 4,096 and
so would starve the sockets of a process that also serves. Must not know: what the parts are used for.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

_WANTED_FILES = 4096  # what mlx-lm itself asks for: models of many shards


@contextmanager
def _file_limit_kept() -> Iterator[None]:
    set_limit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = set_limit
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= _WANTED_FILES
    if not enough:
        wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(_WANTED_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


with _file_limit_kept():
    from mlx_lm.models.activations import swiglu
    from mlx_lm.models.base import scaled_dot_product_attention
    from mlx_lm.models.cache import (
        ArraysCache,
        CacheList,
        ChunkedKVCache,
        ConcatenateKVCache,
        KVCache,
        RotatingKVCache,
        make_prompt_cache,
    )
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
    from mlx_lm.utils import _get_classes as find_model_classes
    from mlx_lm.utils import load_adapters, load_model

Model: TypeAlias = Any
"""An ``mlx.nn.Module``, whose methods carry no types."""

__all__ = [
    "ArraysCache",
    "CacheList",
    "ChunkedKVCache",
    "ConcatenateKVCache",
    "KVCache",
    "Model",
    "QuantizedSwitchLinear",
    "RotatingKVCache",
    "SwitchLinear",
    "find_model_classes",
    "load_adapters",
    "load_model",
    "make_prompt_cache",
    "scaled_dot_product_attention",
    "swiglu",
]
