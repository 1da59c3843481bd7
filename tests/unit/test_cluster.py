"""What is handed out on a cluster, and to whom, without one: shards of a job, cores of a worker, cells of a node."""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.api import (
    GenerationRequest,
    HardwareLimits,
    HardwareRequirements,
    HarnessError,
    OffloadPolicy,
    WorkloadSpec,
)
from harness.cluster.connection import connected
from harness.cluster.groups import choose, fits, group, label
from harness.cluster.ledger import MAX_LOSSES, Ledger, shard_size
from harness.cluster.placement import Node, worker_needs
from harness.cluster.versions import require_same, versions_for
from tests.records import FAKE, cell, record

GIB = 2**30


@given(st.integers(1, 40), st.integers(1, 9), st.randoms(use_true_random=False))
def test_every_request_is_settled_once_whatever_is_lost(count, size, rng):
    names = [f"{i}.0" for i in range(count)]
    ledger = Ledger([GenerationRequest(name, (1,)) for name in names], size)
    out, written, refused, losses = [], [], [], 0
    lost = []  # requests of workers that are lost, one of whose answers may still be on its way
    while not ledger.done:
        choice = rng.choice(["take", "answer", "lose", "late"])
        if choice == "take" and (shard := ledger.take()):
            assert not {*shard.requests} & {*written, *refused}, "what is settled is not handed out again"
            out.append(shard)
        elif choice == "late" and lost:
            name = rng.choice(lost)
            written += [name] if ledger.settle(name) else []
        elif out:
            shard = rng.choice(out)
            if choice == "answer" and shard.requests:
                name = rng.choice([*shard.requests])
                assert ledger.settle(name)
                assert not ledger.settle(name), "an answer that comes twice is one"
                written.append(name)
            else:
                out.remove(shard)
                lost += shard.requests
                losses += 1
                events = ledger.give_back(shard, "it died")
                assert not events or shard.losses == MAX_LOSSES
                assert all("3 times: it died" in event.reason for event in events)
                refused += [event.id for event in events]
    assert sorted([*written, *refused]) == sorted(names)
    assert losses >= MAX_LOSSES or not refused
    assert all(not shard.requests for shard in out)
    with pytest.raises(HarnessError, match="does not have"):
        ledger.settle("0.1")


@given(st.integers(1, 10_000), st.integers(1, 40), st.integers(1, 300))
def test_shards_are_small_and_workers_get_as_much(requests, workers, block):
    size = shard_size(requests, workers, block)
    assert 1 <= size <= 4 * block
    rounds = math.ceil(math.ceil(requests / size) / workers)
    assert rounds * size <= requests / workers + rounds, "of the worker that has most"


@given(
    st.lists(st.tuples(st.integers(0, 16), st.integers(0, 64)), min_size=1, max_size=5),
    st.integers(1, 8),
    st.integers(1, 20),
    st.integers(1, 2),
)
def test_workers_get_all_the_cores_that_leave_room_for_each(sizes, workers, memory, ranks):
    nodes = [Node("", "", {"CPU": float(cpu), "memory": float(gib * GIB)}) for cpu, gib in sizes]
    job = replace(FAKE, limits=HardwareLimits(host_memory=memory * GIB), policy=OffloadPolicy(pipeline=ranks))

    def room(cores):
        return sum(min(cpu // cores, gib // (memory * ranks)) for cpu, gib in sizes)

    if room(1) < workers:
        with pytest.raises(HarnessError, match=f"has room for {room(1)} workers"):
            worker_needs(job, nodes, workers)
        return
    needs = worker_needs(job, nodes, workers)
    assert needs["memory"] == ranks * memory * GIB
    assert room(int(needs["CPU"])) >= workers > room(int(needs["CPU"]) + 1)
    own = replace(job, limits=replace(job.limits, threads=1))
    if room(ranks) >= workers:
        assert worker_needs(own, nodes, workers)["CPU"] == ranks, "a core for each thread"


A, B = cell("a"), cell("b", "offload")
C = cell("c", workload=WorkloadSpec(gen_len=7))


def on(node, spec, repeat=0, **changes):
    return record(spec, repeat, provenance={"node": node}, **changes)


def groups_of(*records):
    return group([A, C, B], {(r.fingerprint, r.repeat): r for r in records})


def test_cells_of_a_workload_stay_on_one_node():
    first, second = groups_of()
    assert [cell.name for cell in first.cells] == ["a", "b"], "what is compared is together"
    assert [(s.cell.name, s.repeat) for s in first.todo][:4] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert choose([first, second], "n", {"n"}) is first
    second.node = "n"
    assert choose([first, second], "n", {"n", "m"}) is second, "a node goes on with its own"
    first.node = "m"
    assert choose([first], "n", {"n", "m"}) is None, "and leaves what another measures"
    assert choose([first], "n", {"n"}) is first, "until that is gone"


def test_a_run_is_resumed_on_its_node_and_mixes_no_machines():
    first, _ = groups_of(on("n", A), on("n", B))
    assert first.node == "n" and not first.mixed
    assert [(s.cell.name, s.repeat) for s in first.todo] == [("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert not groups_of(*(on("n", C, repeat) for repeat in range(3)))[1].todo
    (refused, _) = groups_of(on("n", A, status="unsupported"))
    assert {s.cell.name for s in refused.todo} == {"b"}, "a refusal settles all repeats"
    for others in ([on("n", A), on("m", B)], [record(A)]):
        mixed, _ = groups_of(*others)
        assert mixed.mixed and len(mixed.todo) == 6


def test_nodes_that_fit_and_what_records_call_them():
    node = Node("id", "10.1.2.3", {"CPU": 8.0, "memory": 16.0 * GIB, "epyc": 1.0})
    assert fits(HardwareRequirements(), node)
    assert fits(HardwareRequirements(cores=8, host_memory=16 * GIB, machine="epyc"), node)
    for need in ({"cores": 9}, {"host_memory": 17 * GIB}, {"device_memory": 1}, {"machine": "xeon"}):
        assert not fits(HardwareRequirements(**need), node)
    assert "10.1" not in label(node)
    assert label(node) == label(replace(node, id="of another start"))


def test_other_versions_than_the_commands_are_refused():
    own = versions_for("offload")
    require_same(own, "offload")
    with pytest.raises(HarnessError, match=r"the command's host 0\.1: install the same on every node"):
        require_same({**own, "torch": "0.1"}, "offload")


def test_without_ray_one_line_names_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HarnessError) as refused, connected("auto"):
        pass
    assert str(refused.value) == "--ray needs Ray: pip install 'offload-harness[ray]'"
    assert not Path("constraints.txt").exists()
