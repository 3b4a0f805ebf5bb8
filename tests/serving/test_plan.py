"""What is run in which order, and the command lines; the options against the real releases."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

from deepinfer_cli.errors import UsageError
from deepinfer_cli.validate.serving import arguments, plan, score, text
from tests.conftest import RELEASES

SIDES = (plan.Side(plan.OVERLAY), plan.Side(plan.ENABLE_ONLY, ("combine",)))


def request(**given):
    return plan.Request(Path("/python"), Path("/site"), SIDES, **({"model": "m"} | given))


def test_the_default_workloads():
    found = request().workloads()
    assert [(work.kind, work.input_tokens, work.streams) for work in found] == [
        ("prefill", 16_384, 1), ("prefill", 65_536, 1), ("decode", None, 1), ("decode", None, 4),
    ]  # fmt: skip
    assert found[2].prompts == "code" and request(small=True).workloads()[2].prompts == "random"


def test_turns():
    names = [[side.name for side in turn.sides] for turn in plan.turns(request(repeats=3, rounds=3))]
    assert names == [["overlay"], ["enable-only"], ["overlay"], ["enable-only"]]
    repeats = [turn.repeats for turn in plan.turns(request(repeats=3, rounds=3))]
    assert repeats == [(0,), (0, 1), (1, 2), (2,)]
    (both,) = plan.turns(request(together=True))
    assert both.sides == SIDES and both.repeats == (0, 1, 2)


def test_no_prompt_comes_twice_to_one_server():
    for given in ({}, {"together": True}, {"rounds": 3}):
        asked = request(**given)
        seeds: dict[str, list[int]] = {}
        for number, turn in enumerate(plan.turns(asked)):
            for bench in plan.benches(asked, turn, number):
                seeds.setdefault(bench.side.name, []).append(bench.seed)
        for name, mine in seeds.items():
            assert len(mine) == len(set(mine)), name
        measured = [
            {(b.workload, b.repeat, b.seed) for b in plan.benches(asked, t, n) if b.repeat is not None and b.side is side}
            for side in SIDES for n, t in enumerate(plan.turns(asked))
        ]  # fmt: skip
        half = len(measured) // 2
        assert set().union(*measured[:half]) == set().union(*measured[half:])


def test_the_server_s_variables(monkeypatch):
    given = {
        "DEEPINFER_DISABLE": "1", "TRITON_INTERPRET": "1", "VLLM_API_KEY": "x", "VLLM_LOGGING_LEVEL": "ERROR",
        "NCCL_DEBUG": "INFO", "VLLM_PP_LAYER_PARTITION": "14,14,12", "PYTHONPATH": "/own",
    }  # fmt: skip
    asked = request(arch="sm80", generate=True)
    fast, slow = (arguments.environment(asked, side, given) for side in SIDES)
    assert fast["NCCL_DEBUG"] == "INFO" and fast["VLLM_PP_LAYER_PARTITION"] == "14,14,12"
    assert fast["PYTHONPATH"] == "/site:/own" and fast["VLLM_LOGGING_LEVEL"] == "INFO"
    assert not {"DEEPINFER_DISABLE", "TRITON_INTERPRET", "VLLM_API_KEY", "DEEPINFER_DISABLE_OPS"} & set(fast)
    assert fast["DEEPINFER_FORCE_ARCH"] == fast["TRITON_OVERRIDE_ARCH"] == "sm80"
    assert slow["DEEPINFER_DISABLE_OPS"] == "combine"
    client = arguments.environment(asked, None, {"no_proxy": "a.b"})
    assert client["no_proxy"] == "a.b,127.0.0.1,localhost" and "DEEPINFER_FORCE_ARCH" not in client
    assert "DEEPINFER_FORCE_ARCH" not in arguments.environment(request(arch="sm80"), SIDES[0], given)


def test_the_server_s_command(tmp_path):
    command = arguments.serve_command(request(extra=("-tp", "8")), SIDES[0], 8_123, tmp_path)
    assert command == [
        "/python", "-m", "vllm.entrypoints.cli.main", "serve", "m", "--host", "127.0.0.1", "--port", "8123",
        "--served-model-name", "deepinfer-overlay", "-tp", "8",
    ]  # fmt: skip
    named = request(
        extra=("--served-model-name=mine", "--tokenizer", "t", "--trust-remote-code"), together=True
    )
    command = arguments.serve_command(named, SIDES[0], 1, tmp_path)
    assert "deepinfer-overlay" not in command and arguments.SHARED_UTILIZATION in command
    bench = plan.benches(named, plan.turns(named)[0], 0)[0]
    words = arguments.bench_arguments(bench, named, "http://h:1", tmp_path / "client", None)
    assert words[words.index("--served-model-name") + 1] == "mine"
    assert words[words.index("--tokenizer") + 1] == "t" and "--trust-remote-code" in words
    for given in ("--gpu-memory-utilization", "--gpu_memory_utilization"):
        own = request(extra=(given, "0.4"), together=True)
        assert arguments.SHARED_UTILIZATION not in arguments.serve_command(own, SIDES[0], 1, tmp_path)
    # argparse takes the last of several
    twice = request(extra=("--served_model_name", "a", "--served-model-name", "b"))
    assert twice.served_name(SIDES[0]) == "b"
    assert "deepinfer-overlay" not in arguments.serve_command(twice, SIDES[0], 1, tmp_path)


def test_a_newer_card_goes_through_the_launcher(tmp_path):
    command = arguments.serve_command(request(arch="sm86", generate=True), SIDES[0], 1, tmp_path)
    assert command[1] == str(arguments.LAUNCH) and command[3] == "serve"
    assert json.loads(Path(command[2]).read_text())["capability"] == [8, 6]


def test_random_prompts_of_the_small_model_are_ordinary_words(tmp_path):
    arguments.serve_command(request(small=True, model=None), SIDES[0], 1, tmp_path)
    for folder, count in (("model", 129_280), ("tokenizer", 120_000)):
        words = json.loads((tmp_path / folder / "tokenizer.json").read_text())["model"]["vocab"]
        assert sorted(words.values()) == list(range(count))


@pytest.mark.parametrize("extra", [("--port=1",), ("--api-key", "x"), ("--api_key=x",), ("--headless",)])
def test_arguments_that_are_ours(extra):
    with pytest.raises(UsageError, match="not yours to give"):
        plan.check(request(extra=extra))


def options_of(path, skipped=()):
    """The options that `add_argument` calls in a file name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            found |= {
                arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            }
    return found


