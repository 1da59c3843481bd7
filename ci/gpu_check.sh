#!/usr/bin/env bash
# For a host with a CUDA device and no network: runs the tests that need a device, then the device suites, in parts of at
# most eight minutes (without one-time conversions). Writes one small folder.
#   ci/gpu_check.sh [-o FOLDER] [PART ...]    parts: tests profile gpu_4g 16bit experts 4bit prompts large; all by default
# PYTHON: the interpreter with PyTorch. WHEELS: a folder of wheels that it lacks (make gpu-wheels, on a host with network).
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
out=gpu-check-$(date +%F)
if [ "${1:-}" = -o ]; then out=$2; shift 2; fi
parts=("$@")
known="tests profile gpu_4g 16bit experts 4bit prompts large"
[ ${#parts[@]} -gt 0 ] || read -ra parts <<<"$known"
for part in "${parts[@]}"; do
  [[ " $known " == *" $part "* ]] || { echo "unknown part $part; there are $known" >&2; exit 2; }
done

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "no CUDA device, or no PyTorch in $python: nothing ran" >&2
  exit 3
fi
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # workers do not import from the current folder
if [ -n "${WHEELS:-}" ]; then
  site=$(mktemp -d)
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl || exit 1
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
export HARNESS_CACHE=${HARNESS_CACHE:-$PWD/.gpu-cache}
{
  nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
  "$python" -c 'import sys, torch; print("python", sys.version.split()[0], "torch", torch.__version__)'
  git rev-parse HEAD 2>/dev/null
} > "$out/machine.txt"

failed=()
run() { # NAME COMMAND...: runs at most eight minutes and keeps the output
  local name=$1
  shift
  echo "== $name"
  timeout "${limit:-480}" "$@" 2>&1 | tee "$out/$name.txt"
  local status=${PIPESTATUS[0]}
  [ "$status" = 0 ] || failed+=("$name: exit $status")
}
prepare() { # SUITE CELL: creates the checkpoint and our converted copy before the measured launches
  limit=3600 run "prepare-$2" "$python" -m harness run "suites/$1.yaml" --cell "$2" --set workload.num_requests=1 \
    --set warmup=0 --set repeats=1 --set timeout=50min --no-report --out "$scratch/$2"
}
each() { # CELL...: runs cells of the large suite, one after the other
  for cell in "$@"; do run "$cell" "$python" -m harness run suites/gpu_16g.yaml --cell "$cell" --out "$out/gpu_16g"; done
}
rounds() { # launches the cells of the small suite in turns; what a round lacks when it is ended, the next one does
  for round in 1 2 3; do
    run "gpu_4g-$round" "$python" -m harness run suites/gpu_4g.yaml --set "repeats=$round" --no-report --out "$out/gpu_4g"
  done
  "$python" -m harness report "$out/gpu_4g"
}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch" ${site:+"$site"}' EXIT

for part in "${parts[@]}"; do
  case $part in
    tests)
      run tests "$python" -m pytest -p no:cacheprovider -m gpu -rs tests/gpu tests/integration/test_gpu.py \
        tests/unit/test_triton_kernels.py ;;
    profile)
      for policy in '"nano_batches": 1' '"nano_batches": 2' '"weight_bits": 4, "kv_bits": 4'; do
        run "profile-$((n = ${n:-0} + 1))" "$python" -m tests.device_profile facebook/opt-6.7b --memory 4096 \
          --policy "{\"schedule\": \"sweep\", \"gpu_batch_size\": 32, $policy}"
      done ;;
    gpu_4g)
      prepare gpu_4g offload-row
      prepare gpu_4g offload-sweep-4bit
      prepare gpu_4g flexgen_ref
      rounds ;;
    16bit)
      prepare gpu_16g offload-row
      each offload-sweep offload-zigzag offload-row flexgen_ref accelerate transformers-offloaded-cache ;;
    experts)
      prepare gpu_16g qwen3moe-sweep
      each qwen3moe-sweep qwen3moe-sweep-experts ;;
    4bit)
      prepare gpu_16g offload-zigzag-4bit
      each offload-sweep-4bit offload-zigzag-4bit flexgen_ref-4bit ;;
    prompts) each offload-sweep-p256 offload-sweep-p1024 accelerate-p256 accelerate-p1024 ;;
    large)
      prepare gpu_16g llama70b-sweep-4bit
      each llama70b-sweep-4bit
      prepare gpu_16g opt175b-sweep-4bit
      each opt175b-sweep-4bit ;;
  esac
done

find "$out" -name report.html -delete
du -sh "$out"
[ ${#failed[@]} = 0 ] || { printf 'failed: %s\n' "${failed[@]}"; exit 1; }
