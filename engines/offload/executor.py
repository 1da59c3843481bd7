"""Runs a pass: each batch is a greenlet that stops when it needs a weight, so a tile is read once for all batches."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import cast

import torch
from greenlet import getcurrent

from engines.offload.expert_routing import ExpertRouting
from engines.offload.kernels import stored_view
from engines.offload.kernels.launch import capture
from engines.offload.kv_cache.attention import AttentionTask
from engines.offload.loaded_model import LoadedModel
from engines.offload.memory.layout import WeightTile, joined_spans, matrix_spans
from engines.offload.model.activation_offload import pause
from engines.offload.model.layer_products import PackedBatch
from engines.offload.model.pass_replay import PassReplay
from engines.offload.pass_ops import Op, pass_ops
from engines.offload.running_batch import Attending, RunningBatch
from engines.offload.weights.host_experts import AddExperts, Mixture, RoutedRows
from engines.offload.weights.joint_gemm import GemmRequest, JointGemm, resident_runs
from engines.offload.weights.resident_products import ResidentProducts
from harness.api import HarnessError


class Executor:
    """Runs passes of a loaded model.

    A batch stops in `gemm`. When all have stopped, the executor multiplies the rows of all batches that wait for the
    next matrix together, tile by tile as tiles arrive, and resumes each batch with its rows: a weight is read, and
    unpacked or cast, once for all batches. A batch that is alone in its pass does not stop for a matrix that is
    resident as a whole, but for the last one, beside which its pass is ended. If attention overlaps products, a batch
    also stops in `attend`, while its attention runs in a separate thread or stream.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._tiles, self._stream, self._timeline = loaded.tiles, loaded.stream, loaded.timeline
        streamed = [i not in loaded.plan.resident for i in range(len(loaded.tiles))]
        spans = joined_spans(matrix_spans(loaded.tiles), loaded.meta_model.joins)
        #: By the first one's index, tiles that are resident, follow each other and are multiplied by a pool.
        self._resident = resident_runs(loaded.tiles, spans, loaded.resident, loaded.gemms)
        #: The operations of a pass by its number of batches.
        self._ops = cache(partial(self._ops_of, streamed, spans))
        matrices = loaded.meta_model.matrices
        rows = {matrix.name: matrix.rows for matrix in matrices}
        #: By the first matrix, the outputs of all that are multiplied together.
        self._outputs = {join[0]: [rows[name] for name in join] for join in loaded.meta_model.joins}
        whole = {loaded.tiles[i].matrix: run for i, run in self._resident.items() if run.whole}
        self._whole = ResidentProducts(whole, self._outputs, loaded.timeline)
        self._host_experts = loaded.host_experts
        split = None if loaded.host_experts is None else loaded.host_experts.split
        self._experts = ExpertRouting(
            loaded.expert_usage, loaded.plan.sequences, loaded.stream, loaded.expert_counts, split
        )
        self._batches = 0  # of the pass that runs
        self._product: JointGemm | None = None  # that runs
        self._in_use: deque[int] = deque()  # numbers of its tiles that hold a slot of the ring, in order
        loaded.meta_model.use(self)
        self._replay = PassReplay(loaded.meta_model) if loaded.can_replay else None

    def run(self, batches: Sequence[PackedBatch], meanwhile: Callable[[], None] | None = None) -> list[torch.Tensor]:
        """Logits of each batch. The caller enters inference mode, since inside greenlets it would leak. `meanwhile` is
        called while the last matrix is multiplied; no attention is left then."""
        self._stream.align()
        self._experts.begin_pass(sum(len(batch.ids) for batch in batches), len(batches))
        self._batches = len(batches)
        model = self._loaded.meta_model if self._replay is None else self._replay.model_for(len(batches))
        running = [RunningBatch(self._loaded, model, batch) for batch in batches]
        try:
            self._run(self._ops(len(batches)), running, meanwhile)
        except BaseException:
            self._abandon(running)
            raise
        self._experts.end_pass()
        return [torch.as_tensor(batch.stopped_for) for batch in running]

    def close(self) -> None:
        """Forgets captured passes, which refer to it. Idempotent."""
        self._replay = None

    def _abandon(self, batches: Sequence[RunningBatch]) -> None:
        """Ends what a failed pass has under way. What fails besides says less than what failed first."""
        ends = [self._finish, *(batch.abandon for batch in batches)]
        if self._product is not None:
            ends.insert(1, self._product.close)  # also where it cannot be completed
        for end in ends:
            with suppress(BaseException):
                end()
        self._product = None
        self._in_use.clear()  # the stream frees their slots as the next pass begins

    def _ops_of(self, streamed: Sequence[bool], spans: Sequence[range], batches: int) -> Sequence[Op]:
        """The operations of a pass, without those for which a batch that is alone does not stop."""
        ops = pass_ops(streamed, spans, batches, self._loaded.overlaps, self._loaded.policy.nano_order)
        unstopped = self._whole.tiles if batches == 1 else ()
        return [op for op in ops if op.tile not in unstopped]

    def _run(self, ops: Sequence[Op], batches: Sequence[RunningBatch], meanwhile: Callable[[], None] | None) -> None:
        in_ring: dict[int, torch.Tensor] = {}  # by tile
        for op, following in zip(ops, [*ops[1:], None], strict=True):
            if op.kind == "load":
                if self._experts.needs(self._tiles[op.tile].matrix):
                    if not self._stream.is_ready():  # compute meanwhile, and free slots for it
                        self._catch_up()
                    in_ring[op.tile] = self._stream.next(op.tile)
                else:
                    self._stream.skip()
            elif op.kind == "multiply":
                self._multiply(op, batches, in_ring)
                is_last = op.last and op.tile + op.count == len(self._tiles)
                if is_last and meanwhile is not None:
                    self._call_beside_product(meanwhile)
            elif op.kind == "resume":
                self._finish()
                batches[op.batch].resume(following is not None and following.kind == "attend")
                if following is None or following.kind != "resume":
                    for batch in batches:
                        batch.resume_paused()

    def _multiply(self, op: Op, batches: Sequence[RunningBatch], in_ring: dict[int, torch.Tensor]) -> None:
        """Adds an operation's tiles to the product of their matrices, which the first tile starts."""
        tile = self._tiles[op.tile]
        if not self._experts.needs(tile.matrix):
            return
        began = self._timeline.begin()
        if self._product is None:
            requests = self._requests(tile.matrix, op, batches)
            self._product = JointGemm(requests, self._outputs[tile.matrix], self._loaded.gemms[tile.stored])
            for batch, rows in zip(batches, self._product.parts, strict=True):
                batch.answer = batch.answer if rows is None else rows
        if op.tile in in_ring:
            number = self._add(tile, in_ring[op.tile])
            if op.last:
                del in_ring[op.tile]
                self._in_use.append(number)
        elif op.tile in self._resident:
            run = self._resident[op.tile]
            self._product.add_run(run)
            if run.whole:  # it is complete
                self._product = None
        else:
            for resident in self._tiles[op.tile : op.tile + op.count]:
                self._add(resident, self._loaded.resident[resident.index])
        if self._product is not None:
            self._release(self._product)
        self._timeline.end("compute", tile.matrix, began)

    def _call_beside_product(self, meanwhile: Callable[[], None]) -> None:
        began, product = time.perf_counter(), self._product
        meanwhile()
        if product is not None and product.is_running:
            self._timeline.add("compute", product.matrix, began, time.perf_counter())
        elif self._loaded.device.where.type == "cpu":  # the product has ended, who knows when: nothing computed
            self._timeline.add_idle(time.perf_counter() - began)

    def _add(self, tile: WeightTile, stored: torch.Tensor) -> int:
        """Adds one tile, of these bytes, to the product that runs; returns its number there."""
        assert self._product is not None
        gemm = self._loaded.gemms[tile.stored].gemm  # a matrix may have tiles that twelve bits cannot hold
        return self._product.add(tile, stored_view(stored, tile.stored, *tile.shape), gemm)

    def _catch_up(self) -> None:
        """Multiplies what was added to the product that runs, if any."""
        if (product := self._product) is None:
            return
        if product.is_pooled:
            began = self._timeline.begin()
            product.wait()
            self._timeline.end("compute", product.matrix, began)
        self._release(product)

    def _finish(self) -> None:
        """Completes and ends the product that runs, if any."""
        self._catch_up()
        if self._product is not None:
            self._product.close()
            self._product = None

    def _release(self, product: JointGemm) -> None:
        """Frees the ring's slots of tiles that were multiplied."""
        while self._in_use and product.is_done(self._in_use[0]):
            self._in_use.popleft()
            self._stream.release()

    def _requests(self, matrix: str, op: Op, batches: Sequence[RunningBatch]) -> list[GemmRequest | None]:
        """The requests that an operation's batches have stopped for; None for others. All are for `matrix`, unless it
        is an expert's, which a batch may skip (None)."""
        requests: list[GemmRequest | None] = []
        for k, batch in enumerate(batches):
            request = batch.stopped_for if op.includes(k) else None
            if request is not None and request.matrices[0] != matrix:
                if not self._experts.is_expert(matrix):
                    raise HarnessError(f"the model needs {request.matrices[0]}, but its dry pass had {matrix} here")
                request = None
            requests.append(request)
        return requests

    def gemm(
        self, matrices: Sequence[str], x: torch.Tensor, biases: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See Weights.gemm."""
        request = GemmRequest(matrices, x.reshape(-1, x.shape[-1]), biases)
        if (captured := capture.get()) is None:
            return self._ask(request)
        with captured.paused():
            outputs = self._ask(request)
        captured.launched(partial(self._bind, matrices, biases), x, *outputs, created=len(outputs))
        return outputs

    def _ask(self, request: GemmRequest) -> Sequence[torch.Tensor]:
        if self._batches == 1 and request in self._whole:
            return self._whole.multiply(request)
        return cast(Sequence[torch.Tensor], getcurrent().parent.switch(request))

    def _bind(
        self, matrices: Sequence[str], biases: Sequence[torch.Tensor | None], x: torch.Tensor, *outs: torch.Tensor
    ) -> Callable[[], object]:
        """What asks for the same products once more, into `outs`, in a pass of a single batch."""
        request = GemmRequest(matrices, x.view(-1, x.shape[-1]), biases, outs)
        return self._whole.bind(request) if request in self._whole and len(x) else partial(self._ask, request)

    def attend(self, task: AttentionTask) -> torch.Tensor:
        """Runs a batch's attention, beside other batches' products if the policy overlaps them."""
        if self._batches > 1 and self._loaded.overlaps:
            attending = Attending(task, self._loaded.device.run_async(partial(task.launch, beside=True)))
            return torch.as_tensor(getcurrent().parent.switch(attending))
        task.launch()
        if self._batches > 1 and self._loaded.cache.host_attention is not None:
            pause()  # all batches launch before the first one waits
        return task.wait()

    def route_experts(self, mixture: Mixture, routed: RoutedRows) -> tuple[Sequence[int], AddExperts | None]:
        """See Weights.route_experts."""
        here, on_host = self._experts.route(mixture.name, routed.counts, routed.tokens)
        if not on_host or self._host_experts is None:
            return here, None
        # all batches launch before the first one waits
        return here, self._host_experts.launch(mixture, on_host, routed, pause if self._batches > 1 else None).add_to
