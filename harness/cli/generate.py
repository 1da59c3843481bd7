"""`harness generate`: one prompt answered on the terminal, or a file of requests answered in a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.errors import EXIT_FAILED, EXIT_INFEASIBLE, say, say_json, say_pieces
from harness.cli.options import cache_option, cluster_options, memory_option, model_option, set_option

if TYPE_CHECKING:
    from harness.batch.input import Lines
    from harness.batch.job import Loader


@click.command()
@model_option()
@click.option("--prompt", metavar="TEXT", help="Answer this prompt on the terminal, as its tokens come.")
@click.option("--chat", is_flag=True, help="Send --prompt as a user's message, by the model's chat template.")
@click.option("--input", "source", type=click.Path(path_type=Path, allow_dash=True),
              help="Requests, one per line; - is stdin.")  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path, allow_dash=True),
              help="Answers, one line per request; - is stdout.")  # fmt: skip
@click.option("--engine", default="offload", show_default=True, help="An engine of `harness ls engines`.")
@memory_option()
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True,
              help="New tokens at most, for lines that set no limit.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, (1 << 31) - 1), default=0, show_default=True,
              help="Lines without a seed get one derived from this and their line number.")  # fmt: skip
@set_option("policy.schedule=row")
@click.option("--fresh", is_flag=True, help="Start over: set earlier answers aside instead of resuming.")
@click.option("--dry-run", is_flag=True, help="Read and check the lines, say what would run, and stop.")
@cluster_options("Answer by workers on")
@click.option("--workers", type=click.IntRange(1), metavar="N",
              help="With --ray or --slurm: how many, each with an engine and --memory of its own.")  # fmt: skip
@cache_option("Models and converted weights")
def generate(prompt: str | None, chat: bool, **options: Any) -> None:
    """Answer one prompt on the terminal, or a file of requests in a file.

    A line of a file is a request in OpenAI's batch format, or {"prompt": "..."} or {"messages": [...]} with its
    settings beside it; in a .txt file it is the prompt itself. Each gets one line of output, with its line number and
    custom_id, when it is finished; a line that cannot be run is answered with the reason. To resume an interrupted job,
    run the same command again.

    \b
    Examples:
      harness generate --model ./opt-6.7b --prompt "Water boils at" --max-tokens 32
      harness generate --model ./qwen3.gguf --chat --prompt "Name three rivers."
      harness generate --model ./opt-6.7b --input prompts.jsonl --output answers.jsonl
      harness generate --model ./opt-6.7b --input prompts.jsonl --output answers.jsonl --memory 4GiB --dry-run
      harness generate --model ./opt-6.7b --input in.jsonl --output out.jsonl --memory 8GiB --ray auto --workers 4
      cat prompts.jsonl | harness generate --model ./opt-6.7b --input - --output -
    """
    if prompt is not None:
        _prompt(prompt, chat, **options)
        return
    if options["source"] is None or options["output"] is None:
        raise click.UsageError("give --prompt TEXT, or --input FILE and --output FILE (- is stdin or stdout)")
    if chat:
        raise click.UsageError("--chat goes with --prompt; a line of --input is a chat where it has `messages`")
    _job(**options)


def _prompt(prompt: str, chat: bool, source: Path | None, output: Path | None, fresh: bool, dry_run: bool,
            ray: str | None, slurm: str | None, workers: int | None, **options: Any) -> None:  # fmt: skip
    """Streams one answer to stdout."""
    from harness.api import InfeasibleError
    from harness.batch.progress import make_job_progress
    from harness.batch.prompt import PromptJob, opened
    from harness.common.locks import in_use

    given = {"--input": source, "--output": output, "--fresh": fresh, "--dry-run": dry_run, "--ray": ray,
             "--slurm": slurm, "--workers": workers}  # fmt: skip
    if with_files := [name for name, value in given.items() if value]:
        raise click.UsageError(f"{with_files[0]} goes with a file of requests, not with --prompt")
    began = time.monotonic()
    with in_use(options["cache"]), ExitStack() as resources:
        try:
            with make_job_progress() as progress:
                answer = resources.enter_context(opened(PromptJob(prompt=prompt, chat=chat, **options), progress))
            loaded = time.monotonic()
            say_pieces(answer.pieces())
        except InfeasibleError as exc:
            say(f"harness: {exc}", err=True)
            sys.exit(EXIT_INFEASIBLE)
    if (result := answer.result) is not None:
        spent = time.monotonic() - loaded
        cut = "; cut off by --max-tokens" if result.finish_reason == "length" else ""
        say(f"{len(result.tokens)} tokens in {spent:.1f} s, after {loaded - began:.1f} s of loading{cut}", err=True)


def _job(source: Path, output: Path, fresh: bool, dry_run: bool, ray: str | None, slurm: str | None,
         workers: int | None, **options: Any) -> None:  # fmt: skip
    """Answers a file of requests."""
    from harness.api import InfeasibleError
    from harness.batch.generate import run
    from harness.batch.job import STDIO, BatchJob, loaded_engine
    from harness.batch.progress import make_job_progress
    from harness.common.locks import in_use

    if fresh and output == STDIO:
        raise click.UsageError("--fresh goes with a file of answers: on stdout there are no earlier ones")
    _check_cluster(ray, slurm, workers, options["memory"])
    with (
        make_job_progress() as progress,
        nullcontext() if dry_run else in_use(options["cache"]),
        ExitStack() as cluster,
    ):
        try:
            job = BatchJob(source=source, output=output, fresh=fresh, dry_run=dry_run, **options)
            load: Loader = loaded_engine
            if workers is not None and not dry_run:
                load = cluster.enter_context(_loading(ray, slurm, workers, options["cache"], progress.note))
            lines = run(job, progress, say_json, load)
        except InfeasibleError as exc:
            progress.note(f"harness: {exc}")
            sys.exit(EXIT_INFEASIBLE)
        except KeyboardInterrupt:
            progress.note(f"interrupted; run the same command again{' without --fresh' if fresh else ''} to resume")
            raise
    say(_summary(lines, dry_run), err=output == STDIO and not dry_run)
    unanswered = lines.refused or any(item.refused for item in lines.settled.values())
    sys.exit(EXIT_FAILED if unanswered else 0)


def _check_cluster(ray: str | None, slurm: str | None, workers: int | None, memory: str | None) -> None:
    """Raises UsageError for options of a cluster that do not go together."""
    if ray is not None and slurm is not None:
        raise click.UsageError("give --ray or --slurm, not both")
    if (ray is None and slurm is None) is not (workers is None):
        raise click.UsageError("--workers goes with --ray or --slurm, and they with it")
    if workers is not None and memory is None:
        raise click.UsageError("workers need --memory: what each of them may use")


@contextmanager
def _loading(
    ray: str | None, slurm: str | None, workers: int, cache: Path, note: Callable[[str], None]
) -> Iterator[Loader]:
    """What loads the engine on as many workers of a cluster."""
    from harness.cluster.slurm import cluster_at
    from harness.cluster.workers import loaded_workers

    with cluster_at(ray, slurm, cache, note) as cluster:
        yield partial(loaded_workers, cluster, workers)


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
