"""Experts that the host multiplies where their weights lie, while others are copied to the device.

The rows that go to them come down and their sum goes back up, never their weights. Which ones: memory/expert_split.py.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

import torch

from engines.offload.device.protocol import Accelerator, Event
from engines.offload.kernels import stored_view
from engines.offload.memory.expert_split import ExpertRates, ExpertSplit, held_experts
from engines.offload.memory.expert_usage import ExpertUsage
from engines.offload.memory.layout import WeightTile
from engines.offload.memory.storage import WeightStorage
from engines.offload.timeline import Timeline
from engines.offload.weights.gemm import GemmBackend
from engines.offload.weights.joint_gemm import GemmRequest, JointGemm

#: Rows at which the host's products are measured, of so many experts, which are too large for a cache together.
_ROWS, _EXPERTS = (1, 8, 64), 3


@dataclass(frozen=True)
class Mixture:
    """What a mixture computes of each expert: a product with its matrix of `first`, `activate`, and one with its matrix
    of `second`. Matrices by name; biases [experts, outputs] where the model computes, if there are any."""

    name: str
    first: str
    second: str
    activate: Callable[[torch.Tensor], torch.Tensor]
    first_biases: torch.Tensor | None = None
    second_biases: torch.Tensor | None = None


@dataclass(frozen=True)
class RoutedRows:
    """A batch's rows for a mixture, x [rows, hidden], of which row i goes to experts chosen[i], in host memory, at the
    shares share[i]. `counts`: rows by expert; `tokens`: rows that go to any."""

    x: torch.Tensor
    chosen: torch.Tensor
    share: torch.Tensor
    counts: Sequence[int]
    tokens: int


#: Adds experts' outputs to a mixture's [rows, hidden], in place, once they are there.
AddExperts = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class HostExpertsTask:
    """Products that the host computes for the `rows` [n] of a batch: their sum over its experts is [n, hidden]. `pause`
    is called before it is waited for."""

    rows: torch.Tensor
    sum: Future[torch.Tensor]
    device: Accelerator
    pause: Callable[[], None] | None

    def add_to(self, out: torch.Tensor) -> None:
        """Adds the sum to a mixture's output [rows, hidden], in place. Blocks until the host has computed it."""
        if self.pause is not None:
            self.pause()
        out.index_add_(0, self.rows, self.device.upload(self.sum.result()))


