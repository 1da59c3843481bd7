"""The layering of architecture.md holds, and help and validation stay light."""

import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

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
    graph = grimp.build_graph("harness", "engines", "suites", "reports")
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
