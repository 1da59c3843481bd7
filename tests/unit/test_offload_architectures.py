"""Every architecture says what transformers says of it: windows, soft-capping, sinks and all the rest."""

from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from engines.offload import survey
from engines.offload.memory.kv_blocks import blocks_for
from harness.api import GenerationRequest, HarnessError, SamplingParams, UnsupportedError
from tests.offload import (
    COMMON,
    CONTEXT,
    VOCAB,
    all_greedy,
    answers,
    drop_tensor,
    exact_score,
    load_and_answer,
    policies,
    prepare,
    requests_of,
    save,
    tiny,
)

ROTARY = COMMON | {
    "intermediate_size": 160,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 8}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
MODELS = {
    "opt-350m": ("opt", COMMON | {"ffn_dim": 160, "word_embed_proj_dim": 32, "do_layer_norm_before": False,
                                  "max_position_embeddings": CONTEXT}),
    "gpt2": ("gpt2", {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT,
                      "bos_token_id": 1, "eos_token_id": 2}),
    "llama3": ("llama", ROTARY | {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", ROTARY | {"sliding_window": 8}),
    "qwen2": ("qwen2", ROTARY | {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}),
    "qwen3": ("qwen3", ROTARY | {"head_dim": 24, "tie_word_embeddings": True}),
    "phi3": ("phi3", ROTARY | {"sliding_window": 8, "eos_token_id": 2}),
    "gemma2": ("gemma2", ROTARY | MIXED | {"head_dim": 24, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", ROTARY | MIXED | {"head_dim": 24, "query_pre_attn_scalar": 24}),
    "mixtral": ("mixtral", ROTARY | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("qwen3_moe", ROTARY | {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 16,
                                         "num_experts_per_tok": 2}),
    "olmoe": ("olmoe", ROTARY | {"intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2,
                                 "eos_token_id": 2}),
    "gpt-oss": ("gpt_oss", ROTARY | MIXED | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
                                             "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    kind, config = MODELS[request.param]
    return save(tmp_path_factory.mktemp(request.param) / "m", kind, **config)


@pytest.fixture(scope="module")
def reference(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def test_greedy_output_is_transformers_own_on_every_schedule(folder, reference, cache):
    model, requests = prepare(folder), requests_of(1, 9)
    for schedule, size, batches, chunk in (("row", 3, 1, None), ("zigzag", 2, 2, 7), ("sweep", 9, 1, 13)):
        policy = {"gpu_batch_size": size, "num_gpu_batches": batches, "prefill_chunk": chunk}
        tokens, _ = load_and_answer(model, cache, requests, schedule=schedule, **policy)
        assert all_greedy(reference, requests, tokens)


@pytest.mark.slow
@settings(max_examples=17, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), policy=policies())
def test_two_hundred_draws_of_architecture_schedule_batch_and_placement(folder, reference, cache, seed, policy, load):
    """17 of each of the thirteen."""
    engine, _ = load(prepare(folder), cache, **policy)
    held = engine.stats().num_kv_blocks
    requests = [r for r in requests_of(seed, 5) if blocks_for(len(r.prompt) + r.sampling.max_tokens) <= held]
    tokens = answers(engine, requests)
    engine.close()
    assert tokens.keys() == {r.id for r in requests}
    assert all_greedy(reference, requests, tokens)


def test_logits_are_within_one_in_ten_thousand(folder, reference, cache, load):
    """Of prompts longer than any window, cut into chunks, against one plain pass for each."""
    torch.manual_seed(1)
    pairs = [(tuple(torch.randint(5, VOCAB, (n,)).tolist()), (7, 8, 9)) for n in (1, 20, 45)]
    engine, _ = load(prepare(folder), cache, schedule="sweep", gpu_batch_size=3, prefill_chunk=11)
    scores = engine.score(pairs)
    for pair, score in zip(pairs, scores, strict=True):
        assert score.logprob == pytest.approx(exact_score(reference, *pair).logprob, rel=1e-4)


def test_only_wanted_experts_are_loaded(tmp_path, load):
    """One token a pass meets 2 of 64 experts in each layer; nothing else is read once the ring was filled."""
    kind, config = MODELS["qwen3-moe"]
    model = tiny(tmp_path / "m", kind, **config | {"num_experts": 64})
    engine, report = load(model, tmp_path, schedule="row", weights=(0.0, 0.0, 1.0))
    at_load = engine.stats().weight_bytes_read
    list(engine.generate([GenerationRequest("a", (5,), SamplingParams(20, ignore_eos=True))]))
    stats, loaded = engine.stats(), engine.loaded
    experts = loaded.expert_usage.experts
    needed = next_pass = 0
    for tile in loaded.tiles:
        mixture, expert = experts.get(tile.matrix, (None, None))
        needed += tile.span * (stats.experts[mixture].used[expert] if mixture else stats.passes)
        next_pass += 0 if mixture else tile.span
    assert needed <= stats.weight_bytes_read <= at_load + needed + next_pass
    assert needed < 20 * report.weights_by_tier[2] / 2


def test_a_mask_other_than_the_window_it_names_is_refused(tmp_path, monkeypatch, load):
    folder = save(tmp_path / "m", "mistral", **ROTARY, sliding_window=8)
    attention = transformers.models.mistral.modeling_mistral.MistralAttention
    plain = attention.forward

    def forward(self, *args, **kwargs):
        self.config.sliding_window = 9
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(attention, "forward", forward)
    with pytest.raises(UnsupportedError, match=r"mistral: .* neither causal nor the window it names"):
        load(prepare(folder), tmp_path / "cache")


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "olmoe"])
def test_mixtures_run_in_sixteen_bits(name, tmp_path):
    """Routers that share in float32 among them."""
    kind, config = MODELS[name]
    model = tiny(tmp_path / "m", kind, torch.bfloat16, **config)
    tokens, report = load_and_answer(model, tmp_path, requests_of(1, 4), compute_dtype="bfloat16", gpu_batch_size=4)
    assert report.compute_dtype == "bfloat16"
    assert len(tokens) == 4


def test_a_missing_expert_is_named(tmp_path, load):
    kind, config = MODELS["qwen3-moe"]
    folder = save(tmp_path / "m", kind, **config)
    names = load_file(folder / "model.safetensors")
    drop_tensor(folder, next(name for name in names if "layers.1" in name and "experts.3." in name))
    with pytest.raises(HarnessError, match=r"lacks an expert between others for model\.layers\.1\."):
        load(prepare(folder), tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["apertus", "arcee", "cohere2", "ernie4_5_moe", "exaone4", "glm4", "glm4_moe", "gpt_bigcode", "gpt_neox", "granite",
     "granitemoe", "minimax_m2", "nanochat", "olmo2", "phimoe", "qwen2_moe", "smollm3", "starcoder2"],
)  # fmt: skip
def test_other_architectures_that_pass_the_check_are_right_too(kind):
    assert not survey.refusal(kind)
    assert survey.difference(kind) < 1e-5


def test_the_table_in_the_docs_says_that_tested_architectures_run():
    table = (Path(__file__).parents[2] / "docs" / "reference" / "architectures.md").read_text()
    runs = table[: table.index("| refused")]
    assert all(f"| `{kind}` |" in runs for kind, _ in MODELS.values())
    assert all(f"| `{kind}` |" not in runs for kind in ("bloom", "falcon", "mpt"))
