"""What a suite requires of a machine."""

import shutil

from harness.api import HardwareRequirements, SuiteSpec
from harness.hardware import provenance, requirements
from harness.hardware.requirements import check_requirements


def test_what_the_cache_holds_counts_as_free_disk(tmp_path, monkeypatch):
    """An earlier run has prepared the models that the space is for."""
    suite = SuiteSpec("s", "", (), requires=HardwareRequirements(disk_free=3 << 20))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9 << 20, 7 << 20, 2 << 20))
    [lacking] = check_requirements(suite, tmp_path / "cache")
    assert lacking == "free disk: 0.0 GiB required, 0.0 GiB free at the cache"
    assert check_requirements(suite, tmp_path / "cache", resuming=True) == []
    (tmp_path / "cache" / "models").mkdir(parents=True)
    (tmp_path / "cache" / "models" / "weights").write_bytes(bytes((1 << 20) - 1))
    assert check_requirements(suite, tmp_path / "cache"), "a byte too few"
    (tmp_path / "cache" / "models" / "weights").write_bytes(bytes(1 << 20))
    assert check_requirements(suite, tmp_path / "cache") == []


def test_a_device_and_cores_that_are_missing_are_told(tmp_path, monkeypatch):
    suite = SuiteSpec("s", "", (), requires=HardwareRequirements(device_memory=4 << 30, cores=3))
    monkeypatch.setattr(provenance, "gpus", lambda: [{"memory": "2048 MiB"}])
    monkeypatch.setattr(requirements, "usable_cpus", lambda: 2)
    told = ["device memory: 4.0 GiB required, 2.0 GiB present", "cores: 3 required, 2 usable"]
    assert check_requirements(suite, tmp_path) == told
    monkeypatch.setattr(provenance, "gpus", lambda: [{"memory": "2048 MiB"}, {"memory": "4096 MiB"}])
    monkeypatch.setattr(requirements, "usable_cpus", lambda: 3)
    assert check_requirements(suite, tmp_path) == []


def test_a_device_that_shares_the_hosts_memory_has_enough(tmp_path, monkeypatch):
    suite = SuiteSpec("s", "", (), requires=HardwareRequirements(device_memory=4 << 30))
    monkeypatch.setattr(provenance, "gpus", lambda: [{"memory": "[N/A]"}])
    assert check_requirements(suite, tmp_path) == []


def test_a_limit_of_this_process_counts_as_the_machines_memory(tmp_path, monkeypatch):
    suite = SuiteSpec("s", "", (), requires=HardwareRequirements(host_memory=2 << 30))
    monkeypatch.setattr(requirements, "own_limit", lambda: 1 << 30)
    assert check_requirements(suite, tmp_path) == ["host memory: 2.0 GiB required, 1.0 GiB present"]
    monkeypatch.setattr(requirements, "own_limit", lambda: 2 << 30)
    assert check_requirements(suite, tmp_path) == []
