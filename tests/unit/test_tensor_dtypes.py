"""Tensors that choose experts keep their digits, as in `from_pretrained`."""

import pytest
import torch
import transformers

from engines.offload.model.meta_model import MetaModel
from tests.offload import prepare, save

SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
         "pad_token_id": 0}  # fmt: skip
KINDS = {
    "llama": {},
    "ernie4_5_moe": SMALL | {"moe_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "gpt_oss": SMALL | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
                        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_small_tensors_have_the_dtypes_that_transformers_gives_them(kind, dtype, tmp_path):
    model = prepare(save(tmp_path / kind, kind, **KINDS[kind]))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model.path, dtype=dtype)
    own = MetaModel(model.path, model.shape, dtype)
    there = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    assert {name: own.dtypes.of(name) for name in own.small} == {name: there[name].dtype for name in own.small}
    nbytes = sum(there[name].numel() * there[name].itemsize for name in own.small)
    assert own.dtypes.values(own.small) == -(-nbytes // dtype.itemsize)
    if kind == "ernie4_5_moe":
        assert any(own.dtypes.of(name) == torch.float32 for name in own.small)
