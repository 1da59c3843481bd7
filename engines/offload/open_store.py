"""Opens the store of KV blocks that a loaded model's option asks for, under a key of all that its blocks depend on."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engines.models.checkpoints import content_digest
from engines.offload.kv_store.disk_tier import DiskTier
from engines.offload.kv_store.options import KVStoreOptions
from engines.offload.kv_store.store import KVStore
from engines.offload.loaded_model import LoadedModel
from engines.offload.memory.plan import mib
from harness.api import HardwareLimits, InfeasibleError, UnsupportedError

#: Changes when the same key would stand for other bytes.
_VERSION = 2


def limits_beside_store(limits: HardwareLimits, options: KVStoreOptions) -> HardwareLimits:
    """What is left of the host's memory beside the store's. Raises InfeasibleError where nothing is, UnsupportedError
    for a limited disk, which the store's reads would not keep to."""
    if options.disk and limits.disk_bandwidth is not None:
        raise UnsupportedError("options.kv_store: disk with limits.disk_bandwidth; leave one of them out")
    if limits.host_memory is None:
        return limits
    left = limits.host_memory - options.host
    if left <= 0:
        raise InfeasibleError(
            f"options.kv_store: host takes {mib(options.host)} of {mib(limits.host_memory)} of memory; make it smaller"
        )
    return replace(limits, host_memory=left)


def open_store(options: KVStoreOptions, loaded: LoadedModel, cache: Path, row_s: Callable[[], float | None]) -> KVStore:
    """The store, which the cache of `loaded` fills and reads from now on; the caller closes it.

    `cache`: the folder with digests of checkpoints. `row_s`: see KVStore. Raises UnsupportedError where the KV cache
    has a second tier, HarnessError for a folder that is in use or cannot be used.
    """
    if loaded.cache.offloaded is not None:
        raise UnsupportedError("options.kv_store: it needs the KV cache in one tier; leave policy.cache out")
    block_bytes, disk = loaded.cache.block_bytes, None
    if options.path is not None:
        disk = DiskTier(options.path, _key(loaded, cache), block_bytes, options.disk)
    store = loaded.cache.store = KVStore(block_bytes, options.host, disk, row_s)
    return store


def _key(loaded: LoadedModel, cache: Path) -> str:
    """Of the model's weights, by their content, and of how keys and values are computed and stored."""
    policy, model = loaded.report.policy, loaded.model
    parts = {
        "version": _VERSION,
        "weights": [content_digest(model, cache, lambda done, total: None), model.quantized_as, model.dtype],
        "block": [loaded.cache.block_bytes, str(loaded.cache.dtype)],
        "device": loaded.device.where.type,
        "compute": loaded.report.compute_dtype,
        "bits": [policy.weight_bits, policy.kv_bits, policy.weight_groups],
        "sparsity": policy.value_sparsity,
        "rotated": loaded.hadamard is not None,
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=12).hexdigest()
