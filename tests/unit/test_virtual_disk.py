"""The disk in virtual time: every transfer in the first idle time after it is ready."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from engines.planning.virtual_disk import VirtualDisk

transfers = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12), st.booleans()), max_size=30)


class Recorded:
    """In the place of a timeline: the whole seconds of the work that was added."""

    def __init__(self):
        self.seconds = []

    def add(self, lane, name, start, end):
        assert int(start) == start and int(end) == end
        self.seconds += range(int(start), int(end))


@given(transfers)
def test_a_transfer_takes_the_first_idle_seconds_after_it_is_ready(moves):
    busy, recorded = set(), Recorded()
    disk = VirtualDisk(read=1.0, write=0.5, timeline=recorded)
    for ready, nbytes, writes in moves:
        seconds = 2 * nbytes if writes else nbytes
        idle = (second for second in itertools.count(ready) if second not in busy)
        expected = list(itertools.islice(idle, seconds))
        move = disk.write if writes else disk.read
        assert move("disk", "x", nbytes, ready) == (expected[-1] + 1 if expected else ready)
        busy.update(expected)
        assert recorded.seconds[len(busy) - len(expected) :] == expected
    assert disk.free == max(busy, default=-1) + 1
