"""Links between the ranks of a launch: the relay that delays, namespaces that can talk, nothing left, refusals."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.api import (
    CalibrateHost,
    Exchange,
    HardwareLimits,
    HarnessError,
    RankLink,
    Refusal,
    UnsupportedError,
    WorkerRequest,
)
from harness.common.rank_network import INTERFACE, address, in_own_namespace, leader_address
from harness.launchers import process
from harness.launchers.links import network as links
from harness.launchers.links.network import Network, network, require_links
from harness.launchers.links.relay import OFFLOADS, relay
from harness.run.store import is_done
from harness.suite.config import load_cell
from tests.records import failed

ROOT = Path(__file__).parents[2]
needs_links = pytest.mark.usefixtures("link_programs")
HARDWARE = [bytes((2, 0, 0, 0, 0, i)) for i in range(3)]


@contextmanager
def relayed(delay_s):
    """Three ends of a relay: sockets that keep frames apart, as an interface does."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in HARDWARE]
    until, end = os.pipe()
    ports = {address: inner for address, (inner, _) in zip(HARDWARE, pairs, strict=True)}
    thread = threading.Thread(target=relay, args=(ports, delay_s, until))
    thread.start()
    try:
        yield [outer for _, outer in pairs]
    finally:
        os.close(end)
        thread.join()
        os.close(until)
        for one in (each for pair in pairs for each in pair):
            one.close()


def frame(to, content):
    return bytes(OFFLOADS) + to + content


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=3000)), min_size=1, max_size=20))
def test_a_relay_keeps_bytes_and_order_of_each_receiver(sent):
    with relayed(0.001) as ends:
        for to, content in sent:
            ends[0].send(frame(HARDWARE[to], content))
        for to in (1, 2):
            expected = [frame(HARDWARE[to], content) for other, content in sent if other == to]
            assert [ends[to].recv(1 << 16) for _ in expected] == expected


def test_a_relay_delays_by_no_less_than_it_should_and_lets_all_that_wait_pass_together():
    with relayed(0.2) as ends:
        start = time.monotonic()
        for size in (1, 1500, 60_000):
            ends[0].send(frame(b"\xff" * 6, bytes(size)))
        for end in ends[1:]:
            end.settimeout(30)
            found = [len(end.recv(1 << 17)) for _ in range(3)]
            assert found == [OFFLOADS + 6 + size for size in (1, 1500, 60_000)], "a frame to all"
        assert time.monotonic() - start >= 0.2
        ends[0].setblocking(False)
        with pytest.raises(BlockingIOError):
            ends[0].recv(1)


SEEN = "import socket; print(*sorted(name for _, name in socket.if_nameindex()), sep=',')"


@needs_links
def test_ranks_see_their_link_only_and_what_was_asked_is_what_is_measured(monkeypatch):
    before = psutil.net_if_addrs().keys()
    with network(RankLink(50_000_000, 0.03), 3, 60) as made:
        for name, value in made.env.items():
            monkeypatch.setenv(name, value)
        assert leader_address() == address(0)
        seen = subprocess.check_output(in_own_namespace(2, [sys.executable, "-c", SEEN]), text=True).strip()
        assert INTERFACE in seen.split(",") and not set(seen.split(",")) & (before - {"lo"})
        delay, rate = made.measurements
        assert (delay.name, delay.unit, rate.name, rate.unit) == ("link_delay_s", "s", "link_bit_s", "bit/s")
        assert min(delay.samples) >= 0.03 and delay.note.startswith("by ")
        assert 1e6 < rate.samples[0] < 100e6, "one connection gives no more than the link has"
        holder = psutil.Process(int(made.namespaces[0].parts[2]))
        assert psutil.net_if_addrs().keys() == before, "nothing is added to the host's own namespace"
    assert not holder.is_running()
    monkeypatch.undo()
    assert leader_address() == "127.0.0.1" and in_own_namespace(1, ["true"]) == ["true"]


HELD = """
import sys, time
from harness.api import RankLink
from harness.launchers.links.network import network
with network(RankLink(None, 0.001), 2, 60) as made:
    print(made.namespaces[0], flush=True)
    time.sleep(600)
"""


