"""`bind`: when it acts, what it refuses, and what it leaves behind."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from deepinfer_cli.overlay import payload as bundled
from tests.fakes import OPS

from .conftest import CACHE_UTILS, COMBINE, GATHER, PAYLOAD, ROCM, LoadedVllm, Platform, stub

GATHER_033 = "out, k_cache, seq_lens, gather_lens, block_table, block_size, offset, use_fnuz=False, max_gather_len=None"
COMBINE_033 = (
    "topk_indices, query_start_loc, seq_lens, gather_lens, window_size, compress_ratio, topk, M, N, out=None"
)
BODY = stub(GATHER, GATHER_033) + stub(COMBINE, COMBINE_033)


def bound(module: ModuleType) -> set[str]:
    return {name for name in (GATHER, COMBINE) if hasattr(vars(module).get(name), "__deepinfer__")}


@pytest.fixture
def cache_utils(vllm: LoadedVllm) -> ModuleType:
    return vllm.module(CACHE_UTILS, BODY)


def test_import_needs_neither_torch_nor_vllm():
    code = (
        "import sys, deepinfer_sm80, deepinfer_sm80.bindings, deepinfer_sm80.gate\n"
        "print([name for name in ('torch', 'triton', 'tilelang', 'vllm') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_no_payload_file_names_its_own_package():
    for file in PAYLOAD.rglob("*.py"):
        imports = [
            line for line in file.read_text().splitlines() if line.lstrip().startswith(("from ", "import "))
        ]
        assert not [line for line in imports if "deepinfer_sm80" in line], file


@pytest.mark.parametrize("card, arch", [((8, 0), "sm80"), ((8, 6), "sm86"), ((8, 9), "sm89")])
def test_binds_on_every_architecture_served(payload, vllm, cache_utils, card, arch):
    vllm.use(Platform(card))
    stock = vars(cache_utils)[GATHER]
    payload.bind(CACHE_UTILS)
    assert bound(cache_utils) == {GATHER, COMBINE}
    replacement = vars(cache_utils)[GATHER]
    assert replacement.__deepinfer__ == {"op": "gather", "stock": stock}
    assert (replacement.__name__, replacement.__module__) == (GATHER, CACHE_UTILS)
    assert not hasattr(replacement, "__wrapped__")
    assert payload.report()["arch"] == arch


@pytest.mark.parametrize(
    "platform",
    [
        Platform((9, 0)),
        Platform((7, 5)),
        Platform((8, 7)),
        Platform((10, 0)),
        Platform(None),
        Platform(cuda=False),
    ],
    ids=["sm90", "sm75", "sm87", "sm100", "unknown", "not-cuda"],
)
def test_does_nothing_on_other_devices(payload, vllm, cache_utils, platform, caplog):
    vllm.use(platform)
    with caplog.at_level(logging.DEBUG):
        payload.bind(CACHE_UTILS)
        payload.bind("vllm.not.ours")
    assert bound(cache_utils) == set()
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    assert payload.report()["enabled"] is False


def test_switched_off_does_nothing_even_with_a_journal(payload, vllm, cache_utils, monkeypatch):
    journal = vllm.root.parent / ".deepinfer" / "journal.json"
    journal.parent.mkdir()
    journal.write_text("{}")
    monkeypatch.setenv("DEEPINFER_DISABLE", "1")
    payload.bind(CACHE_UTILS)
    assert bound(cache_utils) == set()
    report = payload.report()
    assert report["enabled"] is False
    # mhc_post_with_sqrsum replaces nothing, so there is no stock to leave it to
    assert report["disabled_ops"] == sorted(set(OPS) - {"mhc_post_with_sqrsum"})


def test_disabled_op_stays_stock_and_is_not_checked(payload, vllm, monkeypatch):
    module = vllm.module(CACHE_UTILS, stub(GATHER, GATHER_033) + stub(COMBINE, "something, new"))
    monkeypatch.setenv("DEEPINFER_DISABLE_OPS", " combine ,")
    payload.bind(CACHE_UTILS)
    assert bound(module) == {GATHER}
    assert payload.report()["disabled_ops"] == ["combine"]


def test_unknown_disabled_op_is_an_error_naming_the_known(payload, cache_utils, monkeypatch):
    monkeypatch.setenv("DEEPINFER_DISABLE_OPS", "gather,decoed")
    with pytest.raises(payload.SwitchError, match=r"decoed; known are .*combine, .*gather"):
        payload.bind(CACHE_UTILS)
    assert bound(cache_utils) == set()


def test_skipped_op_stays_stock_and_is_not_checked(payload, vllm):
    module = vllm.module(CACHE_UTILS, stub(COMBINE, COMBINE_033))
    payload.bind(CACHE_UTILS, skip=("gather",))
    assert bound(module) == {COMBINE}
    assert payload.report()["skipped"] == ["gather"]


def test_unknown_skip_is_refused(payload, cache_utils):
    with pytest.raises(payload.BindError, match="decode"):
        payload.bind(CACHE_UTILS, skip=("decode",))


def test_forced_arch_asks_no_platform(payload, vllm, cache_utils, monkeypatch):
    platform = vllm.use(Platform((9, 0)))
    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", "sm86")
    payload.bind(CACHE_UTILS)
    assert bound(cache_utils) == {GATHER, COMBINE}
    assert platform.asked == []
    assert (payload.report()["arch"], payload.report()["forced"]) == ("sm86", True)


@pytest.mark.parametrize("layout", ["deepseek_v41", "deepseek_v4_1"])
@pytest.mark.parametrize("module", [CACHE_UTILS, ROCM])
def test_both_layouts(payload, vllm, layout, module):
    name = module.replace("deepseek_v41", layout)
    made = vllm.module(name, stub(GATHER, GATHER_033) + stub(COMBINE, COMBINE_033.removesuffix(", out=None")))
    if module == CACHE_UTILS:
        made = vllm.module(name, BODY)
    payload.bind(name)
    assert COMBINE in bound(made)


def test_hook_without_binding_is_a_mismatch(payload, vllm):
    vllm.module("vllm.models.deepseek_v41.attention", "")
    with pytest.raises(payload.BindError, match=r"vllm\.models\.deepseek_v41\.attention"):
        payload.bind("vllm.models.deepseek_v41.attention")


@pytest.mark.parametrize("name", ["vllm.models.deepseek_v4.common.ops.cache_utils", "cache_utils"])
def test_other_models_have_no_binding(payload, vllm, name):
    vllm.module(name, BODY)
    with pytest.raises(payload.BindError):
        payload.bind(name)


def test_missing_symbol_names_all_that_is_needed_and_binds_nothing(payload, vllm):
    module = vllm.module(CACHE_UTILS, stub(COMBINE, COMBINE_033))
    with pytest.raises(payload.BindError) as raised:
        payload.bind(CACHE_UTILS)
    message = str(raised.value)
    assert isinstance(raised.value, RuntimeError)
    assert all(
        text in message for text in (f"{CACHE_UTILS}.{GATHER}", "0.33.0", "deepinfer status", "gather")
    )
    assert bound(module) == set()


@pytest.mark.parametrize("installed", ["0.31.0", None])
def test_message_has_a_version_where_the_package_says_none(payload, vllm, monkeypatch, installed):
    def version(_name):
        if installed is None:
            raise metadata.PackageNotFoundError
        return installed

    monkeypatch.setattr(metadata, "version", version)
    del vllm.package.__version__
    vllm.module(CACHE_UTILS, "")
    with pytest.raises(payload.BindError, match=installed or "version unknown"):
        payload.bind(CACHE_UTILS)


def test_second_symbol_failing_leaves_the_first_alone(payload, vllm):
    module = vllm.module(CACHE_UTILS, stub(GATHER, GATHER_033) + stub(COMBINE, "topk_indices"))
    with pytest.raises(payload.BindError, match=COMBINE):
        payload.bind(CACHE_UTILS)
    assert bound(module) == set()
    assert payload.report()["bound"] == []


@pytest.mark.parametrize("bound_first", [True, False])
def test_imported_symbol_is_not_this_modules(payload, vllm, cache_utils, bound_first):
    if bound_first:
        payload.bind(CACHE_UTILS)
    module = vllm.module(ROCM, f"from {CACHE_UTILS} import {COMBINE}")
    with pytest.raises(payload.BindError, match=f"comes from {CACHE_UTILS}"):
        payload.bind(ROCM)
    assert vars(module)[COMBINE] is vars(cache_utils)[COMBINE]


def test_binding_twice_wraps_once(payload, cache_utils):
    payload.bind(CACHE_UTILS)
    first = dict(vars(cache_utils))
    payload.bind(CACHE_UTILS)
    assert all(vars(cache_utils)[name] is first[name] for name in (GATHER, COMBINE))
    assert len(payload.report()["bound"]) == 2


def test_reloaded_module_is_bound_again(payload, cache_utils):
    payload.bind(CACHE_UTILS)
    exec(BODY, vars(cache_utils))
    assert bound(cache_utils) == set()
    payload.bind(CACHE_UTILS)
    assert bound(cache_utils) == {GATHER, COMBINE}
    assert not hasattr(vars(cache_utils)[GATHER].__deepinfer__["stock"], "__deepinfer__")


def git_dir(parent: Path) -> Path:
    (parent / ".git").mkdir()
    return parent / ".git"


def git_worktree(parent: Path) -> Path:
    real = parent / "elsewhere" / "worktrees" / "one"
    real.mkdir(parents=True)
    (parent / ".git").write_text(f"gitdir: {real}\n")
    return real


def git_submodule(parent: Path) -> Path:
    real = parent / "modules" / "vllm"
    real.mkdir(parents=True)
    (parent / ".git").write_text("gitdir: modules/vllm\n")
    return real


@pytest.mark.parametrize("git", [None, git_dir, git_worktree, git_submodule])
def test_journal_stops_an_unfinished_overlay(payload, vllm, cache_utils, git):
    parent = vllm.root.parent
    state = parent / ".deepinfer" if git is None else git(parent) / "deepinfer"
    payload.bind(CACHE_UTILS, skip=("gather", "combine"))
    state.mkdir()
    (state / "journal.json").write_text("{}")
    with pytest.raises(payload.BindError, match=r"interrupted.*deepinfer status"):
        payload.bind(CACHE_UTILS)
    assert bound(cache_utils) == set()
    assert payload.report()["journal_present"] is True
    vllm.use(Platform((9, 0)))
    payload.bind(CACHE_UTILS)


def test_journal_is_found_where_files_are_links_to_a_cache(payload, vllm, cache_utils, tmp_path):
    link = tmp_path / "site" / "vllm"
    link.parent.mkdir()
    link.symlink_to(vllm.root, target_is_directory=True)
    vllm.package.__path__ = [str(link)]
    vllm.package.__file__ = "/cache/vllm/__init__.py"
    (tmp_path / ".deepinfer").mkdir()
    (tmp_path / ".deepinfer" / "journal.json").write_text("{}")
    with pytest.raises(payload.BindError, match="interrupted"):
        payload.bind(CACHE_UTILS)


def test_one_line_at_info_per_process(payload, vllm, cache_utils, caplog, monkeypatch):
    monkeypatch.setenv("DEEPINFER_FORCE_ARCH", "sm80")
    vllm.module(ROCM, stub(COMBINE, COMBINE_033.removesuffix(", out=None")))
    with caplog.at_level(logging.DEBUG):
        payload.bind(CACHE_UTILS)
        payload.bind(ROCM)
        payload.bind(CACHE_UTILS)
    lines = [record for record in caplog.records if record.levelno >= logging.INFO]
    assert [record.name for record in lines] == [payload.__name__]
    text = lines[0].getMessage()
    assert all(part in text for part in (payload.__version__, "sm80 (forced)", "combine, gather"))


def test_the_line_names_what_is_left_to_stock(payload, cache_utils, caplog, monkeypatch):
    monkeypatch.setenv("DEEPINFER_DISABLE_OPS", "combine")
    with caplog.at_level(logging.INFO):
        payload.bind(CACHE_UTILS)
    assert "switched off: combine" in caplog.text


def test_the_line_says_that_nothing_is_bound(payload, cache_utils, caplog, monkeypatch):
    monkeypatch.setenv("DEEPINFER_DISABLE_OPS", "combine,gather")
    with caplog.at_level(logging.INFO):
        payload.bind(CACHE_UTILS)
        payload.bind(CACHE_UTILS)
    assert [("bound nothing; switched off: combine, gather" in line) for line in caplog.messages] == [True]


def test_report_is_json_and_its_digest_is_the_installers(payload, cache_utils):
    payload.bind(CACHE_UTILS)
    report = json.loads(json.dumps(payload.report()))
    assert report["bound"] == [
        {"op": "gather", "module": CACHE_UTILS, "symbol": GATHER},
        {"op": "combine", "module": CACHE_UTILS, "symbol": COMBINE},
    ]
    assert report["payload_digest"] == bundled.load(PAYLOAD).digest
    assert Path(report["payload_root"]) == PAYLOAD
    assert (report["version"], report["journal_present"], report["enabled"]) == (
        payload.__version__,
        False,
        True,
    )


def test_worker_on_the_second_card_asks_for_that_card(payload, vllm, cache_utils, monkeypatch):
    platform = vllm.use(Platform((9, 0), (8, 6)))
    cuda = SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 1)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    payload.bind(CACHE_UTILS)
    assert set(platform.asked) == {1}
    assert bound(cache_utils) == {GATHER, COMBINE}


def test_binding_does_not_start_cuda(payload, vllm, cache_utils, monkeypatch):
    def refuse(*_args):
        raise AssertionError("CUDA was started")

    cuda = SimpleNamespace(is_initialized=lambda: False, current_device=refuse, get_device_properties=refuse)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    payload.bind(CACHE_UTILS)
    assert bound(cache_utils) == {GATHER, COMBINE}


def test_a_stand_in_that_raises_for_any_attribute_is_not_ours() -> None:
    """vLLM puts such objects into its modules where an optional package is missing."""

    class Missing:
        def __getattr__(self, name: str) -> object:
            raise ModuleNotFoundError("No module named 'optional'")

    def ours() -> None: ...

    ours.__deepinfer__ = {"op": "gather"}  # type: ignore[attr-defined]
    from deepinfer_sm80.bindings import is_ours

    assert (is_ours(Missing()), is_ours(ours)) == (False, True)
