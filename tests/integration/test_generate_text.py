"""`harness generate` with a real tokenizer and a tiny model: text in, what transformers would write out."""

import json
import shutil

import pytest
import tokenizers
import torch
import transformers

from engines.common.text import Text
from engines.models import checkpoints
from harness.api import GenerationResult, ModelSpec, TokenLogprob
from harness.batch.format import answer, parse_line
from tests.offload import TEMPLATE, VOCAB, save, save_with_tokenizer

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_with_tokenizer(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(scope="module")
def expected(folder):
    """What transformers writes after some token ids."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def write(ids, count):
        ids = torch.tensor([ids])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
        return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    return write


def run(cli, folder, *lines, engine="transformers", seed=0, code=0):
    """What the command says, and its answers by line."""
    source, output = cli.folder / "in.jsonl", cli.folder / f"out{seed}.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = cli("generate", "--model", folder, "--engine", engine, "--memory", "300MiB", "--input", source,
               "--output", output, "--seed", seed, code=code)  # fmt: skip
    rows = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    return done.stderr, {row["line"]: row for row in rows}


@pytest.fixture
def copy(tmp_path, folder):
    """A copy of the model's folder, without some files."""

    def copied(*without):
        return shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns(*without))

    return copied


@pytest.mark.parametrize("engine", ["offload", "transformers"])
def test_text_and_chats_are_answered_as_transformers_would(cli, folder, expected, engine):
    whole = expected([0, 20, 30, 40], 8)
    stop = whole.split()[3]
    _, rows = run(
        cli, folder,
        {"prompt": "w20 w30 w40", "max_tokens": 8},
        {"messages": [{"role": "system", "content": "w5"}, {"role": "user", "content": "w6"}], "max_tokens": 6},
        {"prompt": "w20 w30 w40", "max_tokens": 8, "stop": stop, "logprobs": 2},
        {"messages": [{"role": "tool", "content": "w5"}]},
        engine=engine, code=1,
    )  # fmt: skip
    bodies = {n: row["response"] and row["response"]["body"] for n, row in rows.items()}
    assert bodies[1]["model"] == "tiny-llama", "no folder of this machine"
    assert bodies[1]["choices"][0]["text"] == whole
    assert bodies[2]["choices"][0]["message"]["content"] == expected([5, 6, 9], 6)
    cut = bodies[3]["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    assert cut["logprobs"]["tokens"][0].strip() == whole.split()[0]
    assert len(cut["logprobs"]["top_logprobs"][0]) == 2
    assert "no tools here" in rows[4]["error"]["message"]


def test_a_folder_without_a_tokenizer_is_refused_before_anything_is_loaded(cli, copy):
    told, rows = run(cli, copy("tokenizer*", "*.jinja"), {"prompt": "w5"}, engine="offload", code=2)
    assert rows == {}
    assert "holds no tokenizer" in told


def test_a_tokenizer_of_another_model_is_said(cli, copy):
    other = copy()
    tokenizer = transformers.AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["new1", "new2"])
    tokenizer.save_pretrained(other)
    told, rows = run(cli, other, {"prompt": "w5", "max_tokens": 2}, {"prompt": "w5 new2"}, engine="offload", code=1)
    assert f"the tokenizer has {VOCAB + 2} tokens, the model {VOCAB}" in told
    assert rows[1]["error"] is None
    assert f"token id {VOCAB + 1} is outside the vocabulary of {VOCAB}" in rows[2]["error"]["message"]


def test_a_chat_without_a_template_is_refused_by_line(cli, copy):
    lines = {"messages": [{"role": "user", "content": "w6"}]}, {"prompt": "w5", "max_tokens": 2}
    _, rows = run(cli, copy("*.jinja"), *lines, engine="offload", code=1)
    assert "this model's tokenizer has none" in rows[1]["error"]["message"]
    assert rows[2]["error"] is None


