"""The cache groups of pipeline stages: the four releases' own functions on small groups, with and without the binding."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.fakes import RELEASES

from .conftest import defines, definition, parsed, real_stub
from .test_without_kernels import called, held, path_of, real

UTILS = "vllm.v1.core.kv_cache_utils"
PLANNING = "vllm.v1.core.kv_cache_planning"
STATE = "vllm.models.deepseek_v41.nvidia.model_state"
PROJECT = "_project_kv_cache_groups_to_worker"
PREPARE = "DeepseekV41ModelState.prepare_attn"
pytestmark = pytest.mark.release


@dataclass(frozen=True)
class Spec:
    page_size_bytes: int
    block_size: int = 32
    has_layer_views: bool = True
    storage_block_size: None = None
    block_stride_alignment: None = None
    prefix_cacheable: bool = True
    prefix_replay_tokens: int = 0

    def get_block_stride_alignment(self) -> int:
        return 1


@dataclass(frozen=True)
class Uniform:
    block_size: int
    kv_cache_specs: dict[str, Spec]


@dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: Any
    is_eagle_group: bool = False
    host_resident: bool = False
    enable_kv_transfer: bool = True
    role: str = "default"


class Config(SimpleNamespace):
    def num_blocks_of(self, tensor: Any) -> int:
        return self.num_blocks


def group_of(names: str, spec: Spec, **more: Any) -> Group:
    return Group(names.split(), Uniform(spec.block_size, dict.fromkeys(names.split(), spec)), **more)


WINDOW, SOURCE, RING = Spec(100), Spec(70, 256), Spec(90, 8)
# in V4.1's order: the sliding windows, the compressed caches, the compressors' states
GROUPS = [
    group_of("0.swa 1.swa 2.swa 3.swa", WINDOW),
    group_of("1.attn 2.attn", SOURCE, is_eagle_group=True, role="r"),
    group_of("1.ring", RING),
]
STAGES = (
    {"0.swa": WINDOW, "1.swa": WINDOW, "1.attn": SOURCE, "1.ring": RING},
    {
        "2.swa": WINDOW,
        "3.swa": WINDOW,
        "2.attn": SOURCE,
    },
)
LAYOUT = SimpleNamespace(is_block_outermost=True, is_block_compact=True)
VLLM_CONFIG = SimpleNamespace(
    attention_config=SimpleNamespace(hisparse_config=None),
    cache_config=SimpleNamespace(
        prefix_cache_retention_interval=None,
        num_gpu_blocks_override=None,
        get_resolved_kv_cache_layout=lambda: LAYOUT,
    ),
)


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tree(release, release_tree) -> Path:
    return release_tree(release)


@pytest.fixture
def name(release) -> str:
    """The module that has the planner."""
    return PLANNING if release == "0.33.0" else UTILS


@pytest.fixture
def planner(tree, name, vllm) -> ModuleType:
    """The release's planner, as far as a stage's groups and tensors go."""
    module = vllm.module(name, "")
    vars(module).update(
        UniformTypeKVCacheSpecs=Uniform, KVCacheGroupSpec=Group, KVCacheConfig=Config, KVCacheTensor=SimpleNamespace,
        HiSparseHotSpec=type("HiSparseHotSpec", (), {}), defaultdict=defaultdict, math=SimpleNamespace(lcm=lcm),
        round_up=lambda size, to: -(-size // to) * to, validate_kv_cache_layout=lambda layout, groups: None,
        _glm5_next_tensor_layout=lambda groups: None,
        compute_layout_strides=lambda spec, blocks, layers, layout, fixed_strides: (spec.page_size_bytes, 1, 0, 0, 0),
    )  # fmt: skip
    for function in (PROJECT, "get_kv_cache_config_from_groups", "_get_kv_cache_bytes_per_block",
                     "_get_per_layer_spec", "_get_layer_block_stride", "may_override_num_blocks"):  # fmt: skip
        if defines(tree / path_of(name), function):
            real(tree / path_of(name), function, vars(module))
    return module


@pytest.fixture
def allocate(tree) -> Callable[[Config], dict[str, Any]]:
    """The release's `allocate_kv_cache`: layer → the specification that its view is made for."""
    scope = {
        "torch": SimpleNamespace(zeros=lambda *args, **kwargs: "buffer", int8="int8"),
        "current_platform": SimpleNamespace(is_rocm=lambda: False),
        "UniformTypeKVCacheSpecs": Uniform,
        "MLAAttentionSpec": Spec,
        "create_kv_cache_views": lambda buffer, spec, blocks, layout, tensor, **more: (
            [spec] * len(tensor.layers)
        ),
    }
    function = real(tree / "v1/worker/utils.py", "allocate_kv_cache", scope)
    return lambda config: function(config, "cuda", LAYOUT)


