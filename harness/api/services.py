"""What the harness asks of engines' packages beside engines: modules that `harness.registry` imports by name."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from harness.api.common import Bits, Schedule, Tune
from harness.api.engine import GenerationRequest, Score
from harness.api.hardware import HardwareProfile
from harness.api.machine import LocalModel, ModelDescription, ModelShape
from harness.api.nano import LayerTimes, NanoOrder, NanoPipeline
from harness.api.record import Forecast, RunRecord
from harness.api.spec import HardwareLimits, ModelSpec, OffloadPolicy, RunSpec
from harness.api.task import Pair, Task, Tokens

#: Receives units of work done, and how many there are in all.
OnProgress = Callable[[int, int], None]
#: FLOP/s by dtype and rows, every sample.
GemmRates = Mapping[str, Mapping[str, Sequence[float]]]
#: Prompt and generated tokens of each request; empty where all have the workload's own.
RequestLengths = Sequence[tuple[int, int]]


class ModelStore(Protocol):
    """Checkpoints on this machine."""

    def prepare(self, model: ModelSpec, cache: Path, on_progress: OnProgress | None = None) -> LocalModel:
        """Makes a checkpoint ready; `on_progress` gets bytes. Raises HarnessError for one that cannot be."""

    def content_digest(self, model: LocalModel, cache: Path, on_progress: OnProgress) -> str:
        """A digest of weights, configuration, tokenizer and templates: of all that decides a model's answers."""

    def check(self, folder: Path) -> None:
        """Raises HarnessError for a checkpoint whose files are missing, damaged or not as long as their headers say."""

    def evict(self, path: str | Path) -> None:
        """Drops a folder's files from the page cache. Raises OSError."""


class ModelDescriptions(Protocol):
    """Models as their configurations tell them."""

    def describe(
        self, model: ModelSpec, cache: Path, refuse: Callable[[Path, ModelShape], None] | None = None
    ) -> ModelDescription:
        """A model for a plan; downloads no weights. Raises HarnessError for one that is not found or not modelled."""


#: Describes an engine's model; raises HarnessError.
Describe = Callable[[str, ModelSpec], ModelDescription]


class ConvertedWeights(Protocol):
    """Folders of weights that an engine converted."""

    def problem(self, folder: Path) -> str | None:
        """What is wrong with one: empty where it is whole, None where it does not tell. Raises OSError."""

    def is_outdated(self, folder: Path) -> bool:
        """Whether it was written in a way that the engine does not read any more."""


class ModelShapes(Protocol):
    """Built-in model shapes."""

    @property
    def CATALOGUE(self) -> Mapping[str, ModelShape]:
        """By id."""

    def tiny(self, family: str) -> str:
        """The id of a negligible model that runs the family's code."""


class MachineRatesProbe(Protocol):
    """Rates of matrix products on this machine, now."""

    def gemm_rates(
        self, dtypes: Sequence[str], rows: Sequence[int], k: int, n: int, threads: int | None = None
    ) -> GemmRates:
        """FLOP/s of x[rows, k] times the transpose of a weight [n, k] on the CPU."""

    def device_rates(
        self, dtypes: Sequence[str], rows: Sequence[int], k: int, n: int
    ) -> tuple[GemmRates, Sequence[float]]:
        """The same on the CUDA device, and bytes/s of copies of pinned memory to it."""


class Calibrator(Protocol):
    """Measures a hardware profile of this host."""

    def measure(self, cache: Path, folder: Path, quick: bool, report: Callable[[str], None]) -> HardwareProfile:
        """`folder`: where the disk is measured; `report` is told what is measured next."""


class LayerProbe(Protocol):
    """Measures a layer of a model on this host."""

    def layer_times(
        self, cache: Path, model: LocalModel, policy: OffloadPolicy, rows: int, context: int, read_s: float,
        report: Callable[[str], None],
    ) -> LayerTimes:  # fmt: skip
        """Of a pass in which `rows` sequences decode at `context` cached tokens; `report` is told what is measured."""


class NanoSearch(Protocol):
    """The search for pipelines of nano-batches."""

    def search_measured(self, shape: ModelShape, times: LayerTimes) -> NanoPipeline:
        """The shortest pipeline found for a model whose layer was measured; some of its layers."""

    def order_of(self, pipeline: NanoPipeline, times: LayerTimes | None = None) -> NanoOrder | None:
        """The order of products by which an engine runs a pipeline; None where none is cut."""


