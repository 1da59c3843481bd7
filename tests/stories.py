"""The stories260K model, a real LLaMA of 260,032 float32 weights, as a transformers folder and with its vocabulary."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

DATA = Path(__file__).parent.parent.parent / "shared" / "data" / "model_stories260k"


def stories260k(folder: Path) -> Path:
    """Writes the model to `folder`. Skips the test where the data are not here."""
    source = DATA / "stories260K.bin"
    if not source.exists():
        pytest.skip(f"no {source.name}: the shared data are not here")
    raw = source.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, context = np.frombuffer(raw, "<i4", 7).tolist()
    values = torch.from_numpy(np.frombuffer(raw, "<f4", offset=28).copy())
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=dim, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=context, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    head = dim // heads
    position = 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal position
        position += (size := torch.Size(shape).numel())
        return values[position - size : position].view(shape)

    def halves(weight: torch.Tensor) -> torch.Tensor:
        """Rows for rotary halves, from rows for rotary pairs."""
        return weight.view(-1, head // 2, 2, dim).transpose(1, 2).reshape(-1, dim)

    parts = {
        "embed_tokens": take(vocab, dim),
        "input_layernorm": take(layers, dim),
        "self_attn.q_proj": take(layers, heads * head, dim),
        "self_attn.k_proj": take(layers, kv_heads * head, dim),
        "self_attn.v_proj": take(layers, kv_heads * head, dim),
        "self_attn.o_proj": take(layers, dim, heads * head),
        "post_attention_layernorm": take(layers, dim),
        "mlp.gate_proj": take(layers, hidden, dim),
        "mlp.down_proj": take(layers, dim, hidden),
        "mlp.up_proj": take(layers, hidden, dim),
        "norm": take(dim),
    }
    state = {f"model.{name}.weight": parts.pop(name) for name in ("embed_tokens", "norm")}
    for name, stacked in parts.items():
        for i, weight in enumerate(stacked):
            rotary = name.endswith(("q_proj", "k_proj"))
            state[f"model.layers.{i}.{name}.weight"] = halves(weight) if rotary else weight
    module = transformers.LlamaForCausalLM(config)
    module.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    module.save_pretrained(folder)
    return folder


def vocabulary() -> list[str]:
    """The text of each token id."""
    raw = (DATA / "tok512.bin").read_bytes()[4:]  # the first number is the longest token's length
    pieces = []
    while raw:
        length = int.from_bytes(raw[4:8], "little")  # behind the token's score
        pieces.append(raw[8 : 8 + length].decode(errors="replace"))
        raw = raw[8 + length :]
    return pieces
