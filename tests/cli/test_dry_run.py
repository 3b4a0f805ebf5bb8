"""What a dry run and a second install say."""

from __future__ import annotations

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