def planned(planner: ModuleType) -> list[Config]:
    return [
        planner.get_kv_cache_config_from_groups(VLLM_CONFIG, vars(planner)[PROJECT](GROUPS, stage), 10_000)
        for stage in STAGES
    ]


def test_a_stage_without_a_groups_layers_starts(payload, planner, name, allocate):
    before = planned(planner)
    with pytest.raises(StopIteration):
        allocate(before[1])
    payload.bind(name)
    after = planned(planner)
    assert [allocate(config) for config in after] == [dict(stage) for stage in STAGES]
    # a block is as large as it was, and the stage that has every group gets what it had
    assert [config.num_blocks for config in after] == [config.num_blocks for config in before]
    assert after[0] == before[0]
    lost = [tensor for tensor in before[1].kv_cache_tensors if tensor.layers == ["1.ring"]]
    assert (
        after[1].kv_cache_tensors == [one for one in before[1].kv_cache_tensors if one not in lost] and lost
    )


def test_the_scheduler_sees_what_it_saw(payload, planner, tree, name):
    """Whichever stage is the first: its specifications are what the scheduler gets."""
    scope = {"copy": __import__("copy"), "UniformTypeKVCacheSpecs": Uniform}
    generate = real(tree / path_of(UTILS), "generate_scheduler_kv_cache_config", scope)

    def seen() -> list[list[Spec]]:
        configs = planned(planner)
        for config in configs:
            config.hisparse_host_num_blocks, config.num_blocks = None, 1
        return [
            [group.kv_cache_spec for group in generate(order).kv_cache_groups]
            for order in (configs, configs[::-1])
        ]

    before = seen()
    payload.bind(name)
    assert seen() == before == [[WINDOW, SOURCE, RING]] * 2


def test_groups_with_layers_are_stocks(payload, planner, name):
    plain = Group(["0.mla"], SOURCE)
    stock = vars(planner)[PROJECT]
    cases = [
        ([*GROUPS, plain], {**STAGES[0], **STAGES[1], "0.mla": SOURCE}),
        (GROUPS[:2], STAGES[1]),
        ([], {}),
    ]
    # a group of one specification has no tensors without layers, in stock either
    cases.append(([*GROUPS[:2], plain], STAGES[0]))
    before = [stock(*case) for case in cases]
    payload.bind(name)
    assert [vars(planner)[PROJECT](*case) for case in cases] == before
    # what stock made without a copy stays the same object
    groups = [replace(plain), replace(plain, layer_names=["1.mla"])]
    spec = {"0.mla": SOURCE, "1.mla": SOURCE}
    kept = [new is old for new, old in zip(stock(groups, spec), groups, strict=True)]
    ours = [new is old for new, old in zip(vars(planner)[PROJECT](groups, spec), groups, strict=True)]
    assert ours == kept


def test_what_else_a_group_says_is_kept(payload, planner, name):
    stock = vars(planner)[PROJECT](GROUPS, {"0.swa": WINDOW})
    payload.bind(name)
    ours = vars(planner)[PROJECT](GROUPS, {"0.swa": WINDOW})
    assert [replace(one, kv_cache_spec=None) for one in ours] == [
        replace(one, kv_cache_spec=None) for one in stock
    ]
    assert [type(one.kv_cache_spec) for one in ours] == [Uniform, Spec, Spec]
    assert all(isinstance(one.kv_cache_spec, Uniform) for one in GROUPS)


def test_the_planner_alone_calls_it_by_its_own_name(tree, name):
    holders = {
        file.relative_to(tree).as_posix(): sum(called(node, PROJECT) for node in ast.walk(parsed(file)))
        for file in sorted((tree / "v1").rglob("*.py"))
        if PROJECT in file.read_text(encoding="utf-8")
    }
    assert holders == {path_of(name): 1}


