"""What a launcher and its worker agree on: how the worker is started, the files they exchange, its exit code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from harness.api import Work

#: Run by the sandbox's interpreter with the exchange folder as its only argument.
WORKER = "harness.run.worker"
#: In the exchange folder: what the launcher writes; what the worker appends; what it writes once, by rename.
REQUEST, EVENTS, RESULT = "request.json", "events.jsonl", "result.json"
#: Exit code of a worker that found no room on the disk for its result.
EXIT_DISK_FULL = 73  # EX_CANTCREAT of sysexits.h
#: The class of each kind of work.
WORK: Mapping[str, type[Work]] = {kind.kind: kind for kind in get_args(Work)}
