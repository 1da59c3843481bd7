"""A pass of another engine than ours in virtual time, sublayer by sublayer: what it issues when, and what waits.

The orders are those of the engines' own programs: FlexGen's loop over tokens, layers and batches (flex_opt.py of
`flexgen` 0.1.8, `generation_loop_overlap_multi_batch`); Accelerate's hooks and LM-Offload, one thing after the other;
and ZeRO-Inference, which fetches a module's parameters beside the module before it. Seconds are the closed form's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engines.planning.closed_form import (
    ACTIVATIONS,
    COMPUTE,
    FROM_DISK,
    FROM_HOST,
    STORE,
    BatchWork,
    Seconds,
    SublayerCosts,
    busy,
)
from engines.planning.virtual_machine import D2H, DEVICE, DISK, H2D, HOST, VirtualMachine
from engines.planning.workload import Sublayer as ModelSublayer
from engines.planning.workload import sublayers

#: A batch's cache moves in two tensors, keys and values.
_KEYS_AND_VALUES = 2
#: Biases and norms have no more values than so many times the hidden size.
_VECTORS = 4
_ONE_AFTER_THE_OTHER = (DISK, HOST, H2D, DEVICE, D2H)


@dataclass(frozen=True)
class Sublayer:
    """Seconds by task [tasks, resources]: of loading a sublayer's weights, and of one batch's work.

    tensors: how many of its matrices come from host memory, and from disk; each is copied whole.
    """

    load: Seconds
    batch: Seconds
    attends: bool = False
    tensors: tuple[int, int] = (1, 1)


def simulated_pass(costs: SublayerCosts, works: Sequence[BatchWork]) -> tuple[float, Seconds]:
    """As SublayerCosts.pass_seconds: how long a pass takes, in which each batch does `works`; and how long each
    resource is busy in it."""
    parts, batches, engine = sublayers(costs.shape), costs.policy.num_gpu_batches, costs.engine
    attention, forward, head = (
        Sublayer(costs.load(part), costs.batch(part, works), part.attends, _tensors(costs, part)) for part in parts
    )
    layers, heads = parts[0].count, parts[2].count  # a stage without the last layer has no head
    seconds, used = 0.0, busy()
    neighbours = (
        (head, attention, forward, layers),
        (attention, forward, attention, layers - heads),
        (attention, forward, head, heads),
        (forward, head, attention, heads),
    )
    for before, sublayer, following, count in neighbours:
        if engine.overlap == "sublayer":
            intervals = _synchronised(before, sublayer, following, batches)
        else:
            intervals = [(_in_turn(sublayer, following if engine.overlap == "layer" else None, batches), 1)]
        for machine, times in intervals:
            seconds += count * times * machine.end
            used += count * times * machine.used
    return seconds, used


def _synchronised(
    before: Sublayer, sublayer: Sublayer, following: Sublayer, batches: int
) -> list[tuple[VirtualMachine, int]]:
    """FlexGen: the intervals between synchronisations of one sublayer, and how often each occurs."""
    if batches == 1:
        return [(_interval(sublayer, loads=following, cached=following, stored=before), 1)]
    return [
        (_interval(sublayer, loads=following, cached=sublayer, stored=before), 1),
        (_interval(sublayer, loads=None, cached=sublayer, stored=sublayer), batches - 2),
        (_interval(sublayer, loads=None, cached=following, stored=sublayer), 1),
    ]


def _interval(sublayer: Sublayer, loads: Sublayer | None, cached: Sublayer, stored: Sublayer) -> VirtualMachine:
    """A batch's sublayer, beside what the next ones need (the weights of `loads`, the cache of `cached`) and what the
    last batch has made in `stored`."""
    machine = VirtualMachine()
    if loads is not None:
        fetch(machine, loads.load, 0.0, loads.tensors)
    fetch(machine, cached.batch, 0.0)
    # only then does the calling thread, which copies to pinned memory itself, launch the arithmetic
    _compute(machine, sublayer.batch, machine.free(HOST))
    machine.chain(stored.batch[STORE], (D2H, DISK), 0.0, _KEYS_AND_VALUES)
    machine.chain(sublayer.batch[ACTIVATIONS], (D2H, DISK, H2D), 0.0)
    if loads is not None:
        machine.run(DEVICE, float(loads.load[COMPUTE][DEVICE]), machine.end)
    return machine


def _in_turn(sublayer: Sublayer, following: Sublayer | None, batches: int) -> VirtualMachine:
    """All of a sublayer, one thing after the other; but for the weights of the `following` one, if any, beside it."""
    machine = VirtualMachine()
    own = batches * sublayer.batch.sum(axis=0)
    if following is None:
        machine.chain(own + sublayer.load.sum(axis=0), _ONE_AFTER_THE_OTHER, 0.0)
    else:
        machine.chain(own + sublayer.load[COMPUTE], _ONE_AFTER_THE_OTHER, 0.0)
        fetch(machine, following.load, 0.0, following.tensors)
    return machine


def fetch(
    machine: VirtualMachine, tasks: Seconds, ready: float, tensors: tuple[int, int] = (_KEYS_AND_VALUES,) * 2
) -> float:
    """When weights or KV cache of `tasks` [tasks, resources] have come to the device, begun at time `ready`; so many
    tensors from host memory and from disk, each of which is copied while the next one is on its way.

    What comes from host memory may pass the calling thread, which copies it to pinned memory. What comes from disk does
    not: the threads that read have buffers of their own.
    """
    from_host = machine.chain(tasks[FROM_HOST], (HOST, H2D), ready, tensors[0])
    return max(from_host, machine.chain(tasks[FROM_DISK], (DISK, H2D), ready, tensors[1]))


def _tensors(costs: SublayerCosts, part: ModelSublayer) -> tuple[int, int]:
    """How many of a sublayer's matrices are in host memory and on disk, at least one."""
    assert costs.policy.weights is not None
    matrices = sum(size > _VECTORS * costs.shape.hidden for size in part.tensors)
    _, host, disk = costs.engine.placed_fractions(part, costs.policy.weights)
    return max(1, round(host * matrices)), max(1, round(disk * matrices))


def _compute(machine: VirtualMachine, tasks: Seconds, ready: float) -> float:
    """When a batch's sublayer is computed. Rows for the host's attention are copied in the stream of the products."""
    compute = tasks[COMPUTE]
    on_device = machine.run(DEVICE, float(compute[DEVICE] + compute[H2D] + compute[D2H]), ready)
    return machine.run(HOST, float(compute[HOST]), on_device)
