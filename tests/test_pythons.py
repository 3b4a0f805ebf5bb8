"""The choice of tests that run under every Python, and that the script makes it."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.pythons import PYTHONS, reason

TESTS = Path(__file__).parent
SCRIPT = TESTS.parent / "scripts" / "run_tests.sh"


@pytest.mark.parametrize("name", PYTHONS)
def test_what_is_chosen_is_there(name: str) -> None:
    path, _, test = name.partition("::")
    text = (TESTS / path).read_text(encoding="utf-8")
    assert f"def {test.partition('[')[0]}(" in text if test else "def test_" in text


def test_a_test_is_chosen_by_its_file_or_its_name() -> None:
    assert reason("overlay/test_manifest.py", "test_any[x]")
    assert reason("cli/test_releases.py", "test_install_status_rollback_gives_back_every_byte[0.33.0]")
    assert not reason("cli/test_releases.py", "test_install_status_rollback_gives_back_every_byte[0.30.0]")
    assert not reason("overlay/test_kill.py", "test_any")
    assert not reason("overlay/test_fingerprint.py", "test_every_python_here_computes_the_manifest")


def test_the_other_pythons_run_what_can_differ(tmp_path: Path) -> None:
    """The real script, with interpreters that only write down what they are asked for."""
    log = tmp_path / "log"
    root = tmp_path / "checkout"
    (root / "scripts").mkdir(parents=True)
    (root / "scripts" / "run_tests.sh").write_bytes(SCRIPT.read_bytes())
    fake = f"""#!/bin/sh
case "$1 $2" in
  "-c "*) echo 3.11 ;;
  "-m venv") mkdir -p "$3/bin"; for name in python ruff mypy; do cp "$0" "$3/bin/$name"; done ;;
  "-m pytest") echo "$0 $*" >> {log} ;;
esac
"""
    pythons = root / "scripts" / "pythons.sh"
    versions = ("3.11", "3.9", "3.10", "3.12")
    pythons.write_text("#!/bin/sh\n" + "".join(f"printf '{v}\\t{tmp_path}/python{v}\\n'\n" for v in versions))
    for path in (pythons, *(tmp_path / f"python{version}" for version in versions)):
        if path is not pythons:
            path.write_text(fake)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "TORCH_INDEX")}
    subprocess.run(["bash", root / "scripts" / "run_tests.sh"], env=env | {"WORKERS": "2"}, check=True)
    said = [
        line.partition("/bin/python -m pytest -q -n 2 --dist worksteal")[::2]
        for line in log.read_text().splitlines()
    ]
    assert [(where.rpartition("/")[2], asked.strip()) for where, asked in said] == [
        (".venv-3.9", "-m pythons and not kernels -p no:cacheprovider"),
        (".venv-3.10", "-m pythons and not kernels -p no:cacheprovider"),
        (".venv-3.12", "-m pythons and not kernels -p no:cacheprovider"),
        (".venv", ""),
    ]
