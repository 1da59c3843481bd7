"""What is known by name: engines, launchers, tasks and workloads, built in or plug-ins, and the modules behind them.

Everything is imported on use, so that nothing heavy is imported to print `--help`.
"""

import functools
import importlib
import importlib.resources
import importlib.util
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from harness.api import Engine, HarnessError, Launcher, LocalModel, ModelSpec, RunSpec, Workload, WorkloadSpec
from harness.api.services import (
    Calibrator,
    Forecaster,
    LmEval,
    LongestSequence,
    MachineRatesProbe,
    ModelShapes,
    ModelStore,
    OnProgress,
    Planner,
    PublishedFigures,
    RequestLengths,
    Simulator,
    TaskCatalogue,
)
from harness.api.task import Task, Text
from harness.common import plugins
from harness.common.plugins import Plugin, resolve
from harness.common.words import nearest

Kind = Literal["engine", "launcher", "task"]


@dataclass(frozen=True)
class Entry:
    """Where something lives (`module:Class`), the importable modules it needs, and the extra that installs them."""

    target: str
    requires: tuple[str, ...] = ()
    extra: str = ""

    def missing(self) -> list[str]:
        """Required modules that this interpreter does not have."""
        return [m for m in self.requires if importlib.util.find_spec(m) is None]

    @property
    def remedy(self) -> str:
        """What installs the missing modules."""
        if self.extra:
            return f"pip install 'offload-harness[{self.extra}]' -c constraints.txt"
        return "use --launcher venv or docker"

    def require(self, who: str) -> None:
        """Raises HarnessError saying that `who` needs modules that are missing."""
        if missing := self.missing():
            raise HarnessError(f"{who} needs {', '.join(missing)}: {self.remedy}")


@dataclass(frozen=True)
class EngineEntry(Entry):
    """An engine's entry."""

    summary: str = ""
    builtin_model: str = ""  # "module:NAME" of a LocalModel for engines that read no checkpoint
    builtin_text: str = ""  # "module:NAME" of the tokenizer of the built-in model
    longest: str = ""  # "module:function" that plans its longest sequence without loading it
    predicted: bool = False  # whether there is a performance model of it on a machine without a device
    environment: str = ""  # name of its list of pins and of its image, for an environment of its own
    needs: str = ""  # what it needs beside packages, in words
    plugin: Plugin | None = None  # where it comes from, for an engine of another distribution


#: Built-in engines; `engines` adds those of plug-ins.
ENGINES: Mapping[str, EngineEntry] = {
    "fake": EngineEntry(
        "engines.adapters.fake:FakeEngine",
        summary="deterministic tokens in virtual time; drives the harness's tests",
        builtin_model="engines.adapters.fake:MODEL",
        builtin_text="engines.adapters.fake:FakeText",
        longest="engines.adapters.fake:longest_sequence",
        environment="harness",
    ),
    "transformers": EngineEntry(
        "engines.adapters.transformers:TransformersEngine",
        ("torch", "transformers", "safetensors"),
        "transformers",
        summary="Hugging Face transformers: weights resident; KV cache resident, offloaded or quantized",
        environment="accelerate",
    ),
    "accelerate": EngineEntry(
        "engines.adapters.accelerate:AccelerateEngine",
        ("torch", "transformers", "safetensors", "accelerate"),
        "accelerate",
        summary="Hugging Face Accelerate: weights on a device, in RAM and on disk",
        environment="accelerate",
    ),
    "deepspeed_zero": EngineEntry(
        "engines.adapters.deepspeed_zero:DeepSpeedZeroEngine",
        ("torch", "transformers", "safetensors", "deepspeed"),
        summary="DeepSpeed ZeRO-Inference: ZeRO stage 3 with parameters in RAM or on disk",
        environment="deepspeed",
        needs="libaio and a C++ compiler for parameters on disk",
    ),
    "flexgen_ref": EngineEntry(
        "engines.adapters.flexgen_ref:FlexGenEngine",
        ("torch", "transformers", "flexgen"),
        summary="FlexGen's own code (OPT only); without CUDA through a shim of ours",
        environment="flexgen",
    ),
    "llama_cpp": EngineEntry(
        "engines.adapters.llama_cpp:LlamaCppEngine",
        ("xllamacpp", "gguf"),
        summary="llama.cpp's server with parallel sequences (LLaMA only); weights mapped from disk",
        environment="llamacpp",
    ),
    "airllm": EngineEntry(
        "engines.adapters.airllm:AirLlmEngine",
        ("torch", "transformers", "airllm"),
        summary="AirLLM: one layer in memory at a time (LLaMA and its like)",
        environment="airllm",
    ),
    "vllm": EngineEntry(
        "engines.adapters.vllm:VllmEngine",
        ("torch", "vllm"),
        summary="vLLM with weights and KV cache offloaded to RAM",
        environment="vllm",
        needs="a CUDA device",
    ),
    "lm_eval_hf": EngineEntry(
        "engines.adapters.lm_eval_hf:LmEvalHfEngine",
        ("torch", "transformers", "safetensors", "accelerate", "lm_eval"),
        "eval",
        summary="lm-eval's own model of transformers: padded batches; weights in RAM, or as Accelerate places them",
        environment="accelerate",
    ),
    "offload": EngineEntry(
        "engines.offload.engine:OffloadEngine",
        ("torch", "transformers", "safetensors", "accelerate", "greenlet"),
        "offload",
        summary="our own: weights streamed from disk under the arithmetic, in row, zigzag or sweep order",
        longest="engines.planning.longest:longest_sequence",
        predicted=True,
        environment="offload",
    ),
}

