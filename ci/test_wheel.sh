#!/usr/bin/env bash
# Installs a wheel where there is no checkout, and does what a new user does: ci/test_wheel.sh WHEEL [EXTRAS]
#   EXTRAS    what is installed with it, such as offload,report; `offload` also runs a suite
#   PYTHON    the interpreter of the new environment [python3]
#   PACKAGES  a folder of site-packages that has the requirements already; without it pip installs them
#   PINS      versions for pip, such as constraints.txt
#   RUN       a run's folder, of which a report and a comparison are made
set -euo pipefail
usage="ci/test_wheel.sh WHEEL [EXTRAS]"
wheel=$(realpath "${1:?$usage}")
extras=${2:-}
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
unset PYTHONPATH
export HARNESS_CACHE=$home/cache
run=${RUN:+$(realpath "$RUN")}

say() { printf -- '-- %s\n' "$*"; }

say "install $(basename "$wheel")${extras:+ with $extras}"
"${PYTHON:-python3}" -m venv "$home/venv"
bin=$home/venv/bin
[ -d "$bin" ] || bin=$home/venv/Scripts # Windows
if [ -n "${PACKAGES:-}" ]; then
  "$bin/python" -m pip install --quiet --no-deps --no-index "$wheel"
  echo "$PACKAGES" > "$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/requirements.pth"
else
  "$bin/python" -m pip install --quiet ${PINS:+-c "$PINS"} "$wheel${extras:+[$extras]}"
fi
PATH=$bin:$PATH
mkdir "$home/work"
cd "$home/work"

say "what is imported is what was installed"
python - "$home" <<'CODE'
import sys
from pathlib import Path

import engines, harness, offload_harness, reports, suites

for package in (engines, harness, offload_harness, reports, suites):
    assert Path(package.__file__).resolve().is_relative_to(Path(sys.argv[1]).resolve()), package.__file__
CODE

say "harness --help, validate, plan, init"
harness --version
harness --help > help.txt
harness validate ci_smoke quickstart
harness plan facebook/opt-6.7b --prompt-len 512 --gen-len 32 --hardware t4_gcp > plan.txt
grep -q 'token/s' plan.txt
harness init --model facebook/opt-1.3b --out mine.yaml
harness validate mine.yaml
harness schema suites > suite.schema.json
harness explain policy.schedule > explained.txt
harness doctor > doctor.txt || true # exit code 1 where this machine lacks something
grep -q 'you can run' doctor.txt

if [ -n "$run" ]; then
  say "harness report, compare"
  harness report "$run" --out report.html
  test -s report.html
  harness compare "$run" --against accelerate > compared.txt || [ $? = 1 ] # a cell is behind
  grep -q ' faster' compared.txt
fi

if grep -q 'you can run no engine' doctor.txt; then
  say "what needs Linux says so"
  if harness run ci_smoke 2> told.txt; then exit 1; fi
  grep -q 'harness run needs Linux' told.txt
  exit
fi

case ",$extras," in *,offload,* | *,all,*)
  say "harness run ci_smoke"
  harness run ci_smoke --engine offload --set repeats=1 --extra-tries 0 --out run
  grep -q '"status":"ok"' run/records.jsonl
  test -s run/report.html
  harness report run --out again.md
  if grep -q '^C++ compiler *ok' doctor.txt; then
    ls "$HARNESS_CACHE"/kernels/*/kernel.so # compiled on first use
  else
    say "no compiler: the engine ran without its kernels"
  fi
esac
say "done"
