"""What the offload engine cannot run, as far as a cell tells before anything is loaded. Imports no torch."""

from engines.offload.memory.tensor_shard import refuse_undivided
from harness.api import HardwareLimits, LocalModel, OffloadPolicy, UnsupportedError


def refuse(policy: OffloadPolicy, limits: HardwareLimits, model: LocalModel | None) -> None:
    """Raises UnsupportedError for settings that do not go together. What a model lacks, only its module tells."""
    for field, schedule in (("num_gpu_batches", "zigzag"), ("nano_batches", "sweep")):
        if getattr(policy, field) != 1 and policy.schedule != schedule:
            raise UnsupportedError(f"policy.{field} is for {schedule}; a {policy.schedule} pass has one batch")
    if (order := policy.nano_order) is not None:
        if limits.gpu and order.attention < 1:
            raise UnsupportedError("policy.nano_batches: attention= is a share of the host's threads; beside a device "
                                   "set options.attention_units")  # fmt: skip
        if model is not None and model.shape.params_idle and max(order.parts["UG"], order.parts["D"]) > 1:
            raise UnsupportedError("policy.nano_batches: experts are multiplied for all nano-batches at once: give the "
                                   "order one UG0 and one D0")  # fmt: skip
    if policy.cpu_attention and not limits.gpu:
        raise UnsupportedError("policy.cpu_attention: without a device all attention is the host's: leave it out")
    if policy.cpu_experts and (not limits.gpu or policy.tensor > 1):
        why = "without a device all experts are the host's" if not limits.gpu else "ranks have parts of every expert"
        raise UnsupportedError(f"policy.cpu_experts: {why}: leave it out")
    if policy.tensor > 1:
        refuse_undivided(policy, limits, model.shape if model else None)