class Planner(Protocol):
    """The best policy for a machine, or what a given policy will do."""

    def plan(
        self, model: ModelDescription, prompt_len: int, gen_len: int, profile: HardwareProfile, engine: str, *,
        schedules: Sequence[Schedule], bits: Sequence[tuple[Bits, Bits]] | None, latency_s: float | None,
        policy: OffloadPolicy | None, stages: int | None, budget: int | None, report: OnProgress,
        kept: Path | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """A plan as plain data; `kept`, the cache, may hold how often a mixture's experts were used.

        Raises HarnessError for what cannot be planned, InfeasibleError where nothing fits.
        """

    def nested(self, policy: Mapping[str, Any]) -> dict[str, Any]:
        """A policy's wg wc wd and so on as triples."""


class LongestSequence(Protocol):
    """An engine's memory planner, asked how long a sequence may be."""

    def __call__(self, spec: RunSpec, model: LocalModel, shortest: int) -> int:
        """Tokens; raises InfeasibleError where not even `shortest` tokens fit."""


class Refuse(Protocol):
    """What an engine cannot run, as far as that is known without its packages, a process or a load."""

    def __call__(self, policy: OffloadPolicy, limits: HardwareLimits, model: LocalModel | None) -> None:
        """Raises UnsupportedError; without a model for settings that do not go together or that it lacks."""


class Simulator(Protocol):
    """Cells of a suite on a machine that is described by a profile."""

    def simulate(
        self, spec: RunSpec, profile: HardwareProfile, lengths: RequestLengths, describe: Describe
    ) -> RunRecord:
        """One cell, predicted."""

    def search_policy(
        self, spec: RunSpec, model: LocalModel, profile: HardwareProfile, lengths: RequestLengths
    ) -> RunSpec:  # fmt: skip
        """The cell with the best policy for it on that machine. Raises HarnessError."""

    def search_notes(self, tune: Tune, policy: OffloadPolicy) -> tuple[str, ...]:
        """What a record should say of the policy that a search has chosen."""


class Forecaster(Protocol):
    """What the performance model says of launches that were measured."""

    def forecast(self, record: RunRecord, profile: HardwareProfile) -> Forecast | None:
        """None where the rates of the launch's dtype are unknown. Raises HarnessError for what cannot be planned."""


class PublishedFigures(Protocol):
    """Figures of papers."""

    def table(self, profiles: Mapping[str, HardwareProfile]) -> list[dict[str, Any]]:
        """A row for each figure, with its prediction."""


class Ablations(Protocol):
    """Published ablations beside simulated ones."""

    def rows(self, profiles: Mapping[str, HardwareProfile]) -> list[dict[str, Any]]:
        """A row for each: throughput over that of the run which a paper compares it with."""


class ModelFits(Protocol):
    """Fits of the performance model's constants to figures of papers."""

    def held_out(self, profiles: Mapping[str, HardwareProfile]) -> list[dict[str, Any]]:
        """A row for each published table, with the errors of constants that were fitted without it."""


class TaskCatalogue(Protocol):
    """Accuracy tasks by name."""

    def task(self, name: str) -> Task:
        """Raises HarnessError for an unknown name."""

    def known(self, name: str) -> bool:
        """Whether a suite may name it."""

    def names(self) -> list[str]:
        """All names that can be listed."""


class LmEvalModel(Protocol):
    """A model that lm-eval can ask. `fingerprint`: a digest of all that decides its answers; `context`: in tokens."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def tokens(self) -> Tokens: ...

    @property
    def context(self) -> int: ...

    def score(self, pairs: Sequence[Pair]) -> Sequence[Score]: ...

    def write(self, prompts: Sequence[GenerationRequest]) -> Sequence[str]: ...


#: Opens a model by the words after `--model_args`.
OpenModel = Callable[[Mapping[str, Any]], LmEvalModel]


class LmEval(Protocol):
    """lm-eval's command line with our engines among its models."""

    def run(self, arguments: Sequence[str]) -> int:
        """Runs it; returns its exit code."""

    def write_local(self, data: Path, into: Path) -> None:
        """Writes task files that read the folder `data`."""

    def register(self, name: str, load: OpenModel, cache: Path) -> None:
        """Makes an engine known by its name; its answers are kept in the folder `cache`."""
