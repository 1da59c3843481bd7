"""What a suite requires of a machine."""

import shutil

from harness.api import HardwareRequirements, SuiteSpec
from harness.hardware.requirements import check_requirements


def test_what_the_cache_holds_counts_as_free_disk(tmp_path, monkeypatch):
    """An earlier run has prepared the models that the space is for."""
    suite = SuiteSpec("s", "", (), requires=HardwareRequirements(disk_free=3 << 20))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9 << 20, 7 << 20, 2 << 20))
    [lacking] = check_requirements(suite, tmp_path / "cache")
    assert lacking == "free disk: 0.0 GiB required, 0.0 GiB free at the cache"
    assert check_requirements(suite, tmp_path / "cache", resuming=True) == []
    (tmp_path / "cache" / "models").mkdir(parents=True)
    (tmp_path / "cache" / "models" / "weights").write_bytes(bytes(1 << 20))
    assert check_requirements(suite, tmp_path / "cache") == []
