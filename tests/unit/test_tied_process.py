"""Programs that are started so end with the process that started them, and so do those that they started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engines.common.tied_process import ending_with_this_thread, run_tied

#: Starts a program as a compiler's driver does, which starts another and waits; both write their ids.
DRIVER = "echo $$ > ids; sh -c 'echo $$ >> ids; sleep 600' & wait"
TIED = "from pathlib import Path; from engines.common.tied_process import run_tied\n"
START = (
    "import time; from pathlib import Path; from engines.common.tied_process import start_tied\n"
    f"start_tied(['sh', '-c', {DRIVER!r}], Path('log'), ['touch', 'ended']); time.sleep(600)"
)
HEIR = (
    "import subprocess; from engines.common.tied_process import ending_with_this_thread\n"
    "subprocess.run(ending_with_this_thread(['/bin/sh', '-c', 'echo $$ > ids; exec sleep 600']))"
)


def ids(folder, count):
    """The ids that programs have written, once there are so many."""
    deadline = time.monotonic() + 60
    while True:
        found = (folder / "ids").read_text().split() if (folder / "ids").exists() else []
        if len(found) == count:
            return [int(pid) for pid in found]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(pids):
    """Whether these processes end; a zombie has."""
    deadline = time.monotonic() + 20
    while any(_runs(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def start(script, folder):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen([sys.executable, "-c", script], cwd=folder, env=environment)


@pytest.mark.parametrize(
    ("script", "count"),
    [(f"{TIED}run_tied(['sh', '-c', {DRIVER!r}], Path('.'), 600)", 2), (HEIR, 1)],
)
def test_kill_minus_nine_ends_them_too(tmp_path, script, count):
    process = start(script, tmp_path)
    pids = ids(tmp_path, count)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert gone(pids)


def test_what_no_signal_reaches_is_ended_by_a_last_command(tmp_path):
    process = start(START, tmp_path)
    pids = ids(tmp_path, 2)
    process.kill()
    process.wait()
    assert gone(pids) and (tmp_path / "ended").exists()


def test_a_program_that_takes_too_long_ends_with_what_it_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        run_tied(["sh", "-c", DRIVER], tmp_path, timeout_s=5)
    assert gone(ids(tmp_path, 2))


def test_what_a_program_says_and_its_exit_code_come_back(tmp_path):
    run_tied(["sh", "-c", "touch $TMPDIR/made"], tmp_path, 60)
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run_tied(["sh", "-c", "echo a; echo error: b >&2; exit 3"], tmp_path, 60)
    assert caught.value.returncode == 3
    assert caught.value.stderr == b"a\nerror: b\n"
    assert [p.name for p in tmp_path.iterdir()] == ["made"], "its temporary files are where they were asked for"


def test_a_program_that_is_to_end_with_its_parent_is_the_program_itself():
    script = ["/bin/sh", "-c", "echo $$; echo $1", "sh", "word"]
    process = subprocess.Popen(ending_with_this_thread(script), stdout=subprocess.PIPE, text=True)
    assert process.communicate()[0].split() == [str(process.pid), "word"]
