"""The engines on transformers models against transformers itself, on tiny random OPT and LLaMA models."""

import random
from types import SimpleNamespace

import pytest
import torch
import transformers

from engines.adapters.accelerate import AccelerateEngine
from engines.adapters.causal_lm import _make_projection_inputs_contiguous, from_checkpoint
from engines.adapters.deepspeed_zero import DeepSpeedZeroEngine
from engines.adapters.transformers import WORK_BYTES, TransformersEngine
from engines.common.machine_rates import gemm_rates
from engines.common.requests import next_batch
from engines.common.work_memory import SLACK_BYTES, working_bytes
from engines.models import checkpoints
from harness.api import GenerationRequest, HarnessError, InfeasibleError, SamplingParams, UnsupportedError
from tests.offload import answers, exact_score, logits_of, prepare, tiny
from tests.offload import greedy as choose

VOCAB, CONTEXT = 64, 48
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "max_position_embeddings": CONTEXT}
CONFIGS = {"opt": SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 32}, "llama": SMALL | {"intermediate_size": 64}}


@pytest.fixture(scope="module", params=CONFIGS)
def model(request, tmp_path_factory):
    """A float32 checkpoint still smaller than the other tests'."""
    return tiny(tmp_path_factory.mktemp(request.param), request.param, **CONFIGS[request.param])


@pytest.fixture
def engine(model, tmp_path, load):
    return load(model, tmp_path, engine=TransformersEngine(), gpu_batch_size=3)[0]


@pytest.fixture
def lm_eval_engine():
    """The class of lm-eval's transformers model."""
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    from engines.adapters.lm_eval_hf import LmEvalHfEngine

    return LmEvalHfEngine


@pytest.fixture
def padding_engine(model, tmp_path, load, lm_eval_engine):
    return load(model, tmp_path, engine=lm_eval_engine(), gpu_batch_size=3)[0]


def ragged_requests(**sampling):
    rng = random.Random(1)
    lengths = [5, 9, 5, 7, 5, 5, 9, 1]
    return [
        GenerationRequest(f"r{i}", tuple(rng.randrange(4, VOCAB) for _ in range(n)), SamplingParams(**sampling))
        for i, n in enumerate(lengths)
    ]


def greedy(reference, prompt, count):
    """The tokens that transformers' own generation chooses; the end of sequence is none of them."""
    return choose(reference, prompt, count, min_new_tokens=count)


def test_ragged_batches_give_transformers_own_greedy_tokens(engine, reference) -> None:
    requests = ragged_requests(max_tokens=8, ignore_eos=True)
    results = {r.id: r for r in engine.generate(requests)}
    for request in requests:
        result = results[request.id]
        assert result.tokens == greedy(reference, request.prompt, 8)
        assert (result.prompt_tokens, result.padding_tokens, result.finish_reason) == (len(request.prompt), 0, "length")
        assert len(result.token_times_s) == 8
        assert sorted(result.token_times_s) == list(result.token_times_s)
        assert 0 <= result.start_s < result.token_times_s[0]
    assert len({r.tokens for r in results.values()}) > 1
    # 4 requests of 5 tokens at most 3 together, 2 of 9, 1 of 7, 1 of 1
    assert len({r.start_s for r in results.values()}) == 5


def test_padded_batches_give_the_same_tokens_and_count_their_padding(padding_engine, reference) -> None:
    requests = ragged_requests(max_tokens=4, ignore_eos=True)
    results = {r.id: r for r in padding_engine.generate(requests)}
    for request in requests:
        assert results[request.id].tokens == greedy(reference, request.prompt, 4)
        assert results[request.id].prompt_tokens == len(request.prompt)
    # by threes, the longest first: 9 9 7, 5 5 5, 5 1
    assert {r.id: r.padding_tokens for r in results.values()} == {
        "r0": 0, "r1": 0, "r2": 0, "r3": 2, "r4": 0, "r5": 0, "r6": 0, "r7": 4
    }  # fmt: skip


def test_rows_of_a_batch_end_on_their_own(engine, reference) -> None:
    prompt = ragged_requests()[0].prompt
    expected = greedy(reference, prompt, 6)
    requests = [GenerationRequest(f"r{n}", prompt, SamplingParams(n, ignore_eos=True)) for n in (2, 6, 4)]
    results = {r.id: r for r in engine.generate(requests)}
    assert {k: (r.tokens, r.padding_tokens) for k, r in results.items()} == {
        "r2": (expected[:2], 4),
        "r6": (expected, 0),
        "r4": (expected[:4], 2),
    }


