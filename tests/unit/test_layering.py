"""The layering of architecture.md holds, help and validation stay light, and the registry's modules have what its
protocols say: they are imported by name, so no type checker looks."""

import inspect
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from harness import registry
from harness.api import services
from harness.builtin import LAUNCHERS

ROOT = Path(__file__).parent.parent.parent


def test_import_contracts_hold():
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_module_has_a_layer():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["type"] == "layers")
    named = {module.strip() for layer in layers for module in layer.split("|")}
    for package in ("harness", "engines", "engines.offload"):
        inside = (ROOT / package.replace(".", "/")).iterdir()
        modules = {f"{package}.{p.stem}" for p in inside if p.suffix == ".py" or (p / "__init__.py").exists()}
        without = {m for m in modules - {f"{package}.__init__", f"{package}.__main__"} if not named & {m}}
        assert not {m for m in without if not any(n.startswith(f"{m}.") for n in named)}


def test_no_import_circles():
    """An import of a module runs its packages' `__init__` first, except for modules inside them."""
    graph = grimp.build_graph("offload_harness", "harness", "engines", "suites", "reports")
    imported = {m: graph.find_modules_directly_imported_by(m) for m in graph.modules}
    TopologicalSorter(
        {m: targets | _packages(targets) - _packages({f"{m}."}) for m, targets in imported.items()}
    ).prepare()


def _packages(modules):
    return {m[: dot.start()] for m in modules for dot in re.finditer(r"\.", m)}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["validate", "suites/quickstart.yaml"], ["ls", "engines"]]
)
def test_light_commands_import_nothing_heavy(arguments):
    script = (
        "import sys; from harness.cli.main import cli\n"
        f"try: cli({arguments!r})\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pandas', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_contracts_use_the_standard_library_only():
    script = (
        "import sys; before = set(sys.modules); import harness.api\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names - {'harness'}\n"
        "assert not new, new"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_reader_follows_a_request_through_few_files():
    """The engine's README names them in the order in which a request meets them."""
    folder = ROOT / "engines" / "offload"
    steps = re.findall(r"^\d+\. \[[^]]+\]\(([^)]+)\)", (folder / "README.md").read_text(), re.MULTILINE)
    assert steps[0] == "engine.py" and steps[-1] == "kernels/attention.py"
    assert len(steps) <= 12
    assert sum(len((folder / step).read_text().splitlines()) for step in steps) < 2000


SERVICES = [
    (services.ModelStore, registry.model_store),
    (services.ModelDescriptions, registry._model_descriptions),
    (services.ConvertedWeights, registry.converted_weights),
    (services.ModelShapes, registry.shapes),
    (services.MachineRatesProbe, registry.machine_rates),
    (services.Calibrator, registry.calibrator),
    (services.LayerProbe, registry.layer_probe),
    (services.NanoSearch, registry.nano_search),
    (services.Planner, registry.planner),
    (services.Simulator, registry.simulator),
    (services.Forecaster, registry.forecaster),
    (services.PublishedFigures, registry.published_figures),
    (services.ModelFits, registry.model_fits),
    (services.TaskCatalogue, registry._tasks),
    (services.LmEval, registry.lm_eval),
]


@pytest.mark.parametrize(("protocol", "module"), SERVICES, ids=[p.__name__ for p, _ in SERVICES])
def test_a_module_has_the_functions_of_its_protocol(protocol, module):
    if protocol is services.LmEval:
        pytest.importorskip("lm_eval")
    for name, member in vars(protocol).items():
        if name.startswith("_"):
            continue
        there = getattr(module(), name)
        if inspect.isfunction(member):
            asked = [p for p in inspect.signature(member).parameters if p != "self"]
            has = inspect.signature(there).parameters
            assert asked == list(has)[: len(asked)], name
            assert all(p.default is not p.empty for p in list(has.values())[len(asked) :]), name


def test_every_built_in_name_is_there():
    for entry in LAUNCHERS.values():
        if not entry.missing():
            assert registry.resolve(entry.target)
    for name in ("fake", "transformers", "offload"):
        assert registry.resolve(registry.engine_entry(name).target)
