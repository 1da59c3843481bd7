"""Checks a cell's workload: keys that belong to another kind, keys that exclude each other, names and distributions."""

from collections.abc import Iterator
from dataclasses import fields

from harness import registry
from harness.api import HarnessError, RunSpec, Slo, WorkloadSpec
from harness.common.words import nearest
from harness.suite.yaml_node import Node, shown

#: Keys of online workloads, as a suite writes them, by the field of WorkloadSpec.
_ONLINE = {name: name for name in ("process", "rate", "cv", "concurrency", "lengths", "slo", "rounds", "stop_when")} | {
    "duration_s": "duration", "think_s": "think_time"
}  # fmt: skip
_CONVERSATION = ("rounds", "think_s")
_DEFAULTS = {field.name: field.default for field in fields(WorkloadSpec)}


def workload_problems(spec: RunSpec, node: Node) -> Iterator[tuple[str, str]]:
    """The path of each problem in a cell's workload, and what it is; empty where there is none."""
    workload, searched = spec.workload, spec.tune.startswith("search")
    if workload.task and not registry.is_task(workload.task):
        yield "workload.task", f"unknown task {shown(workload.task)}; {nearest(workload.task, registry.task_names())}"
    yield "workload.task", registry.clash("task", workload.task)
    if (workload.kind == "trace") != bool(workload.trace) and not workload.online:
        yield "workload.trace", "workload.trace goes with `kind: trace`: set both, or neither"
    if (workload.kind == "task") != bool(workload.task):
        yield "workload.task", "workload.task goes with `kind: task`: set both, or neither"
    if workload.task and searched:
        yield "policy", "policy: a search needs prompt and output lengths, and a task sets none; give a policy"
    if workload.task:
        for key in node.find(("workload",)).only("prompt_len", "gen_len").entries:
            yield f"workload.{key}", f"workload.{key}: the examples of a task have their own lengths"
    if workload.online:
        yield from _online_problems(spec)
    for name, key in _ONLINE.items():
        kinds = "`kind: conversation`" if name in _CONVERSATION else "`kind: arrivals` or `conversation`"
        allowed = workload.kind == "conversation" or (workload.online and name not in _CONVERSATION)
        if not allowed and getattr(workload, name) != _DEFAULTS[name]:
            yield f"workload.{name}", f"workload.{key} goes with {kinds}: other workloads do not use it"


def _online_problems(spec: RunSpec) -> Iterator[tuple[str, str]]:
    workload = spec.workload
    if spec.tune != "none" or spec.candidates:
        yield "tune", "searches measure throughput of a fixed job: an online workload needs a given policy"
    if (workload.num_requests == "auto") == (workload.duration_s is None):
        yield "workload", "an online workload ends after `duration` or after `num_requests`: set one of them"
    if workload.process == "trace" and not workload.trace:
        yield "workload.process", "workload.process trace goes with workload.trace, the file with the times"
        return
    if workload.trace and workload.lengths:
        yield "workload.lengths", "lengths come from workload.trace or from workload.lengths: set one of them"
    if workload.cv != 1.0 and workload.process != "gamma":
        yield "workload.cv", "workload.cv goes with `process: gamma`: the other processes have no variation to set"
    if workload.concurrency is not None:
        if workload.rate is not None or workload.process != "poisson":
            yield "workload.concurrency", "a closed loop sends when answers come: leave rate and process out"
    elif workload.rate is None and workload.process != "trace":
        yield "workload", "an online workload needs a `rate` (requests per second, or sweep) or a `concurrency`"
    if workload.slo is not None:
        yield from _slo_problems(workload.slo)
    if workload.stop_when is not None and not 0 < workload.stop_when.ci_width <= 1:
        width = workload.stop_when.ci_width
        yield "workload.stop_when.ci_width", f"workload.stop_when.ci_width is {width:g}; it must lie in (0, 1]"
    try:
        registry.arrivals(workload)
    except HarnessError as exc:
        yield "workload.trace" if workload.trace else "workload.lengths", str(exc)


def _slo_problems(slo: Slo) -> Iterator[tuple[str, str]]:
    if not slo.limits:
        yield "workload.slo", "workload.slo sets no limit: give ttft_s, tpot_s or normalized_s"
    for name, limit in slo.limits.items():
        if not 0 < limit <= 86400:
            yield f"workload.slo.{name}", f"workload.slo.{name} is {limit:g}; it must be more than 0, at most 86,400 s"
    if slo.attainment != "mean" and not 0 < slo.attainment <= 1:
        yield "workload.slo.attainment", f"workload.slo.attainment is {slo.attainment:g}; it must lie in (0, 1]"
