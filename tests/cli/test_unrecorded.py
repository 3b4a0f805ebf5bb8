"""Overlays without a record, of other versions, and in part: what the commands say of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from deepinfer_cli.overlay.manifest import Manifest
from deepinfer_cli.overlay.payload import Payload
from tests.cli.conftest import Cli, install_into, use_payload
from tests.conftest import FakeVllm


def test_an_older_overlay_without_a_record_is_named_and_force_replaces_it(
    cli: Cli,
    fake: FakeVllm,
    fake_payload: Callable[..., Payload],
    fake_manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = fake.snapshot()
    install_into(cli, fake)
    shutil.rmtree(fake.site / ".deepinfer")
    use_payload(fake_payload("0.2.0"), fake_manifest, monkeypatch)
    assert (
        "its files are not those of this DeepInfer's overlay 0.2.0"
        in cli("status", "--target", fake.site).out
    )
    refused = cli("install", "--target", fake.site, "--arch", "sm80", "--yes")
    assert refused.code == 4
    assert "error[overlay-conflict]: an overlay of version 0.1.0 is there without a record" in refused.err
    forced = install_into(cli, fake, "--force")
    assert "upgrades overlay 0.1.0 to 0.2.0" in forced.out
    use_payload(fake_payload("0.1.0"), fake_manifest, monkeypatch)
    assert "downgrades overlay 0.2.0 to 0.1.0" in install_into(cli, fake).out
    assert cli("rollback", "--target", fake.site, "--yes").code == 0
    (copies,) = fake.site.glob(".deepinfer-kept-*")
    shutil.rmtree(copies)
    assert fake.snapshot() == start


def test_a_dry_run_says_that_it_would_adopt(cli: Cli, fake: FakeVllm) -> None:
    install_into(cli, fake)
    shutil.rmtree(fake.site / ".deepinfer")
    assert "adopts it" in cli("status", "--target", fake.site).out
    data = cli("install", "--target", fake.site, "--arch", "sm80", "--dry-run", "--json").document["data"]
    assert (data["already_installed"], data["plan"]["adopts"]) == (False, True)
    adopted = install_into(cli, fake)
    assert "adopted overlay 0.1.0" in adopted.out
    assert "Action\tPath" not in adopted.out, "no table without rows"


def test_a_partial_install_is_not_called_compatible(cli: Cli, fake: FakeVllm) -> None:
    text = fake.cache_utils.read_bytes()
    fake.cache_utils.write_bytes(text.replace(b"return topk + window", b"return topk - window"))
    fake.reinstall_record()
    installed = install_into(cli, fake, "--partial")
    for shown in (installed, cli("status", "--target", fake.site)):
        assert "partial: not every symbol that matters is as in vLLM 0.33.0" in shown.out
        assert "compatible" not in shown.out
