"""A real small language model: the offload engine writes what transformers writes."""

import pytest
import torch
import transformers

from engines.offload.engine import OffloadEngine
from harness.api import GenerationRequest, HardwareLimits, Job, OffloadPolicy, SamplingParams

pytestmark = pytest.mark.slow
PROMPTS = ("The capital of France is", "Once upon a time, there was a small dragon who", "def fibonacci(n):")
NEW = 40


@pytest.fixture(scope="module")
def reference(gguf_file):
    return transformers.AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    ).eval()


@pytest.mark.parametrize("schedule", ["row", "zigzag", "sweep"])
def test_smollm2_writes_what_it_writes_in_transformers(smollm2, reference, tmp_path, schedule):
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2.path)
    requests = [GenerationRequest(p, tuple(tokenizer(p).input_ids), SamplingParams(NEW)) for p in PROMPTS]
    engine = OffloadEngine()
    policy = OffloadPolicy(schedule=schedule, gpu_batch_size=2, num_gpu_batches=2 if schedule == "zigzag" else 1)
    engine.load(smollm2, policy, HardwareLimits(), Job(tmp_path, tmp_path, 64, 64))
    written = {r.id: tokenizer.decode(r.tokens) for r in engine.generate(requests)}
    engine.close()
    for request in requests:
        ids = torch.tensor([request.prompt])
        with torch.no_grad():
            out = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
        assert written[request.id] == tokenizer.decode(out[0, ids.shape[1] :])
    assert "Paris" in written[PROMPTS[0]]
