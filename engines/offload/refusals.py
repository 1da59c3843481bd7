"""What the offload engine cannot run, as far as a cell tells before anything is loaded. Imports no torch."""

from engines.offload.memory.tensor_part import refuse_undivided
from harness.api import HardwareLimits, LocalModel, OffloadPolicy, UnsupportedError


def refuse(policy: OffloadPolicy, limits: HardwareLimits, model: LocalModel | None) -> None:
    """Raises UnsupportedError for settings that do not go together. What a model lacks, only its module tells."""
    for field, schedule in (("num_gpu_batches", "zigzag"), ("nano_batches", "sweep")):
        if getattr(policy, field) != 1 and policy.schedule != schedule:
            raise UnsupportedError(f"policy.{field} is for {schedule}; a {policy.schedule} pass has one batch")
    if policy.cpu_attention and not limits.gpu:
        raise UnsupportedError("policy.cpu_attention: without a device all attention is the host's: leave it out")
    if policy.tensor > 1:
        refuse_undivided(policy, limits, model.shape if model else None)
