"""Probes and provenance see what really happened, on a device too; records name no folder of this machine."""

import mmap
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.common.buffers import direct_buffer
from harness.common.disk_rate import sequential_read_rates
from harness.hardware import provenance
from harness.probes import counters, energy
from harness.probes.counters import CpuProbe, DiskProbe
from harness.probes.energy import EnergyProbe
from harness.probes.family import family
from harness.probes.gpu import GpuProbe
from harness.probes.memory import MemoryProbe


def test_memory_probe_sees_a_short_peak():
    with MemoryProbe(period_s=0.01) as probe:
        block = mmap.mmap(-1, 200 << 20)
        for i in range(0, len(block), 4096):
            block[i] = 1
        block.close()
    anonymous = probe.measurements("load")[0]
    assert (anonymous.name, anonymous.unit, anonymous.phase) == ("rss_anon_bytes", "bytes", "load")
    # a shared anonymous mapping counts as shared memory, reported with files
    total = [a + f for a, f in zip(*(m.samples for m in probe.measurements("load")), strict=True)]
    assert max(total) - total[-1] > 100 << 20


def test_disk_probe_counts_what_reached_the_disk(tmp_path):
    with DiskProbe() as probe, (tmp_path / "file").open("wb") as file:
        file.write(os.urandom(8 << 20))
        os.fsync(file.fileno())
    written = {m.name: m.samples for m in probe.measurements("run")}["write_bytes"]
    assert not written or written[0] >= 8 << 20  # empty where this file system or kernel does not account it


def reads_directly(path) -> bool:
    """Whether the file system takes O_DIRECT."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        with direct_buffer(1 << 20) as buffer:
            return os.preadv(descriptor, [buffer], 0) > 0
    except OSError:
        return False
    finally:
        os.close(descriptor)


def test_read_rates_are_of_two_walks_or_none_where_there_is_nothing_to_read(tmp_path):
    assert sequential_read_rates(tmp_path) == []
    (tmp_path / "big").write_bytes(os.urandom(4 << 20))
    rates = sequential_read_rates(tmp_path, seconds=2)  # the file ends first
    assert len(rates) == (2 if reads_directly(tmp_path / "big") else 0)
    assert all(rate > 1e6 for rate in rates)


def test_energy_wraps_is_null_without_counters_and_zero_where_none_was_spent(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    with EnergyProbe() as probe:
        pass
    assert probe.measurements("run")[0].samples == ()
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (tmp_path / "intel-rapl:0:0").mkdir()  # a part of the package: counting it too would count twice
    (tmp_path / "intel-rapl:0:0" / "energy_uj").write_text("5")
    (zone / "name").write_text("package-0\n")
    platform = tmp_path / "intel-rapl:1"  # of client machines, which has the package's joules too
    platform.mkdir()
    (platform / "name").write_text("psys\n")
    (platform / "energy_uj").write_text("4000000")
    (zone / "energy_uj").write_text("9000000")
    with EnergyProbe() as probe:
        pass
    assert figures(probe) == {"energy_j": ("J", (0.0,), "CPU packages (RAPL)")}, "the counter did not wrap"
    (zone / "max_energy_range_uj").write_text("10000000")
    with EnergyProbe() as probe:
        (zone / "energy_uj").write_text("1000000")
    assert probe.measurements("run")[0].samples == (2.0,)
    (zone / "energy_uj").write_text("0")
    with EnergyProbe(period_s=3600.0) as probe:
        for value in (9_000_000, 8_000_000, 7_000_000):  # wraps twice
            (zone / "energy_uj").write_text(str(value))
            probe._sample()  # as its thread does every period
    assert probe.measurements("run")[0].samples == (27.0,)


@given(st.text(alphabet="ab/ .'", max_size=40))
def test_scrub_never_leaves_a_known_folder(text):
    scrubbed = provenance.scrub(text.replace("a", "/srv/x/cache"), {"/srv/x/cache": "$CACHE", "/srv/x": "$OUT"})
    for token in scrubbed.replace("'", " ").split():
        assert not f"{token}/".startswith("/srv/x/cache/")


def test_scrub_replaces_the_longest_folder_first_and_only_whole_names():
    places = {"/a/b": "$B", "/a": "$A"}
    assert provenance.scrub("/a/b/c /a/d '/a/b' /ab", places) == "$B/c $A/d '$B' /ab"


def test_git_state_tells_commit_and_changes(tmp_path):
    if provenance.git_state(tmp_path) is not None:
        pytest.skip("the temporary folder lies inside a repository")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.invalid"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "f").write_text("1")
    subprocess.run([*git, "add", "f"], check=True)
    subprocess.run([*git, "commit", "-qm", "m"], check=True)
    assert provenance.git_state(tmp_path)["dirty"] is False
    (tmp_path / "f").write_text("2")
    state = provenance.git_state(tmp_path)
    assert state["dirty"] is True and len(state["commit"]) == 40
    installed = tmp_path / "venv" / "package"  # whose code is not of that commit
    installed.mkdir(parents=True)
    (installed / "module.py").touch()
    assert provenance.git_state(installed) is None


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("printf ok", "ok"),
        ("printf '\\377\\376'", "\ufffd\ufffd"),
        ("printf partly; exit 3", None),
        ("kill -9 $$", None),
        ("yes", None),
        ("printf begun; sleep 60", None),
        ("printf begun; sleep 60 & exit 0", "begun"),
    ],
)
def test_no_tool_of_this_machine_stops_the_harness(script, said, monkeypatch):
    monkeypatch.setattr(provenance, "_TOOL_S", 0.3)
    assert provenance.said_by(["sh", "-c", script]) == said
    assert provenance.said_by(["/nowhere/tool"]) is None


def test_machine_facts_are_there_and_stable():
    facts = provenance.machine()
    assert facts["cores_usable"] >= 1
    assert facts["ram_bytes"] > 1 << 28
    assert provenance.machine_key() == provenance.machine_key()


def test_cpu_probe_tells_own_work_from_others():
    with CpuProbe() as probe:
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
    own = {m.name: m.samples for m in probe.measurements("run")}["cpu_own_s"]
    assert not own or own[0] >= 0.25


def test_a_child_that_still_runs_is_no_disturbance():
    """Engines with processes of their own, such as vLLM's, would otherwise disturb themselves."""
    burn = "import sys, time\nwhile time.process_time() < 0.5: pass\nprint(flush=True); sys.stdin.read()"
    with CpuProbe() as probe:
        child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
    own = {m.name: m.samples for m in probe.measurements("run")}["cpu_own_s"]
    child.communicate()
    assert not own or own[0] >= 0.45


