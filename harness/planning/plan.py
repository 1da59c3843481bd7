"""What `harness plan` and `harness check-model` take and print."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import click

from harness import hardware, registry
from harness.api import RESOURCE_WORDS, Bits, HarnessError, OffloadPolicy, Schedule
from harness.common.tables import print_rows
from harness.suite import check as suite_check
from harness.suite import yaml_source

_QUANTIZE = re.compile(r"(3|4|8|16)(?::(3|4|8|16))?")


def make(
    model: str, prompt_len: int, gen_len: int, profile: str, engine: str, schedules: Sequence[str], quantize: str,
    latency_s: float | None, policy: str | None, stages: int | None, cache: Path, report: Callable[[int, int], None],
) -> dict[str, Any]:  # fmt: skip
    """The plan; see engines.planning.plan. `report` is told how far its search is.

    Raises HarnessError for what cannot be read.
    """
    return registry.planner().plan(
        model, prompt_len, gen_len, hardware.load(profile, cache), engine,
        schedules=cast(Sequence[Schedule], schedules or ("row", "zigzag", "sweep")), bits=_bits(quantize),
        latency_s=latency_s, policy=None if policy is None else _policy(policy), stages=stages, report=report,
    )  # fmt: skip


def show(plan: Mapping[str, Any], as_json: bool) -> None:
    """Prints a plan: one JSON object, or a table for people."""
    if as_json:
        click.echo(json.dumps(plan))
        return
    policy, predicted = plan["policy"], plan["predicted"]
    lengths = f"{plan['prompt_len']} + {plan['gen_len']} tokens"
    on = plan["hardware"] + (f" in {plan['stages']} stages, a device each" if plan["stages"] > 1 else "")
    click.echo(f"{plan['model']} on {on}, {lengths}, engine {plan['engine']}\n")
    bits = f"weights {policy['weight_bits']} bit, cache {policy['kv_bits']} bit"
    where = ""
    if plan["devices"]:
        where = f", attention on the {'host' if policy['cpu_attention'] else 'device'}"
    batches = f"{policy['num_gpu_batches']} x {policy['gpu_batch_size']} sequences"
    click.echo(f"  {policy['schedule']}, {batches}, {bits}{where}")
    if plan["stages"] > 1:
        click.echo("  of each stage:")
    print_rows(list(_placement(plan)), False)
    rate = (
        f"{predicted['throughput_tok_s']:.3g} token/s, {predicted['fraction_of_roofline']:.0%} of what arithmetic and "
        "disk allow for this batch"
    )
    busy = (f"{RESOURCE_WORDS[name]} {part:.0%}" for name, part in predicted["busy"].items() if part >= 0.005)
    what = "a sequence" if policy["schedule"] == "sweep" else "a block"
    click.echo(f"\n  {rate}; {what} takes {_duration(predicted['block_latency_s'])}")
    click.echo(f"  limited by {RESOURCE_WORDS[predicted['bottleneck']]}; busy: {', '.join(busy)}")
    if plan["rejected"]:
        click.echo("\nrejected:")
        for other in plan["rejected"]:
            rate = f"{other['throughput_tok_s']:.3g} token/s, " if "throughput_tok_s" in other else ""
            click.echo(f"  {other['kind']}: {rate}{other['reason']}")


def _placement(plan: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    policy, peak = plan["policy"], plan["predicted"]["peak_bytes"]
    places = [("device", "g"), ("host", "c"), ("disk", "d")][0 if plan["devices"] else 1 :]
    for name, letter in (("weights", "w"), ("cache", "c"), ("activations", "h")):
        yield {"": name} | {place: f"{100 * policy[letter + p]:.0f} %" for place, p in places}
    yield {"": "needs"} | {place: f"{peak[place] / 2**30:.1f} GiB" for place, _ in places}


def show_published(as_json: bool) -> None:
    """Prints published figures beside predictions, and the median error of each group that nothing was fitted on."""
    found = registry.published_figures().table({name: hardware.load(name) for name in hardware.names()})
    if as_json:
        click.echo(json.dumps(found))
        return
    print_rows([{**row, "error": _percent(row["error"])} for row in found], False)
    click.echo()
    print_rows(list(_medians(found)), False)


def _medians(found: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in found:
        groups.setdefault((row["hardware"], row["engine"]), []).append(row)
    for (machine, engine), rows in groups.items():
        known = [row for row in rows if row["error"] is not None and not row["repeated"]]
        unseen = [abs(row["error"]) for row in known if not row["fitted"]]
        fitted = [abs(row["error"]) for row in known if row["fitted"]]
        yield {
            "hardware": machine,
            "engine": engine,
            "cells not fitted": len(unseen),
            "median error": _share(statistics.median(unseen)),
            "largest": _share(max(unseen)),
            "cells fitted": len(fitted),
            "their median": _share(statistics.median(fitted) if fitted else None),
            "their largest": _share(max(fitted, default=None)),
        }


def _bits(quantize: str) -> list[tuple[Bits, Bits]] | None:
    """Of weights and cache, that may be chosen; None: any."""
    if quantize == "none":
        return [(16, 16)]
    if quantize == "auto":
        return None
    match = _QUANTIZE.fullmatch(quantize)
    if not match:
        raise HarnessError(f"--quantize {quantize}: expected none, auto, bits (3, 4, 8 or 16), or two such as 4:16")
    return [(cast(Bits, int(match[1])), cast(Bits, int(match[2] or match[1])))]


def _policy(text: str) -> OffloadPolicy:
    """A policy in JSON, as `plan --json` prints it or as a suite has it."""
    given = yaml_source.parse(text, "--policy", positions=False).plain()
    if not isinstance(given, dict):
        raise HarnessError(f"--policy: expected a JSON object, got {text[:64]!r}")
    words = json.dumps(registry.planner().nested(given), ensure_ascii=False)
    return suite_check.policy(yaml_source.parse(words, "--policy", positions=False))


def _duration(seconds: float) -> str:
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 3600:.3g} h"


def _share(error: float | None) -> str:
    """Of an error without its sign."""
    return "" if error is None else f"{error:.1%}"


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}" if error else "0"
