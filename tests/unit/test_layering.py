"""The layering of architecture.md holds, and help and validation stay light."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def test_import_contracts_hold():
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_contracts_name_every_module_of_the_harness():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    below = [c for c in contracts if "harness.runner" in c.get("forbidden_modules", ())]
    modules = {
        f"harness.{p.stem}" for p in (ROOT / "harness").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert len(below) == 2
    for contract in below:
        missing = modules - {"harness.__init__", "harness.api"} - set(contract["forbidden_modules"])
        assert not missing, contract["name"]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["validate", "suites/quickstart.yaml"], ["ls", "engines"]]
)
def test_light_commands_import_nothing_heavy(arguments):
    script = (
        "import sys; from harness.cli import cli\n"
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