@pytest.mark.release
@pytest.mark.parametrize("version", RELEASES)
def test_the_releases_have_every_option(pristine_release, version, tmp_path):
    root = pristine_release(version) / "vllm"
    bench = options_of(root / "benchmarks" / "serve.py")
    for path in (root / "benchmarks" / "datasets").glob("*.py"):
        bench |= options_of(path)
    for given in ({"small": True}, {}, {"prompts": Path("/p.jsonl")}):
        asked = request(**given)
        for one in plan.benches(asked, plan.turns(asked)[0], 0):
            words = arguments.bench_arguments(one, asked, "http://h:1", tmp_path / "client", Path("/p"))
            missing = {word for word in words if word.startswith("--")} - bench
            assert not missing
    serve = options_of(root / "engine" / "arg_utils.py")
    for name in ("", "entrypoints/common/cli_args.py", "entrypoints/openai/cli_args.py"):
        path = root / name
        serve |= options_of(path) if path.is_file() else set()
    command = arguments.serve_command(request(small=True), SIDES[0], 1, tmp_path)
    wanted = {word.replace("--no-", "--") for word in command if word.startswith("--")}
    # those that vLLM makes of a configuration's fields
    assert wanted - serve <= {"--host", "--port"}


def test_code_to_go_on_with(tmp_path):
    path = tmp_path / "prompts.json"
    text.write_prompts(path, 3)
    first = path.read_text()
    entries = json.loads(first)
    assert len(entries) == 64 and all(len(one["conversations"]) == 2 for one in entries)
    assert all(500 < len(one["conversations"][0]["value"]) <= text.PROMPT_CHARS for one in entries)
    text.write_prompts(path, 3)
    assert path.read_text() == first
    text.write_prompts(path, 4)
    assert path.read_text() != first


def test_the_text_to_score(tmp_path):
    words, said = text.to_score(None)
    assert len(words) == text.SCORED_CHARS and len(said["sha256"]) == 64
    own = tmp_path / "own.txt"
    own.write_text("a text")
    assert text.to_score(own)[0] == "a text" and text.to_score(own)[1]["source"] == "own.txt"
    own.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        text.to_score(own)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("own.json", '{"prompt": "go on"}\n'), ("own.jsonl", ""), ("own.jsonl", '{"text": "go on"}\n'),
        ("own.jsonl", '{"prompt": "go on"}\ngo on\n'), ("own.jsonl", '{"prompt": 3}\n'), ("gone.jsonl", None),
    ],
)  # fmt: skip
def test_prompts_that_vllm_would_not_read(tmp_path, name, content):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=r"no list of prompts|cannot be read"):
        text.check(path, None)


def test_prompts_and_texts_that_can_be_used(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "go on"}\n\n{"prompt": "and on", "output_tokens": 3}\n')
    text.check(path, path)
    path.write_text(" \n")
    with pytest.raises(UsageError, match="is empty"):
        text.check(None, path)


def test_pieces():
    assert score.pieces(range(10), 4, 9) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert score.pieces(range(10), 4, 1) == [[0, 1, 2, 3]]
    assert score.pieces(range(3), 4, 2) == [[0, 1, 2]]
    assert max(score.random_ids(1_000, 1)) < arguments.ORDINARY_IDS


def test_standard_library_alone_is_imported_by_what_runs_elsewhere():
    # the guard runs isolated, the client and the launcher in the target's interpreter
    folder = Path(plan.__file__).parent
    for name in ("guard.py", "client.py", "launch.py"):
        tree = ast.parse((folder / name).read_text())
        for node in tree.body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert {one.partition(".")[0] for one in names} <= {*sys.stdlib_module_names, "__future__"}, name
