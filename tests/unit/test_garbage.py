"""The garbage collector leaves alone what existed when it was told so."""

import gc
import subprocess
import sys
import weakref

from harness.common.garbage import collect_rarely, leave_what_exists


class Ring:
    def __init__(self):
        self.itself = self


def test_garbage_goes_and_what_stays_is_not_looked_at_again():
    gone, stays = weakref.ref(Ring()), Ring()
    try:
        leave_what_exists()
        assert gone() is None
        assert not any(each is stays for each in gc.get_objects())
        later = weakref.ref(Ring())
        gc.collect()
        assert later() is None
        often = gc.get_threshold()
        collect_rarely()
        assert gc.get_threshold()[0] > 10 * often[0]
        leave_what_exists()
        assert gc.get_threshold() == often
    finally:
        gc.unfreeze()


def test_a_command_does_not_search_what_it_imported_neither_then_nor_when_it_ends():
    code = (
        "import atexit, gc, sys; sys.argv = ['harness', 'ls', 'suites'];"
        "atexit.register(lambda: print(gc.get_threshold()[0], len(gc.get_objects()), file=sys.stderr));"
        "from harness.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after, looked_at = map(int, done.stderr.split())
    assert after >= 50_000
    assert looked_at < 1000
