"""The ranks of a model: those that the leader starts on its host, or those that torchrun or srun has started."""

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch._C._distributed_c10d import PrefixStore, TCPStore

from engines.models.checkpoints import require_same
from engines.offload.backend.base import LoadRequest
from engines.offload.memory.tensor_part import TensorPart
from engines.offload.model.stage import Stage
from engines.offload.pipeline.pulse import beat
from engines.offload.pipeline.ranks import LOAD_S, START_S, Loaded, Ranks
from engines.offload.pipeline.rates import Machine, ToldRates
from engines.offload.pipeline.started import STORE, world
from harness.api import HardwareLimits, HarnessError, Job, LocalModel, OffloadPolicy, first_line, from_json, to_json
from harness.common.rank_groups import in_own_group
from harness.common.rank_network import in_own_namespace, leader_address

#: How long ranks get to end when the leader has ended.
_END_S = 10.0
_LOOK_S = 0.05


@contextmanager
def leading(count: int, threads: int) -> Iterator[Ranks]:
    """Ranks that are ready to load: those that torchrun or srun started with this process, or `count` - 1 processes of
    this host, of `threads` threads each.

    Raises HarnessError where they do not come, or are of other versions.
    """
    if world() is not None:
        yield from _joined(count)
        return
    store = TCPStore("127.0.0.1", 0, count, is_master=True, wait_for_workers=False)
    children = {rank: _started(rank, count, store.port, threads) for rank in range(1, count)}
    ranks = Ranks(count, store, children)
    try:
        for rank in children:
            ranks.wait_for(f"ready/{rank}", rank, START_S)
        store.set("join", "yes")
        _join_watched(ranks)
        yield _introduced(ranks)
    except BaseException:
        for child in children.values():
            child.kill()  # what they would end for may never come
        raise
    finally:
        _end(ranks)


def _joined(count: int) -> Iterator[Ranks]:
    _join_by_environment()
    ranks = Ranks(count, dist.distributed_c10d._get_default_store())
    try:
        yield _introduced(ranks)
    finally:
        dist.destroy_process_group()


def follow(
    measure: Callable[[LoadRequest], ToldRates | None],
    load: Callable[[LoadRequest], tuple[Loaded, Callable[[Sequence[int]], None]]],
) -> None:
    """What a rank but the leader does: joins, tells of its machine and perhaps its rates, loads its stage, and then
    does what `load` returned, with the ranks in the order of their stages; or ends where it has no stage.

    Whatever ends it, the leader learns why.
    """
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if (port := os.environ.get(STORE)) is not None:
        _end_with_parent()
        store: Any = TCPStore(leader_address(), int(port), count, is_master=False)
        store.set(f"ready/{rank}", "yes")
        store.wait(["join"], timedelta(seconds=START_S))
        _join(store, rank, count)
    else:
        _join_by_environment()
        store = dist.distributed_c10d._get_default_store()
        beat(store, rank)
    try:
        machine = Machine.here()
        store.set(f"version/{rank}", versions())
        store.set(f"machine/{rank}", json.dumps(to_json(machine)))
        _await(store, "job")
        told = json.loads(store.get("job"))
        request = _told(told, rank, machine)
        require_same(request.model)
        if told["measure"]:
            store.set(f"rates/{rank}", json.dumps(to_json(measure(request))))
        _await(store, "stages")
        stages = dict(json.loads(store.get("stages")))
        if rank in stages:
            part = TensorPart.under(request.policy, rank)
            loaded, run = load(replace(request, stage=from_json(Stage, stages[rank]), part=part))
            store.set(f"loaded/{rank}", json.dumps(to_json(loaded)))
            run(list(stages))
        dist.destroy_process_group()
    except HarnessError as exc:
        _tell(store, rank, str(exc))
        _end_now()
    except BaseException as exc:
        _tell(store, rank, f"{type(exc).__name__}: {exc}")
        traceback.print_exc()
        _end_now()


