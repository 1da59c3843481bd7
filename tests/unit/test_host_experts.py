"""Experts that the host multiplies beside a device: answers are transformers' own, whoever multiplies."""

import pytest
import torch
import transformers

from engines.offload.memory.expert_split import ExpertRates
from engines.offload.refusals import refuse
from engines.offload.weights.host_experts import HostExperts
from harness.api import HardwareLimits, HarnessError, OffloadPolicy, UnsupportedError
from tests.offload import all_greedy, answers, prepare, requests_of, save
from tests.unit.test_expert_usage import route_by
from tests.unit.test_offload_architectures import MODELS
from tests.unit.test_offload_device import load


def rates(monkeypatch, **found):
    monkeypatch.setattr(HostExperts, "_measured", lambda self, some: ExpertRates(**found))


@pytest.fixture
def fast(monkeypatch):
    """The host counts as far faster than the link, so that it gets every expert that it may have."""
    rates(monkeypatch, link=1.0, host=[(1, 1e-9), (1000, 1e-9)])


@pytest.fixture
def alike(monkeypatch):
    """The host multiplies one row as fast as the link copies the weights."""
    rates(monkeypatch, link=1.0, host=[(1, 1.0), (1000, 1000.0)])


def model_of(tmp_path, name, dtype=torch.float32):
    kind, config = MODELS[name]
    folder = save(tmp_path / name, kind, dtype, **config)
    module = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return prepare(folder), module.eval()


def multiplied(engine):
    return engine.loaded.host_experts.multiplied


SWEEP = {"schedule": "sweep", "gpu_batch_size": 4, "weights": (0.0, 1.0, 0.0)}
POLICIES = {
    "sweep": SWEEP,
    "zigzag": {"schedule": "zigzag", "gpu_batch_size": 2, "num_gpu_batches": 2, "weights": (0.0, 1.0, 0.0)},
    "nano": {"schedule": "sweep", "gpu_batch_size": 4, "nano_batches": 2, "weights": (0.2, 0.4, 0.4)},
    "attention": SWEEP | {"cpu_attention": True, "cache": (0.0, 1.0, 0.0), "nano_batches": 2},
}


@pytest.mark.parametrize(
    ("name", "policy"),
    [("mixtral", "zigzag"), ("qwen3-moe", "nano"), ("gpt-oss", "sweep"), ("mixtral", "attention")],
)
def test_answers_are_transformers_own_if_the_host_multiplies(name, policy, tmp_path, cache, fast):
    model, reference = model_of(tmp_path, name)
    requests = requests_of(5, 4)
    engine, report, _ = load(model, cache, cpu_experts=True, **POLICIES[policy])
    tokens = answers(engine, requests)
    assert report.policy.cpu_experts
    assert multiplied(engine)
    engine.close()
    assert all_greedy(reference, requests, tokens)


@pytest.mark.parametrize("policy", ["sweep", pytest.param("zigzag", marks=pytest.mark.slow)])
def test_answers_are_transformers_own_if_both_do(policy, tmp_path, cache, alike):
    model, reference = model_of(tmp_path, "olmoe")
    requests = requests_of(6, 4)
    engine, _, _ = load(model, cache, cpu_experts=True, **POLICIES[policy])
    tokens = answers(engine, requests)
    stats, found = engine.stats(), multiplied(engine)
    engine.close()
    used = sum(sum(counts.used) for counts in stats.experts.values())
    assert 0 < found < used * POLICIES[policy].get("num_gpu_batches", 1)
    assert all_greedy(reference, requests, tokens)
    plain, _, _ = load(model, cache, **POLICIES[policy])
    assert answers(plain, requests) == tokens
    assert plain.stats().experts == stats.experts, "experts are counted whoever multiplies them"
    assert stats.weight_bytes_read < plain.stats().weight_bytes_read
    plain.close()


