"""`harness plan`: the best policy for a machine, or where a run's time differs from its prediction."""

from __future__ import annotations

import dataclasses
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from harness.cli.errors import EXIT_INFEASIBLE, say, say_json
from harness.cli.options import cache_option, json_option
from harness.cli.tables import print_rows
from harness.common.accuracy_words import accuracy_words
from harness.common.units import rounded

if TYPE_CHECKING:
    from harness.planning.explain import Explanation


_NOT_RUN = "nothing here runs this plan: it has several devices, or an engine that no adapter runs"


@click.command()
@click.argument("model", required=False)
@click.option("--prompt-len", type=click.IntRange(1), help="Tokens of each prompt.")
@click.option("--gen-len", type=click.IntRange(1), help="Tokens that each request generates.")
@click.option("--hardware", default="local", show_default=True, metavar="H",
              help="A shipped profile (harness ls hardware), a file, or local, as measured by harness calibrate.",
)  # fmt: skip
@click.option("--engine", default="offload", show_default=True,
              help="offload, flexgen_ref, accelerate, deepspeed_zero or lm_offload.")  # fmt: skip
@click.option("--schedule", "schedules", multiple=True, type=click.Choice(["row", "zigzag", "sweep"]),
              help="Consider only this schedule; may be repeated.")  # fmt: skip
@click.option("--quantize", default="none", show_default=True, metavar="Q",
              help="none, auto (16, 8 or 4 bits), bits such as 4, or bits of weights and KV cache such as 4:16.",
)  # fmt: skip
@click.option("--latency", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
              help="The most seconds that a block may take; with schedule sweep, a sequence.")  # fmt: skip
@click.option("--stages", type=click.IntRange(1),
              help="Machines or devices of a pipeline [default: the devices of the hardware].")  # fmt: skip
@click.option(
    "--memory", metavar="SIZE", help="Host memory that the job may take, such as 4GiB [default: the machine's]."
)
@click.option("--device-memory", metavar="SIZE", help="Memory of the device that it may take [default: all].")
@click.option("--disk", metavar="SIZE", help="Disk that weights and cache may take [default: all].")
@click.option("--policy", metavar="JSON", help="Predict this policy instead of searching for one.")
@click.option("--explain", "run", type=click.Path(exists=True, path_type=Path), metavar="RECORD",
              help="Compare a run (its folder or records) with its prediction, instead of planning.")  # fmt: skip
@click.option("--yaml", "as_yaml", is_flag=True, help="Print a suite that runs the plan: for harness run.")
@json_option("Print one JSON object.")
@cache_option("Where the local profile is kept")
@click.pass_context
def plan(context: click.Context, /, run: Path | None, as_yaml: bool, as_json: bool, **options: Any) -> None:
    """Say which policy is best for MODEL on a machine, and how fast it will be, before weights are downloaded.

    MODEL is a name of `harness ls models`, a folder, a config.json, a GGUF file, package:NAME, or a hub id.

    \b
    Examples:
      harness plan facebook/opt-175b --prompt-len 512 --gen-len 32 --hardware t4_gcp --quantize auto
      harness plan ./my-model --prompt-len 512 --gen-len 32 --memory 4GiB
      harness plan facebook/opt-30b --prompt-len 512 --gen-len 32 --hardware t4_gcp --engine flexgen_ref --json
      harness plan --explain results/quickstart
    """
    from harness.api import HarnessError, InfeasibleError
    from harness.batch.progress import make_job_progress
    from harness.planning.explain import explain
    from harness.planning.plan import PlanOptions, make_plan
    from harness.planning.suite import suite_yaml

    if as_yaml and (as_json or run is not None):
        raise click.UsageError("--yaml prints a suite that runs a plan: leave out --json and --explain")
    if run is not None:
        print_explanations(explain(run, options["hardware"], options["cache"]), as_json)
        return
    if any(options[name] is None for name in ("model", "prompt_len", "gen_len")):
        raise click.UsageError("a plan needs MODEL, --prompt-len and --gen-len (or --explain RECORD)")
    try:
        with make_job_progress() as progress:
            made = make_plan(PlanOptions(**options), partial(progress.advance, "searching policies"))
    except InfeasibleError as exc:
        if as_json:
            say_json({"infeasible": exc.lacking, "reason": str(exc)})
        say(f"harness: {exc}", err=True)
        sys.exit(EXIT_INFEASIBLE)
    if as_yaml and made["suite"] is None:
        raise HarnessError(_NOT_RUN)
    if as_yaml:
        say(suite_yaml(made["suite"]).rstrip())
    elif as_json:
        say_json(made)
    else:
        _print_plan(made)
        _print_commands(made, context)


