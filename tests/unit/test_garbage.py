"""The garbage collector leaves alone what existed when it was told so."""

import gc
import weakref

from harness.common.garbage import leave_what_exists


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
    finally:
        gc.unfreeze()
