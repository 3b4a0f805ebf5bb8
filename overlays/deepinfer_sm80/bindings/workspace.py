"""`v1/worker/workspace.py`: the scratch buffer that attention, indexer and experts ask for in turns.

One method in all four releases. Ours asks stock's and notes how far the answer reaches (`attention/retained.py`): attention's
gathered rows outlive a layer until somebody asks for their bytes. Nothing about the answer changes.
"""

from __future__ import annotations

from .spec import Binding

MODULE = "v1.worker.workspace"


def _get(stock):
    """All four."""

    def get_simultaneous(self, *shapes_and_dtypes):
        from ..attention import retained

        views = stock(self, *shapes_and_dtypes)
        retained.asked(views)
        return views

    return get_simultaneous


BINDINGS = (Binding("WorkspaceManager.get_simultaneous", "yoco", (_get,)),)