def _print_commands(plan: Mapping[str, Any], context: click.Context) -> None:
    """The commands that run a plan."""
    from harness.planning.suite import generate_command, is_configuration

    if plan["suite"] is None:
        say(f"\n{_NOT_RUN}")
        return
    if is_configuration(plan["model"]):
        say("\na configuration has no weights: give the model's folder or hub id for the commands that run this plan")
        return
    where = "" if plan["hardware"] == "local" else f", on {plan['hardware']}"
    say(f"\nto measure it{where}:\n  {shlex.join(['harness', *_words(context), '--yaml'])} > plan.yaml")
    say(f"  harness run plan.yaml\nto answer a file of requests by it:\n  {generate_command(plan['suite'])}")


def _words(context: click.Context) -> Iterator[str]:
    """The command as it was given, by its names of options."""
    yield str(context.info_name)
    for parameter in context.command.params:
        value = context.params.get(str(parameter.name))
        if context.get_parameter_source(str(parameter.name)) != ParameterSource.COMMANDLINE:
            continue
        for each in value if isinstance(value, tuple) else (value,):
            yield from [str(each)] if isinstance(parameter, click.Argument) else [parameter.opts[-1], str(each)]


def _print_plan(plan: Mapping[str, Any]) -> None:
    from harness.api import RESOURCE_WORDS

    policy, predicted = plan["policy"], plan["predicted"]
    lengths = f"{plan['prompt_len']} + {plan['gen_len']} tokens"
    each = "a device each" if plan["devices"] else "a host each"
    on = plan["hardware"] + (f" in {plan['stages']} stages, {each}" if plan["stages"] > 1 else "")
    say(f"{plan['model']} on {on}, {lengths}, engine {plan['engine']}\n")
    batches = f"{policy['num_gpu_batches']} x {policy['gpu_batch_size']} sequences"
    bits = f"weights {policy['weight_bits']} bit, cache {policy['kv_bits']} bit"
    attention = f", attention on the {'host' if policy['cpu_attention'] else 'device'}" if plan["devices"] else ""
    experts = ", experts on both" if policy.get("cpu_experts") else ""
    say(f"  {policy['schedule']}, {batches}, {bits}{attention}{experts}")
    if plan["stages"] > 1:
        say("  of each stage:" if plan["devices"] else "  of all stages together, and what the largest needs:")
    print_rows(list(_placement(plan)))
    rate = (
        f"{rounded(predicted['throughput_tok_s'])} token/s, {predicted['fraction_of_roofline']:.0%} of what "
        "arithmetic and disk allow for this batch"
    )
    unit = "a sequence" if policy["schedule"] == "sweep" else "a block"
    say(f"\n  {rate}; {unit} takes {_duration(predicted['block_latency_s'])}")
    say(f"  {_error(plan['error'])}")
    busy = (f"{RESOURCE_WORDS[name]} {share:.0%}" for name, share in predicted["busy"].items() if share >= 0.005)
    say(f"  limited by {RESOURCE_WORDS[predicted['bottleneck']]}; busy: {', '.join(busy)}")
    if plan["pipeline"]:
        _print_pipeline(plan["pipeline"])
    costs = {"tokens_per_dollar": "tokens per dollar", "tokens_per_joule": "tokens per joule"}
    if told := [f"{rounded(predicted[name])} {words}" for name, words in costs.items() if name in predicted]:
        say(f"  {', '.join(told)}, at the prices of the hardware profile")
    say(f"  {_workload(plan['workload'])}")
    if plan["experts"]:
        say(f"  {_experts(plan['experts'])}")
    if plan["threads"]:
        say(f"  {_threads(plan['threads'])}")
    if plan["accuracy"]:
        say(f"  {accuracy_words(plan['accuracy'])}")
    for caveat in plan["caveats"]:
        say(f"  not modelled: {caveat}")
    if plan["rejected"]:
        say("\nrejected:")
        for other in plan["rejected"]:
            rate = f"{rounded(other['throughput_tok_s'])} token/s, " if "throughput_tok_s" in other else ""
            say(f"  {other['kind']}: {rate}{other['reason']}")


def _print_pipeline(pipeline: Mapping[str, Any]) -> None:
    """What each stage does, and which one takes longest."""
    from harness.api import RESOURCE_WORDS

    slowest, stages = pipeline["bottleneck"], pipeline["stages"]
    total = sum(stages[0][name] for name in ("busy_s", "fill_s", "drain_s", "link_s", "stage_s"))
    decoding = pipeline["decode_throughput_tok_s"]
    rate = f"; decoding alone {rounded(decoding)} token/s" if decoding else ""
    limit = RESOURCE_WORDS.get(slowest["limited_by"], slowest["limited_by"])
    say(f"  stage {slowest['stage']} takes longest, limited by {limit}; groups under way: {pipeline['groups']}{rate}")
    columns = {"at work": "busy_s", "idle: fill": "fill_s", "drain": "drain_s", "for a stage": "stage_s",
               "for a link": "link_s"}  # fmt: skip
    print_rows([
        {"stage": str(stage["stage"]), "layers": str(stage["layers"])}
        | {words: f"{stage[name] / total:.0%}" for words, name in columns.items()}
        | {"limited by": RESOURCE_WORDS.get(stage["limited_by"], stage["limited_by"])}
        for stage in stages
    ])  # fmt: skip


