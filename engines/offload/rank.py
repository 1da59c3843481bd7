"""A rank of a pipeline: `torchrun ... -m engines.offload.rank COMMAND...` runs a command of the harness on rank 0,
with the other ranks behind its engine, such as `generate --set policy.pipeline=4 ...`.

Rank 0 starts the others itself where torchrun does not.
"""

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from engines.offload.backend.base import LoadRequest
from engines.offload.backend.choice import backend_for
from engines.offload.kernels import HostKernels
from engines.offload.loader import load
from engines.offload.pipeline.follower import Follower
from engines.offload.pipeline.links import Links
from engines.offload.pipeline.processes import follow
from engines.offload.pipeline.ranks import Loaded
from engines.offload.pipeline.wire import PlainWire


def main() -> int:
    """Runs the rank that the environment names."""
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        runpy.run_module("harness", run_name="__main__", alter_sys=True)
        return 0
    with ExitStack() as resources:

        def load_stage(request: LoadRequest) -> tuple[Loaded, Callable[[Sequence[int]], None]]:
            given = [count for count in (request.policy.threads, request.limits.threads) if count is not None]
            torch.set_num_threads(min([*given, torch.get_num_threads()]))
            kernels = HostKernels(request.job.cache, torch.get_num_threads())
            resources.callback(kernels.close)
            loaded = load(request, backend_for(request, kernels, resources, None), kernels, resources)
            stage = request.stage
            assert stage is not None
            wire = PlainWire(loaded.meta_model.dtype)

            def run(order: Sequence[int]) -> None:
                Follower(loaded, Links(rank, order, wire), stage.is_first, stage.first).run()

            return Loaded.of(loaded), run

        follow(load_stage)
    return 0


if __name__ == "__main__":
    sys.exit(main())
