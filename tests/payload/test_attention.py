"""The attention class against the real methods of the four releases: same results, each row rotated once, less work."""

from __future__ import annotations

import ast
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from deepinfer_sm80.attention import choice, layer, layout, retained, shared  # noqa: E402
from deepinfer_sm80.bindings import BindError, nvidia_model, workspace  # noqa: E402

from tests.fakes import RELEASES  # noqa: E402

from . import attention_layers as real  # noqa: E402
from .conftest import definition  # noqa: E402

pytestmark = [pytest.mark.kernels, pytest.mark.release]
ROTATING = RELEASES[1:]
PLANNED = RELEASES[2:]
# a small V4.1: a window alone, two caches, three selections of the second
SMALL = ((0, 2, 2, 1, 1, 1, 1, 0), (1, 3), (1, 3, 5))
# V4.1's own
FULL = ((0, 0, *[2] * 18, *[1] * 20), (2, 8, 14, 20), (2, 8, 14, 20, 24, 28, 32, 36))
# a decode, then prompts: fresh, longer than the window, a later chunk of a long one
BATCH = ((30, 5, 13, 40, 9, 21), (1, 5, 13, 6, 9, 3))


@pytest.fixture(params=RELEASES)
def release(request) -> str:
    return request.param


@pytest.fixture
def made(release, release_tree) -> Any:
    return real.module(release_tree(release), release)


@pytest.fixture(autouse=True)
def fresh_workspace(monkeypatch):
    """What this process knows of its workspace: nothing."""
    monkeypatch.setattr(retained, "_captured", 0)
    monkeypatch.setattr(retained, "_watching", False)
    monkeypatch.setattr(retained, "_owners", {})


@pytest.fixture
def stock(made) -> type:
    return vars(made)[real.CLASS]


def q_of(batch: real.Batch) -> Any:
    tokens = int(batch.starts[-1]) - batch.decodes
    return torch.randn((tokens, real.HEADS, real.DIM), generator=torch.Generator().manual_seed(7)).bfloat16()


def groups(batch: real.Batch, count: int = 4) -> Any:
    """Layer → metadata: every fourth layer's window is in one group, as vLLM splits them."""
    objects = [batch.metadata() for _ in range(count)]
    return lambda index: objects[index % count]


def count(calls: list[Any], name: str, what: Any = None) -> int:
    return sum(call[0] == name and what in (None, call[1]) for call in calls)


@pytest.mark.parametrize("ragged", [False, True], ids=["our prefill kernel", "stock's prefill kernel"])
def test_layers_that_share_compute_what_stock_computes(made, stock, ragged):
    if not ragged:
        made.rocm_sparse_attn_prefill = real.replaced(made.rocm_sparse_attn_prefill)
    batch = real.Batch(made, *BATCH)
    q = q_of(batch)
    made.context = real.Context({})
    expected = real.Model(made, stock, *SMALL).prefill(groups(batch), q)
    asked = set(made.workspace.asked)
    before = len(made.calls)
    made.context, made.workspace.asked[:] = real.Context({}), []
    ours = layer.make(made, stock, shared=True)
    found = real.Model(made, ours, *SMALL).prefill(groups(batch), q)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"layer {index}"
    assert any(output.abs().sum() > 0 for output in expected)
    assert not torch.equal(expected[3], expected[5])
    # the same bytes of vLLM's workspace
    assert set(made.workspace.asked) == asked
    attended = [call for call in made.calls[before:] if call[0] == "attend"]
    assert {how for _, how in attended} == {"ragged" if ragged else "dense"}


# --- gathered rows --------------------------------------------------------------------------------------------------


