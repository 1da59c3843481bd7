"""The lanes: what each does with a bench."""

from collections.abc import Callable, Mapping

from tests.load.bench import Bench
from tests.load.bodies import bodies
from tests.load.connections import connections
from tests.load.crowd import crowd
from tests.load.overhead import overhead
from tests.load.slow_reader import slow_reader

LANES: Mapping[str, Callable[[Bench], None]] = {
    lane.__name__: lane for lane in (crowd, overhead, connections, bodies, slow_reader)
}
