"""Load tests of any OpenAI-compatible endpoint, and what may be concluded from them."""
