"""What a dry run and a second install say."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_cli.errors import UnsupportedError
from deepinfer_cli.overlay import hook, state
from tests.cli.conftest import Cli, install_into
from tests.conftest import FakeVllm


def test_a_dry_run_refuses_the_links_that_an_install_would_refuse(cli: Cli, fake: FakeVllm) -> None:
    real = fake.site / "real.py"
    fake.cache_utils.rename(real)
    fake.cache_utils.symlink_to(real)
    for more in ("--dry-run", "--yes"):
        run = cli("install", "--target", fake.site, "--arch", "sm80", more)
        assert (run.code, "error[symlinked-file]" in run.err) == (4, True)


def test_a_kept_copy_is_named_once(cli: Cli, fake: FakeVllm) -> None:
    fake.cache_utils.write_bytes(fake.cache_utils.read_bytes() + b"EXTRA = 1\n")
    assert "your edited file was kept as" in install_into(cli, fake, "--force").err
    again = install_into(cli, fake, "--json")
    assert again.document["data"]["kept"] == []
    assert "was kept as" not in again.err


def test_force_takes_an_edit_beside_the_block_for_the_original(cli: Cli, fake: FakeVllm) -> None:
    install_into(cli, fake)
    original = hook.strip(fake.cache_utils.read_bytes())
    edited = b"# mine\n" + fake.cache_utils.read_bytes()
    fake.cache_utils.write_bytes(edited)
    dry = cli("install", "--target", fake.site, "--arch", "sm80", "--force", "--dry-run", "--json")
    assert dry.document["data"]["already_installed"] is False
    forced = install_into(cli, fake, "--force")
    assert "already installed" not in forced.out
    assert "was edited: it stays as it is" in forced.err
    assert fake.cache_utils.read_bytes() == edited
    assert cli("status", "--target", fake.site).code == 0
    assert install_into(cli, fake).out.startswith("already installed")
    assert cli("rollback", "--target", fake.site, "--yes").code == 0
    assert fake.cache_utils.read_bytes() == b"# mine\n" + original


def test_where_nothing_can_be_written_it_may_be_installed_already(
    cli: Cli, fake: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(state_dir: Path) -> None:
        raise UnsupportedError("cannot write", code="read-only")

    arguments = ("install", "--target", fake.site, "--arch", "sm80", "--yes")
    with monkeypatch.context() as patched:
        patched.setattr(state, "lock", refuse)
        assert cli(*arguments).code == 3
    install_into(cli, fake)
    monkeypatch.setattr(state, "lock", refuse)
    again = cli(*arguments)
    assert (again.code, again.out.startswith("already installed")) == (0, True)
    other = cli("install", "--target", fake.site, "--arch", "sm86", "--yes")
    assert (other.code, other.out.count("\n")) == (0, 1)
    assert "it stays recorded as installed for sm80: nothing can be written there" in other.err
    (fake.root / "deepinfer_sm80" / "gate.py").unlink()
    assert cli(*arguments).code == 3
