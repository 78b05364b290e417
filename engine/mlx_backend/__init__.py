"""The only room that imports MLX. Importing it loads the fast BLAS, which must happen before MLX is loaded."""

from __future__ import annotations

from engine.mlx_backend import blas

blas.load()
