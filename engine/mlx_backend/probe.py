"""placeholder"""

from engine.mlx_backend.loaded_model import LoadedModel


def check_parity(loaded: LoadedModel) -> None: ...
