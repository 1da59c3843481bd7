"""Ranks that others start: SLURM's variables, their number, a pulse that stops, and links that carry nothing."""

import multiprocessing
import os
import socket
import sys
import threading
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from engines.offload import rank
from engines.offload.pipeline import pulse
from engines.offload.pipeline import ranks as ranks_module
from engines.offload.pipeline.links import Links, LostRankError
from engines.offload.pipeline.meeting import LeaderEndedError, await_call, call_ranks, meeting_store
from engines.offload.pipeline.pulse import beat
from engines.offload.pipeline.ranks import Failure, Ranks
from engines.offload.pipeline.stages import order_of
from engines.offload.pipeline.started import (
    STORE,
    first_host,
    own_rank,
    rank_variables,
    ranks_share_host,
    require_ranks,
    world,
)
from engines.offload.pipeline.wire import PlainWire
from harness.api import HarnessError
from tests.offload import load, tiny

STEP = {
    "SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3",
    "SLURM_STEP_NODELIST": "node[007-009,12]", "SLURM_NTASKS": "4",
}  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node7", "node7"),
        ("node[007-009,12],gpu1", "node007"),
        ("gpu1,node[1-2]", "gpu1"),
        ("r[0-1]n[4-5]-ib", "r0n4-ib"),
        ("node[3,5]", "node3"),
    ],
)
def test_the_first_host_of_a_list_of_slurms(nodes, host):
    assert first_host(nodes) == host


def test_a_task_of_srun_is_a_rank():
    found = rank_variables(STEP)
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == ("3", "4", "node007")
    assert 1024 < int(found["MASTER_PORT"]) < 32768
    assert rank_variables({**STEP, "SLURM_PROCID": "0"})["MASTER_PORT"] == found["MASTER_PORT"], "all meet at one"
    assert rank_variables({**STEP, "SLURM_STEP_ID": "3"})["MASTER_PORT"] != found["MASTER_PORT"], "steps do not clash"
    own = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}
    assert own.items() <= rank_variables({**STEP, **own}).items()


def test_a_batch_script_one_task_and_torchrun_under_srun_are_none():
    assert rank_variables({**STEP, "RANK": "1"}) == {}
    assert rank_variables({**STEP, "SLURM_STEP_NUM_TASKS": "1"}) == {}
    assert rank_variables({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}) == {}
    with pytest.raises(HarnessError, match=r"srun does not say 'SLURM_STEP_NODELIST'.* or set RANK, WORLD_SIZE"):
        rank_variables({name: value for name, value in STEP.items() if name != "SLURM_STEP_NODELIST"})


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SLURM_STEP_ID"])
def test_a_variable_of_a_step_that_is_no_number_is_named(name):
    with pytest.raises(HarnessError, match=rf"{name} is 'x' in the environment, which is no number"):
        rank_variables({**STEP, name: "x"})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_variable_of_torchrun_that_is_no_number_is_named(name, monkeypatch):
    for each in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(each, "x" if each == name else "1")
    with pytest.raises(HarnessError, match=f"{name} is 'x' in the environment"):
        assert (own_rank(), world()) is None


