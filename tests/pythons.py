"""Which tests `scripts/run_tests.sh` also runs under the Pythons beside the one that runs them all.

What is not here works on files, hashes and text, alike under every Python: mypy checks the syntax and library
of the oldest. A path below `tests`, or a test in it, has the marker `pythons`, and why.
"""

from __future__ import annotations

PYTHONS = {
    "cli/test_app.py": "typer and click render and parse by the interpreter's own argument and annotation handling",
    "cli/test_doctor.py": "reads what is installed beside this interpreter",
    "cli/test_install.py": "the smoke test of a command from its options to its JSON document",
    "cli/test_output.py": "rich, and what this Python makes of a closed or odd stdout",
    "cli/test_releases.py::test_install_status_rollback_gives_back_every_byte[0.33.0]": "a real install and rollback",
    "cli/test_releases.py::test_the_built_wheel_installs_and_changes_no_torch_or_vllm": "this Python's pip and metadata",
    "detect/test_vllm.py": "asks interpreters, and reads metadata, through importlib",
    "detect/test_wheel.py": "zipfile's and pathlib's handling of odd names",
    "overlay/test_closure.py": "ast: a digest must be the same under every Python",
    "overlay/test_fingerprint.py": "ast and tokenize: a fingerprint must be the same under every Python",
    "overlay/test_manifest.py": "tomllib, or tomli where there is none",
    "overlay/test_match.py": "fingerprints of sources that may be newer than this Python",
    "payload/test_adapters.py": "the payload runs in vLLM's Python: inspect.signature",
    "payload/test_bind.py": "the payload runs in vLLM's Python: importing and rebinding modules",
    "payload/test_gate.py": "the payload runs in vLLM's Python: switches and the device",
    "payload/test_releases.py": "signatures of vLLM's own functions, as this Python evaluates their annotations",
    "validate/test_liverun.py": "children of this interpreter, and what they print",
    "validate/test_verify.py": "probes interpreters, and starts workers in them",
}
# these start every Python themselves: once is enough
ONCE = ("test_every_python_here",)


def reason(path: str, name: str) -> str | None:
    """Why a test (path below `tests`, name with its parameters) runs under every Python; None if it need not."""
    if name.startswith(ONCE):
        return None
    return PYTHONS.get(path) or PYTHONS.get(f"{path}::{name}")
