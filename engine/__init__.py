"""One machine: tokens in, tokens out. Knows nothing of Ray, HTTP or other machines."""
