"""Checkpoints on their way into the offload engine: every weight, whole or not at all, and files that are damaged."""

import errno
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import transformers

from engines.offload.device.host import HostDevice
from engines.offload.memory.layout import tiles_of
from engines.offload.memory.storage import Plain
from engines.offload.model.meta_model import MetaModel
from engines.offload.weights import manifest
from engines.offload.weights.checkpoint_reader import CheckpointReader
from engines.offload.weights.convert import CheckpointLayout, convert
from harness import api
from tests.offload import (
    CONFIGS,
    GOOD,
    all_greedy,
    answers,
    drop_tensor,
    prepare,
    save,
)


def meta_model(model):
    return MetaModel(Path(model.path), model.shape, torch.float32)


def convert_into(model, cache, on_progress=lambda done, total: None):
    found = meta_model(model)
    source = CheckpointReader(model, found.prefix, found.aliases)
    tiles = tiles_of(found.matrices, [Plain(model.dtype)] * len(found.matrices))
    layout = CheckpointLayout(found.matrices, tiles, found.tables, found.small)
    return convert(model, source, layout, {}, cache, on_progress)


def test_conversion_keeps_every_weight(model, reference, tmp_path):
    converted = convert_into(model, tmp_path)
    state = reference.state_dict()
    for tile in converted.tiles:
        data = (converted.folder / tile.file).read_bytes()[tile.offset : tile.offset + tile.nbytes]
        stored = torch.frombuffer(bytearray(data), dtype=torch.float32).view(tile.shape)
        whole = state[tile.matrix]
        part = whole[tile.start : tile.stop] if tile.axis == 0 else whole[:, tile.start : tile.stop]
        assert torch.equal(stored, part)
    for name in converted.tables:
        assert torch.equal(converted.table(name), state[name])
    small = converted.small()
    assert all(torch.equal(small[name], state[name]) for name in small)
    assert {b.matrix for b in converted.tiles} | set(converted.tables) | set(small) == set(state)


def test_another_training_step_is_another_conversion(tmp_path, cache):
    folder = save(tmp_path / "m", "opt")
    first, again = (convert_into(prepare(folder), tmp_path) for _ in range(2))
    assert again.folder == first.folder
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # a bit of a value somewhere
    path.write_bytes(data)
    other = convert_into(prepare(folder), tmp_path)
    assert other.folder != first.folder


def test_a_converted_folder_says_whether_it_is_whole(model, tmp_path):
    folder = convert_into(model, tmp_path).folder
    assert manifest.problem(folder) == "" and not manifest.is_outdated(folder)
    (folder / "small.safetensors").unlink()
    assert "small.safetensors has 0 of" in manifest.problem(folder)


def _convert_slowly(path, cache, started):
    def tell(done, total):
        started.set()
        time.sleep(0.02)

    convert_into(prepare(path), cache, tell)


def test_kill_minus_nine_during_conversion_leaves_nothing_half_done(model, tmp_path):
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=_convert_slowly, args=(model.path, tmp_path, started))
    process.start()
    assert started.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    folder = tmp_path / "offload"
    assert [p for p in folder.iterdir() if ".tmp-" in p.name], "it was in the middle"
    assert not [p for p in folder.iterdir() if p.is_dir() and ".tmp-" not in p.name]
    converted = convert_into(model, tmp_path)
    assert [p for p in folder.iterdir() if p.is_dir()] == [converted.folder]


def test_a_full_disk_during_conversion_is_told_and_leaves_nothing(model, tmp_path):
    def full(done, total):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(api.DiskFullError, match=r"disk full while writing \d+ bytes of converted weights"):
        convert_into(model, tmp_path, full)
    assert not [p for p in (tmp_path / "offload").iterdir() if p.is_dir()]


def test_nan_weights_are_refused_by_name(tmp_path, cache, load):
    folder = save(tmp_path / "m", "opt")
    module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        module.model.decoder.layers[1].fc1.weight[3, 3] = torch.nan
    module.save_pretrained(folder)
    with pytest.raises(api.HarnessError, match=r"NaN or infinity in model.decoder.layers.1.fc1.weight"):
        load(prepare(folder), tmp_path / "cache")


