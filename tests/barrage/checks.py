"""What is wrong with how a case ended."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tests.barrage.case import SECRET, Case

#: The columns of the table, and what a fault in each means.
COLUMNS = ("tracebacks", "hangs", "wrong codes", "several lines", "leftovers", "memory")
#: Codes with which an input is refused as a whole.
_REFUSED = (2, 4)
_TRACES = ("Traceback (most recent call last)", "Exception ignored in", "Fatal Python error", "Segmentation fault")
#: Ours; click's after its usage; argparse's, of lm-eval.
_ERROR = re.compile(r"harness: |Error: |[\w .-]+: error: ")
#: A further error of a suite.
_IN_SUITE = re.compile(r"\S+:\d+:\d+: |--set |\.\.\. and \d+ more")
#: What acts on a terminal when it is printed.
_RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f\x9b]")


@dataclass(frozen=True)
class Outcome:
    """How a case ended: its exit code as a shell has it, seconds, peak memory, what it said, and what it left."""

    case: Case
    code: int
    seconds: float
    peak_bytes: int
    out: str
    err: str
    hung: bool = False
    left: tuple[str, ...] = ()


def faults(outcome: Outcome, most_bytes: int) -> Mapping[str, str]:
    """What is wrong, by column; `most_bytes`: the memory that it may have used.

    A case that hung was killed: of what it said and left nothing is expected then.
    """
    case, found = outcome.case, {}
    if outcome.peak_bytes > most_bytes:
        found["memory"] = f"peak memory {outcome.peak_bytes >> 20} MiB, more than {most_bytes >> 20} MiB"
    if outcome.hung:
        return found | {"hangs": f"still running after {outcome.seconds:.0f} s"}
    said = outcome.out + outcome.err
    if any(trace in said for trace in _TRACES):
        found["tracebacks"] = said.strip().rpartition("\n")[2][:200]
    if outcome.code not in case.codes:
        allowed = ", ".join(map(str, sorted(case.codes)))
        found["wrong codes"] = f"exit code {outcome.code}, not {allowed}: {_last(outcome.err)}"
    if words := _wrong_words(outcome):
        found["several lines"] = words
    if outcome.left:
        found["leftovers"] = ", ".join(outcome.left)[:200]
    return found


def _wrong_words(outcome: Outcome) -> str:
    """What is wrong with the words of a refusal; empty where nothing is."""
    case, said = outcome.case, outcome.out + outcome.err
    if raw := _RAW.search(said):
        return f"prints {raw.group()!a} as it is"
    if SECRET in said:
        return "tells the secret"
    if case.says not in said:
        return f"does not say {case.says!r}: {_last(outcome.err)}"
    # where stderr is closed or full, or no file may grow, nobody can read it
    unheard = "2>" in case.shell or "ulimit -f" in case.shell
    if outcome.code not in _REFUSED or unheard:
        return ""
    lines = [line for line in outcome.err.split("\n") if line.strip()]
    if case.arguments[:1] == ("validate",) and lines and not _ERROR.match(lines[-1]):
        return "" if len(lines) == 1 or all(map(_IN_SUITE.match, lines)) else f"{len(lines)} lines: {lines[-1][:150]!a}"
    # notes may come before the error; what follows it would be its second line
    errors = [i for i, line in enumerate(lines) if _ERROR.match(line)]
    # but for a suite, which may have several errors
    if len(errors) == 1 and all(map(_IN_SUITE.match, lines[errors[0] + 1 :])):
        return ""
    return f"{len(errors)} errors in {len(lines)} lines: {_last(outcome.err)}"


def _last(text: str) -> str:
    return ascii(text.strip().rpartition("\n")[2][:150])
