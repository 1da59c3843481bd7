"""What the offload engine's import leaves out until it is used, and that all of it still works then."""

import subprocess
import sys
from pathlib import Path

import torch

from engines.common.meta_device import NothingDrawn
from engines.models import checkpoints
from harness.api import ModelSpec
from tests import offload

ROOT = Path(__file__).parents[2]


def python(script, *arguments):
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


ANSWER = """
import sys
from pathlib import Path
from engines.models import checkpoints
from engines.offload.engine import OffloadEngine
from harness.api import GenerationRequest, HardwareLimits, Job, ModelSpec, OffloadPolicy, SamplingParams

cache = Path(sys.argv[2])
model = checkpoints.prepare(ModelSpec(sys.argv[1]), cache)
engine = OffloadEngine()
engine.load(model, OffloadPolicy(schedule="sweep"), HardwareLimits(), Job(cache, cache, 32, 32))
[result] = engine.generate([GenerationRequest("a", (5, 6, 7), SamplingParams(max_tokens=4, temperature=1.0, seed=1))])
engine.close()
assert len(result.tokens) == 4
print(*{"torch._dynamo", "torch._inductor", "scipy.optimize"} & set(sys.modules))
"""


def test_an_answer_needs_no_compiler_and_no_optimizer(tmp_path, cache):
    """A model that is known, from the first import to the last token."""
    model = tmp_path / "model"
    offload.save(model, "llama")
    checkpoints.prepare(ModelSpec(str(model)), cache)
    assert python(ANSWER, model, cache).strip() == ""


CALIBRATED = """
import shutil, sys
from pathlib import Path
from engines.offload.calibrate.engine import random_model

model = random_model(Path(sys.argv[1]))
assert (model.shape.num_layers, model.shape.hidden, model.dtype) == (4, 2048, "bfloat16")
shutil.rmtree(sys.argv[1])
print(*{"torch._dynamo", "torch._inductor"} & set(sys.modules))
"""


def test_calibration_s_model_needs_no_compiler(tmp_path):
    """Whose import leaves a folder among the temporary files."""
    (tmp_path / "scratch").mkdir()
    assert python(CALIBRATED, tmp_path / "scratch").strip() == ""


SCANS = """
import sys
from pathlib import Path
opened = []
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
{}
import transformers, transformers.models
print(sum(Path(name).name == "modeling_albert.py" for name in opened), hash((*sorted(transformers.__all__),)),
      hash((*sorted(transformers.models.__all__),)))
"""


def test_transformers_is_scanned_once_and_finds_the_same(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    lean, plain = (
        python(SCANS.format(line)).split()
        for line in ("import engines.common.lean_transformers as l; l.import_transformers()", "")
    )
    assert int(lean[0]) == 1 <= int(plain[0])
    assert lean[1:] == plain[1:]


def test_what_was_deferred_works_when_it_is_called():
    script = """
import sys
import engines.offload.model
from transformers import masking_utils
from transformers.loss import loss_for_object_detection
assert not {"scipy.optimize", "torch._dynamo"} & set(sys.modules)
rows, columns = loss_for_object_detection.linear_sum_assignment([[4, 1], [2, 8]])
print(*columns)
from scipy.optimize import linear_sum_assignment, minimize
with masking_utils.TransformGetItemToIndex():
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
assert isinstance(masking_utils.TransformGetItemToIndex(), TransformGetItemToIndex)
"""
    assert python(script).split() == ["1", "0"]


def test_decorators_of_the_compiler_take_effect_when_it_is_imported():
    script = """
import sys
import torch
from engines.common.lazy_dynamo import lazy_dynamo

with lazy_dynamo():
    @torch.compiler.assume_constant_result
    def constant(): return 3

    @torch._dynamo.assume_constant_result
    def other(): return 4

    @torch.compiler.disable(recursive=False)
    def whether(x):
        "Whether this is compiled."
        return torch.compiler.is_compiling(), x

assert "torch._dynamo" not in sys.modules
assert whether.__doc__ and constant() == 3
print(whether(2))
assert "torch._dynamo" in sys.modules, "its call imports the compiler"
assert constant._dynamo_marked_constant and other._dynamo_marked_constant
assert torch._dynamo.disable is not None and torch._dynamo.__file__

@torch.compile(backend="eager")
def compiled(x): return x + 1, torch.compiler.is_compiling(), whether(x)[0]
print(compiled(torch.ones(1))[1:])
"""
    assert python(script).splitlines() == ["(False, 2)", "(True, False)"]


def test_what_else_is_asked_of_the_compiler_imports_it_at_once():
    script = """
import sys
import torch
from engines.common.lazy_dynamo import lazy_dynamo

with lazy_dynamo():
    @torch._dynamo.assume_constant_result
    def constant(): return 3
    {}
    assert constant._dynamo_marked_constant
assert sys.modules["torch._dynamo"] is torch._dynamo and torch._dynamo.config is config
"""
    for line in ("config = torch._dynamo.config", "import torch._dynamo.config as config"):
        python(script.format(line))


def test_only_tensors_without_values_are_not_drawn():
    torch.manual_seed(0)
    with NothingDrawn():
        drawn = torch.zeros(64).normal_(), torch.nn.init.normal_(torch.zeros(64)), torch.zeros(64).uniform_()
        assert all(values.unique().numel() > 32 for values in drawn)
        with torch.device("meta"):
            layer = torch.nn.Linear(4, 3)
            embedding = torch.nn.Embedding(5, 2)
    assert layer.weight.is_meta and embedding.weight.shape == (5, 2)


def test_a_shape_is_kept_until_the_configuration_changes(tmp_path, monkeypatch):
    model, cache = tmp_path / "model", tmp_path / "cache"
    offload.save(model, "llama")
    cache.mkdir()
    known = checkpoints.prepare(ModelSpec(str(model)), cache)
    built = []

    def shape_of(folder, original=checkpoints.shape_of):
        built.append(folder)
        return original(folder)

    monkeypatch.setattr(checkpoints, "shape_of", shape_of)
    assert checkpoints.prepare(ModelSpec(str(model)), cache) == known and not built
    config = model / "config.json"
    config.write_text(config.read_text().replace(f'"max_position_embeddings": {offload.CONTEXT}',
                                                 '"max_position_embeddings": 64'))  # fmt: skip
    assert checkpoints.prepare(ModelSpec(str(model)), cache).shape.max_context == 64 and len(built) == 1
    memo = cache / "contents.json"
    memo.write_text(memo.read_text().replace("num_layers", "number_of_layers"))
    assert checkpoints.prepare(ModelSpec(str(model)), cache).shape.max_context == 64 and len(built) == 2


AHEAD = """
import sys
loaded = []
sys.addaudithook(lambda event, given: loaded.append(str(given[0])) if event == "ctypes.dlopen" else None)
from engines.offload.kernels import ahead
ahead.main()
compiled, before = [name for name in loaded if name.endswith("kernel.so")], len(loaded)
{}
assert compiled, "nothing was compiled ahead"
print(*(name for name in loaded[before:] if name.endswith("kernel.so")))
"""


def test_kernels_compiled_ahead_are_those_of_a_model_in_16_bits(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(cache))
    model = tmp_path / "model"
    offload.save(model, "llama", torch.bfloat16)
    checkpoints.prepare(ModelSpec(str(model)), cache)
    assert python(AHEAD.format(ANSWER), model, cache).split() == []
