"""GGUF files and pickled weights become the folder of safetensors that they are meant to be."""

import json
import os
import pickle
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from engines.models import checkpoints
from harness.api import HarnessError, ModelSpec, UnsupportedError
from tests.offload import save
from tests.unit.test_offload_architectures import MODELS

gguf = pytest.importorskip("gguf")


def prepare(path, **fields):
    """The model in a file or folder, with a cache beside it."""
    return checkpoints.prepare(ModelSpec(str(path), **fields), path.parent / "cache")


def nothing_is_left(cache):
    return not any(path.is_dir() for path in (cache / "models").iterdir())


def tensors_of(path):
    index = json.loads((path / "model.safetensors.index.json").read_text())
    found = {}
    for name in set(index["weight_map"].values()):
        found |= load_file(path / name)
    assert set(found) == set(index["weight_map"])
    return found


def permuted(weight, heads):
    """The order of rows in which llama.cpp keeps what is rotated: pairs side by side."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, module, architecture, kind=gguf.GGMLQuantizationType.F32, leave_out=(), also=None, base=1e4):
    """As llama.cpp's converter writes a model; matrices in `kind`."""
    config, state = module.config, {k: v.numpy() for k, v in module.state_dict().items()}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(base)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["t", *map(str, range(1, 5)), *(f"t{i}" for i in range(5, config.vocab_size - 1)), "t1"])
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    if architecture == "qwen3moe":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if also:
        also(writer)
    arch = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, values in state.items():
        stem, _, suffix = name.rpartition(".")
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(values, 2, axis=1)
            layer = name.split(".")[2]
            found = {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
        elif name.endswith("experts.down_proj"):
            found = {f"blk.{name.split('.')[2]}.ffn_down_exps.weight": values}
        elif architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            found = {f"{names.get_name(stem)}.{suffix}": permuted(values, heads)}
        else:
            found = {f"{names.get_name(stem)}.{suffix}": values}
        for key, value in found.items():
            if key in leave_out:
                continue
            if value.ndim > 1 and kind != gguf.GGMLQuantizationType.F32:
                writer.add_tensor(key, gguf.quants.quantize(value, kind), raw_dtype=kind)
            else:
                writer.add_tensor(key, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("llama"), "llama", intermediate_size=192, tie_word_embeddings=False)
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_a_gguf_file_unpacks_to_what_transformers_reads_in_it(llama, tmp_path, kind):
    path = write_gguf(tmp_path / "m.gguf", llama, "llama", gguf.GGMLQuantizationType[kind])
    local = prepare(path, dtype="float32")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    found = tensors_of(Path(local.path))
    expected = reference.state_dict()
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    if kind == "F32":
        assert all(torch.equal(found[name], values) for name, values in llama.state_dict().items())
    again = transformers.AutoConfig.from_pretrained(local.path)
    assert (again.vocab_size, again.num_key_value_heads, again.eos_token_id) == (512, 2, 2)
    assert transformers.AutoTokenizer.from_pretrained(local.path).convert_tokens_to_ids("t7") == 7


def test_a_tokenizer_beside_a_gguf_file_is_not_taken_for_its(llama, tmp_path):
    tokens = []
    for neighbour in (None, '{"model": {"type": "WordLevel", "vocab": {"other": 0}, "unk_token": "other"}}'):
        folder = tmp_path / f"with-{neighbour is not None}"
        folder.mkdir()
        path = write_gguf(folder / "m.gguf", llama, "llama")
        if neighbour:
            (folder / "tokenizer.json").write_text(neighbour)
            (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        local = prepare(path)
        tokens.append(transformers.AutoTokenizer.from_pretrained(local.path).get_vocab())
    assert tokens[0] == tokens[1]
    assert tokens[0]["t7"] == 7


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("Q8_0", "bfloat16")])
def test_auto_is_the_float_type_of_the_file(llama, tmp_path, kind, dtype):
    path = write_gguf(tmp_path / "m.gguf", llama, "llama", gguf.GGMLQuantizationType[kind])
    assert prepare(path).dtype == dtype


