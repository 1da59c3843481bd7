"""The device's kernels compile for real devices, without one: what the interpreter runs is also what CUDA can run."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None and "CI" not in os.environ:
    pytest.skip("no Triton here: make .venv/.triton", allow_module_level=True)

#: By compute capability what a program may have of shared memory (CUDA programming guide, table of capabilities).
SHARED = {75: 64 << 10, 80: 163 << 10, 90: 227 << 10}

SCRIPT = """
import inspect, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from engines.offload.kernels import triton_attention, triton_panels, triton_quantizer

def shared(kernel, types, constants, capability):
    names = list(inspect.signature(kernel.fn).parameters)
    assert {*names} == {*types, *constants}, {*names} ^ {*types, *constants}
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    compiled = compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]
    return compiled.metadata.shared

def attend(query, rows, itemsize, bits, dim, group, prompts, capability):
    pointers = dict(query=query, resident=rows, staged=rows, sinks="fp32", out=query if prompts else "fp32", lse="fp32",
                    starts="i32", cached="i32", table="i32", segments="i32", firsts="i32")
    numbers = ("query_head", "query_row", "query_column", "resident_blocks", "resident_block", "staged_block",
               "kv_value", "kv_head", "kv_token", "table_row", "out_row", "out_head", "tokens", "window", "code_bytes",
               "groups")
    types = {k: "*" + v for k, v in pointers.items()} | dict.fromkeys(numbers, "i32") | {"scale": "fp32", "cap": "fp32"}
    constants = triton_attention.tile(dim, itemsize, group, prompts) | dict(
        BLOCK=8, STAGED=True, WINDOW=True, CAP=True, SINKS=True, LSE=True, BITS=bits, GROUP=0 if bits == 16 else 64,
        PRECISION="ieee" if itemsize == 4 else "tf32")
    return shared(triton_attention._attend, types, constants, capability)

capability = int(sys.argv[1])
sizes = dict.fromkeys(("columns", "width", "code_bytes", "groups"), "i32")
for kernel, types, constants in (
    (triton_quantizer._unpack, {"packed": "*u8", "out": "*fp16"}, dict(BITS=4, GROUP=64, TILE=1024)),
    (triton_quantizer._pack, {"x": "*fp16", "packed": "*u8"}, dict(BITS=3, GROUP=64, HALF_MAX=65504.0)),
):
    print(shared(kernel, types | sizes, constants, capability))
numbers = dict.fromkeys(("rows", "columns", "width"), "i32")
print(shared(triton_panels._unpack12, {"chunks": "*u8", "out": "*i16"} | numbers,
             dict(PANEL=16, CHUNK=64, CHUNK_BYTES=1552), capability))
print(shared(triton_attention._merge, {"partial": "*fp32", "lse": "*fp32", "out": "*bf16", "out_lse": "*fp32",
             "tokens": "i32", "heads": "i32"}, dict(PARTS=32, DIM=128, WIDTH=128, LSE=True), capability))
merged = {"out": "*fp16", "out_row": "i32", "out_head": "i32", "lse": "*fp32", "rows": "*i64", "other": "*fp16"}
print(shared(triton_attention._merge_rows, merged | {"other_lse": "*fp32", "heads": "i32"}, dict(DIM=80, WIDTH=128),
             capability))
for case in (("fp16", "fp16", 2, 16, 128, 1, True), ("bf16", "bf16", 2, 16, 128, 8, False),
             ("fp16", "u8", 2, 4, 128, 1, True), ("fp16", "fp16", 2, 16, 256, 2, True),
             ("fp32", "u8", 4, 3, 80, 3, False)):
    print(attend(*case, capability))
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
def test_kernels_compile_and_fit_a_multiprocessor(capability, tmp_path):
    """A T4, an A100 and an H100."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(capability)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    taken = [int(line) for line in done.stdout.split()]
    assert len(taken) == 10
    assert max(taken) <= SHARED[capability], taken
