"""What is known by name: engines, launchers, tasks and workloads, built in or plug-ins, and the modules behind them.

Everything is imported on use, so that nothing heavy is imported to print `--help`.
"""

import functools
import importlib
import importlib.resources
import importlib.util
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, cast

from harness.api import (
    Arrivals,
    Engine,
    HarnessError,
    Launcher,
    LocalModel,
    ModelDescription,
    ModelShape,
    ModelSpec,
    RunSpec,
    Workload,
    WorkloadSpec,
    services,
)
from harness.api.task import Task, Text
from harness.builtin import ENGINES, LAUNCHERS, EngineEntry
from harness.common import plugins
from harness.common.packages import install_extra
from harness.common.plugins import Plugin, resolve
from harness.common.system import require_linux
from harness.common.words import nearest

Kind = Literal["engine", "launcher", "task"]

_WORKLOADS: Mapping[str, str] = {"synthetic": "suites.workloads:Synthetic", "trace": "suites.workloads:Traced"}


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
    return cast(services.LongestSequence, resolve(planned))(spec, model, shortest) if planned else None


def refuse(spec: RunSpec, model: LocalModel | None = None) -> None:
    """Raises UnsupportedError for a cell that its engine cannot run, as far as that is known before it is built.

    Without `model` by its settings alone.
    """
    if refuses := engine_entry(spec.engine).refuses:
        cast(services.Refuse, resolve(refuses))(spec.policy, spec.limits, model)


def describe_model(engine: str, model: ModelSpec, cache: Path) -> ModelDescription:
    """A model for a plan of an engine; downloads no weights.

    Raises HarnessError for one that is not found or not modelled, UnsupportedError for one that the engine cannot run.
    """
    entry = engines().get(engine)  # plans are also made for engines of papers that no adapter runs
    target = entry.refuses_model if entry else ""

    def refuse(folder: Path, shape: ModelShape) -> None:
        if target:  # resolved here: it imports torch, which shipped names do without
            resolve(target)(folder, shape)

    return _model_descriptions().describe(model, cache, refuse)


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


def environment_build(name: str) -> Path | None:
    """The script that an environment's Python runs once, after its pins are installed; None where nothing is built."""
    script = _environments() / f"{name}.py"
    return script if script.exists() and name in environments() else None


def _environments() -> Path:
    return Path(str(importlib.resources.files("engines") / "environments"))


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


def arrivals(spec: WorkloadSpec) -> Arrivals:
    """An online cell's workload. Raises HarnessError for lengths or a trace that cannot be used."""
    return cast(Arrivals, resolve("suites.arrivals:Online")(spec))


def lengths(spec: WorkloadSpec) -> services.RequestLengths:
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


def prepare_model(
    engine: str, model: ModelSpec, cache: Path, on_progress: services.OnProgress = lambda done, total: None
) -> LocalModel:
    """The engine's built-in model, or a checkpoint made ready on this machine. Raises HarnessError."""
    builtin = engine_entry(engine).builtin_model
    return cast(LocalModel, resolve(builtin)) if builtin else model_store().prepare(model, cache, on_progress)


def identity(engine: str, model: LocalModel, cache: Path, on_progress: services.OnProgress) -> str:
    """A digest of all that decides a model's answers."""
    builtin = engine_entry(engine).builtin_model
    return model.digest if builtin else model_store().content_digest(model, cache, on_progress)


def text(engine: str, model: LocalModel) -> Text:
    """A model's tokenizer. Raises HarnessError where its folder has none."""
    return cast(Text, resolve(engine_entry(engine).builtin_text or "engines.common.text:Text")(model))


def _module(name: str) -> Callable[[], Any]:
    """What imports the module `name`. It is not type-checked: tests compare it with its protocol."""
    return functools.partial(importlib.import_module, name)


model_store: Callable[[], services.ModelStore] = _module("engines.models.checkpoints")
_model_descriptions: Callable[[], services.ModelDescriptions] = _module("engines.models.describe")
converted_weights: Callable[[], services.ConvertedWeights] = _module("engines.offload.weights.manifest")
shapes: Callable[[], services.ModelShapes] = _module("engines.models.shapes")
machine_rates: Callable[[], services.MachineRatesProbe] = _module("engines.common.machine_rates")
planner: Callable[[], services.Planner] = _module("engines.planning.plan")
simulator: Callable[[], services.Simulator] = _module("engines.planning.simulated")
forecaster: Callable[[], services.Forecaster] = _module("engines.planning.forecast")
nano_search: Callable[[], services.NanoSearch] = _module("engines.planning.nano_search")
published_figures: Callable[[], services.PublishedFigures] = _module("engines.planning.published")
ablations: Callable[[], services.Ablations] = _module("engines.planning.ablations")
model_fits: Callable[[], services.ModelFits] = _module("engines.planning.fit")
_tasks: Callable[[], services.TaskCatalogue] = _module("suites.tasks")


def calibrator() -> services.Calibrator:
    """Raises HarnessError where a module that calibration needs is missing."""
    require_linux("harness calibrate")
    ENGINES["offload"].require("harness calibrate")
    return cast(services.Calibrator, importlib.import_module("engines.offload.calibrate.host"))


def layer_probe() -> services.LayerProbe:
    """Raises HarnessError where a module that the offload engine needs is missing."""
    require_linux("harness tune")
    ENGINES["offload"].require("harness tune")
    return cast(services.LayerProbe, importlib.import_module("engines.offload.calibrate.layer_times"))


def lm_eval() -> services.LmEval:
    """Raises HarnessError where lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise HarnessError(f"lm-eval is not installed: {install_extra('eval')}")
    return cast(services.LmEval, importlib.import_module("suites.lm_eval_models"))
