"""Names of KV blocks by their content: the tokens up to their end."""

import hashlib
from array import array
from collections.abc import Sequence

from engines.offload.memory.kv_blocks import BLOCK_SIZE


def extend_block_hashes(tokens: Sequence[int], hashes: list[bytes], until: int) -> None:
    """Appends to `hashes`, which covers the first blocks, the hashes of the full blocks of the first `until` tokens.

    A block's hash is of its tokens and the hash before it, so it stands for the whole prefix.
    """
    for i in range(len(hashes), until // BLOCK_SIZE):
        block = array("q", tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]).tobytes()
        hashes.append(hashlib.blake2b((hashes[-1] if hashes else b"") + block, digest_size=16).digest())
