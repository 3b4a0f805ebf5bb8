"""The argument checks that the ops share."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.kernels


def memory(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def checked(given: torch.Tensor, *shapes: tuple[int | None, ...], **options: Any) -> None:
    from deepinfer_sm80.ops import check

    check.tensor("x", given, "bfloat16", *shapes, **options)


@pytest.mark.parametrize(
    ("given", "shapes", "options"),
    [
        (memory(3, 8), [(3, 8)], {"whole": True}),
        (memory(3, 8), [(None, 8)], {"fewest": 3}),
        (memory(3, 8), [(3, 8, 1), (None, None)], {}),
        (memory(3, 16)[:, :8], [(3, 8)], {}),
        (memory(3, 8)[:, ::8], [(3, 1)], {}),
        # memory of no size has no address
        (memory(25)[1:1], [(0,)], {"whole": True}),
    ],
)
def test_takes(given: torch.Tensor, shapes: list[tuple[int | None, ...]], options: dict[str, Any]) -> None:
    checked(given, *shapes, **options)


@pytest.mark.parametrize(
    ("given", "shapes", "options", "error", "message"),
    [
        (torch.zeros(3), [(3,)], {}, TypeError, "x must be torch.bfloat16, is torch.float32"),
        (memory(3, 8), [(3, 7)], {}, ValueError, r"x must have shape \(3, 7\), has \(3, 8\)"),
        (memory(3, 8), [(2, None)], {}, ValueError, r"shape \(2, None\) \(None: any\), has \(3, 8\)"),
        (memory(3, 8), [(3,), (3, 8, 1)], {}, ValueError, r"\(3,\) or \(3, 8, 1\), has"),
        (memory(3), [(None,)], {"fewest": 4}, ValueError, "x must have 4 entries or more in its first dim, has 3"),
        (memory(3, 16)[:, ::2], [(3, 8)], {}, ValueError, r"last dim must be contiguous, .* \(16, 2\)"),
        (memory(3, 16)[:, :8], [(3, 8)], {"whole": True}, ValueError, "x must be contiguous, its strides"),
        (memory(25)[1:], [(24,)], {"whole": True}, ValueError, "x must start at a multiple of 16 bytes"),
    ],
)  # fmt: skip
def test_refuses(
    given: torch.Tensor,
    shapes: list[tuple[int | None, ...]],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        checked(given, *shapes, **options)
