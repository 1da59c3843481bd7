"""Every option of every command, as click knows them, with values that it may not have."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

import click

from harness.api import HardwareLimits, ModelSpec, OffloadPolicy, WorkloadSpec
from harness.cli.main import cli
from harness.suite.config import CELL_KEYS
from tests.barrage import good
from tests.barrage.case import EITHER, FAILED, REFUSED, SECRET, Case

KIND = "options"
#: By command: arguments with which it soon ends well or is refused, as pairs of an option and its value, then others.
#: `calibrate` and `serve` are always refused: they would measure for minutes, and serve for ever.
BASE: Mapping[str, tuple[Mapping[str, str], Sequence[str]]] = {
    "calibrate": ({"--out": "file/x.yaml"}, ()),
    "chat": ({"--model": "fake", "--engine": "fake", "--memory": "1GiB"}, ()),
    "check-model": ({}, ()),
    "compare": ({}, ("rec", "aa")),
    "completion": ({}, ("bash",)),
    "doctor": ({}, ()),
    "explain": ({}, ("policy.threads",)),
    "generate": (
        {"--model": "fake", "--engine": "fake", "--input": "in.jsonl", "--output": "out.jsonl", "--memory": "1GiB"},
        ("--dry-run",),
    ),
    "history add": ({"--db": "sqlite:///new.db"}, ("rec",)),
    "history show": ({"--db": "sqlite:///h.db"}, ()),
    "history trend": ({"--db": "sqlite:///h.db"}, ()),
    "images build": ({}, ("harness",)),
    "images ls": ({}, ()),
    "init": ({"--model": "facebook/opt-125m", "--out": "new.yaml"}, ()),
    "lm-eval": ({}, ()),
    "ls": ({}, ("hardware",)),
    "plan": ({"--prompt-len": "8", "--gen-len": "8", "--hardware": "laptop_cpu"}, ("facebook/opt-1.3b",)),
    "report": ({}, ("rec",)),
    "run": ({}, ("tiny.yaml", "--dry-run")),
    "schema": ({}, ("suites",)),
    "serve": (
        {"--model": "fake", "--engine": "fake", "--memory": "1GiB", "--port": "0"},
        ("--set", "options.colour=red"),
    ),
    "validate": ({}, ("tiny.yaml",)),
}
#: Exit codes where a value is not refused, other than 0.
_MORE: Mapping[str, frozenset[int]] = {
    "chat": frozenset({4}),
    "compare": frozenset({5}),
    "doctor": frozenset({1}),
    "generate": frozenset({1, 4}),
    "lm-eval": frozenset({1}),
    "plan": frozenset({4}),
}
VALUES: Mapping[str, str] = {
    "empty": "",
    "minus-one": "-1",
    "zero": "0",
    "1e18": "1e18",
    "nan": "nan",
    "inf": "inf",
    "2-to-63": str(2**63),
    "5000-letters": "a" * 5000,
    "5000-digits": "9" * 5000,
    "escapes": "\x1b]0;title\x07\x1b[31mred\r",
    "two-lines": "one\ntwo",
    "not-utf-8": "caf\udce9",  # as Python has the byte
    "unknown": "zzyzx",
}
_SETTINGS: Mapping[str, str] = {
    "empty": "",
    "null": "null",
    "text": "zzyzx",
    "minus-one": "-1",
    "list": "[]",
    "object": "{}",
    "1e999": "1e999",
    "30-digits": "9" * 30,
}
_SECTIONS = {"policy": OffloadPolicy, "workload": WorkloadSpec, "model": ModelSpec, "limits": HardwareLimits}
#: A name that is nearly right, and the one that is to be offered.
_NEAREST: Mapping[str, tuple[Sequence[str], str]] = {
    "command": (("rum", "tiny.yaml"), "run"),
    "history-command": (("history", "sho"), "show"),
    "images-command": (("images", "lss"), "'ls'"),
    "engine": (("run", "tiny.yaml", "--dry-run", "--engine", "fakee"), "it has fake"),
    "cell": (("run", "tiny.yaml", "--dry-run", "--cell", "aa"), "it has a"),
    "suite": (("run", "quickstrat", "--dry-run"), "quickstart"),
    "suite-validated": (("validate", "quickstrat"), "quickstart"),
    "launcher": (("run", "tiny.yaml", "--dry-run", "--launcher", "doker"), "'docker'"),
    "engine-of-job": ((*good.GENERATE, "--model", "fake", "--engine", "fakee"), "'fake'"),
    "section-of-job": ((*good.GENERATE, *good.FAKE, "--set", "polici.schedule=row"), "policy"),
    "hardware": ((*good.PLAN, "--hardware", "t4_gpc"), "'t4_gcp'"),
    "model": (("plan", "facebook/opt-1.3c", *good.PLAN[2:]), "facebook/opt-1.3b"),
    "engine-of-plan": ((*good.PLAN, "--engine", "ofload"), "offload"),
    "schedule": ((*good.PLAN, "--schedule", "swep"), "sweep"),
    "policy-field": ((*good.PLAN, "--policy", '{"schedul": "row"}'), "'schedule'"),
    "metric": (("compare", "rec", "aa", "--metric", "thruoghput"), "throughput"),
    "against": (("compare", "rec", "--against", "fakee"), "engines: fake"),
    "format": (("compare", "rec", "aa", "--format", "txt"), "text"),
    "environment": (("images", "build", "ofload"), "'offload'"),
    "listing": (("ls", "engine"), "engines"),
    "set-section": (("run", "tiny.yaml", "--dry-run", "--set", "polici.schedule=row"), "'policy'"),
    "set-field": (("run", "tiny.yaml", "--dry-run", "--set", "policy.schedul=row"), "'schedule'"),
    "set-engine": (("run", "tiny.yaml", "--dry-run", "--set", "engine=fakee"), "'fake'"),
    "set-option-of-job": ((*good.GENERATE, *good.FAKE, "--set", "options.colour=red"), "colour"),
}
#: What does not go together, or has no effect.
_EXCLUSIVE: Mapping[str, Sequence[str]] = {
    "json-without-dry-run": (*good.RUN, "--json"),
    "hardware-without-simulate": (*good.RUN, "--hardware", "t4_gcp"),
    "against-and-aa": ("compare", "rec", "--against", "fake", "--aa", "aa"),
    "against-and-allow": ("compare", "rec", "--against", "fake", "--allow", "packages"),
    "base-without-head": ("compare", "rec"),
    "policy-and-latency": (*good.PLAN, "--policy", "{}", "--latency", "1"),
    "policy-and-quantize": (*good.PLAN, "--policy", "{}", "--quantize", "4"),
    "plan-of-nothing": ("plan",),
    "plan-without-lengths": ("plan", "facebook/opt-1.3b"),
    "input-is-output": ("generate", *good.FAKE, "--input", "in.jsonl", "--output", "./in.jsonl"),
    "search-in-a-job": (*good.GENERATE, *good.FAKE, "--set", "policy=max_batch"),
    "repeats-of-a-job": (*good.GENERATE, *good.FAKE, "--set", "repeats=3"),
    "nano-overlap-of-one": ("run", "tiny.yaml", "--dry-run", "--set", "policy.nano_overlap=false"),
    "nano-order-without-a-start": (
        *("run", "tiny.yaml", "--dry-run", "--set", "policy.schedule=sweep", "--set", "policy.nano_batches=O0 UG0 D0"),
    ),
    "two-formats-of-weights": (
        *("run", "tiny.yaml", "--dry-run", "--set", "policy.weight_format=exact12", "--set", "policy.weight_bits=4"),
    ),
    "search-by-a-number": (
        *("run", "tiny.yaml", "--dry-run"),
        *("--set", "policy={schedule: row, max_batch: true}", "--set", "policy.max_batch=7"),
    ),
}
#: Where a user may give a secret, well or badly.
_SECRETS: Mapping[str, Sequence[str]] = {
    "option": (*good.RUN, "--set", f"options.api_key={SECRET}"),
    "option-listed": ("run", "tiny.yaml", "--dry-run", "--json", "--set", f"options.client={{password: {SECRET}}}"),
    "option-of-a-job": (*good.GENERATE, *good.FAKE, "--set", f"options.hf_token={SECRET}"),
    "option-cut": ("run", "tiny.yaml", "--set", f"options.token={{a: {SECRET}"),
    "variable": (*good.RUN, "--set", f"env.VLLM_API_KEY={SECRET}"),
    "variable-of-no-engine": (*good.RUN, "--set", f"env.AWS_SECRET={SECRET}"),
    "candidate": (*good.RUN, "--set", f"candidates={{options.api_key: [{SECRET}]}}"),
    "model": (*good.RUN, "--set", f"model.id=https://me:{SECRET}@host/x"),
    "model-of-a-job": (*good.GENERATE, "--engine", "fake", "--model", f"https://{SECRET}@host/x"),
    "model-of-a-plan": (*good.PLAN[:1], f"https://host/x?access_token={SECRET}", *good.PLAN[2:]),
    "trace": (*good.RUN, "--set", f"workload={{kind: trace, trace: 'https://me:{SECRET}@host/x', num_requests: 2}}"),
    "image": (*good.RUN, "--launcher", "docker", "--set", f"image=https://me:{SECRET}@host/x"),
    "history": ("history", "show", "--db", f"postgresql+psycopg://me:{SECRET}@127.0.0.1:1/x"),
    "history-of-a-report": ("report", "rec", "--history", f"mysql://me:{SECRET}@127.0.0.1:1/x?password={SECRET}"),
    "folder": ("report", f"https://me:{SECRET}@host/x"),
}
_SHARDS = ("", "1", "/", "0/2", "3/2", "1/0", "-1/2", "1/2/3", "\u00b2/3", "1/" + "9" * 5000, "1.5/2", "1/ 2")
_POLICIES: Mapping[str, str] = {
    "empty": "",
    "list": "[]",
    "text": '"row"',
    "cut": '{"schedule": ',
    "nested-lists": "[" * 50_000,
    "nested-objects": '{"a":' * 20_000,
    "nan": '{"value_sparsity": NaN}',
    "1e999": '{"value_sparsity": 1e999}',
    "twice": '{"threads": 1, "threads": 2}',
    "two-of-three": '{"wg": 0.5, "wc": 0.5}',
    "both-ways": '{"wg": 0, "wc": 0, "wd": 1, "weights": [0, 0, 1]}',
    "sum": '{"weights": [0.5, 0.5, 0.5]}',
    "batch-of-2-to-62": json.dumps({"gpu_batch_size": 2**62}),
    "batches-of-2-to-31": json.dumps({"gpu_batch_size": 2**30, "num_gpu_batches": 2**30, "schedule": "zigzag"}),
    "group-of-2-to-62": json.dumps({"group_size": 2**62, "weight_bits": 4}),
    "lone-surrogate": '{"schedule": "\\ud800"}',
    "negative-threads": '{"threads": -1}',
}


def cases() -> Iterator[Case]:
    """Values for all options, names that are nearly right, what excludes each other, and settings of --set."""
    for path, command in commands():
        for option in options(command):
            yield from _values(path, option)
        # lm-eval's own command line follows on `lm-eval`, with codes of its own
        codes, heavy = (FAILED, True) if path == "lm-eval" else (REFUSED, False)
        words = (*path.split(), "--no-such-option", "x")
        yield Case(KIND, f"{path}/unknown-option", words, codes=codes, torch=heavy)
    for what, (words, nearest) in _NEAREST.items():
        yield Case(KIND, f"nearest/{what}", tuple(words), says=nearest)
    for what, words in _EXCLUSIVE.items():
        yield Case(KIND, f"exclusive/{what}", tuple(words))
    for what, words in _SECRETS.items():
        yield Case(KIND, f"secret/{what}", tuple(words), codes=FAILED)
    for i, shard in enumerate(_SHARDS):
        yield Case(KIND, f"shard/{i}", ("run", "tiny.yaml", "--dry-run", f"--shard={shard}"))
    for what, policy in _POLICIES.items():
        yield Case(KIND, f"policy/{what}", (*good.PLAN, "--policy", policy), codes=frozenset({0, 2, 4}))
    yield from _settings()


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command that is no group, by its words."""

    def below(group: click.Group, words: tuple[str, ...]) -> Iterator[tuple[str, click.Command]]:
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None, name
            if isinstance(command, click.Group):
                yield from below(command, (*words, name))
            else:
                yield " ".join((*words, name)), command

    return below(cli, ())


