"""Hostile model files are refused before a library allocates what they ask for."""

import base64
import json
import math
import os
import struct

import pytest

from engines.common.text import load_tokenizer
from engines.models import checkpoints, gguf_header, safetensors_file
from engines.models.folder_limits import check_files, check_numbers
from harness.api import HarnessError, ModelSpec

U64, U32 = "<Q", "<I"
HUGE = 1 << 31


def packed(*parts):
    return b"".join(p if isinstance(p, bytes) else struct.pack(*p) for p in parts)


def text(content, length=None):
    return packed((U64, len(content) if length is None else length), content)


def field(name, kind, *value):
    return packed(text(name), (U32, kind), *value)


def tensor(name=b"w", shape=(32,), kind=0, offset=0):
    return packed(text(name), (U32, len(shape)), *((U64, n) for n in shape), (U32, kind), (U64, offset))


def gguf(fields=(), tensors=(), counts=None, magic=b"GGUF", version=3, data=0):
    count = counts or (len(tensors), len(fields))
    head = packed(magic, (U32, version), (U64, count[0]), (U64, count[1]), *fields, *tensors)
    return head.ljust(math.ceil(len(head) / 32) * 32, b"\0") + bytes(data)


ALIGNMENT = field(b"general.alignment", 4, (U32, 32))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it ends within its magic"),
        (gguf(magic=b"GGML"), "does not begin with GGUF"),
        (gguf(version=1), "version 1 is not known"),
        (gguf(counts=(HUGE, 0)), "tensors are more than any model has"),
        (gguf(counts=(0, 1 << 63)), "fields are more than any model has"),
        (gguf(counts=(0, 3)), "ends within"),
        (gguf([field(b"a", 99, (U32, 0))]), "a has the unknown type 99"),
        (gguf([field(b"a", 9, (U32, 9), (U64, 1), (U32, 9), (U64, 1))]), "a is an array of arrays"),
        (gguf([field(b"a", 9, (U32, 0), (U64, HUGE))]), "elements of a are more"),
        (gguf([field(b"a", 9, (U32, 8), (U64, 1 << 20))]), "ends within"),
        (gguf([field(b"a", 9, (U32, 0), (U64, 5 << 20), bytes(5 << 20))] * 2), "its arrays have more elements"),
        (gguf([packed(text(b"a", 1 << 62))]), "bytes of the name of a field are more"),
        (gguf([field(b"a", 8, (U64, 1 << 40))]), "bytes of a are more"),
        (gguf([field(b"general.alignment", 4, (U32, 0))]), "its alignment 0"),
        (gguf([field(b"general.alignment", 4, (U32, 48))]), "its alignment 48"),
        (gguf([field(b"general.alignment", 8, text(b"32"))]), "its alignment b'32'"),
        (gguf([ALIGNMENT], [tensor(shape=(1,) * 5)]), "w has 5 dimensions"),
        (gguf([ALIGNMENT], [tensor(kind=999)]), "w has the unknown type 999"),
        (gguf([ALIGNMENT], [tensor(shape=(HUGE, HUGE, HUGE))], data=256), "it ends within w"),
        (gguf([ALIGNMENT], [tensor(shape=(33,), kind=2)], data=256), "no whole blocks of 32"),
        (gguf([ALIGNMENT], [tensor(offset=1 << 63)], data=256), "it ends within w"),
        (gguf([ALIGNMENT], [tensor()], data=127), "it ends within w"),
    ],
)
def test_a_gguf_header_is_refused_within_bounds(tmp_path, content, words):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(HarnessError, match=words):
        gguf_header.check(path)


def test_a_whole_header_passes_in_both_byte_orders(tmp_path):
    fields = [ALIGNMENT, field(b"t", 9, (U32, 8), (U64, 2), text(b"\xff"), text(b"b")), field(b"f", 7, b"\1")]
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(fields, [tensor(shape=(8, 2, 1, 2)), tensor(b"q", (64, 2), 2, 128)], data=128 + 4 * 18))
    gguf_header.check(path)
    swapped = packed(
        b"GGUF", (">I", 3), (">Q", 1), (">Q", 0), (">Q", 1), b"w", (">I", 1), (">Q", 2), (">I", 0), (">Q", 0)
    )
    path.write_bytes(swapped.ljust(64, b"\0") + bytes(8))
    gguf_header.check(path)


