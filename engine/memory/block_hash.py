"""Names for the contents of KV blocks: a chain of hashes, one per full block.

Owns: what makes two blocks interchangeable. K and V at a position depend on every token before it, on the weights, and
(by policy) on who may see whom; so a block's hash covers its own tokens, its predecessor's hash, and a root made of
the model's revision and the cache's salt. Must not know: which blocks exist or who holds them.

128 bits of BLAKE2b: an accidental collision would hand one person another's context, so the hash is a cryptographic
one and no token is compared afterwards.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16


def root_hash(revision: str, *salts: str) -> bytes:
    """The hash before the first block. Requests share blocks only under equal roots.

    Salts are length-prefixed, so that ("ab", "c") and ("a", "bc") differ.
    """
    digest = blake2b(digest_size=HASH_BYTES)
    for part in (revision, *salts):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def extend_hashes(hashes: list[bytes], root: bytes, token_ids: Sequence[int], num_tokens: int, block_size: int) -> None:
    """Append to ``hashes`` until it covers every full block of ``token_ids[:num_tokens]``: O(new blocks)."""
    parent = hashes[-1] if hashes else root
    for index in range(len(hashes), num_tokens // block_size):
        tokens = array("I", token_ids[index * block_size : (index + 1) * block_size])
        parent = blake2b(parent + tokens.tobytes(), digest_size=HASH_BYTES).digest()
        hashes.append(parent)
