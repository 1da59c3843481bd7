"""A block of sequences, or a sweep's steady state, as passes of our engine on a device in virtual time.

Passes of a block that differ by little are simulated once. The scheduler itself does not run: a block's passes are as
many as its prompts need in the memory plan's chunks, and one a token; a sweep's are all alike.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engines.planning.closed_form import BatchWork, Seconds, decode_work, mean_over, mixed_work, prefill_work
from engines.planning.closed_form_planner import Phases
from engines.planning.device_pass import DevicePass
from engines.planning.workload import Lengths
from harness.api import OffloadPolicy

#: Passes after which a sweep's take equally long.
_WARM_UP = 2


def block_phases(passes: DevicePass, policy: OffloadPolicy, lengths: Lengths, chunk: int) -> Phases:
    """A block of `row` or `zigzag`, whose batches prefill `chunk` tokens a pass."""
    size, batches = policy.gpu_batch_size, policy.num_gpu_batches
    prompts, count = prefill_work(size, lengths), math.ceil(size * lengths.prompt / chunk)
    part = replace(prompts, tokens=prompts.tokens / count, logits_rows=prompts.logits_rows / count)
    total = _timed(passes, [[part]] * batches)
    if count > 1:
        total = total + (count - 1) * _timed(passes, [[part]] * batches)
    prefill_s, steps = float(total[0]), lengths.generated - 1
    if steps:

        def step(context: float) -> Seconds:
            return _timed(passes, [[decode_work(size, context)]] * batches)

        step(lengths.prompt)  # it runs partly beside the last of the prompts
        total = total + steps * mean_over(step, lengths.prompt, lengths.prompt + steps)
    return Phases(prefill_s, float(total[0]) - prefill_s, total[1:])


def sweep_phases(passes: DevicePass, sequences: int, parts: int, lengths: Lengths, chunk: int) -> Phases:
    """As many tokens as `sequences` of a sweep generate, which runs in `parts` nano-batches.

    A pass takes no more than `chunk` tokens of prompts. Where that is fewer than a steady number of sequences needs,
    fewer of them run.
    """
    together = min(sequences, chunk * lengths.generated / lengths.prompt)
    works = [mixed_work(together / parts, lengths)] * parts
    for _ in range(_WARM_UP):
        passes.run(works)
    total = lengths.generated * sequences / together * _timed(passes, works)
    return Phases(0.0, float(total[0]), total[1:])


def _timed(passes: DevicePass, works: Sequence[Sequence[BatchWork]]) -> Seconds:
    """Seconds of one pass, and then those of each resource."""
    before = passes.machine.used
    return np.array([passes.run(works), *(passes.machine.used - before)])
