"""How many nano-batches `harness tune` found fastest on this machine, by model shape; beside the machine's profile."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from harness.api import ModelShape, OffloadPolicy
from harness.common.files import replace_with
from harness.common.host_cpu import cpu_flags, cpuinfo, instruction_sets
from harness.common.host_memory import total_memory
from harness.common.regular_file import read_kept
from harness.common.system import usable_cpus


class KeptNanoBatches:
    """Counts in a file of the cache. A file that is damaged holds none."""

    def __init__(self, cache: Path) -> None:
        self.path = cache / "nano_batches.json"

    def get(self, shape: ModelShape, policy: OffloadPolicy) -> int:
        """The nano-batches that were kept for a model of this shape with the policy's bits; 1 where none were."""
        count = read_kept(self.path).get(_key(shape, policy))
        return count if type(count) is int and count >= 1 else 1

    def keep(self, shape: ModelShape, policy: OffloadPolicy, count: int) -> None:
        """Replaces what was kept. Raises OSError."""
        replace_with(
            self.path, json.dumps(read_kept(self.path) | {_key(shape, policy): count}, indent=1, sort_keys=True)
        )


def _key(shape: ModelShape, policy: OffloadPolicy) -> str:
    cpu = (cpuinfo().get("model name"), instruction_sets(cpu_flags()), usable_cpus(), total_memory())
    parts = [cpu, asdict(shape), policy.weight_bits, policy.kv_bits]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
