"""Products with matrices that are in memory as a whole, for a batch that is alone in its pass."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from engines.offload.timeline import Timeline
from engines.offload.weights.joint_gemm import GemmRequest, JointGemm, ResidentRun


class ResidentProducts:
    """`runs`, by their first matrix, of which `outputs` says how many rows each matrix has."""

    def __init__(
        self, runs: Mapping[str, ResidentRun], outputs: Mapping[str, Sequence[int]], timeline: Timeline
    ) -> None:
        self._runs = runs
        self._outputs = outputs
        self._timeline = timeline

    def __contains__(self, request: GemmRequest) -> bool:
        return request.matrices[0] in self._runs

    @property
    def tiles(self) -> Collection[int]:
        """Their indices."""
        return {i for run in self._runs.values() for i in run.indices}

    def multiply(self, request: GemmRequest) -> Sequence[torch.Tensor]:
        """What is requested, complete on return."""
        began, matrix = self._timeline.begin(), request.matrices[0]
        run = self._runs[matrix]
        product = JointGemm([request], self._outputs[matrix], run.backend)
        product.add_run(run)
        self._timeline.end("compute", matrix, began)
        [rows] = product.parts
        assert rows is not None
        return rows

    def bind(self, request: GemmRequest) -> Callable[[], None]:
        """What writes to `request.outs` what is requested, with the values that x [rows, columns] has then."""
        timeline, matrix = self._timeline, request.matrices[0]
        run = self._runs[matrix]
        assert run.backend.pool is not None and request.outs is not None
        multiply = run.backend.pool.bind(request.x, run.products(request.biases, request.outs))

        def products() -> None:
            began = timeline.begin()
            multiply()
            timeline.end("compute", matrix, began)

        return products
