"""Fingerprints: what changes them, what does not, and that every Python computes the same."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_cli.overlay import fingerprint, manifest
from deepinfer_cli.overlay.fingerprint import ABSENT, fingerprints
from tests.conftest import RELEASES

BASE = '''
@decorate(1)
def f(a, *, b=2):
    """Docstring."""
    if a:
        return f"{a!r:>{b}} {{x}} ü" "tail"
    return b
'''

TRICKY = '''
def f(a, b=f"é{a!r:>{3}} {{x}}" "t", c="ünï"):
    """doc ü"""
    return (f"""ü{a}
   é{a:{b}} {a["x"]}""" + rf'{a}\\d{{' + F"{'nested' f'{a}'}" + f"{a=}" + b"x".decode())  # é
class A:
    def n(self): return f'{self.x}' f"{{}}"  # é
    x: int = \\
        f"{1}"
'''


def of(source: str, name: str = "f") -> str:
    return fingerprints(source, [name])[name]


@pytest.mark.parametrize(
    "source",
    [
        BASE.replace('"""Docstring."""', '"""Another.\n\n    longer\n    """'),
        BASE.replace('    """Docstring."""\n', ""),
        BASE.replace("    if a:", "    # why\n\n    if a:  # here"),
        BASE.replace("    ", "  "),
        BASE.replace("    ", "\t"),
        BASE.replace("\n", "\r\n"),
        "\ufeff" + BASE,
        "import os\n\nX = 1\n" + BASE + "\n\ndef g():\n    pass\n",
        BASE.replace("def f(a, *, b=2):", "def f(\n    a,  # first\n    *, b=2):"),
        BASE.rstrip("\n"),
        "try:\n" + "\n".join("    " + line for line in BASE.splitlines()) + "\nexcept E:\n    pass\n",
    ],
)
def test_layout_comments_and_docstrings_do_not_count(source):
    assert of(source) == of(BASE)


@pytest.mark.parametrize(
    "source",
    [
        BASE.replace("b=2", "b=3"),
        BASE.replace("@decorate(1)\n", ""),
        BASE.replace("decorate(1)", "decorate(2)"),
        BASE.replace("return b", "return  a"),
        BASE.replace("    return b\n", "        return b\n"),
        BASE.replace("!r", "!s"),
        BASE.replace("{{x}}", "{{y}}"),
        BASE.replace("tail", "tale"),
        BASE.replace("def f", "async def f"),
        BASE.replace('"""Docstring."""', 'f"""Docstring."""'),
        BASE.replace('    """Docstring."""\n', '    x = """Docstring."""\n'),
        BASE + BASE,
    ],
)
def test_meaning_counts(source):
    assert of(source) != of(BASE)


def test_names():
    source = (
        "from m import imported\nA = B = 1\nC: int = 2\nD, (E, *F) = g()\nobj.attribute = 3\n"
        "class K:\n    '''Doc.'''\n    P: int = 4\n    def m(self): return self.P\n    class Inner:\n        z = 1\n"
        "if A:\n    def h(): return 1\nelse:\n    def h(): return 2\n"
    )
    names = [
        "A",
        "B",
        "C",
        "D",
        "E",
        "F",
        "K",
        "K.P",
        "K.m",
        "K.Inner.z",
        "h",
        "imported",
        "obj",
        "P",
        "m",
        "K.no",
        "X.y",
    ]
    result = fingerprints(source, names)
    assert [name for name in names if result[name] == ABSENT] == ["imported", "obj", "P", "m", "K.no", "X.y"]
    assert result["h"] != fingerprints(source.replace("return 2", "return 3"), ["h"])["h"], (
        "every definition counts"
    )
    assert result["h"] == fingerprints(source.replace("A = B = 1", "A = B = 7"), ["h"])["h"]
    assert result["K.m"] == fingerprints(source.replace("P: int = 4", "P: int = 5"), ["K.m"])["K.m"]
    assert result["K"] != fingerprints(source.replace("P: int = 4", "P: int = 5"), ["K"])["K"]


@pytest.mark.parametrize(
    "source",
    [
        "from a.b import f",
        "from a.b import g as h, f",
        "from a.b import (\n    e,\n    f,\n)",
        "from a.b import f as f  # re-exported",
        "try:\n    from a.b import f\nexcept ImportError:\n    f = None",
    ],
)
def test_an_import_is_asked_for_by_what_it_says(source):
    name = "from a.b import f"
    assert fingerprints(source, [name])[name] == fingerprints("from a.b import f", [name])[name] != ABSENT


@pytest.mark.parametrize(
    "source",
    [
        "from a.b import f as g",
        "from a.b import ff",
        "from a.c import f",
        "from .a.b import f",
        "import a.b",
        "def f(): ...",
        "def g():\n    from a.b import f",
        "",
    ],
)
def test_another_import_is_none(source):
    assert fingerprints(source, ["from a.b import f"]) == {"from a.b import f": ABSENT}


def test_the_first_and_a_later_method_are_alike():
    first = "class K:\n    def m(self):\n        return 1\n"
    later = "class K:\n    def a(self):\n        if 1:\n            pass\n    # c\n    def m(self):\n        return 1\n"
    assert of(first, "K.m") == of(later, "K.m")


def test_docstrings_at_every_level_are_dropped():
    bare = "class K:\n    def m(self):\n        def inner():\n            return 1\n        return inner\n"
    full = (
        'class K:\n    "K"\n    def m(self):\n        """m"""; x = 1\n        def inner():\n'
        '            "a" "b"\n            return 1\n        return inner\n'
    )
    assert of(full.replace('"""m"""; x = 1\n', '"""m"""\n'), "K") == of(bare, "K")
    assert of(full, "K") == of(bare.replace("        def inner", "        x = 1\n        def inner"), "K")
    assert of("def f(): 'one'\n") == of("def f(): 'other'\n")


def test_the_two_layout_names_are_one():
    stock = (
        "from vllm.models.deepseek_v41 import a\nX = 'vllm.models.deepseek_v41.y'\nY = f'{X}.deepseek_v41'\n"
    )
    fork = stock.replace("deepseek_v41", "deepseek_v4_1")
    assert fingerprints(stock, ["X", "Y"]) == fingerprints(fork, ["X", "Y"])
    assert of("X = 'deepseek_v4_12'", "X") != of("X = 'deepseek_v412'", "X")


@pytest.mark.parametrize(
    "source",
    [
        BASE,
        TRICKY,
        "X = 1; Y = 2\nZ = 3\n",
        'X = 1; Y = """\n"""; Z = (\n3); W = 4\nV = 5',
        "X = 1; \\\n  Y = 2\nZ = 3\n",
        "X = 1 \\\n\nY = 2\n",
        "X = 1\n\\\ndef f(): return 2\n",
        '"""Module.\n"""; X = 1\n',
        "@(\n  dec\n)\ndef f():\n    return 1\n\n\n@dec  # why\n# here\n@other(\n 1)\nclass K:\n  'doc'\n  def m(self): 'd'; return 1\n",
        "if X: Y = 1\nif (Y\n   and X): Z = 1\nelse:\n  # c\n  Z = 2; W = '''\n'''; V = 1\n",
        "try:\n  X = 1\nexcept E:\n  X = 2\nelse:\n  X = 3\nfinally:\n  X = 4\nmatch X:\n  case 1:\n    X = 5\n  case _:\n    def f(): 'd'\n",
    ],
)
def test_a_statement_read_alone_has_the_tokens_that_it_has_in_its_module(source, monkeypatch):
    names = ["f", *"KVWXYZA", "K.m", "A.n", "A.x"]
    alone = fingerprints(source, names)
    assert set(alone.values()) != {ABSENT}
    monkeypatch.setattr(
        fingerprint._Parts, "_tokens", lambda self, number: list(fingerprint._tokens(self._lines, 0))
    )
    assert fingerprints(source, names) == alone


def test_long_elif_chains_are_read_wherever_they_are():
    chain = "".join(f"  elif a == {number}: x = {number}\n" for number in range(1_500))
    source = f"def f(a):\n  if a: x = 1\n{chain}X = 1\n"
    assert fingerprint.fingerprints(source, ["X"]) == fingerprint.fingerprints("X = 1\n", ["X"])
    assert fingerprint.fingerprints(source, ["f"])["f"] != fingerprint.ABSENT


def test_what_no_python_can_parse_raises():
    with pytest.raises(SyntaxError):
        of("def f(:\n")


def pythons() -> list[str]:
    """Every Python from 3.10 on that this machine has, the running one first."""
    found = [sys.executable, *(shutil.which(f"python3.{minor}") or "" for minor in range(10, 20))]
    found += [str(path) for path in Path.home().glob(".pyenv/versions/3.*/bin/python")]
    return [path for path in dict.fromkeys(found) if path and version_of(path) >= (3, 10)]


def version_of(python: str) -> tuple[int, ...]:
    command = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 else (0,)


SCRIPT = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("fingerprint", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
result = []
for path, names in json.load(sys.stdin):
    with open(path, encoding="utf-8", newline="") as file:
        result.append(module.fingerprints(file.read(), names))
print(json.dumps(result))
"""


