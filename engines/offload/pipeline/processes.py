"""The ranks of a pipeline: those that the leader starts on its host, or those that torchrun has started."""

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch._C._distributed_c10d import PrefixStore, TCPStore

from engines.offload.backend.base import LoadRequest
from engines.offload.loaded_model import LoadedModel
from engines.offload.model.stage import Stage
from engines.offload.pipeline.links import Links
from engines.offload.pipeline.stages import stage_of, stages
from harness.api import HardwareLimits, HarnessError, Job, LocalModel, OffloadPolicy, from_json, to_json

#: How long a rank may take to start, and to load its stage, in seconds.
_START_S, _LOAD_S = 300.0, 24 * 3600.0
#: How long ranks get to end when the leader has ended.
_END_S = 10.0
_LOOK_S = 0.05
#: The environment of a rank that the leader started: the address of the leader's store.
STORE = "HARNESS_PIPELINE_STORE"


@dataclass(frozen=True)
class Loaded:
    """What a rank has loaded, as far as all must agree: KV blocks, sequences that run, prompt tokens of a pass, and
    whether weights stream."""

    blocks: int
    sequences: int
    chunk: int
    streams: bool

    @classmethod
    def of(cls, loaded: LoadedModel) -> "Loaded":
        """That of this rank."""
        plan = loaded.plan
        return cls(loaded.cache.num_blocks, plan.sequences, plan.chunk, bool(loaded.stream.tiles))


