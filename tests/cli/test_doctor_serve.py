"""`deepinfer doctor` on serving: kernels, settings, partitions, and the line, on machines that are made up."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_cli.commands import doctor, doctor_serve, doctor_settings
from deepinfer_cli.detect import host, process
from deepinfer_cli.detect.gpu import Gpu, GpuReport
from deepinfer_cli.overlay import manifest as manifests
from deepinfer_cli.overlay import payload as payloads
from deepinfer_cli.validate import switches
from tests.cli.conftest import Cli, Run, install_into
from tests.cli.test_doctor import rows
from tests.conftest import FakeVllm

BUNDLED, LOAD = payloads.bundled, manifests.load
Cards = Callable[..., None]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    """`cards(8, 48, (8, 6))` gives this machine eight cards of 48 GiB and a host of 512 GiB."""

    def give(
        count: int,
        gib: float,
        capability: tuple[int, int] = (8, 0),
        visible: str | None = None,
        *more: tuple[int, int],
    ) -> None:
        kinds = [capability] * count + list(more)
        found = tuple(
            Gpu(i, "NVIDIA Card", f"GPU-{i}", kind, int(gib * 2**30)) for i, kind in enumerate(kinds)
        )
        monkeypatch.setattr(
            doctor, "detect_gpus", lambda: GpuReport(found, "580.65.06", "13.0", "nvml", None, visible)
        )

    monkeypatch.setattr(host, "memory_bytes", lambda: 512 * 2**30)
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    return give


def test_eight_a100_get_a_line_to_paste(cli: Cli, fake: FakeVllm, cards: Cards) -> None:
    cards(8, 79.25)
    run = cli("doctor", "--target", fake.site)
    found = rows(run.out)
    assert run.code == 0
    assert found["serving"][:2] == ["ok", "TP8, context 1,048,576 (an estimate)"]
    line = next(text for text in run.out.splitlines() if text.startswith("vllm serve "))
    words = shlex.split(line)
    assert words[words.index("--tensor-parallel-size") + 1] == "8"
    assert words[words.index("--engram-config") + 1] == '{"cpu_offload": true}'
    document = cli("doctor", "--target", fake.site, "--json").document
    serve = document["data"]["serve"]
    assert serve["line"] == line
    assert serve["layout"]["tensor_parallel"] == 8
    assert sum(serve["layout"]["stages"][0].values()) < serve["layout"]["usable_gib"]


def test_cards_that_are_too_small_are_a_note_with_the_sum_and_no_line(
    cli: Cli, fake: FakeVllm, cards: Cards
) -> None:
    cards(8, 40)
    run = cli("doctor", "--target", fake.site)
    status, value, hint = rows(run.out)["serving"]
    assert (run.code, status) == (0, "note")
    assert "8 x 40.0 GiB is 320 GiB; the weights without Engram are 286.4 GiB" in value
    assert "16 GPUs of this size: TP8 x PP2 (20,20)" in hint and "8 GPUs of 48 GB" in hint
    assert "\nvllm serve " not in run.out


def test_a_host_without_room_for_engram_is_a_problem(
    cli: Cli, fake: FakeVllm, cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(8, 64)
    monkeypatch.setattr(host, "memory_bytes", lambda: 128 * 2**30)
    run = cli("doctor", "--target", fake.site)
    assert run.code == 1
    assert rows(run.out)["host memory"][:2] == [
        "problem",
        "128 GiB; Engram's tables take 188.8 GiB of it, pinned",
    ]


def test_only_visible_cards_of_the_most_frequent_kind_are_planned_for(
    cli: Cli, fake: FakeVllm, cards: Cards
) -> None:
    cards(8, 80, (8, 0), None, (9, 0), (8, 6))
    found = rows(cli("doctor", "--target", fake.site).out)
    assert found["serving"][1].startswith("TP8,")
    assert found["mixed GPUs"][0] == "note"
    assert set(found) >= {"attention sm80", "attention sm90", "attention sm86"}
    assert "binds nothing" in found["attention sm90"][1]
    cards(8, 80, (8, 0), "0,1,GPU-2")
    assert rows(cli("doctor", "--target", fake.site).out)["serving"][0] == "note"


def test_the_published_partition_is_refused_by_name(cli: Cli, fake: FakeVllm, cards: Cards) -> None:
    cards(6, 64)
    run = cli("doctor", "--target", fake.site, "--tp", 2, "--pp", 3, "--partition", "14,14,12")
    status, value, hint = rows(run.out)["settings: VLLM_PP_LAYER_PARTITION=14,14,12"]
    assert (run.code, status, hint) == (1, "problem", "VLLM_PP_LAYER_PARTITION=14,6,20")
    assert "published layout of six GPUs" in value and "before layer 28" in value
    layout = rows(run.out)["layout TP2 x PP3 (14,6,20)"]
    assert layout[0] == "note" and "67.2 experts" in layout[1] and "it does not fit" in layout[1]


def test_the_partition_of_the_environment_is_looked_at(
    cli: Cli, fake: FakeVllm, cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(8, 80)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "20,20")
    found = rows(cli("doctor", "--target", fake.site).out)
    assert found["partition"][0] == found["layout TP4 x PP2 (20,20)"][0] == "ok"
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "21,19")
    run = cli("doctor", "--target", fake.site)
    assert run.code == 1 and "partition" not in rows(run.out)
    assert rows(run.out)["settings: VLLM_PP_LAYER_PARTITION=21,19"][2] == "VLLM_PP_LAYER_PARTITION=20,20"
    assert rows(run.out)["serving"][0] == "ok"


def test_a_serve_line_is_looked_at(cli: Cli, fake: FakeVllm, cards: Cards) -> None:
    cards(8, 80)
    line = "VLLM_USE_V2_MODEL_RUNNER=0 vllm serve m -tp 8 --block-size 64"
    run = cli("doctor", "--target", fake.site, "--serve", line)
    found = rows(run.out)
    assert run.code == 1
    assert found["settings: --block-size 64"][0] == "problem"
    assert found["settings: VLLM_USE_V2_MODEL_RUNNER=0"][0] == "problem"
    right = cli("doctor", "--target", fake.site, "--serve", "vllm serve m -tp 8 --block-size 128")
    assert right.code == 0 and rows(right.out)["settings"][0] == "ok"


def test_what_the_shell_would_fill_in_is_named(cli: Cli, fake: FakeVllm, cards: Cards) -> None:
    cards(8, 80)
    run = cli("doctor", "--target", fake.site, "--serve", "vllm serve m -tp $GPUS --block-size 64")
    found = rows(run.out)
    assert found["settings: --tensor-parallel-size"][0] == "note"
    assert found["settings: --block-size 64"][0] == "problem"


@pytest.mark.parametrize("text", ["hello world", "", "vllm serve 'm"])
def test_text_without_a_serve_line_is_refused(cli: Cli, fake: FakeVllm, text: str) -> None:
    run = cli("doctor", "--target", fake.site, "--serve", text)
    assert (run.code, run.out) == (2, "")
    assert "error[usage]: " in run.err and "hint: " in run.err


@pytest.mark.parametrize(
    ("variables", "status", "word"),
    [
        ({"DEEPINFER_DISABLE_OPS": "gather,decod"}, "problem", "unknown ops: decod"),
        ({"DEEPINFER_DISABLE": "maybe"}, "problem", "neither on"),
        ({"DEEPINFER_FORCE_ARCH": "sm90"}, "problem", "is unknown"),
        ({"DEEPINFER_DISABLE": "1", "DEEPINFER_DISABLE_OPS": "decod"}, "note", "DEEPINFER_DISABLE is on"),
        ({"DEEPINFER_DISABLE_OPS": "gather"}, "note", "leaves gather to stock"),
        ({}, "ok", "none set"),
    ],
)
def test_switches(cli: Cli, fake: FakeVllm, cards: Cards, monkeypatch, variables, status, word) -> None:
    cards(8, 80)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run = cli("doctor", "--target", fake.site)
    found = rows(run.out)["switches"]
    assert found[0] == status and word in found[1]
    assert run.code == (1 if status == "problem" else 0)


def test_switches_are_read_as_the_installed_overlay_would(
    cli: Cli, fake: FakeVllm, cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots: list[Path] = []
    monkeypatch.setattr(switches, "read", lambda root: roots.append(root) or switches.Switches(False))
    cards(8, 80)
    cli("doctor", "--target", fake.site)
    install_into(cli, fake)
    cli("doctor", "--target", fake.site)
    # the rows of the switches and of the kernels, each time
    assert roots == [payloads.bundled().root] * 2 + [fake.root / "deepinfer_sm80"] * 2


@pytest.mark.release
@pytest.mark.parametrize("version", ["0.30.0", "0.33.0"])
def test_the_kernels_of_a_real_install(
    cli: Cli, cards: Cards, real_release, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(payloads, "bundled", BUNDLED)
    monkeypatch.setattr(manifests, "load", LOAD)
    cards(8, 80, (8, 6))
    site = real_release(version)
    before = rows(cli("doctor", "--target", site).out)
    assert before["attention sm86"][0] == "note" and "FlashMLA" in before["attention sm86"][1]
    assert "kernels sm86" not in before
    assert cli("install", "--target", site, "--arch", "sm86", "--yes", "--no-verify").code == 0
    after = rows(cli("doctor", "--target", site).out)
    assert after["attention sm86"][0] == "ok"
    assert "DeepInferSM8xAttention" in after["attention sm86"][1]
    for op in LOAD().enable:
        assert op in after["kernels sm86"][1]
    assert "left to stock" not in after["kernels sm86"][1]
    monkeypatch.setenv("DEEPINFER_DISABLE_OPS", "engram,gather")
    run = cli("doctor", "--target", site)
    status, value, hint = rows(run.out)["attention sm86"]
    assert (run.code, status) == (1, "problem")
    assert "engram left to stock" in value and hint == "take engram out of DEEPINFER_DISABLE_OPS"
    monkeypatch.setenv("DEEPINFER_DISABLE_OPS", "gather")
    run = cli("doctor", "--target", site)
    assert run.code == 0 and "left to stock: gather" in rows(run.out)["kernels sm86"][1]


def test_an_overlay_without_an_attention_class_says_so(cli: Cli, fake: FakeVllm, cards: Cards) -> None:
    cards(8, 80)
    install_into(cli, fake)
    found = rows(cli("doctor", "--target", fake.site).out)
    assert found["attention sm80"][:2] == ["ok", "stock's: this overlay has no attention class"]


def test_a_running_servers_options_are_looked_at(
    cli: Cli, fake: FakeVllm, cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(8, 80)
    command = 'python vllm serve m --block-size 64 --engram-config {"cpu_offload": true}'
    monkeypatch.setattr(
        process, "running", lambda root: (process.Process(7, command), process.Process(8, "VLLM::Worker"))
    )
    run = cli("doctor", "--target", fake.site)
    assert run.code == 1
    assert [name for name in rows(run.out) if name.startswith("process")] == ["process 7: --block-size 64"]


def line_of(run: Run) -> str:
    return next(text for text in run.out.splitlines() if "vllm serve deepseek" in text)


def test_a_line_with_stages_is_right_from_033_on(cli: Cli, fake: FakeVllm, cards: Cards) -> None:
    cards(8, 80)
    line = "VLLM_PP_LAYER_PARTITION=20,20 vllm serve m -tp 4 -pp 2 --block-size 128"
    found = rows(cli("doctor", "--target", fake.site, "--serve", line).out)
    assert (found["settings"][0], found["partition"][0]) == ("ok", "ok")


def test_stages_of_a_vllm_before_033_are_a_problem_and_do_not_get_the_line(
    cli: Cli, fake: FakeVllm, cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(8, 80)
    for module in (doctor_serve, doctor_settings):
        monkeypatch.setattr(module, "release_of", lambda target: "0.32.0")
    run = cli("doctor", "--target", fake.site, "--tp", 4, "--pp", 2, "--partition", "20,20")
    found = rows(run.out)
    assert run.code == 1
    status, value, hint = found["settings: --pipeline-parallel-size 2"]
    assert status == "problem" and "vLLM 0.32.0 runs no pipeline" in value and hint.endswith("or vLLM 0.33")
    status, value, hint = found["layout TP4 x PP2 (20,20)"]
    assert status == "note" and "experts" in value and "requires input_ids" in value and "vLLM 0.33" in hint
    assert found["serving"][1].startswith("TP8, ") and "pipeline" not in line_of(run)


def test_the_layout_that_is_asked_for_is_the_one_of_the_line(cli: Cli, fake: FakeVllm, cards: Cards) -> None:
    cards(8, 80)
    run = cli("doctor", "--target", fake.site, "--tp", 4, "--pp", 2, "--partition", "20,20")
    found = rows(run.out)
    assert found["layout TP4 x PP2 (20,20)"][0] == "ok"
    assert found["serving"][1].startswith("TP4 x PP2 (20,20), context 1,048,576")
    assert line_of(run).startswith("VLLM_PP_LAYER_PARTITION=20,20 vllm serve ")
    assert "--tensor-parallel-size 4 --pipeline-parallel-size 2" in line_of(run)


def test_a_layout_that_does_not_fit_leaves_the_advice_as_it_is(
    cli: Cli, fake: FakeVllm, cards: Cards
) -> None:
    cards(8, 80)
    run = cli("doctor", "--target", fake.site, "--tp", 4)
    found = rows(run.out)
    assert found["layout TP4"][0] == "note" and "it does not fit" in found["layout TP4"][1]
    assert found["serving"][1].startswith("TP8,") and "--tensor-parallel-size 8" in line_of(run)


def test_more_stages_than_there_are_cuts_are_no_layout(cli: Cli, fake: FakeVllm, cards: Cards) -> None:
    cards(8, 80)
    found = rows(cli("doctor", "--target", fake.site, "--pp", 7).out)
    assert found["layout PP7"][0] == "note" and found["layout PP7"][2] == "at most 4 stages"
    assert not any(name.startswith("layout TP") for name in found)


def test_serving_is_not_well_where_the_host_is_too_small(
    cli: Cli, fake: FakeVllm, cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(8, 64)
    for gib, memory, serving in (
        (128, "problem", "note"),
        (210, "note", "ok"),
        (280, "ok", "ok"),
        (512, "ok", "ok"),
    ):
        monkeypatch.setattr(host, "memory_bytes", lambda gib=gib: gib * 2**30)
        run = cli("doctor", "--target", fake.site)
        found = rows(run.out)
        assert (found["host memory"][0], found["serving"][0]) == (memory, serving), gib
        assert ('"use_thp": true' in line_of(run)) is (gib < 300)
        assert ("the host's memory does not" in found["serving"][1]) is (gib == 128)


def test_engram_is_on_the_gpus_where_the_host_has_no_room_for_it(
    cli: Cli, fake: FakeVllm, cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(8, 80)
    monkeypatch.setattr(host, "memory_bytes", lambda: 128 * 2**30)
    for words in ((), ("--tp", 4), ("--pp", 1)):
        run = cli("doctor", "--target", fake.site, *words)
        found = rows(run.out)
        assert run.code == 0 and found["host memory"][0] == "note"
        assert "the line puts them on the GPUs" in found["host memory"][1]
        assert '"cpu_offload": false' in line_of(run)


def test_a_context_that_the_model_has_not(cli: Cli, fake: FakeVllm, cards: Cards) -> None:
    cards(8, 80)
    run = cli("doctor", "--target", fake.site, "--context", 2_000_000)
    assert (run.code, run.out) == (2, "")
    assert "error[context-too-long]" in run.err and "--context 1048576" in run.err
