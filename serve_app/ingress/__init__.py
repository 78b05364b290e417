"""The HTTP side: OpenAI's shapes in, calls to replicas, OpenAI's shapes out. Loads no model and no MLX."""
