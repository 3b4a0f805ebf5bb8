"""`python -m deepinfer_cli`."""

from __future__ import annotations

from deepinfer_cli.entry import entry

if __name__ == "__main__":
    entry()
