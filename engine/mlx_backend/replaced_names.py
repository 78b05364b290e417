"""Replaces a function that an mlx-lm model looks up by name, without changing mlx-lm.

Owns: finding the places. Must not know: what the functions do.

The name is replaced in the module that *defines* the running ``__call__``: a model may inherit a part from another
architecture's file. The replacement must itself pass on every call that is not meant for it, because all models of the
process that share the file see it.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.mlx_backend.mlx_lm_parts import Model

Function = Callable[..., object]


def replace_name(model: Model, name: str, original: Function, replacement: Function) -> int:
    """Put ``replacement`` wherever a part of ``model`` looks up ``original`` as ``name``.

    Returns in how many files it now stands; those that it stood in before are counted.
    """
    places = {id(names): names for module in model.modules() if name in (names := _globals_of(module))}
    for names in places.values():
        if names[name] is original:
            names[name] = replacement
    return sum(names[name] is replacement for names in places.values())


def _globals_of(module: Model) -> dict[str, object]:
    call: Function = type(module).__call__
    names: dict[str, object] = getattr(call, "__globals__", {})
    return names
