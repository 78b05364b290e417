"""Which replica answers a call, and what happens to the call when that replica goes away."""
