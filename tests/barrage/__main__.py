"""`python -m tests.barrage`: bad inputs against the command line; exits with 1 if one does not end as it should."""

import os
import shlex
import sys
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

#: Before numpy and torch are imported: threads of theirs do not survive a fork. And no network.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}
#: So many characters of an argument are shown.
_SHOWN = 60


@click.command()
@click.option("--kind", "kinds", multiple=True, help="Only cases of this kind; may be repeated.")
@click.option("--only", "names", multiple=True, metavar="KIND/NAME", help="Only this case, or those below it.")
@click.option("--part", metavar="I/N", help="Only the I-th of N parts, by a hash of the names.")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Cases at a time.")
@click.option("--keep", type=click.Path(path_type=Path), metavar="DIR", help="Leave the folders of the cases in DIR.")
@click.option("--list", "listed", is_flag=True, help="Print the names and stop.")
def main(kinds: Sequence[str], names: Sequence[str], part: str | None, jobs: int, keep: Path | None,
         listed: bool) -> None:  # fmt: skip
    """Run bad inputs against `harness` and count what goes wrong, by kind."""
    os.environ |= _ENVIRONMENT
    from tests.barrage.checks import COLUMNS
    from tests.barrage.inputs import every_case
    from tests.barrage.run import Verdict, run_cases

    cases = [
        case for case in every_case()
        if (not kinds or case.kind in kinds)
        and (not names or any(case.id == name or case.id.startswith(f"{name}/") for name in names))
        and in_part(case.id, part)
    ]  # fmt: skip
    if not cases:
        raise click.UsageError("no such case; --list prints all")
    if listed:
        click.echo("\n".join(case.id for case in cases))
        return
    counts: dict[str, Counter[str]] = {case.kind: Counter() for case in cases}
    done = 0

    def tell(verdict: Verdict) -> None:
        nonlocal done
        done += 1
        case = verdict.outcome.case
        counts[case.kind].update(["inputs", *verdict.faults])
        for column, what in verdict.faults.items():
            click.echo(f"{case.id}: {column}: {ascii(what)[1:-1]}\n  {repeats(case.id)}\n  {shown(case.arguments)}")
        if done % 100 == 0:
            click.echo(f"{done} of {len(cases)}")

    verdicts = run_cases(cases, jobs, tell, keep)
    columns = ("inputs", *COLUMNS)
    click.echo("  ".join([f"{'kind':<14}", *columns]))
    for kind, count in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        click.echo("  ".join([f"{kind:<14}", *(f"{count[column]:>{len(column)}}" for column in columns)]))
    sys.exit(1 if any(verdict.faults for verdict in verdicts) else 0)


def in_part(name: str, part: str | None) -> bool:
    """Whether a case is in the part I/N, as its name decides; in all of them without one."""
    if part is None:
        return True
    index, slash, count = part.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise click.UsageError(f"--part {part}: expected I/N with 1 <= I <= N, such as 1/3")
    return zlib.crc32(name.encode()) % int(count) == int(index) - 1


def repeats(name: str) -> str:
    """The command line that repeats a case."""
    return f"python -m tests.barrage --only {shlex.quote(name)} --keep barrage"


def shown(arguments: Sequence[str]) -> str:
    """A case's command line; long arguments are cut."""
    cut = [word if len(word) <= _SHOWN else f"{word[:_SHOWN]}...({len(word)})" for word in arguments]
    return f"harness {ascii(shlex.join(cut))[1:-1]}"


if __name__ == "__main__":
    main()