class Gathers:
    """A batch of one prompt through layers 2-39 of the full model, with the workspace watched or not."""

    def __init__(self, made: Any, stock: type, *, watched: bool = True) -> None:
        made.rocm_sparse_attn_prefill = real.replaced(made.rocm_sparse_attn_prefill)
        self.made = made
        self.batch = real.Batch(made, (30,), (12,))
        self.q = q_of(self.batch)
        self.groups = groups(self.batch)
        made.context = real.Context({})
        self.expected = real.Model(made, stock, *FULL).prefill(self.groups, self.q)
        made.workspace.__init__()
        if watched:
            ((adapter,),) = [binding.adapters for binding in workspace.BINDINGS]
            made.workspace.get = adapter(real.Workspace.stock)
        made.context = real.Context({})
        self.model = real.Model(made, layer.make(made, stock, shared=True), *FULL)

    def compressed(self, layers: range = range(40)) -> int:
        self.made.calls.clear()
        found = self.model.prefill(self.groups, self.q, layers)
        for index, one in zip(layers, found, strict=True):
            assert torch.equal(one, self.expected[index]), f"layer {index}"
        return count(self.made.calls, "gather", "compressed")


def test_rows_of_a_kv_source_are_gathered_once(made, stock):
    """38 in stock; 4 sources."""
    case = Gathers(made, stock)
    # one request to know the buffer
    assert case.compressed() == 4


def test_without_a_view_of_all_requests_every_layer_gathers(made, stock):
    assert Gathers(made, stock, watched=False).compressed() == 38


def test_rows_are_gathered_again_where_others_reach(made, stock, release):
    """Whole buffers for the experts: nothing may be kept, and nothing wrong is read."""
    case = Gathers(made, stock)
    case.model.scratch = max(4 * (2 * real.MAX_LEN + real.WINDOW + real.MAX_TOKENS) * real.DIM * 2, 1)
    assert case.compressed() == 38


def test_an_indexer_that_asks_for_all_ends_them(made, stock):
    """vLLM's asks for 132 bytes x 40 per position, attention for 1,024 x 4: 20, 24, 28, 32 and 36 gather, and 2, 8 and 14."""
    case = Gathers(made, stock)
    case.model.indexer = 4 * (2 * real.MAX_LEN + real.WINDOW + real.MAX_TOKENS) * real.DIM * 2
    assert case.compressed() == 8


@pytest.mark.parametrize("capturing", [True, False])
def test_what_a_graph_was_captured_with_counts_for_ever(made, stock, monkeypatch, capturing):
    """On replay the experts write without asking: to what they asked for once."""
    case = Gathers(made, stock)
    size = 4 * (real.MAX_LEN + real.WINDOW + real.MAX_TOKENS) * real.DIM * 2
    with monkeypatch.context() as patched:
        patched.setattr(retained, "_capturing", lambda _view: capturing)
        made.workspace.get_simultaneous(((size,), torch.uint8))
    assert case.compressed() == (38 if capturing else 4)


def test_a_request_that_reaches_the_rows_is_seen(made, stock):
    case = Gathers(made, stock)
    assert case.compressed(range(23)) == 4
    case.model.scratch = len(made.workspace.buffer)
    # its own experts overwrite layer 23's rows
    assert case.compressed(range(23, 24)) == 0
    assert case.compressed(range(24, 40)) == 16


def test_a_workspace_that_has_grown_holds_nothing(made, stock):
    case = Gathers(made, stock)
    case.compressed(range(23))
    made.workspace.buffer = torch.full((len(made.workspace.buffer) + 4096,), 0x40, dtype=torch.uint8)
    assert case.compressed(range(23, 25)) == 1


@pytest.mark.parametrize("change", ["context", "block table", "cache", "a drafter between"])
def test_rows_of_something_else_are_gathered(made, stock, change):
    case = Gathers(made, stock)
    case.compressed(range(22))
    if change == "context":
        made.context = real.Context({})
    elif change == "block table":
        case.model.compressed_metadata.clear()
    elif change == "cache":
        case.model.layers[22].cache = case.model.layers[22].cache.clone()
    else:
        before, made.context = made.context, real.Context({})
        case.model.prefill(case.groups, case.q, range(1))
        made.context = before
    assert case.compressed(range(22, 23)) == 1