def test_end_of_sequence_stops_a_row_unless_ignored(engine, reference, monkeypatch) -> None:
    prompt = ragged_requests()[0].prompt
    eos = greedy(reference, prompt, 4)[0]
    monkeypatch.setattr(engine._module.generation_config, "eos_token_id", eos)
    requests = [GenerationRequest(str(i), prompt, SamplingParams(4, ignore_eos=i > 0)) for i in range(2)]
    stopped, ran = engine.generate(requests)
    assert (stopped.tokens, stopped.finish_reason, stopped.padding_tokens) == ((eos,), "stop", 3)
    assert len(ran.tokens) == 4 and eos not in ran.tokens


def test_stop_strings_need_a_tokenizer_and_end_a_row(engine, model, reference, monkeypatch) -> None:
    request = GenerationRequest("a", (5, 6, 7), SamplingParams(6, stop=("never",), ignore_eos=True))
    with pytest.raises(UnsupportedError, match="tokenizer"):
        engine.generate([request])
    second = greedy(reference, request.prompt, 6)[1]
    monkeypatch.setattr(
        "engines.adapters.causal_lm.decoder", lambda *_: lambda tokens: "never" if second in tokens else ""
    )
    (result,) = engine.generate([request])
    assert result.tokens[-1] == second and result.finish_reason == "stop" and len(result.tokens) <= 2


def test_next_batch_waits_for_nobody() -> None:
    pending = [
        GenerationRequest(str(i), (1,) * n, arrival_s=t) for i, (n, t) in enumerate([(2, 0), (3, 0), (2, 1), (2, 0)])
    ]
    assert [r.id for r in next_batch(pending, 0.5, 8)] == ["0", "3"]
    assert [r.id for r in next_batch(pending, 1.0, 2)] == ["0", "2"]


def test_a_seed_gives_the_same_sample_in_any_batch(engine) -> None:
    def sample(prompts, seed):
        sampling = SamplingParams(8, temperature=1.0, top_p=0.9, top_k=20, seed=seed, ignore_eos=True)
        return answers(engine, [GenerationRequest(str(i), p, sampling) for i, p in enumerate(prompts)])["0"]

    alone = sample([(5, 6, 7)], seed=3)
    assert sample([(5, 6, 7), (9, 9, 9)], seed=3) == alone
    assert sample([(5, 6, 7)], seed=4) != alone


def test_samples_follow_the_distribution(engine, reference) -> None:
    prompt, count, temperature, top_k = (5, 6, 7), 600, 1.5, 4
    best = (logits_of(reference, prompt, (0,))[-1] / temperature).topk(top_k)
    expected = dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))
    sampling = [SamplingParams(1, temperature=temperature, top_k=top_k, seed=i, ignore_eos=False) for i in range(count)]
    requests = [GenerationRequest(str(i), prompt, asked) for i, asked in enumerate(sampling)]
    engine._block_size = count
    drawn = [token for (token,) in answers(engine, requests).values()]
    assert set(drawn) <= set(expected)
    for token, probability in expected.items():
        assert drawn.count(token) / count == pytest.approx(probability, abs=0.08)  # 4 standard errors at 0.5


def test_scores_equal_a_float64_reference(engine, reference) -> None:
    pairs = [((5, 6, 7), (8, 9)), ((), (5, 6)), ((5,), (7,)), ((9, 8, 7, 6), (5,)), ((5, 6, 7), (9, 8))]
    prefix = reference.config.bos_token_id
    double = transformers.AutoModelForCausalLM.from_pretrained(reference.name_or_path, dtype=torch.float64).eval()
    for (context, continuation), score in zip(pairs, engine.score(pairs), strict=True):
        expected = exact_score(double, context or (prefix,), continuation)
        assert score.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert score.is_greedy == expected.is_greedy


