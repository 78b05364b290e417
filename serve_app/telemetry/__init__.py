"""What becomes visible of the fleet's work: one record per finished call, and traces, metrics and logs made from it."""
