"""``python -m engine.mlx_backend.blas build``: make the fast BLAS ready, and say which one runs. Exit 1: none."""

from __future__ import annotations

import argparse
import sys

from engine.mlx_backend import blas


def main() -> int:
    """Importing the room has already found or built the library: what is left is to say so."""
    parser = argparse.ArgumentParser(prog="python -m engine.mlx_backend.blas", description=__doc__)
    parser.add_argument("action", choices=["build", "show"])
    parser.parse_args()
    print(blas.describe())
    return 0 if blas.load().optimised or sys.platform != "linux" else 1


if __name__ == "__main__":
    sys.exit(main())
