"""Matrices with one input are multiplied together: which they are, and that nothing comes out differently."""

import pytest
import torch

from engines.offload.kernels import AttentionSpec
from engines.offload.model import build
from engines.offload.model.layer_products import PackedBatch
from engines.offload.model.meta_model import MetaModel
from engines.offload.timeline import BETWEEN
from harness.api import GenerationRequest, HarnessError, SamplingParams
from tests.offload import OTHERS, load, tiny

SAMPLING = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=3)
REQUESTS = [GenerationRequest(f"r{i}", tuple(range(7 + i, 12 + 4 * i)), SAMPLING) for i in range(4)]


def joins(model):
    """The last words of the names that are joined."""
    found = MetaModel(model.path, model.shape, torch.float32).joins
    return [tuple(name.split(".")[-2] for name in join) for join in found]


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("llama", [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]),
        ("opt", [("q_proj", "k_proj", "v_proj"), ("out_proj",), ("fc1",), ("fc2",)]),
        ("gpt2", [("c_attn",), ("c_proj",), ("c_fc",), ("c_proj",)]),
    ],
)
def test_matrices_with_one_input_are_joined_up_to_the_attention(tmp_path, kind, layer):
    model = tiny(tmp_path, kind, **OTHERS.get(kind, {}))
    assert joins(model) == [*layer * 3, ("lm_head",)]


def test_experts_are_not_joined(tmp_path):
    model = tiny(tmp_path, "mixtral", **OTHERS["mixtral"])
    found = MetaModel(model.path, model.shape, torch.float32).joins
    assert {len(join) for join in found if "experts" in join[0]} == {1}


def dry_pass(groups):
    return build.DryPass(dict.fromkeys(groups, 4), groups)


class Zeros:
    """Weights of nothing but zeros."""

    def __init__(self, outputs):
        self.outputs = outputs

    def gemm(self, matrices, x, biases):
        return [x.new_zeros(x.shape[-2], self.outputs[matrix]) for matrix in matrices]


@torch.no_grad()
def test_an_input_that_was_written_to_is_another():
    dry, x = dry_pass(dict.fromkeys("abcde", "layer")), torch.ones(2, 3)
    for matrix in "ab":
        dry.gemm([matrix], x, [None])
    x.mul_(2)
    for matrix in "cd":
        dry.gemm([matrix], x, [None])
    dry.gemm(["e"], x.clone(), [None])
    assert dry.joins == [("a", "b"), ("c", "d"), ("e",)]


@torch.no_grad()
def test_matrices_of_two_files_are_not_joined():
    dry, x = dry_pass({"a": "layer-0", "b": "outside"}), torch.ones(2, 3)
    for matrix in "ab":
        dry.gemm([matrix], x, [None])
    assert dry.joins == [("a",), ("b",)]


@torch.no_grad()
def test_an_attention_ends_a_join():
    dry, x = dry_pass(dict.fromkeys("ab", "layer")), torch.ones(2, 3)
    dry.gemm(["a"], x, [None])
    dry.attend(0, *[torch.ones(1, 2, 4)] * 3, AttentionSpec(1.0))
    dry.gemm(["b"], x, [None])
    assert dry.joins == [("a",), ("b",)] and dry.attends == [1]


def test_a_layer_that_gets_another_input_than_in_the_dry_pass_is_an_error(tmp_path):
    """It would get the product of the joined one's."""
    model = tiny(tmp_path, "llama")
    meta = MetaModel(model.path, model.shape, torch.float32)
    attention = meta.layers()[0].self_attn
    forward = attention.k_proj.forward
    attention.k_proj.forward = lambda x: forward(x.clone())
    meta.use(Zeros({matrix.name: matrix.rows for matrix in meta.matrices}))
    two = torch.arange(2)
    with pytest.raises(HarnessError, match=r"layers.0.self_attn.k_proj.weight multiplies another input"):
        meta(PackedBatch(two, two, two[1:], dry_pass({})))


POLICIES = {
    "resident": {"schedule": "sweep", "gpu_batch_size": 4},
    "resident, 4 bits": {"schedule": "sweep", "gpu_batch_size": 4, "weight_bits": 4},
    "streamed": {"schedule": "zigzag", "gpu_batch_size": 2, "num_gpu_batches": 2, "weights": (0.0, 0.0, 1.0)},
    "half streamed": {"schedule": "sweep", "gpu_batch_size": 4, "weights": (0.0, 0.5, 0.5), "prefill_chunk": 9},
    "half streamed, 4 bits": {"schedule": "zigzag", "gpu_batch_size": 2, "num_gpu_batches": 2, "weight_bits": 4,
                              "weights": (0.0, 0.5, 0.5)},
    "nano-batches": {"schedule": "sweep", "gpu_batch_size": 4, "nano_batches": 2, "weights": (0.0, 0.5, 0.5)},
}  # fmt: skip


@pytest.mark.parametrize(("kind", "kv_bits"), [("llama", 4), ("opt", 16)])
def test_a_batch_that_is_alone_has_the_bits_of_one_that_stops_for_each_matrix(tmp_path, kind, kv_bits):
    """Where all is resident it stops for the last matrix only; where weights are streamed, and among nano-batches, for
    each."""
    model = tiny(tmp_path, kind, torch.bfloat16, num_hidden_layers=2)
    found = []
    for weights, batch, nano in (((0.0, 1.0, 0.0), 1, 1), ((0.0, 0.5, 0.5), 1, 1), ((0.0, 1.0, 0.0), 4, 2)):
        policy = {"weights": weights, "gpu_batch_size": batch, "nano_batches": nano, "kv_bits": kv_bits}
        engine, _ = load(model, tmp_path / "cache", schedule="sweep", prefill_chunk=9, reproducible=True, **policy)
        found.append({result.id: (result.tokens, result.logprobs) for result in engine.generate(REQUESTS)})
        stops = sum(span.name == BETWEEN for span in engine.loaded.timeline.kept)
        in_one_call = all(way.pool for way in engine.loaded.gemms.values())
        engine.close()
        assert (stops == 2) == (in_one_call and (weights[1], batch) == (1.0, 1))
    assert found[0] == found[1] == found[2]


#: Each loads two engines; the fast ones have a product in one call, and tiles that come one by one beside others.
FAST = {("llama", "resident, 4 bits"), ("llama", "half streamed")}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=() if (kind, name) in FAST else pytest.mark.slow)
        for kind in ("llama", "opt")
        for name in POLICIES
    ],
)
def test_joined_products_are_bit_by_bit_those_of_each_matrix(tmp_path, monkeypatch, kind, name):
    """Tokens and log-probabilities; matrices of several tiles, with biases and without."""
    ffn = {"llama": "intermediate_size", "opt": "ffn_dim"}[kind]
    model = tiny(tmp_path, kind, torch.bfloat16, num_hidden_layers=2, **{ffn: 600})

    def answers():
        engine, _ = load(model, tmp_path / "cache", reproducible=True, **POLICIES[name])
        most = max(len(join) for join in engine.loaded.meta_model.joins)
        found = {result.id: (result.tokens, result.logprobs) for result in engine.generate(REQUESTS)}
        engine.close()
        return found, most

    joined, most = answers()
    gemm = build.DryPass.gemm
    monkeypatch.setattr(build.DryPass, "gemm", lambda self, names, x, biases: gemm(self, names, x.clone(), biases))
    apart, fewest = answers()
    assert (most, fewest) == (3, 1)
    assert joined == apart
