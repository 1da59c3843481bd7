"""Where the time of a job goes on a CUDA device: torch's profiler beside the engine's own timeline.

    python -m tests.device_profile facebook/opt-1.3b --memory 1536 --policy '{"schedule": "sweep"}'

Runs twice the policy's block (prompts of 512 tokens, 32 new ones), prints its speed and the timeline's sums; then runs
16 sequences under the profiler, and prints for how long each kind of work kept the device busy, by which kernels, and
which of CUDA's calls the host spent its time in. `--out` keeps the profiler's trace for a browser.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from engines.models import checkpoints
from engines.offload.engine import OffloadEngine
from harness.api import GenerationRequest, HardwareLimits, Job, ModelSpec, OffloadPolicy, SamplingParams
from harness.common.files import default_cache
from harness.common.intervals import union_length

PROMPT, NEW = 512, 32
SLEEPS = ("Context Sync", "Event Sync", "Stream Wait", "Stream Sync")


def requests(count, new=NEW, seed=0):
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(5, 30000) for _ in range(PROMPT)) for _ in range(count)]
    return [GenerationRequest(f"r{i}", p, SamplingParams(new, ignore_eos=True)) for i, p in enumerate(prompts)]


def timed(engine, asked):
    began = time.perf_counter()
    for _ in engine.generate(asked):
        pass
    torch.cuda.synchronize()
    return time.perf_counter() - began


def show(found, out):
    """Prints what a profiler has `found`."""
    busy, seconds, count, host = defaultdict(list), Counter(), Counter(), Counter()
    for event in found.profiler.kineto_results.events():
        name, began, lasted = event.name(), event.start_ns() / 1e9, event.duration_ns() / 1e9
        if "CUDA" not in str(event.device_type()):
            host[name] += lasted
        elif not name.startswith(SLEEPS):
            busy[name.split(" (")[0] if name.startswith(("Memcpy", "Memset")) else "kernels"].append(
                (began, began + lasted)
            )
            seconds[name[:110]] += lasted
            count[name[:110]] += 1
    for kind, spans in busy.items():
        out(f"  {kind}: busy {union_length(spans):.3f} s, {len(spans)}")
    out(f"  any of them: {union_length([span for spans in busy.values() for span in spans]):.3f} s")
    for name, total in seconds.most_common(12):
        out(f"  {total:.4f} s {count[name]:6} {name}")
    for name, total in host.most_common(8):
        out(f"  host {total:.4f} s {name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--policy", required=True)
    parser.add_argument("--memory", type=float, required=True, help="of the device, MiB")
    parser.add_argument("--host-memory", type=float, default=24 * 1024, help="pinned, MiB")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cache = default_cache()
    model = checkpoints.prepare(ModelSpec(args.model, weights="dummy", dtype="float16"), cache)
    policy = OffloadPolicy(**json.loads(args.policy))
    limits = HardwareLimits(int(args.memory) << 20, int(args.host_memory) << 20)
    scratch = cache / "device_profile"
    scratch.mkdir(exist_ok=True)

    def out(line):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    engine = OffloadEngine()
    loaded = engine.load(model, policy, limits, Job(scratch, cache, PROMPT + NEW, PROMPT + NEW // 2))
    for note in (f"{policy}", f"weights by tier: {loaded.weights_by_tier}", *loaded.notes):
        out(note)
    timed(engine, requests(4, new=3, seed=1))
    count = 2 * policy.block_size
    seconds = timed(engine, requests(count))
    out(f"{count} x ({PROMPT} + {NEW}): {seconds:.2f} s, {count * NEW / seconds:.1f} tok/s")
    out("  " + ", ".join(f"{name} {value:.5g}" for name, value in engine.trace().metrics.items()))
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        seconds = timed(engine, requests(16, new=8))
    out(f"16 x ({PROMPT} + 8) under the profiler: {seconds:.3f} s")
    show(found, out)
    if args.out is not None:
        found.export_chrome_trace(str(args.out))
    engine.close()


if __name__ == "__main__":
    main()
