#!/usr/bin/env bash
# Every CPython from 3.10 on this machine that starts and can make a virtual environment, the default one first:
# one line each, "<major.minor> TAB <path>". Versions of pyenv count too.
set -u

ask='import ensurepip, sys, venv
version = sys.version_info
if version < (3, 10) or sys.implementation.name != "cpython":
    raise SystemExit(1)
print(f"{version[0]}.{version[1]}", sys.executable, sep="\t")'

seen=" "
for candidate in python3 python3.{10..20} "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3; do
  found=$("$candidate" -c "$ask" 2>/dev/null </dev/null) || continue
  minor=${found%%$'\t'*}
  case "$seen" in *" $minor "*) continue ;; esac
  seen="$seen$minor "
  printf '%s\n' "$found"
done
