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
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch._C._distributed_c10d import PrefixStore, TCPStore

from engines.models.checkpoints import require_same
from engines.offload.backend.base import LoadRequest
from engines.offload.memory.tensor_shard import TensorShard
from engines.offload.model.stage import Stage
from engines.offload.pipeline.meeting import (
    LeaderEndedError,
    await_call,
    await_leader,
    call_ranks,
    leave,
    meeting_store,
    not_met,
)
from engines.offload.pipeline.pulse import LOST_S, beat
from engines.offload.pipeline.ranks import START_S, Failure, Loaded, Ranks
from engines.offload.pipeline.rates import Machine, MeasuredRates
from engines.offload.pipeline.started import STORE, world
from harness.api import HardwareLimits, HarnessError, Job, LocalModel, OffloadPolicy, from_json, to_json
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
    store = meeting_store()
    call_ranks(store)
    _join_met(store, 0, count)
    try:
        yield _introduced(Ranks(count, store))
    finally:
        dist.destroy_process_group()


def follow(
    measure: Callable[[LoadRequest], MeasuredRates | None],
    load: Callable[[LoadRequest], tuple[Loaded, Callable[[Sequence[int]], None]]],
) -> None:
    """What a rank but the leader does: joins, tells of its machine and perhaps its rates, loads its stage, and then
    does what `load` returned, with the ranks in the order of their stages; or ends where it has no stage.

    Whatever ends it, the leader learns why. Raises LeaderEndedError where the leader ends before it has told all that,
    HarnessError where the ranks cannot join.
    """
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if (port := os.environ.get(STORE)) is not None:
        _end_with_parent()
        store: Any = TCPStore(leader_address(), int(port), count, is_master=False)
        store.set(f"ready/{rank}", "yes")
        store.wait(["join"], timedelta(seconds=START_S))
        _join(store, rank, count)
    else:
        store = meeting_store()
        await_call(store)
        _join_met(store, rank, count)
        beat(store, rank, partial(_end_without_leader, rank))
    try:
        machine = Machine.here()
        store.set(f"version/{rank}", versions())
        store.set(f"machine/{rank}", json.dumps(to_json(machine)))
        await_leader(store, "job")
        message = json.loads(store.get("job"))
        request = _load_request(message, rank, machine)
        require_same(request.model)
        if message["measure"]:
            store.set(f"rates/{rank}", json.dumps(to_json(measure(request))))
        await_leader(store, "stages")
        stages = dict(json.loads(store.get("stages")))
        if rank in stages:
            shard = TensorShard.under(request.policy, rank)
            loaded, run = load(replace(request, stage=from_json(Stage, stages[rank]), shard=shard))
            store.set(f"loaded/{rank}", json.dumps(to_json(loaded)))
            run(list(stages))
        dist.destroy_process_group()
        leave(store)
    except LeaderEndedError:
        dist.destroy_process_group()
        raise
    except HarnessError as exc:
        _tell(store, rank, exc)
        _end_now()
    except BaseException as exc:
        _tell(store, rank, HarnessError(f"{type(exc).__name__}: {exc}"))
        traceback.print_exc()
        _end_now()


def _end_without_leader(rank: int) -> None:
    sys.stderr.write(f"rank {rank}: rank 0 is gone: its store gave no answer for {LOST_S:g} s\n")
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


def _load_request(message: Mapping[str, Any], rank: int, machine: Machine) -> LoadRequest:
    """What a rank is to load, of what the leader told all, but for its stage."""
    job = message["job"]
    scratch = Path(job["scratch"]) / f"rank-{rank}"
    scratch.mkdir(parents=True, exist_ok=True)
    return LoadRequest(
        from_json(LocalModel, message["model"]),
        from_json(OffloadPolicy, message["policy"]),
        machine.limits(from_json(HardwareLimits, message["limits"])),
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
    """Asks Linux to kill this process when its leader dies, even by kill -9. Ctrl-C is the leader's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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


def _join_met(store: Any, rank: int, count: int) -> None:
    """Joins the ranks that torchrun or srun started. Raises HarnessError where not all come."""
    try:
        _join(store, rank, count)
    except (RuntimeError, ValueError) as exc:
        raise HarnessError(not_met(exc)) from exc


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


def _tell(store: Any, rank: int, error: HarnessError) -> None:
    with suppress(Exception):  # the leader may be what is gone
        store.set(f"failed/{rank}", Failure.of(error).encoded())
        leave(store)
