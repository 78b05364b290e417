"""Which node a conversation belongs to when nothing else speaks for one. Pure.

Owns: rendezvous hashing. Every router that sees the same nodes prefers the same one for the same key, without talking
to the others, and a node that comes or goes moves only the keys that belong to it. Nodes are named by their id and not
by their replica's: a replica gets a new id whenever it restarts.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

UInts = NDArray[np.uint64]

_HASH_BYTES = 8


def node_number(node_id: str) -> int:
    """Return the number that stands for a node."""
    return int.from_bytes(blake2b(node_id.encode(), digest_size=_HASH_BYTES).digest(), "little")


def weights(nodes: UInts, key: int) -> UInts:
    """Return how much each node wants ``key``; the largest has it.

    The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every input bit changes every output bit with probability
    one half, and it is three multiplications for all nodes at once.
    """
    mixed = nodes ^ np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