@dataclass
class Ranks:
    """All ranks of a pipeline, as the leader sees them. `children` are those that it started, by rank."""

    count: int
    store: Any
    children: Mapping[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def assign(self, request: LoadRequest) -> LoadRequest:
        """Tells each rank what to load; returns what the leader loads. All compute in the same dtype, the policy's."""
        cut = stages(request.model.shape, self.count)
        job = {name: getattr(request.job, name) for name in _JOB_FIELDS}
        told = {"model": request.model, "policy": request.policy, "limits": request.limits, "job": job, "stages": cut}
        self.store.set("load", json.dumps(to_json(told)))
        return replace(request, stage=cut[stage_of(0, self.count)])

    def links(self) -> Links:
        """The leader's."""
        return Links(0, self.count, self.store)

    def agree(self, own: Loaded) -> Loaded:
        """What all ranks can do, once all have loaded. Raises HarnessError for one that cannot, naming it."""
        found = [own]
        for rank in range(1, self.count):
            self.wait_for(f"loaded/{rank}", rank, _LOAD_S)
            found.append(from_json(Loaded, json.loads(self.store.get(f"loaded/{rank}"))))
        return Loaded(
            min(one.blocks for one in found),
            min(one.sequences for one in found),
            min(one.chunk for one in found),
            any(one.streams for one in found),
        )

    def wait_for(self, key: str, rank: int, patience_s: float) -> None:
        """Until the rank has set the key. Raises HarnessError where it fails, dies or takes too long."""
        deadline = time.monotonic() + patience_s
        while not self.store.check([key]):
            if self.store.check([f"failed/{rank}"]):
                raise HarnessError(f"rank {rank} of the pipeline: {self.store.get(f'failed/{rank}').decode()}")
            if died := self.died():
                raise HarnessError(f"the pipeline has ended: {died}")
            if time.monotonic() > deadline:
                raise HarnessError(f"rank {rank} of the pipeline did not answer for {patience_s:g} s")
            time.sleep(_LOOK_S)

    def died(self) -> str:
        """Which of the processes that the leader started has died by itself, and of what; empty where none has."""
        for rank, child in self.children.items():
            code = child.poll()
            if code is not None and code < 0:
                return f"rank {rank} died of {signal.Signals(-code).name}"
            if code:
                return f"rank {rank} ended with exit code {code}"
        return ""

    def why_lost(self) -> str:
        """Why the pipeline ended, as far as anybody knows."""
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            if any(self.store.check([f"failed/{rank}"]) for rank in range(1, self.count)):
                break
            if (died := self.died()) and "SIG" in died:
                return died
            time.sleep(_LOOK_S)
        if (died := self.died()) and "SIG" in died:
            return died
        return Links(0, self.count, self.store).why_lost() or died


#: What a rank needs to know of a job.
_JOB_FIELDS = ("scratch", "cache", "max_sequence", "mean_sequence", "mean_new", "reproducible")


@contextmanager
def leading(count: int, threads: int) -> Iterator[Ranks]:
    """Ranks that are ready to load: those that torchrun started with this process, or `count` - 1 processes of this
    host, of `threads` threads each.

    Raises HarnessError where they are not as many, or of other versions.
    """
    if started_by_torchrun():
        yield from _joined_by_torchrun(count)
        return
    store = TCPStore("127.0.0.1", 0, count, is_master=True, wait_for_workers=False)
    children = {rank: _started(rank, count, store.port, threads) for rank in range(1, count)}
    ranks = Ranks(count, store, children)
    try:
        for rank in children:
            ranks.wait_for(f"ready/{rank}", rank, _START_S)
        store.set("join", "yes")
        _join(store, 0, count)
        _require_same_versions(ranks)
        yield ranks
    except BaseException:
        for child in children.values():
            child.kill()  # what they would end for may never come
        raise
    finally:
        _end(ranks)


def started_by_torchrun() -> bool:
    """Whether this process is one of the ranks that torchrun started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and STORE not in os.environ


def _joined_by_torchrun(count: int) -> Iterator[Ranks]:
    world = int(os.environ["WORLD_SIZE"])
    if world != count:
        raise HarnessError(
            f"policy.pipeline is {count}, and torchrun started {world} ranks: set policy.pipeline={world}"
        )
    dist.init_process_group("gloo")
    ranks = Ranks(count, dist.distributed_c10d._get_default_store())
    try:
        _require_same_versions(ranks)
        yield ranks
    finally:
        dist.destroy_process_group()


def follow(load: Callable[[LoadRequest], tuple[Loaded, Callable[[Links], None]]]) -> None:
    """What a rank but the leader does: joins, loads its stage by `load`, and then does what that returned.

    Whatever ends it, the leader learns why.
    """
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if (port := os.environ.get(STORE)) is not None:
        _end_with_parent()
        store: Any = TCPStore("127.0.0.1", int(port), count, is_master=False)
        store.set(f"ready/{rank}", "yes")
        store.wait(["join"], timedelta(seconds=_START_S))
        _join(store, rank, count)
    else:
        dist.init_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()
    links = Links(rank, count, store)
    try:
        store.set(f"version/{rank}", versions())
        store.wait(["load"], timedelta(seconds=_LOAD_S))
        loaded, work = load(_told(json.loads(store.get("load")), rank, count))
        store.set(f"loaded/{rank}", json.dumps(to_json(loaded)))
        work(links)
        dist.destroy_process_group()
    except HarnessError as exc:
        _tell(links, str(exc))
        _end_now()
    except BaseException as exc:
        _tell(links, f"{type(exc).__name__}: {exc}")
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


def _require_same_versions(ranks: Ranks) -> None:
    own = versions()
    for rank in range(1, ranks.count):
        ranks.wait_for(f"version/{rank}", rank, _START_S)
        if (theirs := ranks.store.get(f"version/{rank}").decode()) != own:
            raise HarnessError(
                f"rank {rank} of the pipeline has {theirs}; rank 0 has {own}: install the same everywhere"
            )


def _told(told: Mapping[str, Any], rank: int, count: int) -> LoadRequest:
    """What a rank is to load, of what the leader told all."""
    job = told["job"]
    scratch = Path(job["scratch"]) / f"rank-{rank}"
    scratch.mkdir(parents=True, exist_ok=True)
    return LoadRequest(
        from_json(LocalModel, told["model"]),
        from_json(OffloadPolicy, told["policy"]),
        from_json(HardwareLimits, told["limits"]),
        Job(**{**job, "scratch": scratch, "cache": Path(job["cache"])}),
        from_json(Stage, told["stages"][stage_of(rank, count)]),
    )


def _started(rank: int, count: int, port: int, threads: int) -> "subprocess.Popen[bytes]":
    code = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]  # this code, not another's
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(code),
        "RANK": str(rank), "WORLD_SIZE": str(count), STORE: str(port), "OMP_NUM_THREADS": str(threads),
        "HARNESS_PIPELINE_PARENT": str(os.getpid()),
    }  # fmt: skip
    return subprocess.Popen([sys.executable, "-P", "-m", "engines.offload.rank"], env=environment)


def _end_with_parent() -> None:
    """Asks Linux to kill this process when its leader dies, even by kill -9."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    if os.getppid() != int(os.environ["HARNESS_PIPELINE_PARENT"]):
        os.kill(os.getpid(), signal.SIGKILL)


def _join(store: Any, rank: int, count: int) -> None:
    dist.init_process_group("gloo", store=PrefixStore("gloo", store), rank=rank, world_size=count)


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


def _tell(links: Links, reason: str) -> None:
    with suppress(Exception):  # the leader may be what is gone
        links.failed(reason)
