#!/usr/bin/env bash
# Compares two versions of your own engine on one machine, and keeps both in a history over your engine's versions.
#
#   compare.sh NAME BASE_VENV BASE_COMMIT HEAD_VENV HEAD_COMMIT SUITE [ROUNDS]
#
# Each virtual environment has offload-harness and one version of the package NAME, whose engine SUITE names. Copy this
# folder into your project, and ci/interleave.sh into it. Exit codes are those of `harness compare`: 1 for a regression.
set -euo pipefail
if (($# < 6)); then
  sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
name=$1 base=$2/bin/harness base_commit=$3 head=$4/bin/harness head_commit=$5 suite=$6 rounds=${7:-7}
here=$(dirname "$0") out=results/compare
interleave=$here/interleave.sh
[[ -e $interleave ]] || interleave=$here/../../ci/interleave.sh

"$interleave" "$base" "$head" "$suite" "$rounds" "$out"
"$head" history add "$out/base" --subject "$name@$base_commit"
"$head" history add "$out/head" --subject "$name@$head_commit"
"$head" report "$out/base" "$out/head" --side-by-side --out "$out/report.html"
exec "$head" compare "$out/base" "$out/head" --allow "packages.$name"
