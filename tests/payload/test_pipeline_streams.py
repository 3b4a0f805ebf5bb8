"""Who waits for whom when pipeline stages exchange tokens: the four releases' own handler, on streams that keep what they wait for."""

from __future__ import annotations

import ast
import inspect
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes import RELEASES

from .conftest import Platform, definition, parsed
from .test_without_kernels import called, path_of, real

HANDLER = "vllm.v1.worker.gpu.pp_utils"
UTILS = "vllm.utils.torch_utils"
MARLIN = "model_executor/layers/quantization/utils/marlin_utils.py"
PYNCCL = "distributed/device_communicators/pynccl.py"
pytestmark = pytest.mark.release


class Stream:
    """A stream: `seen` is all that its next kernel comes after."""

    made = 0

    def __init__(self, device: Any = None) -> None:
        Stream.made += 1
        self.seen: set[str] = set()

    def wait_stream(self, other: Stream) -> None:
        self.seen |= other.seen

    def record_event(self) -> Stream:
        event = Stream()
        event.seen = set(self.seen)
        return event

    wait_event = wait_stream


class Cuda:
    """`torch.cuda`, with PyTorch's own stream as the current one."""

    Stream = Stream

    def __init__(self) -> None:
        self.current = Stream()

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current
        self.set_stream(stream)
        yield
        self.set_stream(before)


class Anything:
    """Stands for tensors and masks: no request is gone, and each wants its token."""

    dtype, shape = "int64", (1, 1)

    def _same(self, *_args: Any, **_more: Any) -> Anything:
        return self

    __getitem__ = __ne__ = __or__ = __invert__ = contiguous = record_stream = _same  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def any(self) -> bool:
        return False

    all = any

    def unbind(self, dim: int) -> tuple[Anything, Anything]:
        return self, self


class Card(Platform):
    def is_rocm(self) -> bool:
        return False

    is_xpu = is_rocm


@pytest.fixture(params=RELEASES)
def tree(request: pytest.FixtureRequest, release_tree) -> Path:
    return release_tree(request.param)


@pytest.fixture
def stage(tree, vllm) -> SimpleNamespace:
    """A worker's process: the release's handler and its `current_stream`, nothing called yet."""
    cuda, sent = Cuda(), []

    def exchange(tensor: Any, src: int, group: str) -> None:
        sent.append(set(cuda.current.seen))
        cuda.current.seen.add("exchanged")

    torch = SimpleNamespace(
        cuda=cuda, int64="int64", int32="int32", distributed=SimpleNamespace(broadcast=exchange),
        empty=lambda *shape, **more: Anything(), stack=lambda tensors, dim: Anything(),
        nn=SimpleNamespace(functional=SimpleNamespace(pad=lambda tensor, *args, **more: tensor)),
    )  # fmt: skip
    vllm.use(Card((8, 0)))
    scope = vars(vllm.module(UTILS, ""))
    scope.update(torch=torch, _current_stream_tls=threading.local(), prev_set_stream=cuda.set_stream)
    cuda.set_stream = real(tree / path_of(UTILS), "_patched_set_stream", scope)
    group = SimpleNamespace(last_rank=1, world_size=2, make_sibling_device_group=lambda group_desc: "group")
    module = vllm.module(HANDLER, "from __future__ import annotations\n")
    vars(module).update(
        torch=torch, deque=deque, dataclass=dataclass, get_pp_group=lambda: group, np=SimpleNamespace(zeros=lambda *a, **k: Anything(), int32=0),
        current_platform=vllm.platforms.current_platform, compute_need_sampled_mask=lambda batch: Anything(),
    )  # fmt: skip
    body = [node for node in parsed(tree / path_of(HANDLER)).body if isinstance(node, ast.ClassDef)]
    exec("from __future__ import annotations\n" + "\n".join(map(ast.unparse, body)), vars(module))
    choose = real(tree / path_of(UTILS), "current_stream", scope)
    return SimpleNamespace(cuda=cuda, sent=sent, group=group, module=module, choose=choose)


def serve(stage: Any, *, last: bool, early: bool) -> set[str]:
    """A step on the first or the last of two stages: what the exchange, or the kernels after it, come after.

    `early`: a communicator of vLLM's own has been made before the handler.
    """
    stage.group.is_last_rank = last
    if early:
        stage.choose()
    handler = stage.module.PPHandler(16, 0, "cuda")
    # a Marlin product
    stage.choose()
    work = stage.cuda.current
    work.seen.add("sampled")
    batch = SimpleNamespace(num_draft_tokens=0, num_reqs=1, idx_mapping=Anything(), idx_mapping_np=Anything())
    if last:
        handler.broadcast(Anything(), Anything(), Anything(), batch)
        return set.intersection(*stage.sent)
    # 0.33 also says whether drafts come
    more = {"recv_drafts": False} if "recv_drafts" in inspect.signature(handler.receive).parameters else {}
    handler.receive(batch, **more)
    handler.get_prev_sampled_outputs()
    assert handler.get_prev_sampled_outputs() is not None
    return work.seen


@pytest.mark.parametrize("last", [True, False], ids=["last", "first"])
@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
def test_stages_wait_for_the_tokens(payload, stage, last, early):
    payload.bind(HANDLER)
    assert ("sampled" if last else "exchanged") in serve(stage, last=last, early=early)


@pytest.mark.parametrize("last", [True, False], ids=["last", "first"])
@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
def test_stock_waits_only_where_the_stream_was_chosen(stage, last, early):
    """The fault: a handler that was made first waits for a stream on which nothing runs."""
    assert (("sampled" if last else "exchanged") in serve(stage, last=last, early=early)) == early


def test_a_chosen_stream_is_kept(payload, stage):
    payload.bind(HANDLER)
    stage.group.is_last_rank = True
    chosen, before = stage.choose(), Stream.made
    handler = stage.module.PPHandler(16, 0, "cuda")
    assert handler.main_stream is chosen is stage.cuda.current
    # its own stream for the exchange, and no other
    assert Stream.made == before + 1


def test_who_chooses_the_stream(tree):
    """The first calls, in the releases' code: a communicator before the handler; a Marlin product after it, from 0.31 on."""
    communicator = [node for node in ast.walk(parsed(tree / PYNCCL)) if isinstance(node, ast.FunctionDef)]
    first = [node for node in communicator if node.name in ("__init__", "_init_comm")]
    assert any(called(inner, "current_stream") for node in first for inner in ast.walk(node))
    locks = definition(tree / MARLIN, "get_marlin_workspace")
    if locks is not None:
        assert any(called(inner, "current_stream") for inner in ast.walk(locks))