@pytest.mark.parametrize("kind", ["pipe", "folder", "zero"])
def test_a_gguf_file_is_a_regular_file(tmp_path, kind):
    path = tmp_path / "model.gguf"
    {"pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "zero": lambda: path.symlink_to("/dev/zero")}[kind]()
    with pytest.raises(HarnessError, match=r"cannot be read: .*(regular file|a folder)"):
        gguf_header.check(path)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"a": ("F32", [2], [0, 4])}, "does not parse"),
        ({"a": ("F32", [2], [8, 0])}, "does not parse"),
        ({"a": ("F32", [-1, -2], [0, 8])}, "does not parse"),
        ({"a": ("F32", [2.0], [0, 8])}, "does not parse"),
        ({"a": ("F32", [True, 2], [0, 8])}, "does not parse"),
        ({"a": ("F32", [1 << 62, 1 << 62], [0, 8])}, "does not parse"),
        ({"a": ("F32", [2], [0, 8, 8])}, "does not parse"),
        ({"a": ("F32", [2], [0, 8]), "b": ("F32", [2], [4, 12])}, "b begins at"),
        ({"a": ("F32", [2], [0, 8]), "b": ("F32", [2], [0, 8])}, "b begins at"),
        ({"a": ("F32", [2], [4, 12])}, "a begins at"),
        ({"a": ("F4", [2], [0, 1 << 50])}, "is truncated or damaged"),
    ],
)
def test_a_safetensors_header_that_lies_is_refused(tmp_path, entries, words):
    header = json.dumps(
        {name: {"dtype": d, "shape": shape, "data_offsets": offsets} for name, (d, shape, offsets) in entries.items()}
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(packed((U64, len(header)), header) + bytes(12))
    with pytest.raises(HarnessError, match=words):
        safetensors_file.read_shards(tmp_path)


@pytest.mark.parametrize("header", [b"[" * 100_000, b'{"a":' * 90_000, b"\xff", b"[1]", b"9" * 5000])
def test_a_safetensors_header_that_is_none_is_refused(tmp_path, header):
    (tmp_path / "model.safetensors").write_bytes(packed((U64, len(header)), header, bytes(8)))
    with pytest.raises(HarnessError, match="its header does not parse"):
        safetensors_file.read_shards(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_hidden_layers": 1 << 31}, "num_hidden_layers is 2147483648, more than any model has"),
        ({"n_layer": 5000}, "n_layer is 5000"),
        ({"num_labels": 1 << 31}, "num_labels is"),
        ({"text_config": {"num_local_experts": 10**9}}, "num_local_experts is"),
        ({"vision": [{"num_attention_heads": -(10**9)}]}, "num_attention_heads is -1000000000"),
        ({"vocab_size": 1 << 50}, "vocab_size is"),
        ({"hidden_size": 10**4000}, "hidden_size is 1"),
    ],
)
def test_numbers_beyond_any_model_are_refused(tmp_path, config, words):
    with pytest.raises(HarnessError, match=words):
        check_numbers(config, tmp_path / "config.json")


def test_numbers_of_real_models_pass(tmp_path):
    check_numbers({"num_hidden_layers": 4096, "num_labels": 1 << 16, "vocab_size": 1 << 40}, tmp_path)
    big = {"num_hidden_layers": 126, "vocab_size": 256_000, "max_position_embeddings": 10_485_760, "num_experts": 512}
    odd = {"head_dim": 576, "rope_theta": 5e8, "tie": True, "eos_token_id": [1, 2], "layer_types": ["a"] * 126}
    check_numbers(big | odd, tmp_path)


def test_a_tokenizer_that_never_ends_is_refused_unread(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    check_files(tmp_path)
    (tmp_path / "gone.json").symlink_to("nowhere")
    check_files(tmp_path)
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(HarnessError, match=r"tokenizer\.json is not a regular file"):
        checkpoints.prepare(ModelSpec(str(tmp_path)), tmp_path / "cache")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").touch()
    os.truncate(tmp_path / "vocab.txt", 3 << 30)
    with pytest.raises(HarnessError, match=r"vocab\.txt has 3221225472 bytes"):
        checkpoints.prepare(ModelSpec(str(tmp_path)), tmp_path / "cache")


@pytest.mark.parametrize("nested", [False, True])
def test_a_map_of_characters_that_says_it_is_huge_is_refused(tmp_path, nested):
    charsmap = base64.b64encode(packed((U32, 2**32 - 4), bytes(8))).decode()
    normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    if nested:
        normalizer = {"type": "Sequence", "normalizers": [{"type": "NFC"}, normalizer]}
    vocab = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"normalizer": normalizer, "model": vocab}))
    with pytest.raises(HarnessError, match="its precompiled_charsmap is cut off"):
        load_tokenizer(tmp_path, "")
