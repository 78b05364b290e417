"""Kernels as callables: a text with its constants bound, compiled by MLX at its first use.

Owns: the call of ``mx.fast.metal_kernel`` and ``mx.fast.cuda_kernel``. Must not know: what a kernel computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, cast

import mlx.core as mx

from engine.mlx_backend.kernels.dialect import KernelText

GpuTarget = Literal["metal", "cuda"]
Groups = tuple[int, int, int]


def gpu_target() -> GpuTarget | None:
    """Where MLX can run kernels on this machine; None without a GPU."""
    if mx.metal.is_available():
        return "metal"
    if mx.cuda.is_available():
        return "cuda"
    return None


class Launch(Protocol):
    """A kernel that can be launched: ``groups`` threadgroups of ``num_threads`` threads; lazily."""

    def __call__(
        self, *inputs: mx.array, groups: Groups, num_threads: int, output_shapes: Sequence[Sequence[int]]
    ) -> list[mx.array]:
        """Outputs in the order of the kernel's text."""
        ...


class KernelFactory(Protocol):
    """Binds a text: number types ``T`` (model) and ``P`` (pool), and its ``constants``."""

    def __call__(self, text: KernelText, dtype: mx.Dtype, pool_dtype: mx.Dtype, constants: Mapping[str, int]) -> Launch:
        """The kernel, not yet compiled."""
        ...


def buffer_dtypes(dtype: mx.Dtype, pool_dtype: mx.Dtype) -> dict[str, mx.Dtype]:
    """MLX's types of the dialect's ``Buffer`` types."""
    fixed = {"half": mx.float16, "word": mx.uint32, "float": mx.float32, "int": mx.int32}
    return {"T": dtype, "P": pool_dtype, **fixed}


def gpu_factory(target: GpuTarget) -> KernelFactory:
    """Kernels that run on the GPU."""
    return lambda text, dtype, pool_dtype, constants: GpuKernel(text, target, dtype, pool_dtype, constants)


class GpuKernel:
    """One form of ``text`` for the GPU, compiled by MLX when it first runs."""

    def __init__(
        self, text: KernelText, target: GpuTarget, dtype: mx.Dtype, pool_dtype: mx.Dtype, constants: Mapping[str, int]
    ) -> None:
        assert set(constants) == set(text.constants), f"{text.name}: constants {sorted(constants)}"
        make = mx.fast.metal_kernel if target == "metal" else mx.fast.cuda_kernel
        self._template = [("T", dtype), ("P", pool_dtype), *((name, constants[name]) for name in text.constants)]
        dtypes = buffer_dtypes(dtype, pool_dtype)
        self._dtypes = [dtypes[out.type] for out in text.outputs]
        self._call = cast(
            Callable[..., list[mx.array]],
            make(
                name=f"{text.name}_{text.fingerprint(target)}",
                input_names=[buffer.name for buffer in text.inputs],
                output_names=[buffer.name for buffer in text.outputs],
                source=text.body(target),
                header=text.header(target),
            ),
        )

    def __call__(
        self, *inputs: mx.array, groups: Groups, num_threads: int, output_shapes: Sequence[Sequence[int]]
    ) -> list[mx.array]:
        """Launch ``groups`` threadgroups of ``num_threads`` threads; lazily, as every MLX operation."""
        return self._call(
            inputs=list(inputs),
            template=self._template,
            grid=(groups[0] * num_threads, groups[1], groups[2]),
            threadgroup=(num_threads, 1, 1),
            output_shapes=output_shapes,
            output_dtypes=self._dtypes,
        )
