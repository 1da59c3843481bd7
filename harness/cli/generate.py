"""`harness generate`: a file of requests, answered in a file."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.errors import EXIT_FAILED, EXIT_INFEASIBLE, interrupt
from harness.cli.options import cache_option

if TYPE_CHECKING:
    from harness.batch.input import Lines


@click.command()
@click.option("--model", required=True, help="A folder of safetensors, a GGUF file, a hub id, or package:NAME.")
@click.option("--input", "source", required=True, type=click.Path(path_type=Path), help="Requests, one per line.")
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Answers, one line per request.")
@click.option("--engine", default="offload", show_default=True, help="An engine of `harness ls engines`.")
@click.option("--memory", metavar="SIZE",
              help="RAM that the engine plans for, such as 6GiB; not enforced [default: most of what is free].",
)  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True,
              help="New tokens at most, for lines that set no limit.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, (1 << 31) - 1), default=0, show_default=True,
              help="Lines without a seed get one derived from this and their line number.")  # fmt: skip
@click.option("--set", "overrides", multiple=True, metavar="K=V",
              help="Override policy, limits, options or model: policy.schedule=row.")  # fmt: skip
@click.option("--fresh", is_flag=True, help="Start over: set earlier answers aside instead of resuming.")
@click.option("--dry-run", is_flag=True, help="Read and check the lines, say what would run, and stop.")
@cache_option("Models and converted weights")
def generate(fresh: bool, dry_run: bool, **options: Any) -> None:
    """Answer a file of requests; answers are written as they finish.

    A line is a request in OpenAI's batch format, or {"prompt": "..."} or {"messages": [...]} with its settings beside
    it; in a .txt file it is the prompt itself. Each gets one line of output, with its line number and custom_id; a line
    that cannot be run is answered with the reason. To resume an interrupted job, run the same command again.

    \b
    Examples:
      harness generate --model ./opt-6.7b --input prompts.jsonl --output answers.jsonl
      harness generate --model ./opt-6.7b --input prompts.jsonl --output answers.jsonl --memory 4GiB --dry-run
    """
    from harness.api import InfeasibleError
    from harness.batch.generate import run
    from harness.batch.job import BatchJob
    from harness.cli.job_progress import make_job_progress

    signal.signal(signal.SIGTERM, interrupt)
    with make_job_progress() as progress:
        try:
            lines = run(BatchJob(fresh=fresh, dry_run=dry_run, **options), progress)
        except InfeasibleError as exc:
            progress.note(f"harness: {exc}")
            sys.exit(EXIT_INFEASIBLE)
        except KeyboardInterrupt:
            progress.note(f"interrupted; run the same command again{' without --fresh' if fresh else ''} to resume")
            raise
    click.echo(_summary(lines, dry_run))
    unanswered = lines.refused or any(item.refused for item in lines.settled.values())
    sys.exit(EXIT_FAILED if unanswered else 0)


def _summary(lines: Lines, dry_run: bool) -> str:
    """A job in one line."""
    parts = [f"{len(lines.ready) + len(lines.refused) + len(lines.settled)} lines"]
    if lines.settled:
        refused = sum(item.refused for item in lines.settled.values())
        parts.append(f"{len(lines.settled)} from an earlier run, {refused} of them refused")
    longest = max((item.tokens for item in lines.ready), default=0)
    parts.append(
        f"{len(lines.ready)} {'to run' if dry_run else 'answered'} ({lines.prompt_tokens} prompt tokens and at most "
        f"{lines.new_tokens} new ones, {longest} in the longest)"
    )
    parts.append(f"{len(lines.refused)} refused")
    return "; ".join(parts)
