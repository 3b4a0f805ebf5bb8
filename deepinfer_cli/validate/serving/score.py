"""Prompt log-probabilities of one text, from vLLM's completions API, and how far two runs of it are apart.

vLLM computes a prompt whose log-probabilities are asked for anew, whatever its prefix cache holds
(`SamplingParams.skip_reading_prefix_cache`), so a second request is a second measurement.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from deepinfer_cli.errors import FailedError
from deepinfer_cli.validate.serving import api
from deepinfer_cli.validate.serving.arguments import ORDINARY_IDS

# what vLLM writes for minus infinity, which JSON has not
_FLOOR = -9_999.0


def tokenize(base_url: str, model: str, text: str, timeout_s: float) -> list[int]:
    """The ids of `text`, by the server's own tokenizer.

    Raises:
        FailedError: it does not say them (`score-failed`).
    """
    try:
        answer = api.post(f"{base_url}/tokenize", {"model": model, "prompt": text}, timeout_s)
        return [int(token) for token in answer["tokens"]]
    except (api.HttpError, KeyError, TypeError, ValueError) as error:
        raise _failed(base_url, error) from error


def random_ids(count: int, seed: int) -> list[int]:
    """Ids for the small model, whose tokenizer makes nothing of text."""
    source = random.Random(seed)
    return [source.randrange(5, ORDINARY_IDS) for _ in range(count)]


def pieces(ids: Sequence[int], length: int, most: int) -> list[list[int]]:
    """At most `most` pieces of `length` ids; what is left over is not scored, unless it is all there is."""
    whole = [list(ids[at : at + length]) for at in range(0, len(ids) - length + 1, length)]
    return whole[:most] or [list(ids)]


def nll(base_url: str, model: str, texts: Sequence[Sequence[int]], timeout_s: float) -> list[float]:
    """Minus log-probability (nats) of every token of every text, from each one's second on.

    Raises:
        FailedError: the server does not say them (`score-failed`).
    """
    found: list[float] = []
    for ids in texts:
        # 0: the prompt's own tokens and no others
        content = {
            "model": model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }
        try:
            answer = api.post(f"{base_url}/v1/completions", content, timeout_s)
            found += _of_prompt(answer["choices"][0], ids)
        except (api.HttpError, KeyError, IndexError, TypeError, ValueError) as error:
            raise _failed(base_url, error) from error
    return found


def _of_prompt(choice: dict[str, Any], ids: Sequence[int]) -> list[float]:
    places = choice.get("prompt_logprobs")
    if not places or len(places) != len(ids):
        raise ValueError(f"{len(places or ())} log-probabilities for {len(ids)} tokens")
    found = []
    for token, place in zip(ids[1:], places[1:], strict=True):
        value = float(place[str(token)]["logprob"])
        if not math.isfinite(value) or value <= _FLOOR:
            raise ValueError(f"the log-probability of token {token} is {value}")
        found.append(-value)
    return found


def _failed(base_url: str, error: Exception) -> FailedError:
    return FailedError(f"{base_url} did not score the text: {error}", code="score-failed")


def apart(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """How far two scores of one text are apart, in nats a token.

    Returns:
        mean (of the second minus the first), rms, largest (of the differences' amounts).
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    return {
        "mean": math.fsum(differences) / len(differences),
        "rms": math.sqrt(math.fsum(value * value for value in differences) / len(differences)),
        "largest": max(abs(value) for value in differences),
    }