@pytest.mark.parametrize("changes", [
    {"weight_bits": 4, "group_size": 32},
    pytest.param({"weight_bits": 8, "group_size": 32, "weight_groups": "output"}, marks=pytest.mark.slow),
    {"compute_dtype": "bfloat16"}, {"compute_dtype": "bfloat16", "weight_format": "exact12"},
], ids=["bits4", "bits8", "bfloat16", "exact12"])  # fmt: skip
def test_weights_are_multiplied_as_they_are_stored_for_the_device(changes, tmp_path, cache, fast):
    in_bfloat16 = "compute_dtype" in changes
    model, _ = model_of(tmp_path, "mixtral", torch.bfloat16 if in_bfloat16 else torch.float32)
    pairs, found = [((5, 6, 7, 8), (9, 10, 11)), ((12, 13), (14, 15, 16, 17))], []
    for cpu_experts in (False, True):
        engine, _, _ = load(model, cache, cpu_experts=cpu_experts, **SWEEP | changes)
        found.append([score.logprob for score in engine.score(pairs)])
        assert not cpu_experts or multiplied(engine)
        engine.close()
    assert found[1] == pytest.approx(found[0], rel=0.02 if in_bfloat16 else 1e-4)


def test_an_expert_that_nobody_chooses_is_neither_copied_nor_multiplied(tmp_path, cache, fast):
    kind, config = MODELS["mixtral"]
    folder = route_by(save(tmp_path / "m", kind, **config | {"num_experts_per_tok": 1}), [0.0] * 4)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    requests = requests_of(4, 3)
    engine, _, _ = load(prepare(folder), cache, cpu_experts=True, **SWEEP)
    tokens = answers(engine, requests)
    counted = engine.stats().experts.values()
    assert 0 < multiplied(engine) <= sum(sum(counts.used) for counts in counted)
    assert all(sum(rows > 0 for rows in counts.rows) == 1 for counts in counted)
    engine.close()
    assert all_greedy(reference, requests, tokens)


def test_a_failed_product_ends_the_pass_and_the_next_one_is_right(tmp_path, cache, fast, monkeypatch):
    model, reference = model_of(tmp_path, "mixtral")
    requests = requests_of(8, 3)
    engine, _, _ = load(model, cache, cpu_experts=True, **POLICIES["zigzag"])
    with monkeypatch.context() as patch:

        def fails(*args):
            raise HarnessError("out of luck")

        patch.setattr(HostExperts, "_product", fails)
        with pytest.raises(HarnessError, match="out of luck"):
            answers(engine, requests)
    assert all_greedy(reference, requests, answers(engine, requests))
    engine.close()


def test_the_load_says_what_the_host_multiplies_and_how_fast(tmp_path, cache, monkeypatch):
    model, _ = model_of(tmp_path, "mixtral")
    multiply, asked = HostExperts._product, []

    def counted(self, matrix, x, *given):
        asked.append((matrix, len(x)))
        return multiply(self, matrix, x, *given)

    monkeypatch.setattr(HostExperts, "_product", counted)
    engine, report, _ = load(model, cache, cpu_experts=True, **SWEEP)
    by_rows = [{matrix for matrix, rows in asked if rows == count} for count in (1, 8, 64)]
    assert by_rows[0] == by_rows[1] == by_rows[2], "the same experts are measured at all rows"
    assert {matrix.rpartition(".")[2].partition("[")[0] for matrix in by_rows[0]} == {"gate_up_proj", "down_proj"}
    assert engine.loaded.host_experts.rates.link > 0
    assert [rows for rows, seconds in engine.loaded.host_experts.rates.host if seconds > 0] == [1, 8, 64]
    layers, experts = 3, 4
    assert any(f"{layers * experts} experts in host memory: copied at" in note for note in report.notes)
    engine.close()
    for weights in ((1.0, 0.0, 0.0), (0.0, 0.0, 1.0)):
        engine, report, _ = load(model, cache, cpu_experts=True, **SWEEP | {"weights": weights})
        assert any("cpu_experts has nothing to do" in note for note in report.notes)
        answers(engine, requests_of(1, 1))
        assert not multiplied(engine)
        engine.close()


def test_without_a_device_or_on_parts_of_experts_it_is_refused():
    with pytest.raises(UnsupportedError, match="cpu_experts: without a device"):
        refuse(OffloadPolicy(cpu_experts=True), HardwareLimits(), None)
    with pytest.raises(UnsupportedError, match="cpu_experts: ranks have parts"):
        refuse(OffloadPolicy(cpu_experts=True, tensor=2), HardwareLimits(device_memory=1 << 30), None)
    refuse(OffloadPolicy(cpu_experts=True), HardwareLimits(device_memory=1 << 30), None)
