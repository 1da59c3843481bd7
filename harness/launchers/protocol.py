"""What a launcher and its worker agree on: how the worker is started, the files they exchange, its exit code.

A cell on its way from `harness run` to an engine, and what each hand-over adds:

    RunSpec        a cell as the suite states it
    Step           which repeat of it (harness.run.steps)
    LaunchRequest  its batch settled, its model on this machine, the folders and the log of the launch
    WorkerRequest  the work as a worker does it, the limit of memory with the engine's idle footprint, threads, device
    request.json   the kind of work and its data, in the sandbox's paths, with the parent's pid and a time limit
    Engine.load    the model, policy and limits of the spec, and a Job: scratch folder and lengths of sequences

Back come a WorkerResult (result.json), an Outcome (with what the kernel counted), a LaunchResult (judged), a RunRecord.
"""

from collections.abc import Mapping
from typing import get_args

from harness.api import Work

#: Run by the sandbox's interpreter with the exchange folder as its only argument.
WORKER = "harness.run.worker"
#: In the exchange folder: what the launcher writes; what the worker appends; what it writes once, by rename.
REQUEST, EVENTS, RESULT = "request.json", "events.jsonl", "result.json"
#: Exit code of a worker that found no room on the disk for its result.
EXIT_DISK_FULL = 73  # EX_CANTCREAT of sysexits.h
#: The classes of work by name.
WORK: Mapping[str, type[Work]] = {kind.__name__: kind for kind in get_args(Work)}
