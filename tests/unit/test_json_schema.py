"""Answers that follow a JSON schema, whatever the model would rather write."""

import json
import sys
from dataclasses import replace

import jsonschema
import pytest
import tokenizers
import transformers

from engines.common.json_schema import constraints
from engines.offload.engine import OffloadEngine
from harness.api import (
    FinishedEvent,
    GenerationRequest,
    HardwareLimits,
    HarnessError,
    Job,
    OffloadPolicy,
    RefusedEvent,
    SamplingParams,
)
from tests.offload import VOCAB, prepare, save, with_kernels

pytest.importorskip("llguidance", reason="needs the extra structured")
SCHEMA = {
    "type": "object", "required": ["name", "age", "tags"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 2},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """With a random model, whose tokens are bytes."""
    folder = save(tmp_path_factory.mktemp("bytes"), "llama", bos_token_id=0, eos_token_id=1)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, **{character: i + 2 for i, character in enumerate(alphabet)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(
        folder
    )
    engine, cache = OffloadEngine(), tmp_path_factory.mktemp("cache")
    policy = OffloadPolicy(schedule="sweep", gpu_batch_size=4)
    engine.load(prepare(folder), policy, HardwareLimits(), Job(cache, with_kernels(cache), 128, 128))
    yield engine
    engine.close()


def requests(schema, count=4, **settings):
    sampling = SamplingParams(100, json_schema=json.dumps(schema), **settings)
    return [
        GenerationRequest(f"{i}", (0, 40 + i, 50), replace(sampling, seed=i, temperature=0.8 * (i % 2)))
        for i in range(count)
    ]


def texts(engine, asked):
    tokenizer = transformers.AutoTokenizer.from_pretrained(engine.loaded.model.path)
    return {result.id: (tokenizer.decode(result.tokens, skip_special_tokens=True), result.finish_reason)
            for result in engine.generate(asked)}  # fmt: skip


def test_every_answer_follows_the_schema_and_ends_with_it(engine):
    free = replace(requests(SCHEMA)[1].sampling, json_schema=None)
    answers = texts(engine, [*requests(SCHEMA), GenerationRequest("free", (0, 41, 50), free)])
    assert not answers.pop("free")[0].startswith("{")
    for text, reason in answers.values():
        assert reason == "stop"
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len({text for text, _ in answers.values()}) > 1


def test_log_probabilities_are_the_model_s_own(engine):
    """Those before the schema leaves tokens out: of those left few are likely."""
    results = {result.id: result for result in engine.generate(requests(SCHEMA, logprobs=3))}
    for result in results.values():
        assert all(value.top[0][1] - value.logprob >= -1e-6 for value in result.logprobs)
        assert any(value.logprob < value.top[-1][1] for value in result.logprobs)


@pytest.mark.parametrize(
    "schema", [{"type": "nothing"}, {"$ref": "http://localhost/x"}, {"properties": 3}, {"pattern": "("}]
)
def test_a_schema_that_cannot_be_followed_is_refused_in_a_line_and_the_engine_goes_on(engine, schema):
    engine.submit(requests(schema, 1)[0])
    [refused] = engine.step()
    assert isinstance(refused, RefusedEvent) and refused.kind == "invalid"
    assert "response_format: the schema cannot be followed: " in refused.reason and "\n" not in refused.reason
    engine.submit(requests(SCHEMA, 1)[0])
    events = []
    while engine.pending():
        events += engine.step()
    assert isinstance(events[-1], FinishedEvent) and events[-1].result.finish_reason == "stop"


def test_without_llguidance_the_extra_is_named(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        HarnessError, match=r"response_format needs llguidance: pip install 'offload-harness\[structured\]"
    ):
        constraints(engine.loaded.model.path, VOCAB, (1,))


def test_a_schema_has_no_ignore_eos():
    for settings in ({"ignore_eos": True}, {"min_tokens": 2}):
        with pytest.raises(HarnessError, match="says when an answer ends"):
            SamplingParams(json_schema="{}", **settings).require_valid("request 1")
