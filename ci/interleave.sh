#!/usr/bin/env bash
# Runs a suite with two installations of the harness on one machine, interleaved: each round launches every cell once
# with each of them, in alternating order, so that machine drift affects both sides alike.
#
#   ci/interleave.sh BASE_HARNESS HEAD_HARNESS SUITE ROUNDS OUT [OPTIONS OF harness run]
#   harness compare OUT/base OUT/head
#
# Seven rounds suffice for up to 34 cells. A run resumes where it stopped; each round adds one repeat.
set -euo pipefail
if (($# < 5)) || [[ ! $4 =~ ^[1-9][0-9]*$ ]]; then
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
base=$1 head=$2 suite=$3 rounds=$4 out=$5
shift 5

for ((round = 1; round <= rounds; round++)); do
  sides=(base head)
  ((round % 2)) || sides=(head base)
  for side in "${sides[@]}"; do
    echo "round $round of $rounds: $side" >&2
    status=0
    "${!side}" run "$suite" --set "repeats=$round" --no-report --out "$out/$side" "$@" || status=$?
    ((status <= 1)) || exit "$status" # harness compare judges failed cells
  done
done
