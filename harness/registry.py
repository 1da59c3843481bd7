"""Names of engines and workloads, resolved on use, so that nothing heavy is imported to print `--help`."""

from __future__ import annotations

import difflib
import importlib
import importlib.resources
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from harness.api import (
    Engine,
    Forecast,
    GenerationRequest,
    HardwareProfile,
    HarnessError,
    LocalModel,
    ModelShape,
    RunRecord,
    RunSpec,
    Workload,
    WorkloadSpec,
)
from harness.api.task import Task


@dataclass(frozen=True)
class EngineEntry:
    """Where an engine lives and which importable modules it needs."""

    target: str
    requires: tuple[str, ...]
    extra: str
    summary: str
    builtin_model: str = ""  # "module:NAME" of a LocalModel for engines that read no checkpoint
    builtin_text: str = ""  # and of what takes a tokenizer's place for them
    predicted: bool = False  # whether there is a performance model of it on a machine without a device
    environment: str = ""  # the list of pins, and the image target, for an environment of its own
    needs: str = ""  # what it cannot do without beside packages, in words

    def missing(self) -> list[str]:
        """Required modules that this interpreter does not have."""
        return [m for m in self.requires if importlib.util.find_spec(m) is None]

    @property
    def remedy(self) -> str:
        """How to come by what is missing."""
        if self.extra:
            return f"pip install 'offload-harness[{self.extra}]' -c constraints.txt"
        return "use --launcher venv or docker"


ENGINES: dict[str, EngineEntry] = {
    "fake": EngineEntry(
        "engines.adapters.fake:FakeEngine",
        (),
        "",
        "deterministic tokens in virtual time; drives the harness's tests",
        "engines.adapters.fake:MODEL",
        "engines.adapters.fake:FakeText",
        environment="harness",
    ),
    "transformers": EngineEntry(
        "engines.adapters.transformers:TransformersEngine",
        ("torch", "transformers", "safetensors"),
        "transformers",
        "Hugging Face transformers: weights resident; KV cache resident, offloaded or quantized",
        environment="accelerate",
    ),
    "accelerate": EngineEntry(
        "engines.adapters.accelerate:AccelerateEngine",
        ("torch", "transformers", "safetensors", "accelerate"),
        "accelerate",
        "Hugging Face Accelerate: weights on a device, in RAM and on disk",
        environment="accelerate",
    ),
    "deepspeed_zero": EngineEntry(
        "engines.adapters.deepspeed_zero:DeepSpeedZeroEngine",
        ("torch", "transformers", "safetensors", "deepspeed"),
        "",
        "DeepSpeed ZeRO-Inference: ZeRO stage 3 with parameters in RAM or on disk",
        environment="deepspeed",
        needs="libaio and a C++ compiler for parameters on disk",
    ),
    "flexgen_ref": EngineEntry(
        "engines.adapters.flexgen_ref:FlexGenEngine",
        ("torch", "transformers", "flexgen"),
        "",
        "FlexGen's own code (OPT only); without CUDA through a shim of ours",
        environment="flexgen",
    ),
    "llama_cpp": EngineEntry(
        "engines.adapters.llama_cpp:LlamaCppEngine",
        ("xllamacpp", "gguf"),
        "",
        "llama.cpp's server with parallel sequences (LLaMA only); weights mapped from disk",
        environment="llamacpp",
    ),
    "airllm": EngineEntry(
        "engines.adapters.airllm:AirLlmEngine",
        ("torch", "transformers", "airllm"),
        "",
        "AirLLM: one layer in memory at a time (LLaMA and its like)",
        environment="airllm",
    ),
    "vllm": EngineEntry(
        "engines.adapters.vllm:VllmEngine",
        ("torch", "vllm"),
        "",
        "vLLM with weights and KV cache offloaded to RAM",
        environment="vllm",
        needs="a CUDA device",
    ),
    "lm_eval_hf": EngineEntry(
        "engines.adapters.lm_eval_hf:LmEvalHfEngine",
        ("torch", "transformers", "safetensors", "accelerate", "lm_eval"),
        "eval",
        "lm-eval's own model of transformers: padded batches; weights in RAM, or as Accelerate places them",
        environment="accelerate",
    ),
    "offload": EngineEntry(
        "engines.offload.engine:OffloadEngine",
        ("torch", "transformers", "safetensors", "accelerate", "greenlet"),
        "offload",
        "our own: weights streamed from disk under the arithmetic, in row, zigzag or sweep order",
        predicted=True,
        environment="offload",
    ),
}

