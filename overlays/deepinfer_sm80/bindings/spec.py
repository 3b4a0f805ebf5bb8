"""What a binding is: a stock symbol, the op that takes its place, and the signatures we know it with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# makes the replacement for a stock function; the replacement's own parameters are the signature it is for
Adapter = Callable[[Callable[..., Any]], Callable[..., Any]]


class BindError(RuntimeError):
    """The overlay does not fit this vLLM; raised at import, so that a half-overlaid vLLM never serves."""


@dataclass(frozen=True)
class Binding:
    """One stock symbol and its replacements.

    Attributes:
        symbol: name in the module, or `Class.method`.
        op: the op that takes its place.
        adapters: one for each signature a release has. Each returns a function whose parameters (names, order,
            kinds and defaults) are exactly that signature, so the table cannot disagree with the code.
        check: raises BindError for a stock function of a known signature that does something unknown.
        serves_all: it serves the other ops too, so it is put in place even with `op` switched off, if it fits then.
        origin: the module that the bound one imports the symbol from, where it is not defined there. Only the bound
            module's own calls get the replacement: elsewhere the function has other uses.
    """

    symbol: str
    op: str
    adapters: tuple[Adapter, ...]
    check: Callable[[Callable[..., Any]], None] | None = None
    serves_all: bool = False
    origin: str | None = None

    @property
    def name(self) -> str:
        """The symbol as the manifest names it."""
        return f"from {self.origin} import {self.symbol}" if self.origin else self.symbol

    def adapt(self, stock: Callable[..., Any], module: str) -> Callable[..., Any]:
        """The replacement for `stock`, a symbol of `module`.

        The replacement has no `__wrapped__`: whoever asks for its signature or source gets ours.

        Raises:
            BindError: no adapter has the signature of `stock`, then it says how it differs from the nearest; or `check`
                refuses it.
        """
        try:
            wanted = _parameters(stock)
        except (TypeError, ValueError) as error:
            raise BindError(f"has no readable signature ({error})") from None
        replacements = [adapter(stock) for adapter in self.adapters]
        for replacement in replacements:
            if _parameters(replacement) == wanted:
                if self.check is not None:
                    self.check(stock)
                replacement.__module__ = module
                replacement.__qualname__ = self.symbol
                replacement.__deepinfer__ = {"op": self.op, "stock": stock}  # type: ignore[attr-defined]
                return replacement
        nearest = min((_difference(wanted, _parameters(known)) for known in replacements), key=_distance)
        raise BindError(f"has an unknown signature ({'; '.join(nearest)})")


def _parameters(function: Callable[..., Any]) -> list[tuple[str, str, str]]:
    """Name, kind and default of each parameter; annotations say nothing about a call."""
    return [
        (one.name, one.kind.description, "" if one.default is one.empty else repr(one.default))
        for one in inspect.signature(function).parameters.values()
    ]


def _difference(found: list[tuple[str, str, str]], known: list[tuple[str, str, str]]) -> list[str]:
    here, there = {one[0]: one for one in found}, {one[0]: one for one in known}
    parts = [f"added: {name}" for name in here if name not in there]
    parts += [f"missing: {name}" for name in there if name not in here]
    for name in here:
        if name in there and here[name] != there[name]:
            parts.append(f"{name} is {_spelled(here[name])}, not {_spelled(there[name])}")
    return parts or [f"order: {', '.join(here)}"]


def _distance(parts: list[str]) -> tuple[int, int]:
    return len(parts), sum(part.startswith(("added", "missing")) for part in parts)


def _spelled(parameter: tuple[str, str, str]) -> str:
    _, kind, default = parameter
    return f"{kind}, default {default}" if default else f"{kind}, no default"