def _error(error: Mapping[str, Any]) -> str:
    """How far the throughput may be off, and on what that stands."""
    if not error["count"]:
        return f"error unknown: {error['stands_on']}"
    low, high = error["low_tok_s"], error["high_tok_s"]
    return f"likely {rounded(low)} to {rounded(high)}: so lay eight of ten of {error['count']} {error['stands_on']}"


def _placement(plan: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Where weights, cache and activations are, and the bytes that each tier must have."""
    policy, peak = plan["policy"], plan["predicted"]["peak_bytes"]
    tiers = [("device", "g"), ("host", "c"), ("disk", "d")][0 if plan["devices"] else 1 :]
    for name, letter in (("weights", "w"), ("cache", "c"), ("activations", "h")):
        yield {"": name} | {tier: f"{100 * policy[letter + suffix]:.0f} %" for tier, suffix in tiers}
    yield {"": "needs"} | {tier: f"{peak[tier] / 2**30:.1f} GiB" for tier, _ in tiers}


def _workload(workload: Mapping[str, Any]) -> str:
    """What bounds a pass, after NanoFlow: the time of each resource over that of arithmetic."""
    words = {"memory": "memory", "network": "network", "pcie": "copies", "host": "host attention", "disk": "disk"}
    ratios = ", ".join(f"{words[name]} {ratio:.2g}" for name, ratio in workload["ratios"].items() if ratio >= 0.005)
    bound = words.get(workload["bound_by"], workload["bound_by"])
    return f"{bound}-bound: against 1 of arithmetic, a pass takes {ratios}"


def _experts(experts: Mapping[str, Any]) -> str:
    """What the plan assumes of a mixture's experts."""
    if experts["usage"] == "all":
        return "experts: every pass is taken to need all of them"
    known = "use taken to be uniform, as none is counted yet"
    if experts["usage"] == "measured":
        known = f"use as counted in {experts['passes']} passes of {experts['of']}"
    return f"experts: {known}; a pass needs {experts['read']:.0%} of their bytes"


def _threads(threads: Mapping[str, Any]) -> str:
    """How the host's threads are divided, and what that wins against the default."""
    several = {name.replace("_", " "): count for name, count in threads["streams"].items() if count > 1}
    streams = f"{sum(threads['streams'].values())} for copies"
    if several:
        streams += f" ({', '.join(f'{count} to {name}' for name, count in several.items())})"
    if not threads["operators"]:
        return f"host threads: {streams}"
    each, default = threads["intra_op"], threads["default"]
    operators = f"{threads['operators']} x {each}" if threads["operators"] > 1 else f"{each}"
    said = f"host threads: {operators} attend (inter-op {threads['inter_op']}, intra-op {each}), {streams}"
    if each == default["intra_op"]:
        return f"{said}; attention as with the default"
    return (
        f"{said};\n  attention takes {1 - threads['attention_time']:.0%} less time than with the default "
        f"(inter-op {default['inter_op']}, intra-op {default['intra_op']}): {rounded(threads['throughput_tok_s'])} "
        f"against {rounded(threads['default_throughput_tok_s'])} token/s"
    )


def _duration(seconds: float) -> str:
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 3600:.3g} h"


def print_explanations(explanations: Sequence[Explanation], as_json: bool) -> None:
    """Prints a line for each launch and the median error, or one JSON object."""
    errors = [abs(e.error) for e in explanations]
    median = statistics.median(errors)
    if as_json:
        launches = [dataclasses.asdict(e) | {"error": e.error} for e in explanations]
        say_json({"launches": launches, "median_absolute_error": median})
        return
    print_rows(
        [
            {
                "cell": f"{e.cell} #{e.repeat}",
                "predicted": f"{e.predicted_tok_s:.3g}",
                "measured tok/s": f"{e.measured_tok_s:.3g}",
                "error": f"{e.error:+.1%}",
                "measured minus predicted": e.differences(),
            }
            for e in explanations
        ]
    )
    inside = sum(error <= 0.15 for error in errors)
    say(f"\nmedian error {median:.1%}, largest {max(errors):.1%}; {inside} of {len(errors)} within 15 %")