#: What others build and we do not: what it is, and why.
NOT_BUILT = {
    "petals": (
        "collaborative inference over slow links",
        "installs only beside old packages (transformers < 4.35, pydantic < 2); pipeline stages of ours over throttled "
        "links are to represent it",
    )
}

WORKLOADS: dict[str, str] = {"synthetic": "suites.workloads:Synthetic", "trace": "suites.workloads:Traced"}

_PREPARE = "engines.models.checkpoints:prepare"
_IDENTITY = "engines.models.checkpoints:content_digest"
_COMPILER = "engines.common.compiler:command"
_TEXT = "engines.common.text:Text"
_CHECK = "engines.common.requests:validate"
_EVICT = "engines.models.checkpoints:evict"
_GEMM_RATES = "engines.common.machine_rates:gemm_rates"
_DEVICE_RATES = "engines.common.machine_rates:device_rates"
_SHAPES = "engines.models.shapes:CATALOGUE"
_TINY = "engines.models.shapes:tiny"
_CALIBRATE = "engines.offload.calibrate.host:measure"
_PLAN = "engines.planning.plan:plan"
_SIMULATE = "engines.planning.simulated:simulate"
_FORECAST = "engines.planning.forecast:forecast"
_SEARCH = "engines.planning.simulated:search_policy"
_NESTED = "engines.planning.plan:nested"
_TASK = "suites.tasks:task"
_TASK_NAMES = "suites.tasks:names"
_TASK_KNOWN = "suites.tasks:known"
_PUBLISHED = "engines.planning.published:table"


