"""Models with weights in panels: the answers that transformers gives, in twelve bits those in sixteen, bit for bit."""

import dataclasses
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engines.offload.engine import OffloadEngine
from engines.offload.kernels import HostKernels
from engines.offload.memory.storage import Panels
from engines.offload.weights import gemm
from harness import api
from tests.offload import (
    CONFIGS,
    OTHERS,
    load,
    load_and_answer,
    prepare,
    requests_of,
    save,
    with_kernels,
)
from tests.offload import tiny as random_model

EXACT12 = {"weight_format": "exact12", "gpu_batch_size": 4}


@pytest.fixture(params=[*CONFIGS, "gpt2", "mixtral"], scope="module")
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("panels") / request.param
    return random_model(folder, request.param, torch.bfloat16, **OTHERS.get(request.param, {}))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Weights are kept in panels, however fast something else is with such small ones."""
    monkeypatch.setattr(gemm, "_CLEARLY_FASTER", 1e-9)
    return tmp_path / "cache"


def scores(engine):
    return engine.score([((5, 6, 7), (8, 9)), ((11,), tuple(range(12, 40)))])


def note_of(report):
    return next((note for note in report.notes if "12 exact bits" in note), "")


def test_answers_are_those_of_transformers(model, cache):
    """As near to the exact ones as transformers' in bfloat16: activations are rounded, or on CPUs without units for
    bfloat16 the cached keys and values."""
    requests = requests_of(5, 12)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).eval()
    found, report = load_and_answer(model, cache, requests, **EXACT12)
    assert note_of(report)
    rounded = transformers.AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.bfloat16).eval()
    pairs = [(request.prompt, found[request.id]) for request in requests]
    engine, _ = load(model, cache, **EXACT12)
    ours = [score.logprob for score in engine.score(pairs)]
    engine.close()
    theirs, exact = ([_logprob(m, *pair) for pair in pairs] for m in (rounded, reference))
    off, their_off = (sum(abs(a - b) for a, b in zip(which, exact, strict=True)) for which in (ours, theirs))
    assert off < 2 * their_off


def _logprob(reference, prompt, tokens):
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).sum().item()


def test_a_reproducible_answer_depends_on_no_company(model, cache, monkeypatch):
    """A job that was interrupted is resumed with what is left of it: each answer is the same to the last bit. So it is
    where a library would be faster, whose sums may depend on the number of rows."""
    monkeypatch.setattr(gemm, "_CLEARLY_FASTER", 1e9)
    requests = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, logprobs=3)) for r in requests_of(11, 14)
    ]
    found = []
    for company, policy in (
        (requests, {"schedule": "sweep", "gpu_batch_size": 6}),
        (requests[9:], {"schedule": "sweep", "gpu_batch_size": 14}),
        (requests[::-2], {"schedule": "zigzag", "gpu_batch_size": 2, "num_gpu_batches": 2, "weights": (0, 0.5, 0.5)}),
    ):
        engine = OffloadEngine()
        job = api.Job(cache, with_kernels(cache), 64, 64, reproducible=True)
        engine.load(model, api.OffloadPolicy(**policy), api.HardwareLimits(), job)
        found.append({r.id: (r.tokens, r.logprobs) for r in engine.generate(company)})
        engine.close()
    whole, rest, others = found
    assert rest == {id_: whole[id_] for id_ in rest} and others == {id_: whole[id_] for id_ in others}


@pytest.mark.parametrize("weights", [(0.0, 1.0, 0.0), (0.0, 0.4, 0.6), (0.0, 0.0, 1.0)])
def test_twelve_bits_are_those_in_sixteen(model, cache, weights):
    dtype = _dtype(model, cache)
    found = []
    for policy in ({"weight_format": "plain"}, {"weight_format": "exact12"}):
        engine, report = load(model, cache, weights=weights, gpu_batch_size=4, compute_dtype=dtype, **policy)
        assert all(isinstance(tile.stored, Panels) for tile in engine.loaded.tiles)
        found.append((scores(engine), {r.id: r.tokens for r in engine.generate(requests_of(2, 6))}))
        engine.close()
        assert bool(note_of(report)) == (policy["weight_format"] == "exact12")
    assert found[0] == found[1]


def _dtype(model, cache):
    engine, report = load(model, cache, **EXACT12)
    engine.close()
    return report.compute_dtype


def test_a_tile_that_is_too_varied_stays_plain(tmp_path, cache):
    folder = save(tmp_path / "m", "opt", torch.bfloat16)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("layers.1.fc1.weight"))
    wild = torch.randint(0, 200, tensors[name].shape).float()
    tensors[name] = tensors[name] * torch.exp2(-wild / 2).bfloat16()
    save_file(tensors, file, metadata={"format": "pt"})
    model = prepare(folder)
    engine, report = load(model, cache, **EXACT12)
    tiles = engine.loaded.tiles
    plain = {tile.matrix for tile in tiles if not tile.stored.exact12}
    assert plain == {name} and "tiles plain" in note_of(report)
    ends = {}
    for tile in tiles:
        assert tile.offset >= ends.get(tile.file, 0)
        ends[tile.file] = tile.offset + tile.nbytes
    ours = scores(engine)
    engine.close()
    again, _ = load(model, cache, **EXACT12)  # from the converted files
    assert scores(again) == ours
    again.close()
    plain_engine, report = load(
        model, cache, weight_format="plain", gpu_batch_size=4, compute_dtype=report.compute_dtype
    )
    assert scores(plain_engine) == ours
    plain_engine.close()
    (listed,) = (path for path in (cache / "offload").glob("*/plain.json") if path.read_text() != "[]")
    listed.write_text("[3,")
    with pytest.raises(api.HarnessError, match=r"plain\.json is damaged; remove its folder"):
        load(model, cache, **EXACT12)


def test_a_quarter_of_the_bytes_is_saved_and_told(model, cache):
    engine, report = load(model, cache, weights=(0.0, 0.0, 1.0), **EXACT12)
    shapes = [tile.shape for tile in engine.loaded.tiles]
    engine.close()
    plain = sum(Panels().matrix_bytes(*shape) for shape in shapes)
    assert sum(report.weights_by_tier) < 0.8 * plain or min(map(min, shapes)) < 64  # small panels are padded
    assert json.dumps(note_of(report)).count("MiB") == 2


@pytest.mark.parametrize(
    ("dtype", "policy", "message"),
    [
        (torch.float32, {}, r"exact12 is for weights in bfloat16"),
        (torch.float16, {}, r"exact12 is for weights in bfloat16"),
        (torch.bfloat16, {"compute_dtype": "float16"}, r"exact12 is for weights in bfloat16"),
    ],
)
def test_where_twelve_bits_cannot_be(tmp_path, cache, dtype, policy, message):
    model = random_model(tmp_path / "m", "llama", dtype)
    with pytest.raises(api.UnsupportedError, match=message):
        load(model, cache, **EXACT12, **policy)


def test_twelve_bits_need_the_compiled_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    model = random_model(tmp_path / "m", "llama", torch.bfloat16)
    job = api.Job(tmp_path, tmp_path / "cache", 64, 64)
    with pytest.raises(api.UnsupportedError, match="slower kernels, because the compiled ones are missing"):
        OffloadEngine().load(model, api.OffloadPolicy(**EXACT12), api.HardwareLimits(), job)


def test_quantized_weights_have_one_format():
    with pytest.raises(api.HarnessError, match="weights have one format"):
        api.OffloadPolicy(weight_bits=4, weight_format="exact12").validate()


@pytest.mark.parametrize(("policy", "kept"), [({}, False), ({"weights": (0.0, 0.5, 0.5)}, None)])
def test_by_itself_the_engine_saves_bytes_only_where_some_are_read_again(model, cache, policy, kept):
    _, report = load_and_answer(model, cache, requests_of(1, 2), gpu_batch_size=4, **policy)
    assert kept is None or bool(note_of(report)) == kept


def test_the_pool_ends_before_any_weight_goes(model, cache, monkeypatch):
    """A thread that has lost its CPU in a product may read a weight when it comes back."""
    seen = []
    engine, _ = load(model, cache, **EXACT12)
    close = HostKernels.close
    monkeypatch.setattr(HostKernels, "close", lambda kernels: (seen.append(engine._runner is not None), close(kernels)))
    engine.close()
    assert seen[0]
    engine.close()  # idempotent


INT8 = {"weight_bits": 8, "compute_dtype": "int8", "gpu_batch_size": 4}


@pytest.mark.parametrize("bits", [8, 4])
def test_int8_answers_are_nearly_those_of_the_same_weights(model, cache, bits):
    """Products are tested to the last code in test_offload_tile_pool.py. Random models amplify what is rounded, a
    mixture by choosing other experts: by up to 0.2 a token here, where a token's log-probability is about -9."""
    engine, report = load(model, cache, **INT8 | {"weight_bits": bits})
    assert report.compute_dtype == report.policy.compute_dtype == "int8"
    assert any("products by int8 panels" in note for note in report.notes)
    found = scores(engine)
    engine.close()
    engine, report = load(model, cache, weight_bits=bits, gpu_batch_size=4)
    expected = scores(engine)
    engine.close()
    assert report.compute_dtype != "int8"
    assert found != expected
    for ours, theirs, tokens in zip(found, expected, (2, 28), strict=True):
        assert abs(ours.logprob - theirs.logprob) < 0.5 * tokens


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"weight_bits": 3}, "int8 is for policy.weight_bits 8 or 4"),
        ({"weight_groups": "output"}, "int8 is for policy.weight_bits 8 or 4 along a matrix's inputs"),
    ],
)
def test_where_int8_cannot_be(tmp_path, cache, policy, message):
    model = random_model(tmp_path / "m", "llama", torch.bfloat16)
    with pytest.raises(api.UnsupportedError, match=message):
        load(model, cache, **INT8 | policy)


def test_int8_is_for_quantized_weights_and_for_this_engine_alone():
    with pytest.raises(api.HarnessError, match="for weights of 8 or 4 bits: set weight_bits"):
        api.OffloadPolicy(compute_dtype="int8").validate()
    with pytest.raises(api.UnsupportedError, match=r"engine accelerate has no policy\.compute_dtype int8"):
        api.OffloadPolicy(compute_dtype="int8", weight_bits=8).float_dtype("accelerate", "bfloat16")
