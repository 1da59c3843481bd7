"""Ranks that torchrun or SLURM's srun starts: how many, and what torch.distributed has to be told of a step of srun."""

import os
import re
from collections.abc import Mapping

from harness.api import HarnessError

#: The environment of a rank that the leader started: the address of the leader's store.
STORE = "HARNESS_PIPELINE_STORE"
#: Ports for jobs without MASTER_PORT, below those that the kernel gives away.
_FIRST_PORT, _PORTS = 20_000, 12_000


def world() -> int | None:
    """How many ranks torchrun or srun started together with this process; None where neither started it."""
    if STORE in os.environ or "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return _number(os.environ, "WORLD_SIZE")


def ranks_share_host() -> bool:
    """Whether a job of several ranks has more than one of them on this host."""
    return world() is None or os.environ.get("LOCAL_WORLD_SIZE", "1") != "1"


def own_rank() -> int:
    """The rank that the environment names, 0 where it names none. Raises HarnessError for one that is no number."""
    return _number(os.environ, "RANK") if "RANK" in os.environ else 0


def require_ranks(count: int) -> None:
    """Raises HarnessError where torchrun or srun started another number of ranks than the policy's `count`."""
    if (ranks := world()) not in (None, count):
        raise HarnessError(
            f"the policy has {count} rank{'s' if count > 1 else ''}, and {ranks} were started: set policy.pipeline, or "
            f"policy.tensor, to {ranks}"
        )


def rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of a task of srun; nothing where somebody else has named the rank,
    or where the step has one task. MASTER_ADDR and MASTER_PORT stay as they are where they are set.

    Raises HarnessError where srun says less than that.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")  # of the step: a batch script itself is no task of srun
    if "RANK" in environ or tasks == "1":
        return {}
    try:
        rank, world = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS")
        step = 16 * _number(environ, "SLURM_JOB_ID") + (
            _number(environ, "SLURM_STEP_ID") if "SLURM_STEP_ID" in environ else 0
        )
        host = environ.get("MASTER_ADDR") or first_host(environ["SLURM_STEP_NODELIST"])
    except KeyError as exc:
        raise HarnessError(
            f"a step of {tasks} tasks, but srun does not say {exc}: start the ranks by srun, or set RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT"
        ) from exc
    port = environ.get("MASTER_PORT") or str(_FIRST_PORT + step % _PORTS)
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": host, "MASTER_PORT": port}


def _number(environ: Mapping[str, str], name: str) -> int:
    """The number that a variable has. Raises HarnessError for one that has none, KeyError where it is not there."""
    if not environ[name].isdecimal():
        raise HarnessError(f"{name} is {environ[name][:40]!r} in the environment, which is no number: unset or set it")
    return int(environ[name])


def first_host(nodes: str) -> str:
    """The first host of a list as SLURM writes it: of `node[007-009,12],gpu1` it is `node007`."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]
