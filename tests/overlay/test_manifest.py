"""The manifest: reading, checking, writing."""

from __future__ import annotations

import pytest

from deepinfer_cli.errors import FailedError
from deepinfer_cli.overlay import manifest
from deepinfer_cli.overlay.manifest import ABSENT, Symbol
from scripts import add_release
from tests.conftest import RELEASES
from tests.fakes import ACCELERATE, ENABLE, OPS, hooked_paths

LAYOUT = "models/{layout}"


def test_the_bundled_manifest_lists_the_four_releases_and_every_op():
    bundled = manifest.load()
    assert tuple(bundled.releases) == RELEASES
    groups = dict.fromkeys(ACCELERATE, "accelerate") | dict.fromkeys(ENABLE, "enable")
    assert {op.name: op.group for op in bundled.ops} == groups
    assert tuple(op.name for op in bundled.ops) == OPS
    assert bundled.enable == set(ENABLE)
    assert all(op.summary for op in bundled.ops)
    # a step between two of our own kernels: vLLM has no such function
    inner = [op for op in bundled.ops if not (op.replaces or op.relies_on)]
    assert [op.name for op in inner] == ["mhc_post_with_sqrsum"]
    assert all(bool(op.replaces) is bool(op.relies_on) for op in bundled.ops)


@pytest.mark.parametrize("version", RELEASES)
def test_the_modules_that_are_hooked(version):
    bundled = manifest.load()
    hooked = bundled.hooked(bundled.releases[version])
    assert [f"vllm/{module}".replace("{layout}", "deepseek_v41") for module in hooked] == hooked_paths(
        version
    )


@pytest.mark.parametrize(("version", "rocm"), list(zip(RELEASES, (True, True, False, False), strict=True)))
def test_rocm_is_hooked_only_where_it_defines_the_combiner(version, rocm):
    bundled = manifest.load()
    hooked = bundled.hooked(bundled.releases[version])
    assert f"{LAYOUT}/common/ops/cache_utils.py" in hooked
    assert (f"{LAYOUT}/amd/rocm.py" in hooked) is rocm
    assert f"{LAYOUT}/amd/rocm.py" not in bundled.hooked(bundled.releases[version], ("gather",))


def test_each_release_has_each_symbol_that_is_replaced_somewhere():
    bundled = manifest.load()
    for release in bundled.releases.values():
        for op in (op for op in bundled.ops if op.replaces):
            assert any(release.fingerprints[symbol.key] != ABSENT for symbol in op.replaces)


def test_dump_and_parse_agree(fake_manifest):
    text = manifest.dump(fake_manifest, "# a header\n")
    assert text.startswith("# a header\n\n[ops.gather]")
    assert manifest.parse(text) == fake_manifest
    assert manifest.dump(manifest.parse(text), "# a header\n") == text


def test_keys():
    symbol = Symbol("models/{layout}/a.py", "K.m")
    assert Symbol.parse(symbol.key) == symbol


@pytest.mark.parametrize(
    "broken",
    [
        "not toml",
        "[ops.a]\ngroup = 'other'\nsummary = ''\nreplaces = []\nrelies_on = []\n",
        "[ops.a]\ngroup = 'enable'\nsummary = ''\nreplaces = ['m::f']\nrelies_on = []\n"
        "[releases.'1'.files]\n[releases.'1'.fingerprints]\n",
        "[ops.a]\ngroup = 'enable'\nsummary = ''\nreplaces = ['m::f']\nrelies_on = []\n"
        "[releases.'1'.files]\n[releases.'1'.fingerprints]\n'm::f' = 'abc'\n",
    ],
)
def test_a_damaged_manifest_says_so(tmp_path, broken):
    path = tmp_path / "manifest.toml"
    path.write_text(broken)
    with pytest.raises(FailedError) as caught:
        manifest.load(path)
    assert caught.value.code == "manifest-invalid"
    assert str(path) in caught.value.paths


@pytest.mark.release
def test_the_bundled_manifest_is_what_the_script_computes(pristine_release, capsys):
    for version in RELEASES:
        pristine_release(version)
    assert add_release.main(["--all", "--check"]) == 0
    assert "is current" in capsys.readouterr().out