def test_lm_evals_own_model_scores_the_same_and_counts_its_padding(padding_engine, engine) -> None:
    pairs = [((5, 6, 7), (8, 9)), ((), (5, 6)), ((5,), (7,)), ((9, 8, 7, 6), (5, 4))]
    for ours, theirs in zip(padding_engine.score(pairs), engine.score(pairs), strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert ours.is_greedy == theirs.is_greedy
    # by threes, the longest first, without last tokens: 5 4 2, 1
    assert padding_engine.trace().metrics == {"scored_padding_tokens": 4.0}
    with pytest.raises(HarnessError, match=r"pair 1: .*continuation is empty"):
        padding_engine.score([((1,), (2,)), ((1,), ())])


def test_lm_evals_own_model_is_placed_as_accelerates_where_memory_is_short(
    model, tmp_path, load, lm_eval_engine
) -> None:
    _, plenty = load(model, tmp_path, engine=lm_eval_engine(), budget=1 << 30)
    assert plenty.weights_by_tier == (0, plenty.weights_by_tier[1], 0)
    short, report = load(model, tmp_path, engine=lm_eval_engine(), budget=model.shape.params_total * 4)
    assert "max_memory cpu" in " ".join(report.notes)
    assert report.weights_by_tier[2] > 0
    assert short.score([((5, 6), (7,))])[0].logprob < 0


def test_the_engines_own_tokens_score_as_greedy(engine, reference) -> None:
    tokens = greedy(reference, (5, 6, 7), 5)
    assert engine.score([((5, 6, 7), tokens)])[0].is_greedy


def test_load_reports_what_was_loaded(model, tmp_path, load) -> None:
    _, report = load(model, tmp_path, engine=TransformersEngine(), gpu_batch_size=2, compute_dtype="bfloat16")
    assert (report.vocab, report.max_context, report.block_size) == (VOCAB, CONTEXT, 2)
    assert report.compute_dtype == "bfloat16"
    assert report.weights_by_tier == (0, model.shape.params_total * 2, 0)


@pytest.mark.parametrize("engine_class", [TransformersEngine, AccelerateEngine])
def test_policies_that_are_not_honoured_are_refused(engine_class, model, tmp_path, load) -> None:
    with pytest.raises(UnsupportedError, match="num_gpu_batches"):
        load(model, tmp_path, engine=engine_class(), num_gpu_batches=2)
    with pytest.raises(UnsupportedError, match="weight_bits"):
        load(model, tmp_path, engine=engine_class(), weight_bits=4)
    with pytest.raises(TypeError):
        engine_class(no_such_option=1)


def test_a_budget_below_the_weights_is_infeasible_when_resident(model, tmp_path, load) -> None:
    needed = model.shape.params_total * 4
    with pytest.raises(InfeasibleError, match=rf"{(needed + WORK_BYTES) / 2**20:.1f} MiB .*budget is 0.0 MiB"):
        load(model, tmp_path, engine=TransformersEngine(), budget=1000, compute_dtype="float32")


def test_the_projection_gets_contiguous_rows() -> None:
    head, seen = torch.nn.Linear(4, 7, bias=False), []
    _make_projection_inputs_contiguous(SimpleNamespace(get_output_embeddings=lambda: head))
    head.register_forward_pre_hook(lambda _, args: seen.append(args[0].is_contiguous()))
    hidden = torch.randn(3, 5, 4)
    last = hidden[:, -1:, :]
    assert not last.is_contiguous()
    assert torch.equal(head(last), torch.nn.functional.linear(last, head.weight))
    assert seen == [True]


def test_a_model_without_a_projection_is_unchanged() -> None:
    _make_projection_inputs_contiguous(torch.nn.ReLU())


@pytest.mark.parametrize("options", [{"disk_only": True}, {"cpu_memory": 60_000}, {}])
def test_accelerate_gives_the_resident_tokens_and_scores(engine, model, tmp_path, options, load) -> None:
    offloaded, _ = load(model, tmp_path / "scratch", engine=AccelerateEngine(**options), gpu_batch_size=3)
    requests = ragged_requests(max_tokens=6, ignore_eos=True)
    assert answers(offloaded, requests) == answers(engine, requests)
    pairs = [((5, 6, 7), (8, 9)), ((), (5,))]
    for ours, theirs in zip(offloaded.score(pairs), engine.score(pairs), strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


def test_accelerate_reports_where_the_weights_are(model, tmp_path, load) -> None:
    total = model.shape.params_total * 4
    tiers = {
        name: load(model, tmp_path / name, engine=AccelerateEngine(**options))[1].weights_by_tier
        for name, options in {"disk": {"disk_only": True}, "both": {"cpu_memory": 60_000}, "ram": {}}.items()
    }
    assert tiers["disk"] == (0, 0, total)
    assert tiers["ram"] == (0, total, 0)
    assert sum(tiers["both"]) == total and 0 < tiers["both"][1] <= 60_000


def test_accelerate_gives_weights_what_a_device_has_left(model, tmp_path, monkeypatch, load):
    """The engine refuses a budget without room for the largest tensor, and otherwise passes the rest as max_memory."""
    monkeypatch.setattr("engines.adapters.causal_lm.device_budget", lambda limits: limits.device_memory)
    passed = {}

    def load_module(*args, **placement):
        passed.update(placement)
        return from_checkpoint(*args)

    monkeypatch.setattr("engines.adapters.accelerate.from_checkpoint", load_module)
    load(model, tmp_path, engine=AccelerateEngine(), device=1 << 30, budget=1 << 30, gpu_batch_size=3)
    shares = passed["max_memory"]
    assert 0 < shares[0] < (1 << 30) - SLACK_BYTES
    assert 0 < shares["cpu"] < (1 << 30) - SLACK_BYTES
    with pytest.raises(InfeasibleError, match=r"accelerate needs \d+ MiB of device memory for 3 x"):
        load(model, tmp_path, engine=AccelerateEngine(), device=1 << 20, gpu_batch_size=3)


def test_accelerate_reads_16_bit_weights_and_computes_in_float32(model, tmp_path, load) -> None:
    folder = tmp_path / "half"
    half = transformers.AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.bfloat16)
    half.save_pretrained(folder)
    local = prepare(folder)
    scratch = tmp_path / "scratch"
    engine, report = load(local, scratch, engine=AccelerateEngine(disk_only=True), compute_dtype="float32")
    assert report.weights_by_tier == (0, 0, local.weight_bytes)
    assert [file.name for file in scratch.iterdir()] == ["kernels"]  # nothing is saved again
    request = GenerationRequest("a", (5, 6, 7), SamplingParams(5, ignore_eos=True))
    assert next(engine.generate([request])).tokens == greedy(half.float().eval(), request.prompt, 5)


def test_accelerate_refuses_a_budget_below_its_largest_layer(model, tmp_path, load) -> None:
    largest = checkpoints.largest_tensor_bytes(model.path)
    with pytest.raises(InfeasibleError, match=r"at least [0-9.]+ MiB for its largest .* the budget is [0-9.]+ MiB"):
        load(model, tmp_path, engine=AccelerateEngine(), budget=largest - 1)
    assert load(model, tmp_path, engine=AccelerateEngine(), budget=largest)[1].weights_by_tier[1] == 0


@pytest.mark.parametrize(
    ("parameters", "purpose"), [("host", "parameters in RAM"), ("disk", "2 buffers of its largest parameter")]
)
def test_deepspeed_refuses_a_budget_below_what_it_holds(model, tmp_path, load, parameters, purpose) -> None:
    """Before it imports DeepSpeed, which is not here."""
    with pytest.raises(InfeasibleError, match=rf"at least [0-9.]+ MiB for {purpose}.*; the budget is [0-9.]+ MiB"):
        load(model, tmp_path, budget=1 << 10, engine=DeepSpeedZeroEngine(parameters=parameters))


def test_accelerate_gives_weights_what_the_cache_leaves(model, tmp_path, load) -> None:
    kv, activations = working_bytes(model.shape, batch=4, tokens=10, dtype_bytes=4)
    assert kv >= 4 * 10 * model.shape.kv_bytes_per_token(4) and activations > 0
    budget = 1 << 30
    _, report = load(model, tmp_path, engine=AccelerateEngine(), max_sequence=10, gpu_batch_size=4, budget=budget)
    passing = 2 * checkpoints.largest_tensor_bytes(model.path)
    assert f"max_memory cpu = {budget - kv - activations - passing - SLACK_BYTES} bytes" in report.notes[0]
    with pytest.raises(TypeError):
        AccelerateEngine(disk_only=True, cpu_memory=1)


def test_gemm_rates_keep_every_sample_and_the_thread_count() -> None:
    threads = torch.get_num_threads()
    dtypes = ("float32", "bfloat16", "int8")
    rates = gemm_rates(dtypes, [1, 8], k=64, n=32, threads=1, seconds=5)
    assert {(d, r) for d in rates for r in rates[d]} == {(d, r) for d in dtypes for r in ("1", "8")}
    assert all(1 <= len(s) <= 15 and min(s) > 0 for curve in rates.values() for s in curve.values())
    assert torch.get_num_threads() == threads
    assert gemm_rates(["float32"], [1], 8, 8, seconds=0) == {"float32": {}}
