"""The modules behind the registry have what its protocols say: they are imported by name, so no type checker looks."""

import inspect

import pytest

from harness import registry
from harness.api import services
from harness.builtin import LAUNCHERS

MODULES = [
    (services.ModelStore, registry.model_store),
    (services.ModelShapes, registry.shapes),
    (services.MachineRatesProbe, registry.machine_rates),
    (services.Calibrator, registry.calibrator),
    (services.Planner, registry.planner),
    (services.Simulator, registry.simulator),
    (services.Forecaster, registry.forecaster),
    (services.PublishedFigures, registry.published_figures),
    (services.TaskCatalogue, registry._tasks),
    (services.LmEval, registry.lm_eval),
]


@pytest.mark.parametrize(("protocol", "module"), MODULES, ids=[p.__name__ for p, _ in MODULES])
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
