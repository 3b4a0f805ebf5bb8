"""What a target's files were before anyone touched them."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_cli.detect.target import Target


@dataclass(frozen=True)
class Origin:
    """The pristine oracle of one target.

    Attributes:
        source: `RECORD`, `HEAD`, `manifest` or `none`.
    """

    source: str

    @classmethod
    def of(cls, target: Target) -> Origin:
        """The oracle for `target`."""
        raise NotImplementedError

    def sha256(self, path: str) -> str | None:
        """The pristine hash of `path` (`vllm/…`), None when unknown."""
        raise NotImplementedError
