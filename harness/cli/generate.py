"""`harness generate`: a file of requests, answered in a file. Imports are made inside it, as in cli.py."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from harness.cli.errors import EXIT_FAILED, EXIT_INFEASIBLE, interrupt, one_line_errors


@click.command()
@click.option("--model", required=True, help="A folder of safetensors, a GGUF file, or a hub id.")
@click.option("--input", "source", required=True, type=click.Path(path_type=Path), help="Requests, one a line.")
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Answers, one for each line.")
@click.option("--engine", default="offload", show_default=True, help="See harness ls engines.")
@click.option(
    "--memory", metavar="SIZE", help="RAM for the model's work, such as 6GiB [default: most of what is free]."
)
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True, help="For lines without one.")
@click.option("--seed", type=click.IntRange(0, (1 << 31) - 1), default=0, show_default=True,
              help="For lines without one; each gets its own.")  # fmt: skip
@click.option(
    "--set", "overrides", multiple=True, metavar="K=V", help="policy, limits, options or model: policy.schedule=row."
)
@click.option("--fresh", is_flag=True, help="Start over: earlier answers are set aside, not gone on with.")
@click.option("--dry-run", is_flag=True, help="Read and check the lines, say what would be run, and stop.")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Models and converted weights [$HARNESS_CACHE].")
def generate(
    model: str, source: Path, output: Path, engine: str, memory: str | None, max_tokens: int, seed: int,
    overrides: tuple[str, ...], fresh: bool, dry_run: bool, cache_dir: Path | None,
) -> None:  # fmt: skip
    """Answer a file of requests, as they finish, in a file of answers.

    A line is a request in OpenAI's batch format, {"prompt": "..."} or {"messages": [...]} with its settings beside,
    or in a .txt file the prompt itself. Each gets one line of output, with its number and custom_id; what cannot be
    run is answered with the reason. An interrupted job goes on where it stopped when the same command is given again.

    \b
    Examples:
      harness generate --model ./opt-6.7b --input prompts.jsonl --output answers.jsonl
      harness generate --model ./opt-6.7b --input prompts.jsonl --output answers.jsonl --memory 4GiB --dry-run
    """
    from harness.api import InfeasibleError

    with one_line_errors():
        from harness.batch import generate as job
        from harness.batch.input import BatchJob
        from harness.cli.job_progress import make_job_progress
        from harness.common.files import default_cache

        signal.signal(signal.SIGTERM, interrupt)
        with make_job_progress() as progress:
            try:
                cell = job.cell(model, engine, memory, overrides, progress)
                batch = BatchJob(cell, source, output, cache_dir or default_cache(), max_tokens, seed, fresh)
                tally = job.run(batch, progress, dry_run)
            except InfeasibleError as exc:
                progress.note(f"harness: {exc}")
                sys.exit(EXIT_INFEASIBLE)
            except KeyboardInterrupt:
                rest = " without --fresh" if fresh else ""
                progress.note(f"interrupted; run the same command again{rest} to go on")
                raise
        click.echo(job.summary(tally, dry_run))
        sys.exit(EXIT_FAILED if tally.refused or tally.refused_before else 0)