#: Engines that are not built: what each is, and why not.
NOT_BUILT = {
    "petals": (
        "collaborative inference over slow links",
        "installs only beside old packages (transformers < 4.35, pydantic < 2); pipeline stages of ours over throttled "
        "links are to represent it",
    )
}

#: Built-in launchers; `launchers` adds those of plug-ins.
LAUNCHERS: Mapping[str, Entry] = {
    "process": Entry("harness.launchers.process:Processes"),
    "venv": Entry("harness.launchers.venv:VirtualEnvironments"),
    "docker": Entry("harness.launchers.docker:Containers", ("docker",), "docker"),
}

_WORKLOADS: Mapping[str, str] = {"synthetic": "suites.workloads:Synthetic", "trace": "suites.workloads:Traced"}


# --------------------------------------------------------------------------- engines


def engines() -> dict[str, EngineEntry]:
    """All engines by name, those of plug-ins first."""
    return {**_plugin_engines(), **ENGINES}


def engine_entry(name: str) -> EngineEntry:
    """Raises HarnessError with the nearest name for an unknown engine."""
    # built-in ones first: their workers spend no time on a look at plug-ins
    entry = ENGINES.get(name) or _plugin_engines().get(name)
    if entry is None:
        raise HarnessError(f"unknown engine {name!r}; {nearest(name, engines())}")
    return entry


def make_engine(name: str, options: Mapping[str, Any]) -> Engine:
    """Builds an engine. Raises HarnessError for a missing module, an unknown option, or a plug-in that is no engine."""
    entry = engine_entry(name)
    entry.require(f"engine {name}")
    make = functools.partial(plugins.build, entry.plugin, Engine) if entry.plugin else resolve(entry.target)
    try:
        return cast(Engine, make(**options))
    except TypeError as exc:
        raise HarnessError(f"engine {name} does not take these options: {exc}") from exc


def longest_sequence(spec: RunSpec, model: LocalModel, shortest: int) -> int | None:
    """Tokens of the longest sequence that the engine's memory plan admits; None for an engine without such a plan.

    Raises InfeasibleError where not even a sequence of `shortest` tokens fits.
    """
    planned = engine_entry(spec.engine).longest
    return cast(LongestSequence, resolve(planned))(spec, model, shortest) if planned else None


@functools.cache
def _plugin_engines() -> Mapping[str, EngineEntry]:
    """Plug-ins' engines: installed with their requirements, and with an environment where their package has pins."""
    return {
        name: EngineEntry(
            plugin.target,
            summary=f"{plugin.summary} (plug-in of {plugin.distribution})".strip(),
            environment=name if _plugin_pins(plugin) else "",
            plugin=plugin,
        )
        for name, plugin in plugins.plugins(plugins.ENGINES).items()
    }


def _plugin_pins(plugin: Plugin) -> Path | None:
    """The file pins.txt beside the module of a plug-in, where there is one."""
    package = plugin.target.partition(":")[0].partition(".")[0]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (pins := Path(folder) / "pins.txt").exists():
            return pins
    return None


def environments() -> list[str]:
    """The environments that the harness brings pins of, by name."""
    return sorted(path.stem for path in _environments().glob("*.txt"))


def environment_pins(name: str) -> Path:
    """The file of pins of an environment: the harness's, or that of the plug-in of this name."""
    plugin = plugins.plugins(plugins.ENGINES).get(name)
    own = _environments() / f"{name}.txt"
    return own if own.exists() or plugin is None else _plugin_pins(plugin) or own


def _environments() -> Path:
    return Path(str(importlib.resources.files("engines") / "environments"))


# --------------------------------------------------------------------------- launchers, tasks, workloads


def launchers() -> list[str]:
    """The names of all launchers."""
    return list(dict.fromkeys([*LAUNCHERS, *plugins.plugins(plugins.LAUNCHERS)]))


