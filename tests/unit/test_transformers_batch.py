"""transformers' continuous batching behind the engine's contract: the tokens and ends of plain `generate`."""

import time

import pytest
import torch

from engines.adapters.transformers import TransformersEngine
from engines.adapters.transformers_batch import TransformersBatchEngine
from harness.api import GenerationRequest, InfeasibleError, SamplingParams, UnsupportedError
from tests.offload import load, tiny


@pytest.fixture(scope="module", params=["opt", "llama"])
def model(request, tmp_path_factory):
    return tiny(tmp_path_factory.mktemp(request.param), request.param, eos_token_id=None)


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    """As in a worker of a cell without a device. Here another test may have registered one, and it takes any."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_device_module", lambda *_: torch.cpu)


def asked(ignore_eos=True, **more):
    """More requests than a batch holds, of several lengths."""
    prompts = [tuple(range(5 + i, 5 + i + n)) for i, n in enumerate((12, 3, 30, 12, 7))]
    return [
        GenerationRequest(str(i), p, SamplingParams(9, ignore_eos=ignore_eos, **more)) for i, p in enumerate(prompts)
    ]


def test_its_tokens_are_those_of_generate(model, tmp_path):
    exact, _ = load(model, tmp_path / "exact", engine=TransformersEngine(), gpu_batch_size=3)
    expected = {r.id: r.tokens for r in exact.generate(asked())}
    engine, report = load(model, tmp_path, engine=TransformersBatchEngine(batch_tokens=16), gpu_batch_size=3)
    try:
        began = time.perf_counter()
        results = {r.id: r for r in engine.generate(asked())}
        elapsed = time.perf_counter() - began
        assert {i: r.tokens for i, r in results.items()} == expected
        assert report.weights_by_tier[1] == model.shape.params_total * 4
        times = [t for r in results.values() for t in (r.start_s, *r.token_times_s)]
        assert 0 <= min(times) < max(times) <= elapsed
        end = expected["0"][3]  # whatever comes fourth ends sequences from now on
        for each in (exact, engine):
            each._module.generation_config.eos_token_id = end
        ended = {r.id: (r.tokens, r.finish_reason) for r in exact.generate(asked(ignore_eos=False))}
        assert {r.id: (r.tokens, r.finish_reason) for r in engine.generate(asked(ignore_eos=False))} == ended
        assert ended["0"][1] == "stop"
        with pytest.raises(UnsupportedError, match="does not support temperature"):
            engine.generate(asked(temperature=1.0))
    finally:
        engine.close()


def test_it_needs_all_weights_in_memory(model, tmp_path):
    with pytest.raises(InfeasibleError, match="transformers_batch needs"):
        load(model, tmp_path, budget=1000, engine=TransformersBatchEngine())
