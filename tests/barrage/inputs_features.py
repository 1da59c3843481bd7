"""What is around commands: values of their arguments, the cache, a KV store, ranks, clusters, first suites."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import click

from tests.barrage import good
from tests.barrage.case import EITHER, FAILED, Case
from tests.barrage.inputs_options import BASE, VALUES, commands
from tests.barrage.odd_files import SPECIAL, put, put_special

KIND = "features"
_JOB = (*good.GENERATE, "--model", "model", "--engine", "offload", "--memory", "1GiB")
#: Without a compiler nothing is built.
_QUICK: Mapping[str, str | None] = {"PATH": "/nowhere", "CXX": None, "TORCHINDUCTOR_CACHE_DIR": "inductor"}
_STORE = ("--set", "options.kv_store={disk: 1MiB, path: kv}")
_STORES: Mapping[str, str] = {
    "list": "[]",
    "text": "disk",
    "nothing": "{}",
    "unknown-key": "{disc: 1GiB}",
    "no-path": "{disk: 1GiB}",
    "no-size": "{path: kv}",
    "negative": "{host: -1}",
    "nan": "{host: .nan}",
    "2-to-70": f"{{host: {2**70}}}",
    "disk-of-2-to-70": f"{{disk: {2**70}, path: kv}}",
    "size-of-letters": "{host: many}",
    "path-empty": "{disk: 1MiB, path: ''}",
    "path-number": "{disk: 1MiB, path: 5}",
    "path-nul": '{disk: 1MiB, path: "a\\0b"}',
    "path-surrogate": '{disk: 1MiB, path: "\\ud800"}',
    "path-of-nobody": "{disk: 1MiB, path: ~zzyzx/kv}",
    "path-long": f"{{disk: 1MiB, path: {'x' * 5000}}}",
    "path-is-a-file": "{disk: 1MiB, path: file}",
    "path-below-a-file": "{disk: 1MiB, path: file/kv}",
    "path-device": "{disk: 1MiB, path: /dev/full}",
    "one-byte": "{disk: 1, path: kv}",
    "escapes": '{disk: "\\e[31m", path: kv}',
}
#: Lines of sh that put something odd at $P, and which file of a store that is.
_MADE = {"fifo": ("*/journal", "mkfifo $P"), "zero": ("*/journal", "ln -s /dev/zero $P"),
         "full": ("*/blocks", "ln -s /dev/full $P"), "folder": ("lock", "mkdir $P")}  # fmt: skip
#: What started ranks, or says so.
_RANKS: Mapping[str, Mapping[str, str]] = {
    "no-number": {"RANK": "x", "WORLD_SIZE": "2"},
    "5000-digits": {"RANK": "0", "WORLD_SIZE": "9" * 5000},
    "other-digits": {"RANK": "\u0660", "WORLD_SIZE": "\u0662"},
    "superscript": {"RANK": "\u00b2", "WORLD_SIZE": "2"},
    "zero": {"RANK": "0", "WORLD_SIZE": "0"},
    "beyond": {"RANK": "7", "WORLD_SIZE": "2"},
    "other-count": {"RANK": "0", "WORLD_SIZE": "3"},
    "no-address": {"RANK": "0", "WORLD_SIZE": "2"},
    "port-of-letters": {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"},
    "port-beyond": {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"},
    "port-of-5000-digits": {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9" * 5000},
    "slurm-of-letters": {"SLURM_STEP_NUM_TASKS": "x"},
    "slurm-of-5000-digits": {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "9" * 5000, "SLURM_JOB_ID": "1"},
    "slurm-half": {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
}
_PIPELINE = ("--set", "policy.pipeline=2")
_RANK_POLICIES: Mapping[str, Sequence[str]] = {
    "more-than-layers": ("policy.pipeline=1000",),
    "2-to-62": (f"policy.pipeline={2**62}",),
    "both": ("policy.pipeline=2", "policy.tensor=2"),
    "tensor-of-five": ("policy.tensor=5",),
    "tensor-of-2-to-62": (f"policy.tensor={2**62}",),
    "wire-alone": ("policy.wire_bits=8",),
    "wire-of-3": ("policy.pipeline=2", "policy.wire_bits=3"),
    "link-alone": ("limits.link_rate=100Mbit",),
    "delay-alone": ("limits.link_delay=10ms",),
    "link-of-nothing": ("policy.pipeline=2", "limits.link_rate=0bit"),
    "link-of-1e400": ("policy.pipeline=2", "limits.link_rate=1e400Gbit"),
    "link-of-16-digits": ("policy.pipeline=2", "limits.link_rate=9999999999999999Gbit"),
    "link-in-bytes": ("policy.pipeline=2", "limits.link_rate=100MB"),
    "delay-of-days": ("policy.pipeline=2", "limits.link_delay=9999999999d"),
    "delay-negative": ("policy.pipeline=2", "limits.link_delay=-10ms"),
    "delay-nan": ("policy.pipeline=2", "limits.link_delay=nan"),
}  # fmt: skip
_CLUSTERS: Mapping[str, Sequence[str]] = {
    "nobody": ("--ray", "127.0.0.1:1"),
    "no-port": ("--ray", "127.0.0.1"),
    "port-of-letters": ("--ray", "127.0.0.1:x"),
    "port-of-5000-digits": ("--ray", "127.0.0.1:" + "9" * 5000),
    "port-beyond": ("--ray", "127.0.0.1:99999"),
    "port-negative": ("--ray", "127.0.0.1:-1"),
    "empty": ("--ray", ""),
    "url": ("--ray", "ray://127.0.0.1:1"),
    "host-of-5000-letters": ("--ray", "x" * 5000 + ":1"),
    "host-of-dots": ("--ray", "a..b:1"),
    "escapes": ("--ray", "\x1b[31m:1"),
    "both": ("--ray", "127.0.0.1:1", "--slurm", "x"),
    "slurm-nowhere": ("--slurm", "--partition=x"),
    "slurm-unclosed": ("--slurm", "'x"),
}
_WORKERS = ("--workers", "2")
#: Models and files of `harness init`; what it writes is to be valid.
_FIRST: Mapping[str, Sequence[str]] = {
    "model-of-nobody": ("--model", "~zzyzx/model"),
    "model-of-yaml": ("--model", "a: {b: [c\n  evil: 1 # x"),
    "model-of-quotes": ("--model", "a\"b'c\\"),
    "model-of-nothing": ("--model", ""),
    "model-of-separators": ("--model", "a\u2028b\x85c\ufeffd"),
    "model-of-escapes": ("--model", "\x1b[31m\x07"),
    "model-is-a-file": ("--model", "file"),
    "model-is-a-pipe": ("--model", "pipe"),
    "model-is-zero": ("--model", "/dev/zero"),
    "name-of-a-number": ("--model", "facebook/opt-125m", "--out", "1.yaml"),
    "name-of-a-float": ("--model", "facebook/opt-125m", "--out", "1e5.yaml"),
    "name-of-null": ("--model", "facebook/opt-125m", "--out", "null.yaml"),
    "name-of-a-bool": ("--model", "facebook/opt-125m", "--out", "true.yaml"),
    "name-of-a-date": ("--model", "facebook/opt-125m", "--out", "2026-01-01.yaml"),
    "name-of-hex": ("--model", "facebook/opt-125m", "--out", "0x1F.yaml"),
    "name-of-lines": ("--model", "facebook/opt-125m", "--out", "a\nb: c.yaml"),
    "name-of-dots": ("--model", "facebook/opt-125m", "--out", "..."),
    "name-of-nothing": ("--model", "facebook/opt-125m", "--out", ""),
    "out-is-a-folder": ("--model", "facebook/opt-125m", "--out", "rec"),
    "out-below-a-file": ("--model", "facebook/opt-125m", "--out", "file/x.yaml"),
    "out-is-a-pipe": ("--model", "facebook/opt-125m", "--out", "pipe"),
    "out-is-stdout": ("--model", "facebook/opt-125m", "--out", "/dev/stdout"),
    "memory-of-yaml": ("--model", "facebook/opt-125m", "--memory", "1GiB}, evil: {a: 1"),
    "memory-of-nothing": ("--model", "facebook/opt-125m", "--memory", "0GiB"),
    "memory-of-other-digits": ("--model", "facebook/opt-125m", "--memory", "\u0661GiB"),
}
#: Where the cache has something, and commands that look.
_CACHED = ("models/x", "offload/x", "offload/x/manifest.json", "kernels/x/kernel.so", "environments/x/bin/python",
           "hub/models--x", "hub/models--x/snapshots/a/model.safetensors", "hardware-2.yaml", "contents.json",
           "gemm_choices.json", "nano_batches.json", "work/0123456789ab", "containers", "scores/0123456789abcdef.jsonl",
           "offload/x.lock", "in-use.lock", ".lock")  # fmt: skip
_ABOUT_CACHE: Mapping[str, Sequence[str]] = {
    "ls": ("cache", "ls"),
    "verify": ("cache", "verify", "--json"),
    "clean": ("cache", "clean", "--all", "--yes"),
}
_MANIFESTS: Mapping[str, bytes] = {
    "infinity": b'{"layout": 1, "quantizer": null, "sizes": {"a": Infinity}}',
    "1e999": b'{"layout": 1, "quantizer": null, "sizes": {"a": 1e999}}',
    "nan": b'{"layout": 1, "quantizer": null, "sizes": {"a": NaN}}',
    "digits": b'{"layout": 1, "quantizer": null, "sizes": {"a": "' + b"9" * 5000 + b'"}}',
    "upwards": b'{"layout": 1, "quantizer": null, "sizes": {"../../../file": 1, "/etc/passwd": 1}}',
    "nul": b'{"layout": 1, "quantizer": null, "sizes": {"a\\u0000b": 1}}',
    "surrogate": b'{"layout": 1, "quantizer": null, "sizes": {"\\ud800": 1}}',
    "long": json.dumps({"layout": 1, "sizes": {"x" * 5000: 1}}).encode(),
    "list": b"[]",
    "nested": b"[" * 100_000,
    "empty": b"",
}
_CACHE_NAMES = ("..", "../rec", "/", "", ".", "models", "models/../../rec", "a\nb", "\x1b[31m", "x" * 5000, "*")
_ANSWER = {"line": 1, "custom_id": "one", "response": {}, "error": None, "line_digest": "0", "model_digest": "0"}
#: Lines of an output, of which only `line` is odd.
_NUMBERS = (
    "Infinity",
    "-Infinity",
    "NaN",
    "1e999",
    "-1",
    "0",
    "9" * 5000,
    '"1"',
    "true",
    "null",
    "[1]",
    "1.5",
    str(2**70),
)


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _arguments()
    yield from _stores()
    yield from _ranks()
    for name, words in _CLUSTERS.items():
        yield Case(KIND, f"cluster/run/{name}", (*good.RUN, *words))
        yield Case(KIND, f"cluster/generate/{name}", (*good.GENERATE, *good.FAKE, *words, *_WORKERS))
    for name, words in _FIRST.items():
        out = words[words.index("--out") + 1] if "--out" in words else "suite.yaml"
        # what it wrote is validated
        shell = f'"$@" && exec {good.PYTHON} -m harness validate "$OUT"'
        yield Case(KIND, f"init/{name}", ("init", *words), _put_pipe, EITHER, {"OUT": out}, shell=shell)
    yield from _caches()
    for number in _NUMBERS:
        line = json.dumps(_ANSWER).replace('"line": 1', f'"line":{number}', 1).encode() + b"\n"
        prepare = partial(_put, "out.jsonl", line)
        yield Case(KIND, f"answers/{number[:20]}", (*good.GENERATE, *good.FAKE), prepare)
    for name, make in {"link": os.symlink, "hard-link": os.link}.items():
        yield Case(KIND, f"output-is-input/{name}", (*good.GENERATE, *good.FAKE), partial(_link_output, make))


def _arguments() -> Iterator[Case]:
    """Values in place of each argument of each command."""
    for path, command in commands():
        given, others = BASE.get(path, ({}, ()))
        arguments = [p for p in command.params if isinstance(p, click.Argument)]
        if not arguments or path in ("lm-eval", "serve"):
            continue
        words = [word for pair in given.items() for word in pair]
        names = [word for word in others if not word.startswith("--")]
        flags = [word for word in others if word.startswith("--")]
        for i in range(max(len(names), 1)):
            for name, value in VALUES.items():
                line = (*path.split(), *words, *flags, "--", *names[:i], value, *names[i + 1 :])
                # an argument's value may be right for one of them, such as the name of a file to be made
                yield Case(KIND, f"argument/{path}/{i}/{name}", line, codes=FAILED)


def _stores() -> Iterator[Case]:
    for name, text in _STORES.items():
        words = (*_JOB, "--set", f"options.kv_store={text}")
        yield _offload(f"kv-store/{name}", words, EITHER | {4})
    for odd, (file, make) in _MADE.items():
        # once to make the store, and again when something odd is in it
        shell = f'PATH=/bin; "$@" && P=$(echo kv/{file}) && rm $P && {make} && exec "$@" --fresh'
        yield _offload(f"kv-store-file/{odd}", (*_JOB, *_STORE), frozenset({2}), shell=shell)


def _ranks() -> Iterator[Case]:
    for name, variables in _RANKS.items():
        yield _offload(f"ranks/{name}", (*_JOB, *_PIPELINE), frozenset({2}), environment=variables)
    for name, settings in _RANK_POLICIES.items():
        words = [word for setting in settings for word in ("--set", setting)]
        yield _offload(f"rank-policy/{name}", (*_JOB, *words), frozenset({2, 4}))
        yield Case(KIND, f"rank-suite/{name}", ("run", "tiny.yaml", "--dry-run", *words))


def _offload(
    name: str, words: tuple[str, ...], codes: frozenset[int], prepare: Callable[[Path], object] | None = None,
    environment: Mapping[str, str] | None = None, shell: str = "",
) -> Case:  # fmt: skip
    def write(folder: Path) -> None:
        good.write_model(folder)
        if prepare is not None:
            prepare(folder)

    return Case(KIND, name, words, write, codes, {**_QUICK, **(environment or {})}, shell=shell, torch=True)


def _caches() -> Iterator[Case]:
    codes = frozenset({0, 1, 2})
    for place in _CACHED:
        for special in SPECIAL:
            for command, words in _ABOUT_CACHE.items():
                prepare = partial(_put_cached, place, special)
                yield Case(KIND, f"cache/{place}/{special}/{command}", tuple(words), prepare, codes)
    for name, content in _MANIFESTS.items():
        for command, words in _ABOUT_CACHE.items():
            prepare = partial(_put_manifest, content)
            yield Case(KIND, f"manifest/{name}/{command}", tuple(words), prepare, codes)
    for name in _CACHE_NAMES:
        yield Case(KIND, f"cache-name/{ascii(name)[1:-1][:20]}", ("cache", "clean", "--yes", "--", name), _put_weights)


def _put_cached(place: str, special: str, folder: Path) -> None:
    path = folder / "cache" / place
    put_special(path, special)
    for built in (path, path.parent):  # as if it had been built
        if built.parent.name in ("models", "offload", "kernels", "environments"):
            put(built.with_name(f"{built.name}.lock"), b"")


def _put_manifest(content: bytes, folder: Path) -> None:
    put(folder / "cache" / "offload" / "x" / "manifest.json", content)
    put(folder / "cache" / "offload" / "x.lock", b"")


def _put_weights(folder: Path) -> None:
    _put_manifest(b"{}", folder)


def _put_pipe(folder: Path) -> None:
    put_special(folder / "pipe", "fifo")


def _put(file: str, content: bytes, folder: Path) -> None:
    put(folder / file, content)


def _link_output(make: Callable[[Path, Path], None], folder: Path) -> None:
    make(folder / "in.jsonl", folder / "out.jsonl")