def _end_now() -> None:
    """Without waiting for threads that still receive."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def versions() -> str:
    """What must be equal on all ranks: the engine's code and the libraries that compute."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".cpp", ".h")):
        digest.update(path.read_bytes())
    return f"engine {digest.hexdigest()[:12]}, torch {torch.__version__}, transformers {transformers.__version__}"


def _introduced(ranks: Ranks) -> Ranks:
    """The same, knowing their machines. Raises HarnessError for a rank of another version."""
    own, machines = versions(), [Machine.here()]
    for rank in range(1, ranks.count):
        ranks.wait_for(f"version/{rank}", rank, START_S)
        if (theirs := ranks.store.get(f"version/{rank}").decode()) != own:
            raise HarnessError(
                f"rank {rank} of {ranks.count} has {theirs}; rank 0 has {own}: install the same everywhere"
            )
        ranks.wait_for(f"machine/{rank}", rank, START_S)
        machines.append(from_json(Machine, json.loads(ranks.store.get(f"machine/{rank}"))))
    return replace(ranks, machines=machines)


def _told(told: Mapping[str, Any], rank: int, machine: Machine) -> LoadRequest:
    """What a rank is to load, of what the leader told all, but for its stage."""
    job = told["job"]
    scratch = Path(job["scratch"]) / f"rank-{rank}"
    scratch.mkdir(parents=True, exist_ok=True)
    return LoadRequest(
        from_json(LocalModel, told["model"]),
        from_json(OffloadPolicy, told["policy"]),
        machine.limits(from_json(HardwareLimits, told["limits"])),
        Job(**{**job, "scratch": scratch, "cache": Path(job["cache"])}),
    )


def _started(rank: int, count: int, port: int, threads: int) -> "subprocess.Popen[bytes]":
    code = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]  # this code, not another's
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(code),
        "RANK": str(rank), "WORLD_SIZE": str(count), STORE: str(port), "OMP_NUM_THREADS": str(threads),
        "HARNESS_PIPELINE_PARENT": str(os.getpid()),
    }  # fmt: skip
    command = in_own_namespace(rank, [sys.executable, "-P", "-m", "engines.offload.rank"])
    return subprocess.Popen(in_own_group(rank, command), env=environment)


def _end_with_parent() -> None:
    """Asks Linux to kill this process when its leader dies, even by kill -9."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    if os.getppid() != int(os.environ["HARNESS_PIPELINE_PARENT"]):
        os.kill(os.getpid(), signal.SIGKILL)


def _join(store: Any, rank: int, count: int) -> None:
    dist.init_process_group("gloo", store=PrefixStore("gloo", store), rank=rank, world_size=count)


def _join_watched(ranks: Ranks) -> None:
    """Joins the ranks that were started. Raises HarnessError for one that dies meanwhile: gloo would wait for it."""
    raised: list[BaseException] = []

    def join() -> None:
        try:
            _join(ranks.store, 0, ranks.count)
        except BaseException as exc:
            raised.append(exc)

    thread = threading.Thread(target=join, name="join", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_S)
        if died := ranks.died():
            raise HarnessError(f"all ranks have ended: {died}")
    if raised:
        raise raised[0]


def _join_by_environment() -> None:
    """Joins the ranks of torchrun or srun. Raises HarnessError where not all come."""
    try:
        dist.init_process_group("gloo")
    except (RuntimeError, ValueError) as exc:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise HarnessError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} did not meet the others at {where}: "
            f"{first_line(exc)}"
        ) from exc


def _await(store: Any, key: str) -> None:
    """Until the leader has set the key, without a long operation, which would keep this rank's pulse from the store."""
    deadline = time.monotonic() + LOAD_S
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise HarnessError(f"rank 0 did not say for {LOAD_S:g} s what to do")
        time.sleep(_LOOK_S)


def _end(ranks: Ranks) -> None:
    """Waits for the processes that were started, and ends those that do not end."""
    deadline = time.monotonic() + _END_S
    for child in ranks.children.values():
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))
        child.kill()
        child.wait()
    if dist.is_initialized():
        dist.destroy_process_group()


def _tell(store: Any, rank: int, reason: str) -> None:
    with suppress(Exception):  # the leader may be what is gone
        store.set(f"failed/{rank}", reason)
