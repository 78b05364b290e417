"""Text on one side, token ids on the other. Imports neither MLX nor anything that does."""