class HostExperts:
    """Multiplies, in a thread of its own, experts all of whose `tiles` are `pinned` (stored bytes by index) in host
    memory. `ways`: by how they are stored; `resident`: tiles on the device. `multiplied` counts experts, once for each
    batch."""

    def __init__(
        self, tiles: Sequence[WeightTile], resident: Collection[int], pinned: Mapping[int, torch.Tensor],
        usage: ExpertUsage, ways: Mapping[WeightStorage, GemmBackend], device: Accelerator, timeline: Timeline,
    ) -> None:  # fmt: skip
        held = held_experts(tiles, pinned, usage)
        self._tiles: dict[str, list[WeightTile]] = {}  # by matrix
        for tile in chain.from_iterable(own for experts in held.values() for own in experts.values()):
            self._tiles.setdefault(tile.matrix, []).append(tile)
        self._pinned = pinned
        self._ways = ways
        self._device = device
        self._timeline = timeline
        self.count = sum(map(len, held.values()))
        self.multiplied = 0
        self.rates = self._measured([own for experts in held.values() for own in experts.values()][:_EXPERTS])
        #: Which ones are multiplied here.
        self.split = ExpertSplit(held, [tile for tile in tiles if tile.index not in resident], usage, self.rates)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-experts")

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._thread.shutdown()

    def launch(
        self, mixture: Mixture, experts: Sequence[int], routed: RoutedRows, pause: Callable[[], None] | None = None
    ) -> HostExpertsTask:
        """Begins with the rows that go to `experts`."""
        rows = torch.isin(routed.chosen, torch.tensor(experts)).any(dim=1).nonzero().flatten()
        there, of_experts = self._device.upload(rows), self._device.upload(torch.tensor(experts))
        biases = [stack for stack in (mixture.first_biases, mixture.second_biases) if stack is not None]
        operands = [routed.x[there], routed.share[there], *(stack[of_experts] for stack in biases)]
        fetched, arrived = self._device.fetch(*operands)
        self.multiplied += len(experts)
        task = self._thread.submit(self._sum, mixture, experts, routed.chosen[rows], fetched, arrived)
        return HostExpertsTask(there, task, self._device, pause)

    @torch.inference_mode()
    def _sum(
        self, mixture: Mixture, experts: Sequence[int], chosen: torch.Tensor, fetched: Sequence[torch.Tensor],
        arrived: Event,
    ) -> torch.Tensor:  # fmt: skip
        """The experts' outputs for the fetched rows, at their shares, added up in float32 in the order of `experts`."""
        arrived.synchronize()
        began = time.perf_counter()
        x, share, *stacks = fetched
        biases = iter(stacks)
        first_biases = None if mixture.first_biases is None else next(biases)
        second_biases = None if mixture.second_biases is None else next(biases)
        total = torch.zeros(x.shape, dtype=torch.float32)
        for i, expert in enumerate(experts):
            row, place = torch.where(chosen == expert)
            inner = self._product(f"{mixture.first}[{expert}]", x[row], first_biases, i)
            outer = self._product(f"{mixture.second}[{expert}]", mixture.activate(inner), second_biases, i)
            total.index_add_(0, row, outer.float() * share[row, place, None].float())
        self._timeline.add("host experts", mixture.name, began, time.perf_counter())
        return total.to(x.dtype)

    def _product(self, matrix: str, x: torch.Tensor, biases: torch.Tensor | None, i: int) -> torch.Tensor:
        """x [rows, columns] times the transpose of an expert's matrix, plus its bias, which is `biases`[i]."""
        tiles = self._tiles[matrix]
        way = self._ways[tiles[0].stored]
        dtype = getattr(torch, way.dtype)
        bias = None if biases is None else biases[i].to(dtype)
        outputs = tiles[-1].stop if tiles[-1].axis == 0 else tiles[-1].shape[0]
        product = JointGemm([GemmRequest([matrix], x.to(dtype), [bias])], [outputs], way)
        try:
            for tile in tiles:
                weight = stored_view(self._pinned[tile.index], tile.stored, *tile.shape)
                product.add(tile, weight, self._ways[tile.stored].gemm)
            product.wait()
        finally:
            product.close()  # a pool's threads write to its results until then
        assert product.parts[0] is not None
        [out] = product.parts[0]
        return out

    @torch.inference_mode()
    def _measured(self, some: Sequence[Sequence[WeightTile]]) -> ExpertRates:
        """The rates of copies and of the host's products, of `some` experts; any, where there are none."""
        copied = list(chain.from_iterable(some))
        if not copied:
            return ExpertRates(1.0, [(1, 1.0)])
        room = torch.empty(max(tile.nbytes for tile in copied), dtype=torch.uint8, device=self._device.where)
        stamps: list[Event] = []
        for tile in copied:
            stamps += self._device.timed_copy(room[: tile.nbytes], self._pinned[tile.index][: tile.nbytes])
        stamps[-1].synchronize()
        times = self._device.seconds(stamps)
        link = sum(tile.nbytes for tile in copied) / max(times[-1] - times[0], 1e-9)
        return ExpertRates(link, [(rows, min(self._seconds_per_byte(own, rows) for own in some)) for rows in _ROWS])

    def _seconds_per_byte(self, tiles: Sequence[WeightTile], rows: int) -> float:
        """Of an expert's products of so many rows."""
        began = time.perf_counter()
        for matrix in dict.fromkeys(tile.matrix for tile in tiles):
            one = self._tiles[matrix][0]
            columns = one.shape[1] if one.axis == 0 else self._tiles[matrix][-1].stop
            self._product(matrix, torch.full((rows, columns), 0.01), None, 0)
        return (time.perf_counter() - began) / sum(tile.nbytes for tile in tiles)
