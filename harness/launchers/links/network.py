"""The network of one launch's ranks: made by a process that lives as long, measured, and entered by the ranks."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.api import Measurement, RankLink, Refusal
from harness.common import rank_network
from harness.launchers.links.rates import LinkRates, measure

#: Programs that make a network, and that enter one.
_PROGRAMS = ("ip", "tc", "nsenter")
#: How long the process may take to end once its standard input has, in seconds.
_END_S = 5.0
_OR_LEAVE_OUT = "or leave limits.link_rate and link_delay out"


@dataclass(frozen=True)
class Network:
    """Ranks' namespaces, by rank, and what was measured between the first two."""

    namespaces: Sequence[Path]
    measurements: tuple[Measurement, ...]

    @property
    def env(self) -> Mapping[str, str]:
        """What the engine's process must be told."""
        return rank_network.told(self.namespaces)

    def wrap(self, command: list[str]) -> list[str]:
        """The command line that starts `command` where rank 0 is."""
        return rank_network.in_namespace(self.namespaces[0], command)


def require_links() -> None:
    """Raises Refusal where this user or this machine cannot make links between ranks. That says nothing of the engine:
    the cell runs when the suite is run again with what was missing."""
    if os.geteuid() != 0:
        raise _refusal("links between ranks are network namespaces, which only root makes: run it again as root")
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        raise _refusal(f"links between ranks need {missing[0]}, which is not there: install iproute2 and util-linux")


@contextmanager
def network(link: RankLink, ranks: int, timeout_s: float) -> Iterator[Network]:
    """Links of this rate and delay between `ranks` namespaces, for as long as the context lasts.

    The kernel removes them when the processes in them are gone and their own, which ends with this one. Raises Refusal
    where they cannot be made, or cannot be measured within `timeout_s`.
    """
    require_links()
    deadline = time.monotonic() + timeout_s
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "harness.launchers.links.process", str(ranks), str(link.rate or 0),
         repr(link.delay_s)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": _code()}, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        told = json.loads(process.stdout.readline() or '{"problem": "their process died"}')
        if "problem" in told:
            raise _refusal(f"links between ranks cannot be made ({told['problem']}): allow network namespaces here")
        spaces = [Path(name) for name in told["namespaces"]]
        try:
            rates = measure(spaces[0], spaces[1], rank_network.address(1), deadline)
        except OSError as exc:
            if time.monotonic() >= deadline:
                raise Refusal("timeout", f"not done after {timeout_s:.0f} s, in which links were measured") from exc
            raise Refusal("error", f"the links between ranks carry nothing ({exc}): try again") from exc
        yield Network(spaces, _measurements(rates, told["way"]))
    finally:
        process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _measurements(rates: LinkRates, way: str) -> tuple[Measurement, ...]:
    """What was measured before the job, for the record."""
    return (
        Measurement("link_delay_s", "s", tuple(round(delay, 6) for delay in rates.delays_s), "load", f"by {way}"),
        Measurement("link_bit_s", "bit/s", (round(rates.bits_s),), "load", "one connection of TCP"),
    )


def _code() -> str:
    """Where the process finds this code, and what else this one finds by PYTHONPATH."""
    return os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])


def _refusal(problem: str) -> Refusal:
    return Refusal("error", f"{problem}, {_OR_LEAVE_OUT}")
