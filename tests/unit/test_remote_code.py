"""No loader runs code that comes with a model: `trust_remote_code` is false wherever it is, and given where needed."""

import ast
import inspect
from pathlib import Path

import pytest

from engines.adapters import refusals

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    p
    for folder in ("offload_harness", "harness", "engines", "suites", "reports", "examples", "docs")
    for p in (ROOT / folder).rglob("*.py")
    if ROOT / "docs" / "results" not in p.parents  # scripts as they ran
)
OPTION = "trust_remote_code"
#: Loaders that take the option and would ask, or obey, without it.
LOADERS = ("from_pretrained", "from_config")


def options(path: Path) -> list[tuple[int, ast.expr]]:
    """Each value given to the option, as a keyword or in a mapping, with its line."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            found += [(node.lineno, k.value) for k in node.keywords if k.arg == OPTION]
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            found += [(node.lineno, v) for k, v in pairs if isinstance(k, ast.Constant) and k.value == OPTION]
    return found


def test_the_option_is_false_everywhere():
    given = {f"{path.relative_to(ROOT)}:{line}": value for path in SOURCES for line, value in options(path)}
    assert len(given) > 8
    assert {place: ast.unparse(value) for place, value in given.items() if ast.unparse(value) != "False"} == {}


def test_no_other_way_to_set_it():
    """Such as an attribute, or an option on a command line."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.Attribute) and node.attr.lower().endswith(OPTION)), path
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            assert "--trust-remote-code" not in text and "TRUST_REMOTE_CODE" not in text, path


def test_loaders_that_would_ask_are_told():
    lacking = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            of = ast.unparse(node.func.value).split(".")[-1]
            own = ast.unparse(node.func.value) == "airllm.AutoModel"  # which takes no such option: see its adapter
            loads = node.func.attr in LOADERS and of.startswith(("Auto", "OVModel")) and not own
            if (loads or ast.unparse(node.func) == "vllm.LLM") and OPTION not in {k.arg for k in node.keywords}:
                lacking.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert lacking == []


def test_the_adapter_whose_library_would_run_it_refuses():
    text = (ROOT / "engines" / "adapters" / "airllm.py").read_text()
    assert text.index("refusals.airllm(") < text.index("airllm.AutoModel.from_pretrained(")
    assert '"auto_map" in' in inspect.getsource(refusals.airllm)


@pytest.mark.parametrize("word", ["--trust_remote_code", "--trust", "pretrained=x,trust_remote_code=True"])
def test_lm_evals_option_is_refused(word):
    from harness.api import HarnessError
    from harness.cli.lm_eval import lm_eval

    with pytest.raises(HarnessError, match="leave it out"):
        lm_eval.main(["run", "--model", "hf", word], standalone_mode=False)