def test_a_hostile_chat_template_costs_only_the_lines_on_which_it_is_hostile(cli, copy):
    hostile = copy()
    bomb = "{% if messages[0].content == 'w7' %}{{ 'a' * (messages | length * 10 ** 11) }}{% endif %}"
    (hostile / "chat_template.jinja").write_text(f"{bomb}{TEMPLATE}")
    chats = [{"messages": [{"role": "user", "content": word}], "max_tokens": 2} for word in ("w7", "w6", "w\ud800")]
    _, rows = run(cli, hostile, *chats, {"prompt": "w5", "max_tokens": 2}, engine="offload", code=1)
    assert rows[1]["error"]["message"].endswith("needs more than 512 MiB of memory for one conversation")
    assert rows[2]["response"]["body"]["usage"]["prompt_tokens"] == 2, "w6 w9"
    assert "half of a surrogate pair" in rows[3]["error"]["message"]
    assert rows[4]["error"] is None


def test_a_job_is_not_resumed_with_other_weights(cli, copy):
    changed = copy()
    run(cli, changed, {"prompt": "w5", "max_tokens": 2})
    shard = changed / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    told, rows = run(cli, changed, {"prompt": "w5", "max_tokens": 2}, code=2)
    assert len(rows) == 1
    assert "holds answers of another model" in told


def test_the_seed_of_a_job_counts(cli, folder):
    line = {"prompt": "w5", "max_tokens": 8, "temperature": 2.0, "ignore_eos": True}
    answers = [run(cli, folder, line, seed=seed)[1][1] for seed in (0, 1)]
    first, other = (row["response"]["body"]["choices"][0]["text"] for row in answers)
    assert first != other


def test_among_tokens_of_the_same_text_the_most_likely_is_reported(folder):
    line = parse_line(b'{"prompt": "x", "logprobs": 3}', 1, 8, 0)
    top = ((7, -0.5), (8, -1.0), (9, -2.0))
    result = GenerationResult("1.0", (7,), 0.0, (0.0,), 1, logprobs=(TokenLogprob(-0.5, top),))
    row = answer(line, "m", [result], ["x"], lambda token: {7: "the", 8: " the", 9: "the"}[token])
    found = row["response"]["body"]["choices"][0]["logprobs"]
    assert found["top_logprobs"] == [{"the": -0.5, " the": -1.0}]


def test_a_tokens_own_text_keeps_its_space_and_names_what_is_no_character(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "\u2581the": 1, "<0xE2>": 2, "<0x82>": 3}, []))
    words.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(),
         tokenizers.decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    folder = save(tmp_path / "m", "llama")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    text = Text(checkpoints.prepare(ModelSpec(str(folder)), tmp_path))
    assert [text.token(t) for t in (0, 1, 2, 3)] == ["a", " the", "<0xE2>", "<0x82>"]


def test_a_word_that_the_tokenizer_does_not_know_is_one_line(cli, copy):
    strict = copy()
    file = strict / "tokenizer.json"
    data = json.loads(file.read_text())
    data["model"]["unk_token"] = "nothing"
    file.write_text(json.dumps(data))
    _, rows = run(cli, strict, {"prompt": "strange"}, {"prompt": "w5", "max_tokens": 2}, code=1)
    assert "the model's tokenizer refuses this text" in rows[1]["error"]["message"]
    assert rows[2]["error"] is None


@pytest.mark.slow
def test_python_and_streams_give_what_transformers_would(folder, expected, tmp_path):
    from offload_harness import Engine

    whole = expected([0, 20, 30, 40], 8)
    stop = whole.split()[3]
    with Engine(str(folder), "300MiB", cache_dir=tmp_path) as engine:
        assert [a.text for a in engine.generate(["w20 w30 w40", [0, 20, 30, 40]], max_tokens=8)] == [whole, whole]
        pieces = list(engine.stream("w20 w30 w40", max_tokens=8))
        assert "".join(pieces) == whole and len(pieces) > 1, "as its tokens come"
        assert "".join(engine.stream("w20 w30 w40", max_tokens=8, stop=stop)) == whole[: whole.index(stop)]
        chat = [{"role": "user", "content": "w6"}]
        assert engine.generate([chat], max_tokens=4)[0].text == "".join(engine.stream(chat, max_tokens=4))
        last = whole.split()[0]
        assert engine.score([("w20 w30 w40", f" {last}")])[0].is_greedy