def test_signatures_are_kept_and_a_new_parameter_is_refused(payload, vllm, tree, name, release):
    symbols = [(name, PROJECT), *([(STATE, PREPARE)] if release != "0.30.0" else [])]
    for module_name, symbol in symbols:
        source = real_stub(tree / path_of(module_name), symbol)
        module = vllm.module(module_name, source)
        before = str(inspect.signature(held(module, symbol)))
        payload.bind(module_name)
        assert hasattr(held(module, symbol), "__deepinfer__")
        assert str(inspect.signature(held(module, symbol))) == before
        vllm.module(module_name, source.replace("):\n", ", more=0):\n", 1))
        with pytest.raises(payload.BindError, match=f"{symbol}.*added: more"):
            payload.bind(module_name)


class Base:
    """What the model's state is derived from, with what its constructor sets."""

    def __init__(self) -> None:
        self._replay: Any = None
        self._replay_attn_groups: Any = "of the profile run"
        self.decoder_replay_layers = None
        self.pcp_size = 1
        self.device = "cuda"

    def _warm_up_replay_kernels(self, *args: Any) -> None: ...

    def _build_attn_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    prepare_attn = _build_attn_metadata


@pytest.fixture
def state(tree, release, vllm) -> ModuleType:
    """The release's own `prepare_attn`, in a class of its name."""
    if release == "0.30.0":
        pytest.skip("0.30.0 has no replay")
    node = definition(tree / path_of(STATE), PREPARE)
    lines = ast.unparse(node).splitlines()
    source = "class DeepseekV41ModelState(Base):\n" + "".join(f"    {line}\n" for line in lines)
    module = vllm.module(STATE, "from __future__ import annotations\nBase = None\n")
    fake = SimpleNamespace(tensor=lambda values, **more: list(values), int32="int32")
    vars(module).update(Base=Base, torch=fake)
    exec("from __future__ import annotations\n" + source, vars(module))
    return module


def config_of(*cacheable: bool, replay: int = 0) -> Config:
    kinds = [replace(WINDOW, prefix_cacheable=one, prefix_replay_tokens=replay) for one in cacheable]
    return Config(kv_cache_groups=[Group([], kind) for kind in kinds])


# of its own layers a stage makes other groups than of all: four windows, then the cache that hits are for
OWN, SERVED = config_of(False, False, False, False, True), config_of(False, False, True, False)


def prepare(state: Any, config: Config) -> Any:
    return state.prepare_attn("batch", "mode", "tables", "slots", "attn groups", config)


def test_a_replay_knows_the_groups_that_are_served(payload, state):
    stock = state.DeepseekV41ModelState()
    prepare(stock, OWN)
    prepare(stock, SERVED)
    # the fault: a number that is no row of the slots any more
    assert stock._replay == (0, [4])
    payload.bind(STATE)
    ours = state.DeepseekV41ModelState()
    prepare(ours, OWN)
    assert ours._replay == (0, [4])
    prepare(ours, SERVED)
    assert (ours._replay, ours._replay_attn_groups) == ((0, [2]), None)


def test_equal_groups_are_not_looked_at_again(payload, state):
    """Without a pipeline: what graphs were captured with stays."""
    payload.bind(STATE)
    ours = state.DeepseekV41ModelState()
    for config in (SERVED, SERVED, config_of(False, False, True, False)):
        prepare(ours, config)
        ours.first = getattr(ours, "first", ours._replay)
        assert ours._replay is ours.first
    assert ours._replay_attn_groups == "of the profile run"


def test_the_call_goes_on_as_it_was(payload, state):
    stock = prepare(state.DeepseekV41ModelState(), SERVED)
    payload.bind(STATE)
    assert prepare(state.DeepseekV41ModelState(), SERVED) == stock
    assert stock[0][:5] == ("batch", "mode", "tables", "slots", "attn groups")


def test_the_profile_run_makes_groups_of_its_own_layers(tree):
    """What the second binding is for, in the releases' code: the groups while graphs are profiled, and who forgets them."""
    file = tree / "v1/worker/gpu/cudagraph_utils.py"
    made = ast.unparse(definition(file, "_init_minimal_kv_cache_for_profiling"))
    assert "runner.get_kv_cache_spec()" in made and "get_kv_cache_groups" in made
    assert "_replay" not in ast.unparse(definition(file, "_teardown_profiling_state"))
