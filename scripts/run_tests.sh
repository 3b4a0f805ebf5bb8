#!/usr/bin/env bash
# All checks: lint, types, what can differ by Python under every Python here, then the whole suite under the first.
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t pythons < <(scripts/pythons.sh)
if [ "${#pythons[@]}" -eq 0 ]; then
  echo "DeepInfer needs CPython 3.10 or newer with the venv module" >&2
  exit 1
fi
first_python=${PYTHON:-${pythons[0]#*$'\t'}}
first_version=$("$first_python" -c 'import sys; print("{}.{}".format(*sys.version_info))')
workers=${WORKERS:-$(getconf _NPROCESSORS_ONLN)}
workers=$((workers > 8 ? 8 : workers))
unset FORCE_COLOR PY_COLORS GITHUB_ACTIONS

install() { # folder, python, extras
  "$2" -m venv "$1"
  "$1/bin/python" -m pip install --quiet --disable-pip-version-check ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -e ".[$3]"
}

echo "== sizes: torch 2.13.0 is about 190 MB as a CPU build and several GB with CUDA; which one you get is your pip"
echo "   index's choice (TORCH_INDEX=URL adds one). TileLang is 50 MB; its kernels are built where nvcc is. The first run also downloads four vLLM wheels, 1.3 GB, and keeps"
echo "   their Python files (about 200 MB) in the cache folder."
echo "== installing into .venv (Python $("$first_python" -c 'import platform; print(platform.python_version())'))"
install .venv "$first_python" test,lint

echo "== ruff and mypy"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy

for line in "${pythons[@]}"; do
  version=${line%%$'\t'*}
  [ "$version" = "$first_version" ] && continue
  echo "== Python $version: what can differ by Python (tests/pythons.py says why)"
  install ".venv-$version" "${line#*$'\t'}" unit
  ".venv-$version/bin/python" -m pytest -q -n "$workers" --dist worksteal -m "pythons and not kernels" -p no:cacheprovider
done

echo "== Python $first_version: all tests"
.venv/bin/python -m pytest -q -n "$workers" --dist worksteal
