"""What a launcher and its worker agree on: how the worker is started, the files they exchange, its exit code."""

from __future__ import annotations

#: Run by the sandbox's interpreter with the exchange folder as its only argument.
WORKER = "harness.run.worker"
#: In the exchange folder: what the launcher writes; what the worker appends; what it writes once, by rename.
REQUEST, EVENTS, RESULT = "request.json", "events.jsonl", "result.json"
#: Exit code of a worker that found no room on the disk for its result.
EXIT_DISK_FULL = 73  # EX_CANTCREAT of sysexits.h