class Kernel:
    """Stands for `Path` in counters: the text of a file of /proc by its path; one without a text is not there."""

    def __init__(self, **texts):
        self.texts = {f"/proc/{name.replace('_', '/')}": text for name, text in texts.items()}

    def __call__(self, path):
        self.path = path
        return self

    def __truediv__(self, name):
        return self(f"{self.path}/{name}")

    def glob(self, pattern):
        """The processes, where all of /proc is asked for."""
        if (self.path, pattern) == ("/proc", "[0-9]*"):
            for path in sorted(self.texts):
                if re.fullmatch(r"/proc/\d+/stat", path):
                    yield self(path.removesuffix("/stat"))

    def read_text(self):
        if self.path not in self.texts:
            raise FileNotFoundError(self.path)
        return self.texts[self.path]


def figures(probe):
    return {m.name: (m.unit, m.samples, m.note) for m in probe.measurements("run")}


def test_cpu_seconds_are_by_whose_they_are(monkeypatch):
    """User, nice, system and both interrupts are work; idle, waiting and guests are not, stolen time counts apart."""
    kernel = Kernel(stat="cpu  100 10 200 5000 600 3 7 50 900 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")

    def spent(pid, *ticks, flags=0x400040):
        kernel.texts[f"/proc/{pid}/stat"] = (
            f"{pid} (a name) of a) R 0 0 0 0 0 {flags} 0 0 0 0 {' '.join(map(str, ticks))} 0 0"
        )

    monkeypatch.setattr(counters, "Path", kernel)
    monkeypatch.setattr(counters.os, "sysconf", {"SC_CLK_TCK": 10}.get)
    monkeypatch.setattr(counters, "family", lambda: [7, 8])
    spent(7, 10, 20, 30, 40)
    spent(9, 500, 500, 0, 0)  # somebody else's
    spent(12, 5, 50, 0, 0, flags=0x4208060)  # a thread of the kernel
    with CpuProbe() as probe:
        kernel.texts["/proc/stat"] = "cpu  300 20 400 9000 900 13 27 90 999 0\ncpu0 2 2 2 2 2 2 2 2 2 2\n"
        spent(7, 15, 31, 50, 80)
        spent(8, 3, 4, 0, 0)  # a child that was started meanwhile
        spent(12, 6, 90, 0, 0, flags=0x4208060)
        spent(13, 1, 2, 0, 0, flags=0x200000)
    # 200 + 10 + 200 + 10 + 20 ticks of work: 5 + 11 + 20 + 40 its own, 7 its child's, 41 + 3 of the kernel's threads
    assert figures(probe) == {
        "cpu_own_s": ("s", (8.3,), ""), "cpu_kernel_s": ("s", (4.4,), ""), "cpu_other_s": ("s", (31.3,), ""),
        "cpu_steal_s": ("s", (4.0,), ""),
    }  # fmt: skip
    with CpuProbe() as probe:  # the process's clock went on, that of the host has not ticked yet; a kernel thread ended
        spent(7, 25, 31, 50, 80)
        del kernel.texts["/proc/12/stat"]
    assert figures(probe)["cpu_other_s"] == figures(probe)["cpu_kernel_s"] == ("s", (0.0,), "")


