"""GPU kernels for paged attention: one text each, run by Metal, by CUDA, and in tests by the CPU.

``dialect`` holds the texts, ``tiling`` the arithmetic of how work is cut, ``launch`` MLX's part, ``paged_attention``
the functions to call, ``reference`` what they mean in plain MLX.
"""
