"""The commands about plans: plan, calibrate, check-model. Imports are made inside them, as in cli.py."""

from __future__ import annotations

import json
import math
import signal
import sys
from pathlib import Path

import click

from harness.cli.errors import EXIT_INFEASIBLE, interrupt, one_line_errors


@click.command()
@click.argument("model", required=False)
@click.option("--prompt-len", type=click.IntRange(1), help="Tokens of each prompt.")
@click.option("--gen-len", type=click.IntRange(1), help="Tokens that each request generates.")
@click.option("--hardware", default="local", show_default=True, metavar="H",
              help="A shipped profile (harness ls hardware), a file, or local: what was calibrated.")  # fmt: skip
@click.option(
    "--engine", default="offload", show_default=True, help="offload, flexgen_ref, accelerate, deepspeed_zero."
)
@click.option("--schedule", "schedules", multiple=True, type=click.Choice(["row", "zigzag", "sweep"]),
              help="Only this order; may be repeated.")  # fmt: skip
@click.option("--quantize", default="none", show_default=True, metavar="Q",
              help="none, auto (16, 8 or 4 bits), bits such as 4, or of weights and cache such as 4:16.")  # fmt: skip
@click.option(
    "--latency",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Most seconds a block may take (of a sweep, a sequence).",
)
@click.option("--stages", type=click.IntRange(1), help="Devices in a pipeline [default: those of the hardware].")
@click.option("--policy", metavar="JSON", help="Predict this policy instead of looking for one.")
@click.option("--explain", "run", type=click.Path(exists=True, path_type=Path), metavar="RECORD",
              help="Say where a run's folder or records and their predictions part, instead of planning.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Where the local profile is kept [$HARNESS_CACHE].")
def plan(
    model: str | None, prompt_len: int | None, gen_len: int | None, hardware: str, engine: str,
    schedules: tuple[str, ...], quantize: str, latency: float | None, stages: int | None, policy: str | None,
    run: Path | None, as_json: bool, cache_dir: Path | None,
) -> None:  # fmt: skip
    """Say what a machine will do with MODEL before anything is downloaded, and by which policy.

    \b
    Examples:
      harness plan facebook/opt-175b --prompt-len 512 --gen-len 32 --hardware t4_gcp --quantize auto
      harness plan facebook/opt-30b --prompt-len 512 --gen-len 32 --hardware t4_gcp --engine flexgen_ref --json
      harness plan --explain results/quickstart
    """
    from harness.api import HarnessError, InfeasibleError

    with one_line_errors():
        from harness.cli.job_progress import make_job_progress
        from harness.common.files import default_cache
        from harness.planning import explain as explanation
        from harness.planning import plan as planning

        cache = cache_dir or default_cache()
        if run is not None:
            explanation.show(explanation.explain(run, hardware, cache), as_json)
            return
        if latency is not None and math.isnan(latency):
            raise HarnessError("--latency is not a number of seconds")
        if policy is not None and (latency is not None or quantize != "none"):
            raise HarnessError("--policy predicts that policy as it is: --latency and --quantize choose among others")
        if model is None or prompt_len is None or gen_len is None:
            raise click.UsageError("a plan needs MODEL, --prompt-len and --gen-len (or --explain RECORD)")
        try:
            with make_job_progress() as progress:
                found = planning.make(
                    model, prompt_len, gen_len, hardware, engine, schedules, quantize, latency, policy, stages, cache,
                    lambda done, total: progress.advance("kinds of policies looked at", done, total),
                )  # fmt: skip
        except InfeasibleError as exc:
            if as_json:
                click.echo(json.dumps({"infeasible": exc.lacking, "reason": str(exc)}))
            click.echo(f"harness: {exc}", err=True)
            sys.exit(EXIT_INFEASIBLE)
        planning.show(found, as_json)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="The profile to write [default: the local one].")
@click.option(
    "--quick", is_flag=True, help="In under a minute (the first time kernels are compiled, too), with fewer rounds."
)
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON.")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="The disk to measure, and compiled kernels.")
def calibrate(out: Path | None, quick: bool, as_json: bool, cache_dir: Path | None) -> None:
    """Measure this host for plans: memory, disk and arithmetic. Leave it alone meanwhile.

    \b
    Examples:
      harness calibrate                    in a few minutes; `harness plan` uses it from then on
      harness calibrate --quick --out here.yaml
    """
    with one_line_errors():
        signal.signal(signal.SIGTERM, interrupt)
        from harness.common.files import default_cache
        from harness.hardware import calibration

        cache = cache_dir or default_cache()
        profile, path = calibration.calibrate(out, quick, cache, lambda what: click.echo(f"measuring {what}", err=True))
        calibration.show_profile(profile, as_json)
        click.echo(f"profile: {path}", err=True)


@click.command("check-model")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check_model(as_json: bool) -> None:
    """Compare the performance model with published figures: those it was fitted on, and those it never saw.

    \b
    Example:
      harness check-model
    """
    with one_line_errors():
        from harness.planning import plan as planning

        planning.show_published(as_json)


@click.command("lm-eval", context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.option("--data-dir", type=click.Path(path_type=Path), help="Data of its tasks [default: the hub].")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Models and known scores [$HARNESS_CACHE].")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lm_eval(data_dir: Path | None, cache_dir: Path | None, arguments: tuple[str, ...]) -> None:
    """lm-eval's own command line, with our engines among its models; --data-dir for hosts that reach no hub.

    \b
    Example:
      harness lm-eval run --model offload --model_args pretrained=./opt-6.7b,memory=4GiB --tasks lambada_openai
    """
    with one_line_errors():
        from harness.cli import lm_eval_command
        from harness.common.files import default_cache

        sys.exit(lm_eval_command.main(arguments, data_dir, cache_dir or default_cache()))
