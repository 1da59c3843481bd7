"""`harness tune`: nano-batches for a model on this machine."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from harness import builtin
from harness.cli.errors import EXIT_INFEASIBLE, say, say_json
from harness.cli.options import cache_option, json_option, memory_option, model_option, set_option
from harness.cli.tables import Row, print_rows
from harness.common.units import rounded, with_unit


@click.command()
@model_option()
@memory_option()
@click.option("--prompt-len", type=click.IntRange(1), default=128, show_default=True, help="Tokens of a prompt.")
@click.option("--gen-len", type=click.IntRange(2), default=32, show_default=True, help="New tokens of a request.")
@click.option("--requests", type=click.IntRange(2), default=16, show_default=True, help="Requests that run at once.")
@click.option("--turns", type=click.IntRange(3), default=3, show_default=True,
              help="Runs with nano-batches, and as many without, in turns.")  # fmt: skip
@set_option("policy.weight_bits=4")
@json_option()
@cache_option("Models, converted weights, and what is kept")
def tune(as_json: bool, cache: Path, overrides: tuple[str, ...], **options: Any) -> None:
    """Find out whether nano-batches make a model faster on this machine. Run nothing else meanwhile.

    Measures a layer's operations alone and side by side, searches a pipeline of nano-batches, and runs the model in
    its order and without nano-batches in turns. `nano_batches: auto` in a policy takes what was clearly faster from
    then on.

    \b
    Examples:
      harness tune --model ./opt-6.7b --memory 4GiB
      harness tune --model ./opt-6.7b --set policy.weight_bits=4 --requests 64
    """
    os.environ |= builtin.ENGINES["offload"].env  # as the engine's own process has them; torch is not loaded yet
    from harness.api import InfeasibleError, to_json
    from harness.batch.progress import make_job_progress
    from harness.common.locks import in_use
    from harness.tune import TuneJob
    from harness.tune import tune as run

    job = TuneJob(cache=cache, overrides=overrides, **options)
    with make_job_progress() as progress, in_use(cache):
        try:
            tuned = run(job, progress)
        except InfeasibleError as exc:
            progress.note(f"harness: {exc}")
            sys.exit(EXIT_INFEASIBLE)
    if as_json:
        say_json(to_json(tuned))
        return
    if beside := _beside(tuned.times):
        print_rows(beside)
        say("")
    print_rows(_operations(tuned.pipeline))
    ratio = tuned.pipeline.sequential_s / tuned.pipeline.length_s
    say(f"\nby the search: {ratio:.2f} times as fast as one operation after the other\n")
    print_rows([_rates(tried, rates) for tried, rates in tuned.rates.items()])
    say("".join(f"\nnano-batches: {tried}" for tried in tuned.rates if tried != 1))
    say(f"kept for this machine and model shape: {'none' if tuned.kept == 1 else 'these'}, because {tuned.why}")


def _beside(times: Any) -> list[Row]:
    """What was measured side by side."""
    names = {"memory": "attention", "disk": "reads"}
    return [
        {"beside products": names[kind], "products lose": f"{lost:.0%}", "it keeps": f"{kept:.0%}"}
        for kind, points in times.beside.items()
        for lost, kept in points
    ]


def _operations(pipeline: Any) -> list[Row]:
    """A layer in the middle of the pipeline, from the start of its first operation."""
    middle = pipeline.operations[len(pipeline.operations) // 2].layer
    layer = [operation for operation in pipeline.operations if operation.layer == middle]
    return [
        {
            "operation": operation.name,
            "nano-batch": f"{operation.part + 1} of {pipeline.parts[operation.name]}",
            "starts": with_unit(operation.start_s - layer[0].start_s, "s"),
            "ends": with_unit(operation.end_s - layer[0].start_s, "s"),
            "units": f"{operation.units:.0%}",
        }
        for operation in layer
    ]


def _rates(tried: int | str, rates: Any) -> Row:
    turns = {f"turn {i}": rounded(rate) for i, rate in enumerate(rates, 1)}
    return {"nano-batches": "none" if tried == 1 else "these", "unit": "token/s"} | turns