def test_a_gguf_file_that_is_unpacked_is_not_parsed_again(llama, tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", llama, "llama", gguf.GGMLQuantizationType.Q8_0)
    first = prepare(path)
    monkeypatch.setattr("engines.models.gguf_file._open", Mock(side_effect=AssertionError("parsed")))
    assert prepare(path) == first
    os.utime(path, ns=(1, 1))
    with pytest.raises(AssertionError, match="parsed"):
        prepare(path)


def test_experts_of_a_gguf_file_are_put_together(tmp_path):
    kind, config = MODELS["qwen3-moe"]
    # transformers takes no width of experts from a GGUF file: it must be its configuration's default
    changes = {"tie_word_embeddings": False, "eos_token_id": 2, "num_hidden_layers": 1, "moe_intermediate_size": 768}
    folder = save(tmp_path / "m", kind, **config | changes)
    module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    path = write_gguf(tmp_path / "m.gguf", module, "qwen3moe")
    local = prepare(path)
    again = transformers.AutoModelForCausalLM.from_pretrained(local.path)
    for name, values in module.state_dict().items():
        assert torch.equal(again.state_dict()[name], values), name


def test_a_gguf_file_that_lacks_a_tensor_is_refused_and_leaves_nothing(llama, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama, "llama", leave_out=("blk.1.ffn_up.weight",))
    with pytest.raises(UnsupportedError, match=r"no tensor for model\.layers\.1\.mlp\.up_proj\.weight"):
        prepare(path)
    assert nothing_is_left(tmp_path / "cache")


@pytest.mark.parametrize("how", ["scaling", "factors", "base"])
def test_positions_that_transformers_would_scale_wrongly_are_refused(llama, tmp_path, how):
    def scale(writer):
        if how == "scaling":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        elif how == "factors":
            writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))

    path = write_gguf(tmp_path / "m.gguf", llama, "llama", also=scale)
    with pytest.MonkeyPatch.context() as patch:
        if how == "base":  # as for architectures of which transformers does not read it
            patch.setitem(transformers.integrations.ggml.GGUF_CONFIG_MAPPING["llama"], "rope.freq_base", None)
            path = write_gguf(tmp_path / "m.gguf", llama, "llama", base=5e5)
        with pytest.raises(UnsupportedError, match=r"rotary"):
            prepare(path)


def test_a_gguf_file_without_a_model_says_so(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "vocab.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(HarnessError, match="without a model"):
        prepare(tmp_path / "vocab.gguf")


def test_what_is_no_whole_gguf_file_is_one_line(llama, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama, "llama")
    whole = path.read_bytes()
    for data in (b"", b"GGUF", b"not a model at all", whole[:100], whole[: len(whole) // 2]):
        path.write_bytes(data)
        with pytest.raises(HarnessError, match="not a whole GGUF file") as caught:
            prepare(path)
        assert "\n" not in str(caught.value)


def test_a_part_of_a_split_file_says_how_to_merge_it(tmp_path):
    part = tmp_path / "m-00001-of-00002.gguf"
    part.write_bytes(b"GGUF")
    with pytest.raises(UnsupportedError, match="merge"):
        prepare(part)


def test_a_gguf_file_that_is_nowhere_is_named(tmp_path):
    with pytest.raises(HarnessError, match="neither an existing file nor a file on the hub"):
        prepare(tmp_path / "none.gguf")


@pytest.fixture
def pickled(tmp_path):
    """An OPT folder as the hub has them: pickled, and the tied head written twice."""
    folder = save(tmp_path / "m", "opt", tie_word_embeddings=True)
    module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(module.state_dict(), folder / "pytorch_model.bin")
    return folder, module


def test_pickled_weights_are_converted_for_who_asks(pickled, tmp_path):
    folder, module = pickled
    with pytest.raises(HarnessError, match="weights: pickle"):
        prepare(folder)
    local = prepare(folder, weights="pickle")
    again = transformers.AutoModelForCausalLM.from_pretrained(local.path).state_dict()
    assert all(torch.equal(again[name], values) for name, values in module.state_dict().items())
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "generation_config.json", "pytorch_model.bin"]


def test_an_index_of_safetensors_beside_pickled_weights_is_not_taken_for_ours(pickled, tmp_path):
    folder, _ = pickled
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    assert prepare(folder, weights="pickle").weight_bytes


def test_pickled_shards_are_found_by_their_index(pickled, tmp_path):
    folder, module = pickled
    state = list(module.state_dict().items())
    parts = {"a.bin": dict(state[:5]), "b.bin": dict(state[5:])}
    for name, part in parts.items():
        torch.save(part, folder / name)
    (folder / "pytorch_model.bin").unlink()
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {key: name for name, part in parts.items() for key in part}}))
    local = prepare(folder, weights="pickle")
    assert local.weight_bytes >= sum(p.numel() * 4 for p in module.parameters())
    index.write_text(json.dumps({"weight_map": {"x": "../a.bin"}}))
    with pytest.raises(HarnessError, match="is missing: its index names it"):
        prepare(folder, weights="pickle")


class Evil:
    def __reduce__(self):
        return (print, ("code has run",))


@pytest.mark.parametrize("content", ["code", "no table", "nested", "cut"])
def test_a_pickle_that_is_more_or_less_than_tensors_is_refused(pickled, tmp_path, capsys, content):
    folder, _ = pickled
    file = folder / "pytorch_model.bin"
    if content == "cut":
        file.write_bytes(file.read_bytes()[:1000])
    elif content == "code":
        file.write_bytes(pickle.dumps({"x": Evil()}))
    else:
        torch.save([torch.ones(1)] if content == "no table" else {"model": {"x": torch.ones(1)}}, file)
    refusal = r"pytorch_model\.bin (is damaged, or holds more|is not a plain state dict)"
    with pytest.raises(HarnessError, match=refusal) as caught:
        prepare(folder, weights="pickle")
    assert "\n" not in str(caught.value)
    assert "code has run" not in capsys.readouterr().out
    assert nothing_is_left(tmp_path / "cache")
