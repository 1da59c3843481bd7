"""Quantized weights and caches: the engine says what transformers says of the values that the codes stand for."""

import pytest
import torch
import transformers

from engines.offload.kernels import HostKernels, quantize
from engines.offload.memory.storage import Grouped
from harness.api import UnsupportedError
from tests.offload import (
    CONFIGS,
    all_greedy,
    answers,
    hadamard_matrix,
    load_and_answer,
    prepare,
    requests_of,
    save,
    with_kernels,
)

POLICIES = [
    {"weight_bits": 4},
    {"weight_bits": 3, "group_size": 32, "weight_groups": "output"},
    {"weight_bits": 8, "group_size": 128},
    {"kv_bits": 4},
    {"kv_bits": 8, "group_size": 32},
    {"weight_bits": 4, "kv_bits": 3},
]


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tmp_path_factory):
    return save(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def model(folder):
    return prepare(folder)


def through(x, how, packed=None):
    """What a tensor is after it was packed, by default to nearest, and unpacked."""
    return quantize.unpack(quantize.pack(x, how) if packed is None else packed, x.shape[-1], how)


def attend_through(how):
    """Attention, as transformers asks for it, to keys and values that were turned and packed."""

    def attend(module, query, key, value, attention_mask, scaling=None, **others):
        turns = hadamard_matrix(query.shape[-1])
        heads = query.shape[1] // key.shape[1]
        key, value = ((through(x @ turns, how) @ turns.T).repeat_interleave(heads, 1) for x in (key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        future = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1)
        scores = (query @ key.transpose(2, 3) * scale).masked_fill(future, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    return attend


def reference(folder, cache, policy):
    """transformers' model with the values that the engine's codes stand for."""
    group = policy.get("group_size", 64)
    attention = "eager"
    if bits := policy.get("kv_bits"):
        attention = f"through-{bits}-{group}"
        transformers.AttentionInterface.register(attention, attend_through(Grouped(bits, group)))
        transformers.AttentionMaskInterface.register(attention, lambda *args, **kwargs: None)
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    if bits := policy.get("weight_bits"):
        how = Grouped(bits, group)
        pack = HostKernels(with_kernels(cache), threads=2).weight_packer(how)
        for name, module in found.named_modules():
            if isinstance(module, torch.nn.Linear) and ".layers." in name:
                across = policy.get("weight_groups") == "output"
                weight = module.weight.data.T if across else module.weight.data
                stored = through(weight, how, pack(weight))
                module.weight.data = stored.T if across else stored
    return found


@pytest.mark.parametrize("schedule", ["row", "zigzag", "sweep"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_quantized_output_is_transformers_own_on_dequantized_values(model, folder, cache, policy, schedule):
    expected = reference(folder, cache, policy)
    requests = requests_of(1, 5)
    common = {"schedule": schedule, "gpu_batch_size": 3, "prefill_chunk": 5}
    tokens, report = load_and_answer(model, cache, requests, **common, **policy)
    assert {name: getattr(report.policy, name) for name in policy} == policy
    assert all_greedy(expected, requests, tokens)


@pytest.mark.parametrize("policy", [{"weight_bits": 4, "kv_bits": 4}, {"weight_bits": 8, "weight_groups": "output"}])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_without_a_compiler_the_values_are_the_same(model, folder, tmp_path, load, monkeypatch, policy, compute_dtype):
    monkeypatch.setenv("CXX", "no-such-compiler")
    engine, report = load(model, tmp_path, schedule="sweep", gpu_batch_size=3, compute_dtype=compute_dtype, **policy)
    assert sum("no-such-compiler" in note for note in report.notes) == 1
    if compute_dtype == "float32":
        requests = requests_of(2, 3)
        assert all_greedy(reference(folder, tmp_path, policy), requests, answers(engine, requests))
    else:
        assert engine.score([([1, 2, 3], [4, 5])])[0].logprob < 0


def test_codes_take_their_bits_on_disk_and_in_memory(model, cache, load):
    exact, packed = (load(model, cache, weights=(0.0, 0.0, 1.0), **more)[1] for more in ({}, {"weight_bits": 4}))
    head = model.shape.vocab * model.shape.hidden * 4
    layers = sum(exact.weights_by_tier) - head
    # float32 to 4 bits and, in rows of 64 or 160 values, two float16 for each 64 begun
    assert 4.5 / 32 <= (sum(packed.weights_by_tier) - head) / layers <= 5 / 32


def test_groups_that_there_are_no_kernels_for_are_refused(model, cache, load):
    with pytest.raises(UnsupportedError, match="groups of 32, 64, 128"):
        load(model, cache, weight_bits=4, group_size=48)


def test_weights_of_an_earlier_quantizer_are_quantized_again(model, tmp_path, load, monkeypatch):
    def folders():
        return {path for path in (tmp_path / "offload").iterdir() if path.is_dir()}

    with monkeypatch.context() as earlier:
        earlier.setattr("engines.offload.weights.convert._QUANTIZER", 1)
        load(model, tmp_path, weight_bits=4)
        (old,) = folders()
        load(model, tmp_path)
    before = folders()
    _, report = load(model, tmp_path, weight_bits=4)
    assert len(folders() - before) == 1
    assert [note for note in report.notes if str(old) in note and "quantized again" in note]
    _, report = load(model, tmp_path)  # plain weights are used as they are
    assert len(folders() - before) == 1
    assert not [note for note in report.notes if "quantized again" in note]