@needs_links
def test_nothing_is_left_when_the_harness_is_killed():
    with subprocess.Popen(
        [sys.executable, "-c", HELD], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as parent:
        namespace = Path(parent.stdout.readline().strip())
        inode = namespace.stat().st_ino
        holder = psutil.Process(int(namespace.parts[2]))
        parent.kill()
    holder.wait(30)
    assert inode not in {inode_of(pid) for pid in psutil.pids()}, "no process is in the namespace: it is gone"


def inode_of(pid):
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return None


CELL = {"engine": "offload", "model": {"id": "m"}, "workload": {}, "policy": {"pipeline": 2}}


def test_a_suite_asks_for_links_in_bits_per_second_and_seconds():
    cell = load_cell(CELL | {"limits": {"link_rate": "100Mbit", "link_delay": "10ms"}})
    assert cell.limits == HardwareLimits(link_rate=100_000_000, link_delay_s=0.01)
    assert cell.limits.link == RankLink(100_000_000, 0.01)
    assert load_cell(CELL | {"limits": {"link_delay": 0.1}}).limits.link == RankLink(None, 0.1)
    assert cell.fingerprint() != load_cell(CELL).fingerprint()
    assert load_cell(CELL | {"limits": {"link_rate": "1Gbit"}}, ["limits.link_rate=none"]).limits.link is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"policy": {}, "limits": {"link_rate": "1Gbit"}},
            "limits.link_rate.*policy.pipeline` or `tensor` of 2 or more",
        ),
        ({"launcher": "docker", "limits": {"link_delay": "1ms"}}, "`launcher: process or venv`"),
        ({"limits": {"link_rate": "100MB"}}, "the units are bit, kbit, Mbit, Gbit"),
        ({"limits": {"link_rate": 10}}, "limits.link_rate is 10; it must lie"),
        ({"limits": {"link_delay": "1min"}}, "limits.link_delay is 60.0; it must lie"),
        ({"limits": {"link_delay_s": 1}}, "unknown key 'link_delay_s' in limits; did you mean 'link_delay'"),
        ({"limits": {"link": "1Gbit"}}, "unknown key 'link' in limits; did you mean 'link_"),
    ],
)
def test_links_that_cannot_be_are_refused_in_a_line(changes, words):
    with pytest.raises(HarnessError, match=words) as caught:
        load_cell(CELL | changes)
    assert len(str(caught.value).splitlines()) == 1


def test_links_need_root_and_programs(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Refusal, match=r"only root makes: run it again as root, or leave limits\.link_rate") as caught:
        require_links()
    refused = failed(load_cell(CELL), caught.value.status, caught.value.reason)
    assert not is_done(refused, refused.spec), "the same command as root runs it"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else f"/bin/{name}")
    with pytest.raises(Refusal, match="need tc, which is not there: install iproute2"):
        require_links()


def test_ci_does_not_skip_what_needs_links(monkeypatch, request):
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(pytest.fail.Exception, match="need ip, which is not there: install iproute2"):
        request.getfixturevalue("link_programs")


@needs_links
def test_a_link_is_not_measured_for_longer_than_its_launch_may_take():
    """There and back over this one takes 40 s, and the measurement 25 times that."""
    with pytest.raises(Refusal, match="not done after 1 s") as caught, network(RankLink(None, 20.0), 2, 1.0):
        pass
    assert caught.value.status == "timeout"


def test_the_time_that_links_take_is_the_launchs(monkeypatch, tmp_path):
    """What is left of it is the worker's."""
    left = []

    @contextmanager
    def slow(link, ranks, timeout_s):
        time.sleep(0.2)
        yield Network((Path("rank0"),), ())

    monkeypatch.setattr(process, "network", slow)
    monkeypatch.setattr(process.ProcessSandbox, "_run", lambda self, request, linked: left.append(request.timeout_s))
    exchange = Exchange(tmp_path, tmp_path / "log")
    for link in (None, RankLink(None, 0.1)):
        process.ProcessSandbox().run(WorkerRequest(CalibrateHost(tmp_path), exchange, 10.0, ranks=2, link=link))
    assert left[0] == 10 and left[1] <= 9.8


def test_a_kernel_that_forbids_links_is_named_in_a_line(monkeypatch):
    """The process that would make them prints why it cannot."""
    told = [sys.executable, "-c", 'print(\'{"problem": "[Errno 1] Operation not permitted"}\')']
    start = subprocess.Popen
    monkeypatch.setattr(links, "require_links", lambda: None)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: start(told, **options))
    with (
        pytest.raises(Refusal, match=r"cannot be made \(\[Errno 1\] Operation not permitted\)"),
        network(RankLink(None, 0.0), 2, 60),
    ):
        pass


def test_an_engine_that_nobody_gave_links_refuses_them(tmp_path):
    """Such as in `harness generate`, which starts ranks without a launcher."""
    loading = pytest.importorskip("engines.offload.engine")
    from engines.adapters.fake import MODEL
    from harness.api import Job, OffloadPolicy

    with closing(loading.OffloadEngine()) as engine, pytest.raises(UnsupportedError, match="only `harness run`"):
        engine.load(MODEL, OffloadPolicy(pipeline=2), HardwareLimits(link_rate=10**8), Job(tmp_path, tmp_path, 8, 8))