def test_counters_that_are_not_there_have_no_samples_and_a_note(monkeypatch):
    monkeypatch.setattr(counters, "Path", Kernel())
    with CpuProbe() as cpu, DiskProbe() as disk:
        pass
    assert set(figures(cpu).values()) == {("s", (), "no /proc/stat")}
    assert set(figures(disk).values()) == {("bytes", (), "no /proc/self/io")}


def test_bytes_are_those_between_both_ends(monkeypatch):
    kernel = Kernel(**{"7_io": "rchar: 1\nread_bytes: 100\nwrite_bytes: 7\n"})
    monkeypatch.setattr(counters, "Path", kernel)
    monkeypatch.setattr(counters, "family", lambda: [7, 8])
    with DiskProbe() as probe:
        kernel.texts["/proc/7/io"] = "rchar: 9\nread_bytes: 350\nwrite_bytes: 7\n"
        kernel.texts["/proc/8/io"] = "rchar: 9\nread_bytes: 30\nwrite_bytes: 0\n"
    assert figures(probe) == {"read_bytes": ("bytes", (280.0,), ""), "write_bytes": ("bytes", (0.0,), "")}


def test_a_child_s_memory_work_and_bytes_count_while_it_lives(tmp_path):
    script = "import sys; held = bytearray(60 << 20); print(sum(range(10**7)), flush=True); sys.stdin.read()"
    others = family()  # that an earlier test in this process left
    with MemoryProbe(period_s=0.01) as memory, CpuProbe() as cpu:
        child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
        time.sleep(0.05)
        assert set(family()) - set(others) == {child.pid}
    child.communicate()
    anonymous = memory.measurements("run")[0].samples
    assert anonymous[-1] - anonymous[0] > 55 << 20
    own = figures(cpu)["cpu_own_s"][1]
    assert not own or own[0] > 0.1


class Nvml:
    """A driver with one device, whose counters go on with every reading; of bytes it tells 32 bits, if `wraps`."""

    NVML_FI_DEV_PCIE_COUNT_TX_BYTES, NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 197, 198
    NVML_VALUE_TYPE_UNSIGNED_INT = 1

    def __init__(self, pid=None, counts=True, wraps=False):
        self.pid, self.counts, self.wraps = pid, counts, wraps
        self.reads = self.looked = 0
        self.asked = None

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByIndex(self, index):
        self.asked = index
        return "device"

    nvmlDeviceGetHandleByUUID = nvmlDeviceGetHandleByIndex

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        self.looked += 1
        if self.looked == 1:  # it has no context yet
            return []
        return [SimpleNamespace(pid=1, usedGpuMemory=7), SimpleNamespace(pid=self.pid, usedGpuMemory=3 << 30)]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=5 << 30)

    def nvmlDeviceGetFieldValues(self, handle, fields):
        self.reads += 1
        found = []
        for each in ({197: 1 << 30, 198: 3 << 30}[field] for field in fields):
            whole = each * self.reads
            value = SimpleNamespace(ullVal=whole, uiVal=whole % (1 << 32))
            found.append(SimpleNamespace(nvmlReturn=0 if self.counts else 3, valueType=int(self.wraps), value=value))
        return found

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return 2500 * self.reads


def measured(monkeypatch, nvml):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with GpuProbe(period_s=0.01) as probe:
        while nvml is not None and nvml.looked < 6:
            time.sleep(0.01)
    return {m.name: m for m in probe.measurements("generate")}


@pytest.mark.parametrize("wraps", [False, True])
def test_it_tells_memory_bytes_and_energy(monkeypatch, wraps):
    """Counters of 32 bits have wrapped several times by then."""
    nvml = Nvml(pid=os.getpid(), wraps=wraps)
    found = measured(monkeypatch, nvml)
    rounds = nvml.reads - 1
    assert rounds > 2
    assert set(found["device_memory_bytes"].samples) == {float(3 << 30)}
    assert found["device_memory_bytes"].note == "of this process"
    assert found["device_received_bytes"].samples == (float(rounds * (3 << 30)),)
    assert found["device_sent_bytes"].samples == (float(rounds << 30),)
    assert found["device_energy_j"].samples == pytest.approx((2.5 * rounds,))


def test_counters_the_driver_lacks_are_null_with_a_note(monkeypatch):
    found = measured(monkeypatch, Nvml(pid=-1, counts=False))
    assert set(found["device_memory_bytes"].samples) == {float(5 << 30)}
    assert "of all processes" in found["device_memory_bytes"].note
    assert found["device_sent_bytes"].samples == ()
    assert found["device_sent_bytes"].note == "the driver does not count it"


@pytest.mark.parametrize(("visible", "asked"), [("2,3", 2), ("GPU-12ab", "GPU-12ab"), ("", 0)])
def test_it_watches_the_device_that_cuda_would_take(monkeypatch, visible, asked):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = Nvml(pid=os.getpid())
    measured(monkeypatch, nvml)
    assert nvml.asked == asked


def test_without_nvml_everything_is_null(monkeypatch):
    found = measured(monkeypatch, None)
    assert len(found) == 4
    assert all(not m.samples and "nvidia-ml-py" in m.note for m in found.values())
