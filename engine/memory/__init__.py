"""Memory as numbers: the ledger and its plan, and the pool of KV blocks. Pure: nothing here allocates a byte."""
