"""Chat templates render as in transformers, and in a process that a hostile one cannot make too expensive."""

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import tokenizers
import transformers

from engines.common.chat_template import ChatTemplate, Limits
from engines.common.text import Text
from harness.api import HarnessError

ROOT = Path(__file__).parent.parent.parent
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux's limits")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: What transformers adds to jinja, and what templates do with it.
FEATURES = """
{%- set ns = namespace(turns=0) -%}
{{- bos_token }}{{ strftime_now('%%') }} {{ dict(tools=tools, documents=documents) | tojson }}
{% for m in messages %}
    {%- if m.role == 'tool' %}{{ raise_exception('no tools: ' + m.content) }}{% endif %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {%- if m.content == 'stop' %}{% break %}{% endif %}
    {%- set ns.turns = ns.turns + 1 %}
{{ m | tojson(indent=2) }} {{ m.content.split(' ')[-1] | upper }}
    {% generation %}{{ m.content | length }}{% endgeneration %} {{ loop.index }}

{%- endfor %}
turns {{ ns.turns }} {{ eos_token }} {{ pad_token is defined }}
{% if add_generation_prompt %}<answer>{% endif %}
"""
#: Costs too much where the first message says so. The length keeps jinja from computing it before.
HOSTILE = (
    "{% set what = messages[0].content %}{% set one = messages | length %}"
    "{% if what == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif what == 'power' %}{{ (9 * one) ** (9 ** 9) }}"
    "{% elif what == 'repeat' %}{{ 'a' * (one * 10 ** 11) }}"
    "{% elif what == 'double' %}{% set ns = namespace(s='a') %}"
    "{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"
    "{% elif what == 'format' %}{{ '{:>99999999999}'.format(one) }}"
    "{% elif what == 'long' %}{{ 'a' * (one * 2 ** 21) }}"
    "{% elif what == 'range' %}{{ range(10 ** 9) }}"
    "{% elif what == 'escape' %}{{ raise_exception('\x1b[31mred\nmore') }}"
    "{% else %}{{ what }}{% endif %}"
)


def user(*contents):
    return [{"role": "user", "content": content} for content in contents]


def tokenizer(template):
    words = tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        chat_template=template,
    )  # fmt: skip


def sandboxed(tokenizer, limits=None):
    """A tokenizer's template, closed after a `with`."""
    arguments = tokenizer.get_chat_template(), tokenizer.special_tokens_map, *([limits] if limits else [])
    return closing(ChatTemplate(*arguments))


def text_with(template, folder):
    """`Text` of a folder whose tokenizer has this template, closed after a `with`."""
    tokenizer(template).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return closing(Text(SimpleNamespace(path=str(folder), shape=SimpleNamespace(vocab=3))))


def children():
    return {child.pid for child in psutil.Process().children()}


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def hostile():
    """A hostile template under small limits, which may try them often."""
    limits = Limits(cpu_s=1, wall_s=120, memory=64 << 20, text=1 << 20, failures=99)
    with closing(ChatTemplate(HOSTILE, {}, limits)) as template:
        yield template


CONVERSATIONS = [
    user("hello"),
    [{"role": "system", "content": "Be brief.\n"}, *user("  two words ", "é\u2028\U0001f600 <b>'\"</b> \\n")],
    [*user("a b", "stop"), {"role": "assistant", "content": "after"}],
    [{"role": "user", "content": ""}, {"role": "developer", "content": "{{ not_a_template }}"}],
]


def renders_alike(reference):
    with sandboxed(reference) as template:
        for messages in CONVERSATIONS:
            expected = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            assert template.render(messages) == expected


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(CHATML, id="chatml"),
        pytest.param(FEATURES, id="features"),
        pytest.param({"default": CHATML, "tool_use": "{{ raise_exception('without tools') }}"}, id="several"),
    ],
)
def test_the_text_is_that_of_transformers(template):
    renders_alike(tokenizer(template))


@pytest.mark.slow
def test_the_text_is_that_of_transformers_for_smollm2(gguf_file):
    import gguf  # which tests that need no real model do without

    template = gguf.GGUFReader(gguf_file).fields["tokenizer.chat_template"].contents()
    renders_alike(tokenizer(template))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (FEATURES, "refuses these messages: no tools: here$"),
        ("{{ messages.nothing.more }}", "refuses these messages: .* has no attribute 'nothing'"),
        ("{% for %}", "refuses these messages: "),
        ("{{ '\\ud800' }}", r"refuses these messages: .*'\\ud800'.* surrogates not allowed"),
    ],
)
def test_a_template_that_refuses_says_why(template, words):
    with sandboxed(tokenizer(template)) as refusing:
        for _ in range(5):  # a refusal is no failure
            with pytest.raises(HarnessError, match=words):
                refusing.render([{"role": "tool", "content": "here"}])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("loop", "takes longer than 1 s of CPU time for one conversation$"),
        ("power", "takes longer than 1 s of CPU time|needs more than 64 MiB"),
        pytest.param("repeat", "needs more than 64 MiB of memory for one conversation$", marks=LINUX),
        pytest.param("double", "needs more than 64 MiB of memory for one conversation$", marks=LINUX),
        pytest.param("format", "needs more than 64 MiB of memory for one conversation$", marks=LINUX),
        ("long", "makes more than 1 MiB of text of these messages$"),
        ("range", "refuses these messages: Range too big"),
        ("escape", r"refuses these messages:  \[31mred$"),
        ("x" * 2**20, "the messages and the model's chat template are longer than 1 MiB$"),
        ("\ud800", "surrogates not allowed$"),
    ],
    ids=lambda value: value[:8].encode("ascii", "backslashreplace").decode(),
)
def test_a_bomb_is_refused_and_the_next_conversation_answered(hostile, what, words):
    with pytest.raises(HarnessError, match=words):
        hostile.render(user(what))
    assert hostile.render(user("good")) == "good"


