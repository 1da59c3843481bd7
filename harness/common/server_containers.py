"""Containers that an engine starts beside its worker: no signal to the worker's processes reaches them."""

import re
import subprocess
import uuid
from contextlib import suppress
from pathlib import Path

_SUFFIX, _REMOVE_S = ".container", 60.0
_NAME = re.compile(r"offload-harness-[0-9a-f]{12}")


def named_container(scratch: Path) -> str:
    """A new name, kept in the engine's scratch folder before anything is started."""
    name = f"offload-harness-{uuid.uuid4().hex[:12]}"
    (scratch / f"{name}{_SUFFIX}").touch()
    return name


def remove_containers(scratch: Path) -> None:
    """Removes those that are named there, if they still are. A container engine that does not answer fails nothing."""
    for name in (path.stem for path in scratch.glob(f"*{_SUFFIX}")):
        if _NAME.fullmatch(name):
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    ["docker", "rm", "--force", name], stdin=subprocess.DEVNULL, capture_output=True,
                    timeout=_REMOVE_S, check=False,
                )  # fmt: skip
