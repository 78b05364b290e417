"""One machine as a part of the fleet: its settings, its secrets, its daemon, and what is checked on it."""