def test_the_profile_runs_own_reservation_is_not_somebody_elses(made, stock):
    case = Gathers(made, stock)
    before, made.context = made.context, real.Context(None)
    one = case.model.layers[20]
    one.forward_mqa(case.q, None, torch.arange(len(case.q)), torch.zeros_like(case.q))
    made.context = before
    assert case.compressed() == 4


# by release: calls of stock in one prefill chunk of V4.1, and what is left of them
WORK = {
    "combine": (40, 9),
    "seq_lens // ratio": (38, 2),
    "chunk plans": (40, 3),
    "gather the window": (40, 40),
    "attend": (40, 40),
}


class Divisions(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts integer divisions of tensors: each is a launch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.name().startswith("aten::floor_divide")
        return function(*args, **(kwargs or {}))


def work(made: Any, layer_class: type) -> dict[str, int]:
    """The calls of one prefill chunk in V4.1's 40 layers."""
    batch = real.Batch(made, (30,), (12,))
    made.context, made.calls[:] = real.Context({}), []
    plans = []
    planner = made.Metadata.get_prefill_chunk_plan
    made.Metadata.get_prefill_chunk_plan = lambda self, **more: plans.append(1) or planner(self, **more)
    with Divisions() as divisions:
        real.Model(made, layer_class, *FULL).prefill(groups(batch), q_of(batch))
    made.Metadata.get_prefill_chunk_plan = planner
    return {
        "combine": count(made.calls, "combine"),
        "seq_lens // ratio": divisions.count,
        "chunk plans": len(plans),
        "gather the window": count(made.calls, "gather", "swa"),
        "attend": count(made.calls, "attend"),
    }


def test_work_of_a_prefill_chunk(made, stock, release):
    made.rocm_sparse_attn_prefill = real.replaced(made.rocm_sparse_attn_prefill)
    without, having = work(made, stock), work(made, layer.make(made, stock, shared=True))
    expected = dict(WORK)
    if release not in PLANNED:
        expected["chunk plans"] = (0, 0)
    assert {name: (without[name], having[name]) for name in expected} == expected


def test_stocks_kernel_gets_its_ragged_lists_once_per_selection(made, stock):
    ours = layer.make(made, stock, shared=True)
    batch = real.Batch(made, (30,), (12,))
    for layer_class, ragged in ((stock, 40), (ours, 9)):
        made.context, made.calls[:] = real.Context({}), []
        real.Model(made, layer_class, *FULL).prefill(groups(batch), q_of(batch))
        # stock's prefill builds them in the kernel's wrapper, here in the stand-in for it
        assert count(made.calls, "ragged") == ragged


def test_metadata_chains_of_layers_21_to_39(made, stock):
    """19 before; what is left are the four layers in there that select anew."""
    made.rocm_sparse_attn_prefill = real.replaced(made.rocm_sparse_attn_prefill)
    batch = real.Batch(made, (30,), (12,))
    made.context = real.Context({})
    model = real.Model(made, layer.make(made, stock, shared=True), *FULL)
    chosen, q = groups(batch), q_of(batch)
    model.prefill(chosen, q, range(21))
    built = []
    for index in range(21, 40):
        made.calls.clear()
        model.prefill(chosen, q, range(index, index + 1))
        if count(made.calls, "combine"):
            built.append(index)
    assert built == [24, 28, 32, 36]


# --- the key --------------------------------------------------------------------------------------------------------

CHANGES: dict[str, Any] = {
    "another forward context": lambda case: case.renew(),
    "a copy of the context": lambda case: case.copy(),
    "another index source": lambda case: vars(case.layer).update(index_source_layer_id=2),
    "another ratio": lambda case: vars(case.layer).update(compress_ratio=2),
    "another selection buffer": lambda case: vars(case.layer).update(topk_indices_buffer=case.model.topk.clone()),
    "a wider window": lambda case: vars(case.layer).update(window_size=real.WINDOW + 1),
    "other chunks": lambda case: vars(case.layer).update(PREFILL_CHUNK_SIZE=3),
    "a longer context": lambda case: vars(case.layer).update(max_model_len=real.MAX_LEN - 1),
    "more tokens": lambda case: vars(case.layer).update(max_num_batched_tokens=real.MAX_TOKENS - 1),
    "other lengths": lambda case: case.change(prefill_seq_lens=case.batch.seq_lens[1:].clone()),
    "another query slice": lambda case: case.change(query_start_loc=case.batch.starts.clone()),
    "another query slice on the CPU": lambda case: case.change(query_start_loc_cpu=case.batch.starts_cpu.clone()),
    "a decode less": lambda case: case.drop_decode(),
    "its own selection": lambda case: vars(case.layer).update(is_index_source=True),
    "the layer again": lambda case: vars(case.layer).update(prefix="model.layers.3.attn"),
    "stock's prefill kernel": lambda case: case.unbind(),
}  # fmt: skip


class Case:
    """Layer 3 of the small model has selected and built; layer 4 comes next, with something changed."""

    def __init__(self, made: Any, stock: type) -> None:
        made.rocm_sparse_attn_prefill = real.replaced(made.rocm_sparse_attn_prefill)
        self.made = made
        self.batch = real.Batch(made, *BATCH)
        made.context = real.Context({})
        self.model = real.Model(made, layer.make(made, stock, shared=True), *SMALL)
        self.layer = self.model.layers[4]
        self.more: dict[str, Any] = {}
        self.q = q_of(self.batch)
        self.model.prefill(lambda _index: self.batch.metadata(), self.q, range(3, 4))

    def renew(self) -> None:
        self.made.context = real.Context({})

    def copy(self) -> None:
        before, self.made.context = self.made.context, real.Context({})
        vars(self.made.context).update(vars(before))

    def change(self, **more: Any) -> None:
        self.more = more

    def drop_decode(self) -> None:
        self.change(num_decode_tokens=0)

    def unbind(self) -> None:
        del self.made.rocm_sparse_attn_prefill.__deepinfer__

    def combined(self) -> int:
        self.made.calls.clear()
        self.model.prefill(lambda _index: self.batch.metadata(**self.more), self.q, range(4, 5))
        return count(self.made.calls, "combine")


def test_a_consumer_of_the_same_selection_builds_nothing(made, stock):
    assert Case(made, stock).combined() == 0


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_a_table_is_made_of_makes_a_new_one(made, stock, change):
    case = Case(made, stock)
    change(case)
    assert case.combined() >= 1


@pytest.mark.parametrize("release", ROTATING, indirect=True)
def test_a_replay_with_other_window_starts_makes_new_tables(made, stock):
    """Decoder replay (0.32 and later): its first layer holds the windows of all rows, the others those of the last alone."""
    case = Case(made, stock)
    case.change(replay_start=torch.full_like(case.batch.replay_start, 2))
    assert case.combined() >= 1


@pytest.mark.parametrize("release", ROTATING, indirect=True)
def test_without_a_replay_start_the_gather_lengths_are_in_the_key(made, stock):
    case = Case(made, stock)
    case.change(replay_start=None)
    assert case.combined() >= 1


def test_builders_say_that_nothing_is_replayed_by_one_tensor(made, stock):
    """Each of stock's has its own zeros: layers of two window groups would share nothing."""
    backend = layer.make(made, stock, shared=True).swa_backend_cls
    builder = backend.get_builder_cls()
    assert issubclass(backend, real.Backend) and issubclass(builder, real.Builder)
    assert builder().no_replay_start is builder().no_replay_start
    assert len(builder(requests=9).no_replay_start) == 9
    assert not hasattr(builder(replays=False), "no_replay_start")
    assert layer.make(made, stock, shared=False).swa_backend_cls is real.Backend


def test_nothing_is_kept_between_steps(made, stock):
    import gc
    import weakref

    case = Case(made, stock)
    step = weakref.ref(shared.of(case.made.context))
    case.renew()
    gc.collect()
    assert step() is None


def test_one_table_of_each_kind_is_held_at_a_time(made, stock):
    case = Case(made, stock)
    case.model.prefill(lambda _index: case.batch.metadata(), case.q)
    assert sorted(shared.of(made.context).tables) == [False, True]


def test_the_profile_run_holds_what_a_step_holds(made, stock):
    case = Case(made, stock)
    held = sum(len(one.rows) * (one.rows.shape[1] + 1) for one in shared.of(made.context).tables[False][1])
    made.context = real.Context(None)
    tokens = len(case.q)
    case.layer.forward(torch.arange(tokens), case.q)
    reserved = shared.of(made.context).reserved
    assert reserved.dtype == torch.int32 and reserved.numel() >= held
    # bounded by the batch, not by the context
    assert reserved.numel() <= tokens * (real.TOPK + 2 * real.WINDOW + 2 * 128)


# --- decode: each row is rotated once -------------------------------------------------------------------------------


def run_layer(made: Any, layer_class: type, bound: bool) -> tuple[Any, Any]:
    """A mixed batch through the release's own `forward_mqa` and `_o_proj`; +1 stands for a rotation."""
    batch = real.Batch(made, *BATCH)
    tokens = int(batch.starts[-1])

    def decode(q: Any, output: Any, inv_rope_positions: Any = None, **_more: Any) -> int | None:
        output.zero_()
        if bound and inv_rope_positions is not None:
            output += 1
        # as stock, and as ours
        return None if "inv_rope" not in parameters else len(output)

    parameters = " ".join(inspect.signature(vars(made)[real.CLASS]._forward_decode).parameters)
    parameters = "inv_rope" if "positions" in parameters else ""
    made.rocm_sparse_attn_decode = real.replaced(decode) if bound else decode
    made.rocm_sparse_attn_prefill = real.replaced(lambda q, output, **_more: output.zero_())
    model = real.Model(made, layer_class, *SMALL)
    one = model.layers[0]
    one._has_kv_transfer, one.kv_cache_dtype = False, "fp8_ds_mla"
    one.n_local_groups = one.o_lora_rank = one._wo_b_scale = None
    made.context = real.Context({one.swa_cache_layer.prefix: batch.metadata()})
    q = torch.zeros((tokens, real.HEADS, real.DIM))
    output = torch.full_like(q, 50.0)
    one.forward_mqa(q, None, torch.arange(tokens), output)
    how, projected = one._o_proj(output, torch.arange(tokens))
    return how, projected.view(tokens, -1)


@pytest.mark.parametrize("sharing", [False, True], ids=["alone", "with yoco"])
@pytest.mark.parametrize("bound", [False, True], ids=["stock's decode", "our decode"])
def test_every_row_is_rotated_exactly_once(made, stock, bound, sharing):
    _how, rows = run_layer(made, layer.make(made, stock, shared=sharing), bound)
    assert torch.equal(rows, torch.ones_like(rows))


@pytest.mark.parametrize("release", ROTATING, indirect=True)
def test_stocks_own_class_would_leave_decode_rows_unrotated(made, stock):
    """The trap that the class is for; if this fails, stock has changed."""
    _how, rows = run_layer(made, stock, bound=False)
    assert (rows[0] == 0).all() and (rows[1:] == 1).all()


def test_wo_b_goes_through_the_base_class_where_it_can_reduce(made, stock, release):
    how, _rows = run_layer(made, layer.make(made, stock, shared=False), bound=True)
    assert how == ("wo_b_proj" if release in ROTATING else "wo_b")


# --- the class and its choice ---------------------------------------------------------------------------------------


def test_wo_a_is_left_for_the_batched_product(made, stock):
    """Read when weights are processed, after every layer has been built."""
    found = layer.make(made, stock, shared=True)(_use_aiter_sparse_mla=True)
    assert found.wo_a.is_bmm is True and found._use_aiter_sparse_mla is False


def test_layout(made, stock, release):
    assert layout.read(made, stock) == layout.Layout(
        rotates_all=release == "0.30.0", planned=release in PLANNED, hint=release in PLANNED
    )


def renamed(method: str) -> Any:
    def change(made: Any, stock: type) -> None:
        exec(f"def {method}(self, q, something_new): pass", space := {})
        setattr(stock, method, space[method])

    return change


def silent(made: Any, stock: type) -> None:
    """A prefill with known parameters that combines nothing."""
    parameters = ", ".join(
        str(one.replace(annotation=inspect.Parameter.empty))
        for one in inspect.signature(stock._forward_prefill).parameters.values()
    )
    exec(f"def _forward_prefill({parameters}): dequantize_and_gather_k_cache()", space := {})
    stock._forward_prefill = space["_forward_prefill"]


BREAKS: dict[str, Any] = {
    **{f"{name} has other parameters": renamed(name) for name in ("_forward_prefill", "_forward_decode", "_o_proj", "forward_mqa")},
    "no method": lambda made, stock: delattr(stock, "_forward_decode"),
    "a prefill that calls something else": silent,
    "a function is gone": lambda made, stock: delattr(made, "combine_topk_swa_indices"),
}  # fmt: skip


@pytest.mark.parametrize("change", BREAKS.values(), ids=BREAKS)
def test_an_unknown_class_is_refused(made, stock, change):
    change(made, stock)
    with pytest.raises(BindError):
        layer.make(made, stock, shared=False)


@pytest.mark.parametrize("release", ["0.30.0"], indirect=True)
def test_a_class_that_mixes_releases_is_refused(made, stock, release_tree):
    newer = real.module(release_tree("0.33.0"), "0.33.0")
    stock._forward_decode = vars(newer)[real.CLASS]._forward_decode
    with pytest.raises(BindError, match="mixes"):
        layer.make(made, stock, shared=False)


def configured(backend: Any = None, context_parallel: int = 1) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(prefill_context_parallel_size=context_parallel),
        attention_config=SimpleNamespace(backend=backend),
    )


