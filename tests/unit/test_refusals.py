"""What engines refuse before an environment is built for them."""

import subprocess
import sys
from dataclasses import replace

import pytest

from engines.models import checkpoints
from harness import api, registry
from harness.builtin import ENGINES
from tests.records import FAKE

GPU = api.HardwareLimits(device_memory=1 << 30)
NONE = api.HardwareLimits()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    cache = tmp_path_factory.mktemp("models")
    return {
        name: checkpoints.prepare(api.ModelSpec(f"tiny/{name}", "dummy", "bfloat16"), cache)
        for name in ("opt", "llama")
    }


@pytest.mark.parametrize(
    ("engine", "model", "policy", "limits", "words"),
    [
        ("llama_cpp", "opt", {}, NONE, "not opt"),
        ("llama_cpp", None, {"kv_bits": 4}, NONE, "policy.kv_bits"),
        ("llama_cpp", None, {"weight_bits": 4}, NONE, "groups of 32"),
        ("llama_cpp", None, {}, api.HardwareLimits(disk_bandwidth=1), "disk_bandwidth"),
        ("flexgen_ref", "llama", {}, NONE, "OPT, not llama"),
        ("flexgen_ref", None, {"schedule": "sweep"}, NONE, "not sweep"),
        ("airllm", "opt", {}, NONE, "not opt"),
        ("ollm", "opt", {}, NONE, "not opt"),
        ("ollm", "llama", {"compute_dtype": "float32"}, NONE, "bfloat16 only"),
        ("ollm", None, {"gpu_batch_size": 2}, NONE, "one sequence"),
        ("openvino", None, {"weight_bits": 4}, NONE, "16 or 8 bits"),
        ("deepspeed_zero", None, {"weight_bits": 8}, NONE, "16 or 4 bits"),
        ("deepspeed_zero", "opt", {"compute_dtype": "float16"}, NONE, "only on a device"),
        ("deepspeed_zero", "opt", {"weight_bits": 4}, GPU, "float16 weights"),
        ("vllm", None, {}, NONE, "limits.device_memory"),
        ("vllm_cpu", None, {"schedule": "zigzag"}, NONE, "policy.schedule"),
        ("offload", None, {"num_gpu_batches": 4}, NONE, "policy.num_gpu_batches"),
        ("offload", None, {"schedule": "zigzag", "nano_batches": 2}, NONE, "policy.nano_batches"),
        ("offload", None, {"cpu_attention": True}, NONE, "policy.cpu_attention"),
        ("fake", None, {"schedule": "sweep"}, NONE, "policy.schedule"),
    ],
)
def test_what_is_known_is_refused(models, engine, model, policy, limits, words):
    spec = replace(FAKE, engine=engine, policy=api.OffloadPolicy(**policy), limits=limits)
    with pytest.raises(api.UnsupportedError, match=words.replace(".", r"\.")):
        registry.refuse(spec, model and models[model])


@pytest.mark.parametrize("engine", [name for name, entry in ENGINES.items() if entry.refuses])
def test_what_may_run_is_not_refused(models, engine):
    limits = GPU if engine == "vllm" else NONE
    spec = replace(FAKE, engine=engine, policy=api.OffloadPolicy(), limits=limits)
    registry.refuse(spec, models["opt" if engine == "flexgen_ref" else "llama"])
    registry.refuse(spec)


def test_refusals_need_none_of_the_engines_packages():
    script = (
        "import importlib, sys; from harness.builtin import ENGINES\n"
        "for entry in ENGINES.values():\n"
        "    if entry.refuses: importlib.import_module(entry.refuses.partition(':')[0])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'gguf', 'xllamacpp', 'vllm', 'openvino'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
