"""JSON over HTTP to servers of this machine, and to endpoints that the user names. Standard library only."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from typing import Any

from deepinfer_cli.errors import FailedError


class HttpError(Exception):
    """No answer, or one that is not 200; says which."""


def get(url: str, timeout_s: float) -> bytes:
    """The body of a GET.

    Raises:
        HttpError: there is none.
    """
    return _open(urllib.request.Request(url, headers=_headers()), timeout_s)


def post(url: str, content: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """The JSON object that answers a JSON object.

    Raises:
        HttpError: there is none.
    """
    headers = {"Content-Type": "application/json", **_headers()}
    body = _open(urllib.request.Request(url, json.dumps(content).encode(), headers), timeout_s)
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise HttpError(f"{url} answers no JSON: {error}") from error
    if not isinstance(answer, dict):
        raise HttpError(f"{url} answers no JSON object")
    return answer


def _headers() -> dict[str, str]:
    # as `vllm bench serve` does
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _open(request: urllib.request.Request, timeout_s: float) -> bytes:
    # no proxy leads to a server of this machine
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        text = error.read(2_000).decode(errors="replace")
        raise HttpError(f"{request.full_url} answers {error.code}: {_message(text)}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise HttpError(f"{request.full_url} does not answer: {reason}") from error


def _message(text: str) -> str:
    try:
        found = json.loads(text)
        return str(found.get("message") or found["error"]["message"])[:400]
    except (ValueError, KeyError, TypeError, AttributeError):
        return " ".join(text.split())[:400]


def first_model(base_url: str, timeout_s: float = 30.0) -> str:
    """The name of the first model that an OpenAI server serves.

    Raises:
        FailedError: there is no such server (`endpoint-failed`).
    """
    try:
        models = json.loads(get(f"{base_url}/v1/models", timeout_s))
        return str(models["data"][0]["id"])
    except (HttpError, ValueError, KeyError, IndexError, TypeError) as error:
        raise FailedError(
            f"{base_url} is no server that serves a model: {error}",
            code="endpoint-failed",
            hint="name it as http://HOST:PORT, and see that it has started",
        ) from error
