"""Names a full block by a hash of everything before it in the sequence and of its own tokens.

Each digest is the SHA-256 of its parent's digest and the block's tokens, the first parent being the key of model,
dtype and tenant. So equal digests mean equal tokens from the start, under the same key, in every process. Only full
blocks have a digest.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256

import msgspec

from kilburn_kv.blocks import Pool

__all__ = ["PrefixKey"]


class PrefixKey(msgspec.Struct, frozen=True):
    """Identifies whose KV it is. Sequences under different keys never share a block by content.

    Args:
        model: identifies the weights. A digest of the file is best, because a name may be given to other weights.
        dtype: of the stored keys and values.
        tenant: sequences of one tenant are never served from another's blocks.
    """

    model: str
    dtype: str
    tenant: str = ""


@lru_cache(maxsize=1024)
def root_digest(key: PrefixKey, size: int) -> bytes:
    """The parent of a first block, for blocks of `size` tokens."""
    return sha256(msgspec.json.encode(("kilburn.kv", 1, key.model, key.dtype, key.tenant, size))).digest()


def chain_digests(parent: bytes, tokens: array[int], size: int) -> Iterator[bytes]:
    """The digest of each block of `size` tokens (an array of type "i", full blocks only) behind `parent`."""
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    text, width = tokens.tobytes(), size * tokens.itemsize
    for start in range(0, len(text) - width + 1, width):
        parent = sha256(parent + text[start : start + width]).digest()
        yield parent


def find_prefix(pool: Pool, root: bytes, tokens: array[int]) -> tuple[list[int], list[bytes]]:
    """The blocks that hold the longest known prefix of `tokens`, and their digests.

    The last token is never part of it: an engine has to run one token to know what comes next.
    """
    blocks: list[int] = []
    digests: list[bytes] = []
    for digest in chain_digests(root, tokens[:-1], pool.size):
        block = pool.holder(digest)
        if block is None:
            break
        blocks.append(block)
        digests.append(digest)
    return blocks, digests
