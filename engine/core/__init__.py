"""The running engine: the step loop that owns the model, and the asynchronous front that callers use."""