def under(python: str, jobs: list[tuple[str, list[str]]]) -> list[dict[str, str]]:
    command = [python, "-I", "-c", SCRIPT, fingerprint.__file__]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_python_here_computes_the_same_for_awkward_sources(tmp_path):
    path, dash = tmp_path / "tricky.py", tmp_path / "dash.py"
    path.write_text(TRICKY, encoding="utf-8")
    # Python 3.12.1 miscounts the columns of such a string's end
    dash.write_text('def f():\n    """a\n    \u2014 b"""\n    return 1\n', encoding="utf-8")
    jobs = [(str(path), ["f", "A", "A.n", "A.x", "none"]), (str(dash), ["f"])]
    assert len({json.dumps(under(python, jobs)) for python in pythons()}) == 1


@pytest.mark.release
def test_every_python_here_computes_the_manifest(pristine_release):
    listed = manifest.load()
    jobs, expected = [], []
    for version in RELEASES:
        for module in sorted({symbol.module for symbol in listed.symbols}):
            path = pristine_release(version) / "vllm" / module.replace("{layout}", "deepseek_v41")
            if path.is_file():
                symbols = [symbol for symbol in listed.symbols if symbol.module == module]
                jobs.append((str(path), [symbol.name for symbol in symbols]))
                known = listed.releases[version].fingerprints
                expected.append({symbol.name: known[symbol.key] for symbol in symbols})
    for python in pythons():
        assert under(python, jobs) == expected, python
