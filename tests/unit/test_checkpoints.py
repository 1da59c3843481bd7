"""Checkpoints: dummy weights are reproducible and crash-safe, damaged folders are named before anything loads."""

import errno
import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import struct
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from engines.models import checkpoints, dummy_weights, shapes
from harness.api import DiskFullError, HarnessError, ModelSpec, UnsupportedError

TINY = "facebook/opt-125m"
#: Of the tensors of the tiny model at bfloat16: raise dummy_weights.RECIPE whenever this has to change.
TINY_SHA256 = "bdd446966678c79c5be952afa2a1d7b36cf5e72f480db4758ce7fa8a9d95badb"


@pytest.fixture(autouse=True)
def tiny_catalogue(monkeypatch):
    """A two-layer OPT behind a catalogue id, in shards of 2 MB."""
    entry = shapes._Opt(2, 64, 2)
    monkeypatch.setitem(shapes._MODELS, TINY, entry)
    monkeypatch.setitem(shapes.CATALOGUE, TINY, entry.shape())
    monkeypatch.setattr(dummy_weights, "SHARD_BYTES", 2 << 20)


def dummy(cache, dtype="auto", on_progress=None):
    return checkpoints.prepare(ModelSpec(TINY, "dummy", dtype), cache, on_progress)


def content(path) -> str:
    """Hash of all tensors in file order."""
    digest = hashlib.sha256()
    for shard in sorted(Path(path).glob("*.safetensors")):
        data = shard.read_bytes()
        digest.update(data[8 + int.from_bytes(data[:8], "little") :])
    return digest.hexdigest()


def folders(cache) -> list[Path]:
    """The checkpoints that a cache has, finished or not."""
    return [path for path in (cache / "models").iterdir() if path.is_dir()]


def test_dummy_weights_are_the_same_everywhere(tmp_path) -> None:
    first, second = dummy(tmp_path / "a"), dummy(tmp_path / "b")
    assert content(first.path) == content(second.path) == TINY_SHA256
    assert first.digest == second.digest
    assert first.dtype == "bfloat16" and first.shape == shapes.shape(TINY)
    assert first.weight_bytes == 2 * first.shape.params_total
    assert len(list(Path(first.path).glob("*.safetensors"))) > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_transformers_loads_a_dummy_and_it_is_not_degenerate(tmp_path, dtype) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(dummy(tmp_path, dtype).path, dtype="auto")
    assert str(model.dtype) == f"torch.{dtype}"
    state = model.model.decoder.layers[0].state_dict()
    assert state["fc1.weight"].float().std().item() == pytest.approx(0.02, rel=0.05)
    assert state["fc2.weight"].float().std().item() == pytest.approx(0.01, rel=0.05)
    assert state["fc1.bias"].abs().max() == 0 and (state["final_layer_norm.weight"] == 1).all()
    embedding = model.get_input_embeddings().weight
    assert len(torch.unique(embedding.float(), dim=0)) == len(embedding)  # equal rows would tie in greedy decoding


def test_a_built_checkpoint_is_used_again(tmp_path) -> None:
    built = []
    first = dummy(tmp_path, on_progress=lambda done, total: built.append((done, total)))
    assert built[-1] == (first.weight_bytes, first.weight_bytes)
    built.clear()
    assert dummy(tmp_path, on_progress=lambda *_: built.append(_)) == first
    assert not built


def _build_slowly(cache, started) -> None:
    def progress(done, total):
        started.set()
        time.sleep(0.05)

    dummy(cache, on_progress=progress)


def test_kill_9_leaves_nothing_that_looks_complete(tmp_path) -> None:
    context = multiprocessing.get_context("fork")
    started = context.Event()
    builder = context.Process(target=_build_slowly, args=(tmp_path, started))
    builder.start()
    assert started.wait(60)
    os.kill(builder.pid, signal.SIGKILL)
    builder.join()
    (left,) = folders(tmp_path)
    assert ".tmp-" in left.name
    assert content(dummy(tmp_path).path) == TINY_SHA256
    assert not list((tmp_path / "models").glob("*.tmp-*"))


def _build_and_count(cache, counter) -> None:
    told = []
    dummy(cache, on_progress=lambda *step: told.append(step))
    with counter.get_lock():
        counter.value += bool(told)


def test_concurrent_users_build_once(tmp_path) -> None:
    context = multiprocessing.get_context("fork")
    counter = context.Value("i", 0)
    users = [context.Process(target=_build_and_count, args=(tmp_path, counter)) for _ in range(3)]
    for user in users:
        user.start()
    for user in users:
        user.join(60)
    assert [user.exitcode for user in users] == [0, 0, 0]
    assert counter.value == 1


def test_disk_full_is_seen_before_and_during_writing(tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
        with pytest.raises(DiskFullError, match=r"need \d+ bytes, 1 are free"):
            dummy(tmp_path)

    def full(done, total):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DiskFullError, match="disk full"):
        dummy(tmp_path, on_progress=full)
    assert not folders(tmp_path)


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(dummy(tmp_path / "cache").path)


def prepare(folder: Path, **fields):
    return checkpoints.prepare(ModelSpec(str(folder), **fields), folder / "unused")


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def test_a_folder_is_described_from_its_own_files(folder) -> None:
    local = prepare(folder)
    assert local.shape == shapes.shape(TINY)
    assert local == dummy(folder.parent.parent)
    assert local.path == str(folder)


def test_a_truncated_shard_is_named_with_both_sizes(folder) -> None:
    size = shard(folder).stat().st_size
    os.truncate(shard(folder), size - 100)
    with pytest.raises(HarnessError, match=rf"{shard(folder).name}.*expected {size} bytes, found {size - 100}"):
        prepare(folder)


