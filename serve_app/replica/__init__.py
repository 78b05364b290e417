"""One Mac's side of Ray Serve: the actor that holds an engine and answers calls. MLX is loaded by the engine alone."""