def engine_entry(name: str) -> EngineEntry:
    """Raises HarnessError with the nearest name for an unknown engine."""
    if name in ENGINES:
        return ENGINES[name]
    near = difflib.get_close_matches(name, ENGINES, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise HarnessError(f"unknown engine {name!r}{hint} (known: {', '.join(ENGINES)})")


def make_engine(name: str, options: dict[str, Any]) -> Engine:
    """Builds an engine. Raises HarnessError when a module or an option is missing or unknown."""
    entry = _require(name, f"engine {name}")
    factory = resolve(entry.target)
    try:
        return cast(Engine, factory(**options))
    except TypeError as exc:
        raise HarnessError(f"engine {name} does not take these options: {exc}") from exc


def _require(name: str, who: str) -> EngineEntry:
    """An engine's entry. Raises HarnessError saying that `who` needs modules that are missing."""
    entry = engine_entry(name)
    if missing := entry.missing():
        raise HarnessError(f"{who} needs {', '.join(missing)}: {entry.remedy}")
    return entry


def environment_pins(name: str) -> Path:
    """The file of pins of an engine's own environment."""
    return Path(str(importlib.resources.files("engines") / "environments" / f"{name}.txt"))


def make_workload(kind: str, **fields: Any) -> Workload:
    """Builds a workload by its kind."""
    return cast(Workload, resolve(WORKLOADS[kind])(**fields))


def workload(spec: WorkloadSpec) -> Workload:
    """A cell's workload."""
    own = {"trace": spec.trace} if spec.kind == "trace" else {}
    return make_workload(spec.kind, prompt_len=spec.prompt_len, gen_len=spec.gen_len, **own)


def lm_eval() -> Any:
    """The module suites.lm_eval_models. Raises HarnessError where lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise HarnessError("lm-eval is not installed: pip install 'offload-harness[eval]' -c constraints.txt")
    return importlib.import_module("suites.lm_eval_models")


def task(name: str) -> Task:
    """suites.tasks.task: an accuracy task. Raises HarnessError for an unknown name."""
    return cast(Task, resolve(_TASK)(name))


def is_task(name: str) -> bool:
    """suites.tasks.known: whether a suite may name it."""
    return cast(bool, resolve(_TASK_KNOWN)(name))


def task_names() -> list[str]:
    """suites.tasks.names: all accuracy tasks."""
    return cast(list[str], resolve(_TASK_NAMES)())


def lengths(spec: WorkloadSpec) -> list[tuple[int, int]]:
    """suites.workloads.Traced.lengths: prompt and generated tokens of each request, where they differ.

    Of a job without a number of requests those of the first thousand. Raises HarnessError for a file that is no trace.
    """
    count = 1000 if spec.num_requests == "auto" else spec.num_requests
    return cast(Any, workload(spec)).lengths(count) if spec.kind == "trace" else []


def resolve(target: str) -> Any:
    """The object behind "module:name"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def prepare_model(engine: str, *args: Any, **kwargs: Any) -> LocalModel:
    """The engine's built-in model, or engines.models.checkpoints.prepare: makes a checkpoint ready on this machine."""
    builtin = engine_entry(engine).builtin_model
    return cast(LocalModel, resolve(builtin) if builtin else resolve(_PREPARE)(*args, **kwargs))


def identity(engine: str, model: LocalModel, *args: Any) -> str:
    """The built-in model's digest, or engines.models.checkpoints.content_digest: of what decides a model's answers."""
    return model.digest if engine_entry(engine).builtin_model else cast(str, resolve(_IDENTITY)(model, *args))


def text(engine: str, model: LocalModel) -> Any:
    """The tokenizer of the engine's built-in model, or engines.common.text.Text of a checkpoint."""
    return resolve(engine_entry(engine).builtin_text or _TEXT)(model)


def check_request(request: GenerationRequest, shape: ModelShape) -> None:
    """engines.common.requests.validate: raises HarnessError for what cannot be run on a model of this shape."""
    resolve(_CHECK)(request, shape)


def device_rates(*args: Any) -> Any:
    """engines.common.machine_rates.device_rates: FLOP/s by dtype and rows, and bytes/s, of a CUDA device."""
    return resolve(_DEVICE_RATES)(*args)


def compiler() -> list[str]:
    """engines.common.compiler.command: the C++ compiler for kernels, empty where there is none."""
    return cast(list[str], resolve(_COMPILER)())


def evict_model(path: str) -> None:
    """engines.models.checkpoints.evict: drops a model folder from the page cache."""
    resolve(_EVICT)(path)


def gemm_rates(*args: Any, **kwargs: Any) -> Any:
    """engines.common.machine_rates.gemm_rates: FLOP/s by dtype and rows."""
    return resolve(_GEMM_RATES)(*args, **kwargs)


def tiny_model(family: str) -> str:
    """engines.models.shapes.tiny: the id of a negligible model that runs the family's code."""
    return cast(str, resolve(_TINY)(family))


def calibrate(*args: Any) -> HardwareProfile:
    """engines.offload.calibrate.host.measure: a profile of this host. Raises HarnessError where a module is missing."""
    _require("offload", "harness calibrate")
    return cast(HardwareProfile, resolve(_CALIBRATE)(*args))


def plan(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """engines.planning.plan.plan: the best policy for a machine, or what a given one will do."""
    return cast(dict[str, Any], resolve(_PLAN)(*args, **kwargs))


def forecast(*args: Any) -> Forecast | None:
    """engines.planning.forecast.forecast: what the performance model says of a launch."""
    return cast("Forecast | None", resolve(_FORECAST)(*args))


def simulate(spec: RunSpec, profile: HardwareProfile, lengths: Sequence[tuple[int, int]]) -> RunRecord:
    """engines.planning.simulated.simulate: one cell, predicted."""
    return cast(RunRecord, resolve(_SIMULATE)(spec, profile, lengths))


def searched(spec: RunSpec, model: LocalModel, profile: HardwareProfile, lengths: Sequence[tuple[int, int]]) -> RunSpec:
    """engines.planning.simulated.search_policy: the cell with the policy that is best for it on that machine."""
    return cast(RunSpec, resolve(_SEARCH)(spec, model, profile, lengths))


def nested_policy(policy: dict[str, Any]) -> dict[str, Any]:
    """engines.planning.plan.nested: wg wc wd and so on as triples."""
    return cast(dict[str, Any], resolve(_NESTED)(policy))


def published(*args: Any) -> list[dict[str, Any]]:
    """engines.planning.published.table: published figures beside predictions."""
    return cast(list[dict[str, Any]], resolve(_PUBLISHED)(*args))


def shapes() -> dict[str, Any]:
    """engines.models.shapes.CATALOGUE: built-in model shapes by id."""
    return cast(dict[str, Any], resolve(_SHAPES))
