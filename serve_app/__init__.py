"""Many machines: Ray Serve, HTTP, routing, planning and the command. Everything about tokens is the engine's."""