@pytest.mark.parametrize(
    ("environment", "shared"),
    [({}, True), ({"RANK": "0", "WORLD_SIZE": "2"}, False),
     ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, False),
     ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, True)],
)  # fmt: skip
def test_ranks_share_a_host_that_the_leader_starts_or_torchrun_puts_there(monkeypatch, environment, shared):
    """Those would share its device."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ranks_share_host() is shared


def test_as_many_ranks_are_started_as_the_policy_has(monkeypatch, tmp_path):
    require_ranks(2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    require_ranks(4)
    with pytest.raises(HarnessError, match=r"the policy has 2 ranks, and 4 were started: set policy.pipeline, or"):
        require_ranks(2)
    with pytest.raises(HarnessError, match=r"the policy has 1 rank, and 4 were started"):
        load(tiny(tmp_path / "m", "llama"), tmp_path / "cache")
    monkeypatch.setenv(STORE, "1")
    require_ranks(2)


def test_a_rank_of_another_host_that_stops_counting_is_lost(monkeypatch):
    monkeypatch.setattr(ranks_module, "LOST_S", 0.3)
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    counting = TCPStore("127.0.0.1", store.port, 1, is_master=False)
    monkeypatch.setattr(pulse, "_BEAT_S", 0.05)
    beat(counting, 1, lambda: None)
    with pytest.raises(HarnessError, match=r"rank 1 of 2 did not answer for 1 s"):
        Ranks(2, store).wait_for("never", 1, 1)
    found = Ranks(3, store)
    with pytest.raises(HarnessError, match=r"rank 2 of 3 gave no sign of life for 0\.3 s"):
        found.wait_for("never", 1, 10)  # whichever it waits for
    counting.set("failed/2", Failure("no checkpoint").encoded())
    with pytest.raises(HarnessError, match=r"rank 2 of 3: no checkpoint"):
        found.wait_for("never", 1, 10)


def test_a_rank_learns_that_the_leader_s_host_is_gone(monkeypatch):
    monkeypatch.setattr(pulse, "_BEAT_S", 0.05)
    monkeypatch.setattr(pulse, "LOST_S", 0.3)
    gone, answers = threading.Event(), [1, 2]
    beat(Mock(add=lambda key, by: answers.pop()), 1, gone.set)  # which raises the third time
    assert not gone.wait(0.2) and gone.wait(10)


def rank_of_two(number, port, words):
    """As `srun python -m engines.offload.rank WORDS` starts it."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = ["rank", *words]
    sys.exit(rank.main())


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["ls", "hardware"], 0, "rank 1: nothing to do: rank 0 has ended"),
        (["generate", "--model", "m"], 2, "rank 1: rank 0 failed: give --prompt TEXT, or --input FILE"),
    ],
    ids=["nothing to do", "refused"],
)
def test_a_job_that_ends_before_the_ranks_join_ends_all_of_them(words, code, line, capfd):
    context, port = multiprocessing.get_context("fork"), _free_port()
    ranks = [context.Process(target=rank_of_two, args=(number, port, words)) for number in range(2)]
    for process in reversed(ranks):
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in ranks] == [code, code]
    assert line in capfd.readouterr().err


def meet(number, port, said):
    """A rank that says when it has met the others, and why rank 0 calls nobody."""
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    store = meeting_store()
    said.send("met")
    try:
        await_call(store)
    except LeaderEndedError as exc:
        said.send((exc.code, str(exc)))


def test_a_rank_0_that_is_killed_before_the_ranks_join_ends_them_too():
    context, port = multiprocessing.get_context("fork"), _free_port()
    (heard, said), ranks = context.Pipe(duplex=False), []
    for number in range(2):
        ranks.append(context.Process(target=meet, args=(number, port, said)))
        ranks[-1].start()
        assert heard.recv() == "met"
    ranks[0].kill()
    code, words = heard.recv()
    ranks[1].join()
    assert code == 1 and words.startswith("rank 0 failed: its store is gone")


def test_ranks_that_have_served_a_load_are_not_waited_for():
    store = dist.HashStore()
    call_ranks(store)
    with pytest.raises(HarnessError, match="have served a load and ended: start the same command again"):
        call_ranks(store)


def silent_or_gone(port, told):
    """Rank 1, which joins, sends nothing, and ends when it is told to."""
    torch.set_num_threads(1)
    _join(port, 1)
    told.recv()


def _join(port, rank):
    store = TCPStore("127.0.0.1", port, 2, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return store


def lose(port, patience_s, said):
    """Rank 0, which waits for hidden states: what it says."""
    torch.set_num_threads(1)
    _join(port, 0)
    links = Links(0, order_of(2), PlainWire(torch.float32), patience_s)
    try:
        links.receive_hidden(2, 8)
    except LostRankError as exc:
        said.send(str(exc))


@pytest.mark.parametrize(("patience_s", "words"), [(0.4, "nothing came for 0.4 s"), (60, "it closed the connection")])
def test_a_link_that_stalls_and_one_that_is_closed_are_told_apart(patience_s, words):
    context = multiprocessing.get_context("fork")
    port = _free_port()
    (heard, said), (order, orders) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    leader = context.Process(target=lose, args=(port, patience_s, said))
    other = context.Process(target=silent_or_gone, args=(port, order))
    leader.start()
    other.start()
    if patience_s > 1:
        orders.send("end")
    text = heard.recv()
    for process in (leader, other):
        process.kill()
        process.join()
    assert text == f"lost rank 1: {words}"


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