@pytest.mark.parametrize("backend", [None, *sorted(choice.SERVED_BACKENDS)])
def test_served_choices(backend):
    choice.refuse(configured(backend and SimpleNamespace(name=backend)))


@pytest.mark.parametrize(
    "backend", ["FLASHMLA_SPARSE_DSV41", "FLASHMLA_MEGA_ATTN_DSV41", "FLASHINFER_MLA_SPARSE_DSV41"]
)
def test_choices_without_kernels_are_refused(backend):
    with pytest.raises(ValueError, match=backend):
        choice.refuse(configured(SimpleNamespace(name=backend)))


def test_prefill_context_parallelism_is_refused():
    with pytest.raises(ValueError, match="FlashMLA"):
        choice.refuse(configured(context_parallel=2))


def test_every_backend_that_stock_tells_apart_is_served_or_refused(release_tree, release):
    """The names in stock's own choice: none of them may go on to a class without kernels."""
    node = definition(release_tree(release) / "models/deepseek_v41/nvidia/model.py", "_select_dsv4_attn_cls")
    names = {
        one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)
        and isinstance(one.value, ast.Name) and one.value.id == "AttentionBackendEnum"
    }  # fmt: skip
    assert names
    for name in names - choice.SERVED_BACKENDS:
        with pytest.raises(ValueError, match=name):
            choice.refuse(configured(SimpleNamespace(name=name)))


def test_the_portable_module_is_not_imported_where_cuda_has_not_started(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with pytest.raises(BindError, match="CUDA"):
        choice.import_rocm("vllm.models.deepseek_v41.amd.rocm")


def test_one_signature_in_all_releases(release_tree, release):
    node = definition(release_tree(release) / "models/deepseek_v41/nvidia/model.py", "_select_dsv4_attn_cls")
    (binding,) = nvidia_model.BINDINGS
    (adapter,) = binding.adapters
    assert [one.arg for one in node.args.args] == list(inspect.signature(adapter(print)).parameters)