def options(command: click.Command) -> list[click.Option]:
    """A command's own options."""
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


def _values(path: str, option: click.Option) -> Iterator[Case]:
    given, others = BASE.get(path, ({}, ()))
    flag = max(option.opts, key=len)
    # calibrate would measure with another --out; other commands get no second value of the option that is tried
    rest = [(name, value) for name, value in given.items() if name != flag or path == "calibrate"]
    base = (*(word for pair in rest for word in pair), *others)
    heavy = path == "lm-eval"
    if option.is_flag:
        yield Case(KIND, f"{path}/{flag}/with-a-value", (*path.split(), *base, f"{flag}=1"), torch=heavy)
        return
    # at the end of the line, where nothing can be taken for the value
    yield Case(KIND, f"{path}/{flag}/missing", (*path.split(), *base, flag), torch=heavy)
    for name, value in VALUES.items():
        words = (*path.split(), f"{flag}={value}", *base)
        codes = EITHER | _MORE.get(path, frozenset())
        yield Case(KIND, f"{path}/{flag}/{name}", words, codes=codes, torch=heavy)


def _settings() -> Iterator[Case]:
    """Keys of cells, and of their sections, with values of every type."""
    keys = [*CELL_KEYS, *(f"{name}.{f.name}" for name, section in _SECTIONS.items() for f in fields(section))]
    for key in keys:
        for name, value in _SETTINGS.items():
            words = ("run", "tiny.yaml", "--dry-run", "--set", f"{key}={value}")
            yield Case(KIND, f"set/{key}/{name}", words, codes=EITHER)