@pytest.mark.parametrize("length", [0, 5, 12])
def test_a_shard_without_a_header_is_named(folder, length) -> None:
    os.truncate(shard(folder), length)
    with pytest.raises(HarnessError, match=r"not a safetensors file"):
        prepare(folder)


def test_a_missing_shard_is_named(folder) -> None:
    shard(folder).unlink()
    with pytest.raises(HarnessError, match=r"model-00001-of-.*missing"):
        prepare(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [({"x": "../../secret.safetensors"}, "outside the folder"), ({"a": ["x"], "b": 3}, "names no shards")],
)
def test_an_index_names_files_of_the_folder_only(folder, weight_map, message) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(HarnessError, match=message):
        prepare(folder)


def test_two_checkpoints_in_one_folder_are_refused(folder) -> None:
    """Some libraries read the single file, others the shards: their answers would be compared."""
    (folder / "model.safetensors").write_bytes(shard(folder).read_bytes())
    with pytest.raises(HarnessError, match=r"holds two checkpoints, model\.safetensors and the shards"):
        prepare(folder)


def test_pickled_weights_are_refused_unread(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(HarnessError, match=r"pickled.*pytorch_model\.bin"):
        prepare(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("\udc80", "not valid JSON"),
        ('{"model_type": "x"}', "no causal model"),
    ],
)
def test_a_wrong_config_is_one_line(folder, text, message) -> None:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(HarnessError, match=message) as caught:
        prepare(folder)
    assert "config.json" in str(caught.value)


def test_quantized_and_differently_stored_weights_are_refused(folder) -> None:
    with pytest.raises(HarnessError, match="stores bfloat16, not float32"):
        prepare(folder, dtype="float32")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {}}))
    with pytest.raises(UnsupportedError, match="quantized"):
        prepare(folder)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/nothing", "a/../b", "a/b/c", "owner/na me", "-x", "", "a;b", "~nobody/x"]
)
def test_odd_ids_never_reach_the_hub(tmp_path, monkeypatch, name) -> None:
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(HarnessError):
        checkpoints.prepare(ModelSpec(name), tmp_path / "cache")


@pytest.mark.parametrize(
    ("error", "message"),
    [("RepositoryNotFoundError", "unknown to the hub"), ("GatedRepoError", "gated"), (None, "cannot be reached")],
)
def test_hub_failures_say_what_to_do(tmp_path, monkeypatch, error, message) -> None:
    import huggingface_hub

    def fail(*args, **kwargs):
        if error is None:
            raise ConnectionError("[Errno -2] Name or service not known")
        kind = getattr(huggingface_hub.errors, error)
        raise kind.__new__(kind, "no")  # its constructor wants the transport's own response

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(HarnessError, match=message) as caught:
        checkpoints.prepare(ModelSpec("owner/model"), tmp_path)
    assert "weights: dummy" in str(caught.value) and "\n" not in str(caught.value)


def test_evict_drops_every_file_of_a_folder_from_the_page_cache(folder, monkeypatch) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "more").write_text("x")
    dropped: list[int] = []
    monkeypatch.setattr(checkpoints, "drop_from_page_cache", lambda file: dropped.append(os.fstat(file).st_ino))
    checkpoints.evict(folder)
    assert sorted(dropped) == sorted(path.stat().st_ino for path in folder.rglob("*") if path.is_file())


def test_odd_folders_are_one_line(folder, tmp_path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    with pytest.raises(HarnessError, match="holds no tensors"):
        prepare(folder)
    with pytest.raises(HarnessError, match="cannot be read"):
        checkpoints.prepare(ModelSpec("x" * 5000), tmp_path)


def test_a_checkpoints_own_code_is_neither_run_nor_asked_about(folder, monkeypatch) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "homemade"
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('code has run')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(HarnessError, match=r"config\.json: transformers builds no causal model"):
        prepare(folder)


def test_a_digest_of_contents_sees_weights_and_tokenizer(folder, tmp_path) -> None:
    model = prepare(folder)
    seen: list[tuple[int, int]] = []

    def digest() -> str:
        return checkpoints.content_digest(model, tmp_path, lambda done, total: seen.append((done, total)))

    first = digest()
    assert seen[-1][0] == seen[-1][1] > model.weight_bytes
    assert digest() == first
    data = bytearray(shard(folder).read_bytes())
    data[-1] ^= 1
    shard(folder).write_bytes(data)
    second = digest()
    (folder / "tokenizer.json").write_text("{}")
    assert len({first, second, digest()}) == 3


def test_converted_folders_keep_their_names() -> None:
    """Users' converted checkpoints are used again only as long as this key stays the same for the same layout."""
    from engines.offload.memory.layout import Matrix, tiles_of
    from engines.offload.memory.storage import Grouped, Panels, Plain
    from engines.offload.weights.convert import folder_key

    matrices = [Matrix("a.weight", 300, 200, "layer-00000"), Matrix("b", 128, 64, "layer-00001", expert=1)]
    stored = (Plain("bfloat16"), Grouped(4, 64), Grouped(3, 32, group_axis=0), Panels(), Panels(Grouped(4, 64)))
    keys = [folder_key(["x"], "bfloat16", tiles_of(matrices, [how] * 2, 20000), ["t"], ["s"]) for how in stored]
    assert keys == ["8acd7c65f1432f32", "5ee7a14eaa68b29e", "3acdc8176b701a24", "9ac7bf3110979ecb", "e3a5adfc31461c27"]
