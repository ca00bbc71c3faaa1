"""Sends requests to a running server, and explains each failure in one plain sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from krul_backend.errors import ConfigError


class CannotRunError(ConfigError):
    """A command cannot be run against this server; the message says why, and what would help."""


def open_client(url: str, *, api_key: str | None, timeout_s: float) -> httpx.Client:
    """A client whose paths are relative to ``url``; close it.

    Raises:
        CannotRunError: the address is not valid.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        return httpx.Client(base_url=url, headers=headers, timeout=timeout_s)
    except httpx.InvalidURL as error:
        raise CannotRunError(f"the server at {url} cannot be reached: {error}") from error


def request(
    client: httpx.Client, method: str, path: str, payload: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Send a request and return the JSON object that the server answers.

    Raises:
        CannotRunError: the server cannot be reached, refuses, or is not an SGLang server.
    """
    try:
        response = client.request(method, path, json=payload)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise CannotRunError(f"the server at {client.base_url} cannot be reached: {reason}") from error
    if response.status_code in (401, 403):
        raise CannotRunError(f"the server at {client.base_url} refuses the request; give --api-key")
    if response.status_code == 404:
        raise CannotRunError(f"{client.base_url} is not an SGLang server: it does not know {path}")
    if response.status_code != 200:
        raise CannotRunError(f"{method} {path} answered {response.status_code}: {response.text[:200]!r}")
    try:
        answer = response.json()
    except ValueError:
        raise CannotRunError(f"{client.base_url} is not an SGLang server: {path} is not JSON") from None
    if not isinstance(answer, dict):
        raise CannotRunError(f"{client.base_url} is not an SGLang server: {path} is not an object")
    return answer


def states_with_krul(client: httpx.Client, info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The ``internal_states`` of ``/server_info``, one for each data-parallel rank.

    Raises:
        CannotRunError: the answer has no such states, or the server runs without krul.
    """
    states = info.get("internal_states")
    if not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
        raise CannotRunError(f"{client.base_url} answers, but not as an SGLang server does")
    if info.get("radix_cache_backend") != "krul" and not any("krul" in state for state in states):
        raise CannotRunError(
            f"the server at {client.base_url} runs without krul; start it with --radix-cache-backend krul"
        )
    return states


def printable(text: str) -> str:
    """Text from outside without control characters, which a terminal would obey; lines stay lines."""
    return "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in text)
