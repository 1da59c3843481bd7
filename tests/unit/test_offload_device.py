"""The engine on a device that does everything as late as it may: the right answers, and nothing of the host's in them."""

import pytest
import torch
import transformers
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engines import checkpoints
from engines.offload.device import CONTEXT_BYTES
from engines.offload.engine import OffloadEngine
from engines.offload.kernels.on_device import DeviceKernels
from engines.offload.pages import pages_for
from harness.api import HardwareLimits, Job, ModelSpec, OffloadPolicy
from tests import pretend
from tests.offload import CONFIGS, requests_of, same_by_the_near_tie_rule, save, with_kernels

MIB = 1 << 20


@pytest.fixture(scope="module", params=CONFIGS)
def model(request, tmp_path_factory):
    folder = save(tmp_path_factory.mktemp(request.param), request.param)
    return checkpoints.prepare(ModelSpec(str(folder)), folder / "cache")


@pytest.fixture(scope="module")
def reference(model):
    return transformers.AutoModelForCausalLM.from_pretrained(model.path).eval()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return with_kernels(tmp_path_factory.mktemp("cache"))


def load(model, cache, /, device=96 * MIB, host=96 * MIB, **policy):
    """On a fresh device of so many bytes beside CUDA's own, with torch's kernels."""
    there = pretend.fresh()
    engine = OffloadEngine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engines.offload.engine.opened", lambda limits: there)
        patch.setattr("engines.offload.loading_device.DeviceKernels", lambda: DeviceKernels(triton=False))
        limits = HardwareLimits(device_memory=CONTEXT_BYTES + device, host_memory=host)
        report = engine.load(model, OffloadPolicy(**policy), limits, Job(cache, cache, 64, 64))
    return engine, report, there


@st.composite
def policies(draw):
    """Weights and keys and values anywhere, in every schedule."""
    weights = draw(st.sampled_from([None, (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.3, 0.3, 0.4)]))
    cache = draw(st.sampled_from([None, (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.5, 0.5, 0.0)]))
    schedule = draw(st.sampled_from(["row", "zigzag", "sweep"]))
    policy = {"weights": weights, "cache": cache, "schedule": schedule, "overlap": draw(st.booleans())}
    policy["gpu_batch_size"] = draw(st.integers(1, 6))
    if schedule == "zigzag":
        policy["num_gpu_batches"] = draw(st.integers(1, 3))
    if schedule == "sweep":
        policy["nano_batches"] = draw(st.integers(1, 3))
    if draw(st.booleans()):
        policy["prefill_chunk"] = draw(st.integers(1, 20))
    return policy


@settings(max_examples=10, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(seed=st.integers(0, 1000), count=st.integers(1, 6), policy=policies())
def test_greedy_output_is_transformers_own(model, reference, cache, seed, count, policy):
    engine, report, device = load(model, cache, **policy)
    held = engine._now.runtime._cache.pages
    requests = [r for r in requests_of(seed, count) if pages_for(len(r.prompt) + r.sampling.max_tokens) <= held]
    engine_blocks = engine._now.runtime._executor._blocks
    device.syncs.clear()
    results = {r.id: r for r in engine.generate(requests)}
    engine.close()
    assert device.syncs == [], "the host waited for the device inside a pass"
    blocks = [b.nbytes for b in engine_blocks]
    for asked, found in ((policy["weights"], report.policy.weights), (policy["cache"], report.policy.cache)):
        assert asked is None or asked == pytest.approx(found, abs=2 * max(blocks) / sum(blocks))
    for request in requests:
        assert same_by_the_near_tie_rule(reference, request, results[request.id].tokens)
