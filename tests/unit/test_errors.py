"""Errors of Python and of the system as the command line tells them, and a system that tells little itself."""

import errno
import os
from pathlib import Path

import psutil
import pytest

from harness.api import HarnessError
from harness.cli.errors import EXIT_USAGE, one_line_errors
from harness.common import host_memory
from harness.common.compiler import compiler_command
from harness.hardware import calibration, provenance


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), "weights"),
        ImportError("libblas.so.3: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
    ],
)
def test_want_of_memory_is_one_line(error, capsys):
    with pytest.raises(SystemExit) as ended, one_line_errors():
        try:
            raise error
        except Exception as exc:
            raise ImportError("numpy says much\nmore") from exc
    assert ended.value.code == EXIT_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert "out of memory" in line and "ulimit -v" in line


def test_a_home_that_is_unknown_is_one_line(capsys):
    with pytest.raises(SystemExit) as ended, one_line_errors():
        Path("~nobody-of-this-name/model").expanduser()
    assert ended.value.code == EXIT_USAGE and "write the path in full" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ImportError("no module"), RuntimeError("a mistake"), KeyError("name")])
def test_a_mistake_of_ours_keeps_its_traceback(error):
    with pytest.raises(type(error)), one_line_errors():
        raise error


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "no", "/proc/meminfo"), KeyError(b"MemTotal:")])
def test_a_machine_without_proc_has_its_memory_from_the_c_library(error, monkeypatch):
    known = host_memory.total_memory()

    def unknown(*args, **kwargs):
        raise error

    for name in ("virtual_memory", "swap_memory", "cpu_count"):
        monkeypatch.setattr(psutil, name, unknown)
    assert host_memory.total_memory() == pytest.approx(known, rel=0.05)
    assert 0 < host_memory.free_memory() <= known
    machine = provenance.machine()
    assert machine["ram_bytes"] > 0 and machine["swap_bytes"] is None and machine["cores_physical"] is None


def test_a_compiler_with_an_unclosed_quote_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "g++ 'oops")
    with pytest.raises(HarnessError, match="CXX"):
        compiler_command()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EFBIG, "File too large"), MemoryError()]
)
def test_a_disk_or_memory_that_is_too_small_to_calibrate_is_one_line(error, monkeypatch, tmp_path):
    class Full:
        def measure(self, *args):
            raise error

    monkeypatch.setattr("harness.registry.calibrator", Full)
    with pytest.raises(HarnessError, match="cannot be measured"):
        calibration.calibrate(tmp_path / "profile.yaml", True, tmp_path, print)
