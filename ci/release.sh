#!/usr/bin/env bash
# Makes and tries what a release consists of: ci/release.sh [--dry-run] [FOLDER]
# Writes into FOLDER [dist]: the source distribution, the wheel, sbom/ (CycloneDX), notes.md and SHA256SUMS. Publishes
# nothing: .github/workflows/release.yml does that with what this has made. Refuses a checkout that is no release; with
# --dry-run it only says what would be refused.
#   PYTHON    an interpreter with build, twine and cyclonedx-bom [.venv-release/bin/python: make .venv-release/.installed]
#   PACKAGES  see ci/test_wheel.sh, which tries the wheel; EXTRAS: what it is tried with [offload,report]
set -euo pipefail
cd "$(dirname "$0")/.."
dry=
case "${1:-}" in --dry-run) dry=yes; shift ;; --) shift ;; esac
case "${1:-}" in -*) echo "ci/release.sh [--dry-run] [FOLDER]" >&2; exit 2 ;; esac
out=${1:-dist}
python=${PYTHON:-.venv-release/bin/python}
refused=0

say() { printf '\n== %s\n' "$1"; }
refuse() { printf 'not a release: %s\n' "$1" >&2; refused=1; }

version=$("$python" -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')
say "offload-harness $version"
tag=${GITHUB_REF_NAME:-$(git describe --exact-match --tags 2>/dev/null || true)}
[ "$tag" = "v$version" ] || refuse "the tag is '${tag:-none}', not v$version; set the version in pyproject.toml, then tag"
[ -z "$(git status --porcelain)" ] || refuse "files are not committed"
grep -qE "^## \[${version//./\\.}\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md ||
  refuse "CHANGELOG.md has no heading '## [$version] - YYYY-MM-DD'"
"$python" ci/release_checks.py || refuse "a public contract changed without its version: see above"
if [ $refused = 1 ] && [ -z "$dry" ]; then exit 1; fi

say "build"
rm -rf "$out"
mkdir -p "$out/sbom"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH # two builds of a commit are equal
"$python" -m build --outdir "$out" . > "$out/build.log" || { tail -20 "$out/build.log" >&2; exit 1; }
rm "$out/build.log"
"$python" -m twine check --strict "$out"/*.whl "$out"/*.tar.gz

say "bill of materials"
PYTHONWARNINGS=ignore "$python" -m cyclonedx_py requirements constraints.txt --pyproject pyproject.toml \
  --mc-type application --output-reproducible --output-format JSON --output-file "$out/sbom/offload-harness.cdx.json"

say "the wheel, outside the checkout"
PYTHON=$(command -v "$python") PINS=$PWD/constraints.txt ci/test_wheel.sh "$out"/*.whl "${EXTRAS-offload,report}"

say "notes and checksums"
awk -v "head=## [$version]" '/^## /{found = index($0, head) == 1} found && !/^## /' CHANGELOG.md > "$out/notes.md"
[ -s "$out/notes.md" ] || echo "Not released yet." > "$out/notes.md"
(cd "$out" && sha256sum -- *.whl *.tar.gz sbom/*.json > SHA256SUMS)
ls -l "$out" "$out/sbom"
if [ $refused = 1 ]; then say "tried; a release would be refused, as said above"; else say "ready to be published"; fi
