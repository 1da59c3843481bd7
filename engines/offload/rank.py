"""A rank of a model: `torchrun ... -m engines.offload.rank COMMAND...`, or `srun python -m engines.offload.rank
COMMAND...`, runs a command of the harness on rank 0, with the other ranks behind its engine, such as
`generate --set policy.pipeline=4 ...` or `policy.tensor=4`.

Rank 0 starts the others itself where neither does.
"""

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import cache
from pathlib import Path

import torch

from engines.offload.backend.base import Backend, LoadRequest
from engines.offload.backend.choice import backend_for
from engines.offload.kernels import HostKernels
from engines.offload.loader import load
from engines.offload.pipeline.follower import Follower
from engines.offload.pipeline.links import Links
from engines.offload.pipeline.meeting import LeaderEndedError, led
from engines.offload.pipeline.processes import follow
from engines.offload.pipeline.ranks import Loaded
from engines.offload.pipeline.rates import Machine, MeasuredRates, measured
from engines.offload.pipeline.started import own_rank, rank_variables, world
from engines.offload.pipeline.wire import wire_of
from harness.api import HarnessError


def main() -> int:
    """Runs the rank that the environment names. Of a rank that cannot join the others, one line says why, and where
    rank 0 has ended the exit status is rank 0's."""
    try:
        os.environ |= rank_variables(os.environ)
        if rank := own_rank():
            _follow(rank)
        else:
            _lead()
    except HarnessError as exc:
        sys.stderr.write(f"rank {os.environ.get('RANK', '0')}: {exc}\n")
        return exc.code if isinstance(exc, LeaderEndedError) else 1
    return 0


def _lead() -> None:
    with nullcontext() if world() in (None, 1) else led():
        runpy.run_module("harness", run_name="__main__", alter_sys=True)


def _follow(rank: int) -> None:
    with ExitStack() as resources:

        @cache
        def kernels_in(folder: Path) -> HostKernels:
            kernels = HostKernels(folder, torch.get_num_threads())
            resources.callback(kernels.close)
            return kernels

        def ready(request: LoadRequest) -> tuple[Backend, HostKernels]:
            torch.set_num_threads(Machine.here().under(request).threads)
            kernels = kernels_in(request.job.cache)
            return backend_for(request, kernels, resources, None), kernels

        def measure(request: LoadRequest) -> MeasuredRates | None:
            return measured(request, *ready(request))

        def load_stage(request: LoadRequest) -> tuple[Loaded, Callable[[Sequence[int]], None]]:
            loaded, stage = load(request, *ready(request), resources), request.stage
            assert stage is not None
            wire = wire_of(request.policy, loaded.meta_model.dtype)

            def run(order: Sequence[int]) -> None:
                Follower(loaded, Links(rank, order, wire), stage).run()

            return Loaded.of(loaded), run

        follow(measure, load_stage)


if __name__ == "__main__":
    sys.exit(main())
