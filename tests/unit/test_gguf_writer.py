"""GGUF files of mixtures hold what the checkpoint does, whether its experts are stacked or apart."""

import gguf
import numpy as np
import pytest
import torch
import transformers

from engines.models.checkpoints import prepare as prepared
from engines.models.gguf_writer import to_gguf
from harness import api
from tests.offload import CONFIGS, tiny

SIZES = CONFIGS["llama"] | {
    "intermediate_size": 96, "num_hidden_layers": 2, "num_experts_per_tok": 2, "num_key_value_heads": 4,
}  # fmt: skip
QWEN = {"moe_intermediate_size": 96, "intermediate_size": 160, "head_dim": 16, "norm_topk_prob": True}
FORMS = ("olmoe", "qwen3_moe", "stacked")


def a_model(folder, form):
    if form == "stacked":
        return prepared(api.ModelSpec("tiny/olmoe", "dummy", "float32"), folder)
    sizes = SIZES | QWEN if form == "qwen3_moe" else SIZES
    return tiny(folder / form, form, num_experts=4, **sizes)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_holds_the_experts_of_the_checkpoint(tmp_path, form):
    model = a_model(tmp_path, form)
    file = to_gguf(model, api.Job(tmp_path, tmp_path / "cache", 64, 64), "F32")
    reader = gguf.GGUFReader(file)
    found = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
    fields = {name: field.contents() for name, field in reader.fields.items()}
    state = transformers.AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).state_dict()
    experts = {"olmoe": 4, "qwen3_moe": 4, "stacked": 8}[form]
    architecture = "qwen3moe" if form == "qwen3_moe" else "olmoe"
    assert fields["general.architecture"] == architecture
    assert fields[f"{architecture}.expert_count"] == experts
    assert fields[f"{architecture}.expert_used_count"] == 2
    for layer in range(2):
        gate_up = state[f"model.layers.{layer}.mlp.experts.gate_up_proj"].numpy()
        gate, up = np.split(gate_up, 2, axis=1)
        assert np.array_equal(found[f"blk.{layer}.ffn_gate_exps.weight"], gate)
        assert np.array_equal(found[f"blk.{layer}.ffn_up_exps.weight"], up)
        down = state[f"model.layers.{layer}.mlp.experts.down_proj"].numpy()
        assert np.array_equal(found[f"blk.{layer}.ffn_down_exps.weight"], down)
        router = state[f"model.layers.{layer}.mlp.gate.weight"].numpy()
        assert np.array_equal(found[f"blk.{layer}.ffn_gate_inp.weight"], router)
        norm = state[f"model.layers.{layer}.self_attn.q_norm.weight"].numpy()
        assert np.array_equal(found[f"blk.{layer}.attn_q_norm.weight"], norm)
    assert fields[f"{architecture}.expert_feed_forward_length"] == (64 if form == "stacked" else 96)
    assert len(found) == 2 * 12 + 3


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        ("olmoe", {"clip_qkv": 8.0}),
        ("olmoe", {"norm_topk_prob": True}),
        ("olmoe", {"num_key_value_heads": 2}),
        ("qwen3_moe", QWEN | {"norm_topk_prob": False}),
        ("qwen3_moe", QWEN | {"decoder_sparse_step": 2}),
        ("qwen3_moe", QWEN | {"mlp_only_layers": [1]}),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path, form, changes):
    model = tiny(tmp_path / "m", form, num_experts=4, **SIZES | changes)
    with pytest.raises(api.UnsupportedError, match=[*changes][-1]):
        to_gguf(model, api.Job(tmp_path, tmp_path / "cache", 64, 64), "F32")
