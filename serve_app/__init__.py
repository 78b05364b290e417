"""Many machines: Ray Serve, HTTP, routing, planning and the command. Tokens are the engine's business."""
