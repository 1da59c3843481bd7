"""The shim between a command and libc (shim.c): built once, told by environment variables what to do."""

import hashlib
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from harness.common.compiler import compiler_command

SOURCE = Path(__file__).with_name("shim.c")
#: Kinds of calls that change files: each may meet a full disk.
WRITES = "open,write,sync,rename,mkdir,truncate"
READS = "read"
_STATE_BYTES = 4096


class NoShimError(Exception):
    """The shim cannot be built here; the message says why."""


def built() -> Path:
    """The shared library. Raises NoShimError."""
    compiler = compiler_command()
    if not compiler:
        raise NoShimError("there is no compiler for the shim")
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    library = Path(__file__).parents[2] / ".pytest_cache" / f"shim-{digest}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        part = library.with_suffix(f".{os.getpid()}")
        flags = ["-O1", "-shared", "-fPIC", "-U_FORTIFY_SOURCE"]
        done = subprocess.run(
            [*compiler, "-x", "c", *flags, str(SOURCE), "-o", str(part)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise NoShimError(f"the shim does not compile: {done.stderr.strip().splitlines()[:1]}")
        part.rename(library)
    return library


@dataclass(frozen=True)
class Fault:
    """What happens to the calls of kinds `calls` on files below `folder`, of all processes of a command together.

    Call number `at` (0: none; they are counted), and with `lasting` each one after it, fails with errno `how`, moves
    only half its bytes (`short`), finds its file cut to half (`cut`) or is the process's last (`kill`). After
    `clock_at` looks at the wall clock it jumps by `clock_jump` seconds. With `log` all calls that change files are
    recorded there.
    """

    folder: Path
    calls: str = WRITES
    at: int = 0
    how: int | str = ""
    lasting: bool = False
    clock_at: int = 0
    clock_jump: int = 0
    log: Path | None = None


@dataclass
class Shim:
    """The shim of one command; `state` is a file outside of the fault's folder."""

    fault: Fault
    state: Path
    library: Path = field(default_factory=built)

    def environment(self) -> dict[str, str]:
        """Variables of the command."""
        self.state.write_bytes(bytes(_STATE_BYTES))
        fault = self.fault
        told = {
            "STATE": self.state, "FOLDER": fault.folder.resolve(), "CALLS": fault.calls, "AT": fault.at,
            "HOW": fault.how, "CLOCK_AT": fault.clock_at, "CLOCK_JUMP": fault.clock_jump,
        }  # fmt: skip
        told |= {"LASTING": 1} if fault.lasting else {}
        told |= {"LOG": fault.log} if fault.log is not None else {}
        return {"LD_PRELOAD": str(self.library)} | {f"FAULTS_{name}": str(value) for name, value in told.items()}

    @property
    def calls(self) -> int:
        """How many calls there were."""
        return int.from_bytes(self.state.read_bytes()[:8], "little")

    @property
    def what(self) -> str:
        """The call that was hit, in words."""
        return self.state.read_bytes()[16:].split(b"\0")[0].decode() or "no call was hit"