def test_a_tensor_that_is_not_there_is_named(tmp_path, load):
    folder = save(tmp_path / "m", "llama")
    drop_tensor(folder, "model.layers.2.mlp.up_proj.weight")
    with pytest.raises(api.HarnessError, match=r"no tensor for model.layers.2.mlp.up_proj.weight"):
        load(prepare(folder), tmp_path / "cache")


def test_a_file_that_is_cut_during_the_run_is_an_error_not_a_hang(model, tmp_path, load):
    engine, _ = load(model, tmp_path, weights=(0.0, 0.0, 1.0), schedule="sweep")
    requests = [api.GenerationRequest("a", (5, 6), api.SamplingParams(50, ignore_eos=True))]
    for path in (tmp_path / "offload").glob("*/layer-00001.bin"):
        os.truncate(path, 4096)
    with pytest.raises(api.HarnessError, match=r"layer-00001.bin ends at byte 4096"):
        list(engine.generate(requests))


@pytest.mark.parametrize("kind", ["table", "safetensors"])
def test_a_file_that_was_mapped_and_is_cut_while_a_model_is_loaded_does_not_end_the_process(
    model, tmp_path, load, kind
):
    """By SIGBUS, that is. What the small tensors' file holds was copied."""
    engine, _ = load(model, tmp_path)
    requests = [api.GenerationRequest("a", (5, 6), api.SamplingParams(4, ignore_eos=True))]
    whole = answers(engine, requests)
    for path in (tmp_path / "offload").glob(f"*/*.{kind}"):
        os.truncate(path, 100)
    if kind == "table":
        with pytest.raises(api.HarnessError, match=r"\.table has 100 of \d+ bytes"):
            list(engine.generate(requests))
    else:
        assert answers(engine, requests) == whole


def test_shards_a_bare_prefix_and_either_of_two_tied_tensors_are_found(model, reference, tmp_path, cache, load):
    from safetensors.torch import save_file

    folder = tmp_path / "bare"
    module = transformers.AutoModelForCausalLM.from_pretrained(model.path)
    module.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    sharded, _ = load(prepare(folder), cache, schedule="sweep")
    prefix = f"{module.base_model_prefix}."
    tensors = {name.removeprefix(prefix): tensor.clone() for name, tensor in module.state_dict().items()}
    if module.config.tie_word_embeddings:
        del tensors[next(n for n in tensors if n.endswith("embed_tokens.weight"))]
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors")
    bare, _ = load(prepare(folder), cache, schedule="sweep")
    for engine in (sharded, bare):
        assert all_greedy(reference, GOOD, answers(engine, GOOD))


def test_embeddings_are_scaled_in_the_compute_dtype(tmp_path):
    """Gemma multiplies its embedding by sqrt(hidden): in bfloat16 that would round every activation."""
    torch.manual_seed(0)
    changes = CONFIGS["llama"] | {"head_dim": 16}
    module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("gemma", **changes))
    module.to(torch.bfloat16).save_pretrained(tmp_path / "m")
    model = prepare(tmp_path / "m")
    found = meta_model(model)
    converted = convert_into(model, tmp_path)
    found.bind({name: converted.table(name) for name in found.tables}, converted.small(), HostDevice())
    exact = transformers.AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    ids = torch.arange(5, 50)[None]
    looked_up = found.module.get_input_embeddings()(ids)
    assert looked_up.dtype == torch.float32
    assert torch.equal(looked_up, exact.get_input_embeddings()(ids))


def test_a_table_that_was_cut_is_seen_at_load(model, tmp_path, load):
    engine, _ = load(model, tmp_path)
    engine.close()
    table = next((tmp_path / "offload").glob("*/*.table"))
    os.truncate(table, 100)
    with pytest.raises(api.HarnessError, match=r"\.table has 100 of \d+ bytes"):
        load(model, tmp_path)
