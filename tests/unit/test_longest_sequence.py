"""The planner's longest sequence, told by a shape alone, against what the engine's own load accepts and refuses."""

from dataclasses import replace

import pytest
import torch

from engines.planning.longest import longest_sequence
from harness import api, registry
from tests.offload import load, tiny

MIB, CONTEXT = 1 << 20, 1 << 18
BUDGET = 400 * MIB
WIDE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
        "intermediate_size": 512, "max_position_embeddings": CONTEXT}  # fmt: skip


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def model(request, tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("long"), "llama", request.param, **WIDE)


def spec(policy, budget=BUDGET, **limits):
    return api.RunSpec(
        "offload",
        api.ModelSpec("m"),
        api.WorkloadSpec(),
        policy,
        limits=api.HardwareLimits(host_memory=budget, **limits),
    )


@pytest.mark.parametrize(
    "policy",
    [
        {"schedule": "sweep", "gpu_batch_size": 64, "cache": (0.0, 1.0, 0.0)},
        {"schedule": "row", "gpu_batch_size": 2, "weights": (0.0, 1.0, 0.0), "cache": (0.0, 1.0, 0.0)},
        {"schedule": "zigzag", "gpu_batch_size": 1, "num_gpu_batches": 2, "weight_bits": 4, "kv_bits": 8},
    ],
    ids=["sweep", "row", "zigzag"],
)
def test_load_takes_what_the_planner_admits_and_little_more(model, policy, tmp_path):
    longest = longest_sequence(spec(api.OffloadPolicy(**policy)), model, 1)
    assert 1000 < longest < CONTEXT, "the budget is what limits it"
    engine, _ = load(model, tmp_path, budget=BUDGET, max_sequence=longest, **policy)
    engine.close()
    with pytest.raises(api.InfeasibleError):
        load(model, tmp_path, budget=BUDGET, max_sequence=int(1.25 * longest), **policy)


def test_ranks_of_a_pipeline_hold_longer_sequences_than_one(model, tmp_path):
    """Each has the limit to itself, and keys and values of its own layers only; and they can load it."""
    policy = api.OffloadPolicy(schedule="sweep", gpu_batch_size=4, cache=(0.0, 1.0, 0.0))
    one, two = (longest_sequence(spec(replace(policy, pipeline=ranks)), model, 1) for ranks in (1, 2))
    assert 1.4 * one < two < CONTEXT
    with pytest.raises(api.HarnessError, match="9 stages"):
        longest_sequence(spec(replace(policy, pipeline=9)), model, 1)


def test_more_memory_and_smaller_batches_admit_more():
    model = api.LocalModel("", registry.shapes().CATALOGUE["facebook/opt-6.7b"], 0, "float16", "")
    policy = api.OffloadPolicy(schedule="row", gpu_batch_size=8)
    device = {"device_memory": 3000 * MIB}
    for limits in ({}, device):
        small, large = (longest_sequence(spec(policy, n * MIB, **limits), model, 1) for n in (1500, 3000))
        assert small < large <= model.shape.max_context
        assert small < longest_sequence(spec(replace(policy, gpu_batch_size=2), 1500 * MIB, **limits), model, 1)
    assert longest_sequence(spec(policy, None), model, 1) == model.shape.max_context


def test_what_not_even_the_shortest_fits_is_refused_with_the_numbers():
    shape = api.ModelShape("opt", 2, 64, 256, 4, 4, 16, 512, 128, params_per_layer=49152, params_total=131072)
    with pytest.raises(api.InfeasibleError, match=r"sequences of 20 tokens .* the budget is 32 MiB") as caught:
        longest_sequence(spec(api.OffloadPolicy(), 32 * MIB), api.LocalModel("", shape, 0, "float32", ""), 20)
    assert caught.value.lacking["host"] > 0


def test_an_engine_without_a_planner_gives_no_answer():
    model = api.LocalModel("", registry.shapes().CATALOGUE["facebook/opt-125m"], 0, "float32", "")
    assert registry.longest_sequence(replace(spec(api.OffloadPolicy()), engine="transformers"), model, 1) is None