def test_time_is_limited_by_the_clock_too():
    with (
        sandboxed(tokenizer(HOSTILE), Limits(cpu_s=600, wall_s=0.5)) as template,
        pytest.raises(HarnessError, match=r"takes longer than 0.5 s for one conversation$"),
    ):
        template.render(user("loop"))


def test_after_some_failures_the_template_is_not_tried_again():
    before = children()
    with sandboxed(tokenizer(HOSTILE), Limits(cpu_s=0.5, text=1 << 20, failures=2)) as template:
        for what, words in (
            ("loop", "takes longer"),
            ("long", "1 MiB of text"),
            ("loop", "longer"),
            ("loop", "longer"),
        ):
            with pytest.raises(HarnessError, match=words):
                template.render(user(what))
        template.close()
        with pytest.raises(HarnessError, match=r"after 2 failures it is not tried again for 60 s"):
            template.render(user("good"))
        assert not children() - before


def test_a_template_is_tried_again_after_a_pause_and_one_conversation_that_fits_pardons_others():
    """Of a server, a few conversations that cost too much must not end the chats of everybody else."""
    with sandboxed(tokenizer(HOSTILE), Limits(cpu_s=0.5, failures=2, pause_s=0.2)) as template:
        for _ in range(3):
            for _ in range(2):
                with pytest.raises(HarnessError, match=r"longer than 0\.5 s of CPU time for one conversation$"):
                    template.render(user("loop"))
            time.sleep(0.25)
            assert "good" in template.render(user("good"))


def test_one_process_serves_all_conversations_and_ends_with_close():
    before = children()
    with sandboxed(tokenizer(CHATML)) as template:
        assert not children() - before
        template.render(user("a"))
        (process,) = children() - before
        template.render(user("b"))
        assert children() - before == {process}
        template.close()
        template.close()
        assert not children() - before, "no zombie either"
        assert "c" in template.render(user("c"))
    assert not children() - before


@LINUX
def test_the_process_may_write_no_file_and_start_no_process():
    before = children()
    with sandboxed(tokenizer(CHATML)) as template:
        template.render(user("a"))
        process = psutil.Process(*(children() - before))
        for limit in (psutil.RLIMIT_FSIZE, psutil.RLIMIT_NPROC, psutil.RLIMIT_CORE):
            assert process.rlimit(limit) == (0, 0)
        assert process.rlimit(psutil.RLIMIT_AS)[1] < process.memory_info().vms + (1 << 30)


@LINUX
def test_the_process_ends_with_its_parent_amid_a_conversation():
    script = (
        "import sys; from engines.common.chat_template import ChatTemplate, Limits\n"
        "template = ChatTemplate(sys.argv[1], {}, Limits(cpu_s=600, wall_s=600))\n"
        "for what in ('good', 'loop'): print(template.render([{'role': 'user', 'content': what}]), flush=True)\n"
    )
    command = [sys.executable, "-c", script, HOSTILE]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout.readline() == "good\n"
            (process,) = psutil.Process(parent.pid).children()
            idle = process.cpu_times().user
            wait_for(lambda: process.cpu_times().user > idle + 0.1)
        finally:
            parent.kill()

    def ended():
        try:
            return process.status() == psutil.STATUS_ZOMBIE  # where nobody waits for orphans
        except psutil.NoSuchProcess:
            return True

    wait_for(ended)


def test_files_of_the_current_folder_do_not_shadow_packages(tmp_path, monkeypatch):
    for name in ("engines", "harness", "transformers", "jinja2", "json", "requests"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    with sandboxed(tokenizer(CHATML)) as template:
        assert template.render(user("a")).startswith("<|im_start|>user\na")


def test_text_that_is_not_unicode_is_refused_by_the_tokenizer_in_one_line(tmp_path):
    words = re.escape(r"the text is not Unicode: \ud83d is half of a surrogate pair")
    with text_with(CHATML, tmp_path) as text, pytest.raises(HarnessError, match=words):
        text.encode("a\ud83d")


def test_a_tokenizer_with_several_templates_and_no_default_is_refused(tmp_path):
    words = r"no chat template to choose: .*no default"
    with text_with({"rag": CHATML, "tool_use": CHATML}, tmp_path) as text, pytest.raises(HarnessError, match=words):
        text.encode_chat(user("a"))


def test_conversations_in_many_threads_are_not_mixed_up(tmp_path):
    before = children()
    with text_with("{% for m in messages %}{{ m.content }}{% endfor %}", tmp_path) as text:
        with ThreadPoolExecutor(8) as threads:
            encoded = list(threads.map(lambda n: text.encode_chat(user("</s>" * n)), range(1, 41)))
            assert len(children() - before) == 1
        assert encoded == [(1,) * n for n in range(1, 41)]
