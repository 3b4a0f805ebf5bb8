"""A serve line is found in what a user pastes, and what holds none is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deepinfer_cli.errors import UsageError
from deepinfer_cli.serve import line, settings
from deepinfer_cli.serve.line import Line, parse, parse_options

TP8 = {"tensor-parallel-size": "8"}
JSON = '{"method": "dspark",\n "num_speculative_tokens": 5}'


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve m -tp 8",
        "-tp 8",
        "--tensor_parallel_size=8",
        "serve m -tp=8",
        "/opt/venv/bin/vllm serve m -tp 8",
        "nohup uv run vllm serve -tp 8 m > log 2>&1 &",
        "python -m vllm.entrypoints.cli.main serve m -tp 8 | tee log",
        "python3 -m vllm.entrypoints.openai.api_server --tensor-parallel-size 8",
        "docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.33.0 m -tp 8",
        "vllm serve m \\\n  -tp \\\r\n 8",
        "#!/bin/bash\n# it isn't much\ncd /srv && (vllm serve m -tp 8)\necho done",
        "vllm bench serve --model m; vllm serve m -tp 8",
    ],
)
def test_a_serve_line_is_found(text: str) -> None:
    found = parse(text)
    assert found.options | TP8 == found.options and found.unread == ()
    assert set(found.options) <= {*TP8, "model"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no serve line"),
        (" \n", "no serve line"),
        ("hello world", "no serve line"),
        ("python -m foo -tp 3", "no serve line"),
        ("vllm bench serve --model m", "no serve line"),
        ("docker pull vllm/vllm-openai", "no serve line"),
        ("vllm serve 'm", "no closing quotation"),
        ("vllm serve a -tp 1\nvllm serve b -tp 2", "several serve lines"),
    ],
)
def test_what_holds_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        parse(text)
    assert error.value.exit_code == 2 and error.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "A=1 B='x y' vllm serve m -tp 8",
        "export A=1 B='x y'; cd /srv; vllm serve m -tp 8",
        "env A=1 B='x y' nohup vllm serve m -tp 8",
        "docker run -e A=1 --env='B=x y' vllm/vllm-openai m -tp 8",
        "[Service]\nEnvironment=A=1 'B=x y'\nRestart=always\nExecStart=/opt/bin/vllm serve m -tp 8\nUser=me",
    ],
)
def test_the_variables_that_it_sets(text: str) -> None:
    found = parse(text)
    assert found.options == TP8 and found.unread == ()
    assert {name: found.environ[name] for name in ("A", "B")} == {"A": "1", "B": "x y"}


def test_a_variable_that_is_not_exported_does_not_reach_the_server() -> None:
    assert parse("A=1; vllm serve m -tp 8").environ == {}


def test_what_the_shell_fills_in_is_named_and_not_guessed() -> None:
    found = parse('P=$X vllm serve "$MODEL" -tp $(nvidia-smi -L | wc -l) --block-size "$B" --max-num-seqs 8')
    assert found == Line({"max-num-seqs": "8"}, {}, ("--tensor-parallel-size", "--block-size", "P"))


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("--enforce-eager m -tp 8", {"enforce-eager": "m"} | TP8),
        ("-tp 8 m", TP8),
        ("-ep -tp 8", {"enable-expert-parallel": "true"} | TP8),
        ("-tp 8 -q mxfp8", TP8 | {"quantization": "mxfp8"}),
        ("--max-model-len -1 -tp 8", {"max-model-len": "-1"} | TP8),
        ("--engram-config.cpu_offload=false", {"engram-config.cpu_offload": "false"}),
        (f"-sc '{JSON}' -tp 8", {"speculative-config": JSON} | TP8),
    ],
)
def test_options(text: str, options: dict[str, str]) -> None:
    assert parse(text).options == options


def test_options_of_a_process_have_no_quotes_left() -> None:
    words = ["vllm", "serve", "m", "--speculative-config", '{"method":', '"dspark"}', "m", "-tp", "8"]
    assert parse_options(words) == {"speculative-config": '{"method": "dspark"}'} | TP8


def test_where_a_servers_words_begin() -> None:
    assert line.start_of(["python3", "/opt/bin/vllm", "serve", "m"]) == 3
    assert line.start_of(["VLLM::EngineCore"]) is None


@pytest.mark.parametrize("name", ["doctor.md", "04_DEPLOYMENT.md"])
def test_the_lines_in_the_documents_are_read_and_go_well(name: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / name).read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL) if "vllm serve" in block]
    assert blocks
    for block in blocks:
        found = parse(block)
        assert found.options and settings.check(settings.Settings(found.environ, found.options)) == []
