"""The nano-batches that `harness tune` found fastest on this machine, by model shape; beside the machine's profile."""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from harness.api import HarnessError, ModelShape, NanoOrder, OffloadPolicy
from harness.common.files import replace_with
from harness.common.host_cpu import cpu_flags, cpuinfo, instruction_sets
from harness.common.host_memory import total_memory
from harness.common.regular_file import read_kept
from harness.common.system import usable_cpus


class KeptNanoBatches:
    """Numbers of nano-batches, or orders of their products, in a file of the cache. One that is damaged holds none."""

    def __init__(self, cache: Path) -> None:
        self.path = cache / "nano_batches.json"

    def get(self, shape: ModelShape, policy: OffloadPolicy) -> int | str:
        """What was kept of a policy's `nano_batches` for a model of this shape with its bits; 1 where nothing was."""
        kept = read_kept(self.path).get(_key(shape, policy))
        if isinstance(kept, str):
            with suppress(HarnessError):
                return str(NanoOrder.parse(kept))
        return kept if type(kept) is int and kept >= 1 else 1

    def keep(self, shape: ModelShape, policy: OffloadPolicy, nano_batches: int | str) -> None:
        """Replaces what was kept. Raises OSError."""
        kept = read_kept(self.path) | {_key(shape, policy): nano_batches}
        replace_with(self.path, json.dumps(kept, indent=1, sort_keys=True))


def _key(shape: ModelShape, policy: OffloadPolicy) -> str:
    cpu = (cpuinfo().get("model name"), instruction_sets(cpu_flags()), usable_cpus(), total_memory())
    parts = [cpu, asdict(shape), policy.weight_bits, policy.kv_bits]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