def make_launcher(name: str, cache: Path) -> Launcher:
    """Builds a launcher. Raises HarnessError for one that is unknown, broken, or cannot work on this machine."""
    if plugin := plugins.plugins(plugins.LAUNCHERS).get(name):
        return cast(Launcher, plugins.build(plugin, Launcher, cache))
    if name not in LAUNCHERS:
        raise HarnessError(f"unknown launcher {name!r}; {nearest(name, launchers())}")
    LAUNCHERS[name].require(f"launcher {name}")
    return cast(Launcher, resolve(LAUNCHERS[name].target)(cache))


def task(name: str) -> Task:
    """An accuracy task. Raises HarnessError for an unknown name, and for a plug-in that is no task."""
    plugin = plugins.plugins(plugins.TASKS).get(name)
    return cast(Task, plugins.build(plugin, Task)) if plugin else _tasks().task(name)


def is_task(name: str) -> bool:
    """Whether a suite may name it."""
    return name in plugins.plugins(plugins.TASKS) or _tasks().known(name)


def task_names() -> list[str]:
    """The names of accuracy tasks, less those that only lm-eval and HELM know."""
    return [*_tasks().names(), *plugins.plugins(plugins.TASKS)]


def workload(spec: WorkloadSpec) -> Workload:
    """A cell's workload."""
    trace = {"trace": spec.trace} if spec.kind == "trace" else {}
    return cast(Workload, resolve(_WORKLOADS[spec.kind])(prompt_len=spec.prompt_len, gen_len=spec.gen_len, **trace))


def lengths(spec: WorkloadSpec) -> RequestLengths:
    """Prompt and generated tokens of each request of a trace, empty for other workloads.

    Of a job without a number of requests those of the first thousand. Raises HarnessError for a file that is no trace.
    """
    count = 1000 if spec.num_requests == "auto" else spec.num_requests
    return cast(Any, workload(spec)).lengths(count) if spec.kind == "trace" else []


def clash(kind: Kind, name: str) -> str:
    """Why a suite may not use this name although it is known: a plug-in and something else have it. Empty otherwise."""
    group = {"engine": plugins.ENGINES, "launcher": plugins.LAUNCHERS, "task": plugins.TASKS}[kind]
    if (plugin := plugins.plugins(group).get(name)) is None:
        return ""
    built_in: Collection[str] = {"engine": ENGINES, "launcher": LAUNCHERS}.get(kind) or _tasks().names()
    return plugins.clash(plugin, name in built_in)


# --------------------------------------------------------------------------- models and their text


def prepare_model(
    engine: str, model: ModelSpec, cache: Path, on_progress: OnProgress = lambda done, total: None
) -> LocalModel:
    """The engine's built-in model, or a checkpoint made ready on this machine. Raises HarnessError."""
    builtin = engine_entry(engine).builtin_model
    return cast(LocalModel, resolve(builtin)) if builtin else model_store().prepare(model, cache, on_progress)


def identity(engine: str, model: LocalModel, cache: Path, on_progress: OnProgress) -> str:
    """A digest of all that decides a model's answers."""
    builtin = engine_entry(engine).builtin_model
    return model.digest if builtin else model_store().content_digest(model, cache, on_progress)


def text(engine: str, model: LocalModel) -> Text:
    """A model's tokenizer. Raises HarnessError where its folder has none."""
    return cast(Text, resolve(engine_entry(engine).builtin_text or "engines.common.text:Text")(model))


# --------------------------------------------------------------------------- modules


def _module(name: str) -> Callable[[], Any]:
    """What imports the module `name`. It is not type-checked: tests compare it with its protocol."""
    return functools.partial(importlib.import_module, name)


model_store: Callable[[], ModelStore] = _module("engines.models.checkpoints")
shapes: Callable[[], ModelShapes] = _module("engines.models.shapes")
machine_rates: Callable[[], MachineRatesProbe] = _module("engines.common.machine_rates")
planner: Callable[[], Planner] = _module("engines.planning.plan")
simulator: Callable[[], Simulator] = _module("engines.planning.simulated")
forecaster: Callable[[], Forecaster] = _module("engines.planning.forecast")
published_figures: Callable[[], PublishedFigures] = _module("engines.planning.published")
_tasks: Callable[[], TaskCatalogue] = _module("suites.tasks")


def calibrator() -> Calibrator:
    """Raises HarnessError where a module that calibration needs is missing."""
    ENGINES["offload"].require("harness calibrate")
    return cast(Calibrator, importlib.import_module("engines.offload.calibrate.host"))


def lm_eval() -> LmEval:
    """Raises HarnessError where lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise HarnessError("lm-eval is not installed: pip install 'offload-harness[eval]' -c constraints.txt")
    return cast(LmEval, importlib.import_module("suites.lm_eval_models"))
