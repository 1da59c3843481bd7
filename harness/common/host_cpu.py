"""What the first processor of this host says of itself."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

#: How the names of instruction sets begin that compilers use, in /proc/cpuinfo of x86 and of ARM.
_INSTRUCTIONS = ("sse", "avx", "amx", "fma", "f16c", "bmi", "asimd", "sve", "sme", "i8mm", "bf16")


def cpuinfo() -> dict[str, str]:
    """The first processor's fields in /proc/cpuinfo."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if not line.strip():
                break
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
    return fields


def cpu_flags() -> list[str]:
    """The features that the processor reports."""
    fields = cpuinfo()
    return fields.get("flags", fields.get("Features", "")).split()


def instruction_sets(flags: Iterable[str]) -> list[str]:
    """Those of `flags` that a compiled program may need, sorted."""
    return sorted(flag for flag in set(flags) if flag.startswith(_INSTRUCTIONS))
