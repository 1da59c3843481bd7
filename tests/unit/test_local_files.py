"""A model that is prepared is read from its folder only: what is missing there is asked of nobody."""

import socket
from pathlib import Path

import huggingface_hub
import pytest
import transformers

from engines.adapters.causal_lm import PlacementRequest, from_checkpoint
from engines.common import text
from engines.models import checkpoints
from engines.offload.model.build import load_config, stop_and_begin_tokens
from harness import api
from tests.offload import prepare, save_with_tokenizer

GONE = Path("owner/model")


@pytest.fixture
def gone(monkeypatch, tmp_path):
    """A relative folder that is not there any more and looks like a name on the hub; what the hub's client was asked
    for, and whether it was told to look on this machine only."""
    asked = []

    def download(name, file, *, local_files_only=False, **_):
        asked.append((name, file, local_files_only))
        raise huggingface_hub.errors.LocalEntryNotFoundError(f"{name} has no {file}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", download)
    return asked


@pytest.mark.parametrize("read", [load_config, checkpoints.full_config, checkpoints.shape_of], ids=lambda f: f.__name__)
def test_a_configuration_that_has_gone_is_not_looked_for_elsewhere(gone, read):
    with pytest.raises((OSError, api.HarnessError)):
        read(GONE)
    assert gone == [(str(GONE), "config.json", True)]


def test_generation_settings_that_are_missing_are_the_configuration_s(gone):
    config = transformers.LlamaConfig(bos_token_id=3, eos_token_id=4)
    assert stop_and_begin_tokens(GONE, config, 100) == ((4,), 3)
    assert gone == [(str(GONE), "generation_config.json", True)]


def test_weights_that_have_gone_are_not_looked_for_elsewhere(gone):
    shape = api.ModelShape("llama", 1, 8, 8, 1, 1, 8, 8, 8, params_per_layer=8, params_total=8)
    model = api.LocalModel(str(GONE), shape, 16, "float32", "")
    job = api.Job(GONE, GONE, 8, 8)
    request = PlacementRequest(model, "float32", api.OffloadPolicy(), api.HardwareLimits(), job, None)
    with pytest.raises(OSError, match="to load the files"):
        from_checkpoint(request)
    assert gone
    assert all(locally for _, _, locally in gone)


def test_a_whole_model_asks_nobody(gone, tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: pytest.fail(f"asked {host}"))
    folder = save_with_tokenizer(tmp_path / "m")
    assert text.load_tokenizer(folder, "").decode([3]) == "w3"
    model = prepare(folder)
    assert load_config(Path(model.path)).model_type == "llama"
    assert stop_and_begin_tokens(folder, load_config(folder), 512) == ((1,), 0)
    assert gone == []
