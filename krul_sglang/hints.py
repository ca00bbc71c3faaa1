"""A client for hints about conversations, sent to the daemon without a request: see docs/agents.md."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import httpx

from krul_backend.errors import HintError, KrulError

TIMEOUT_S = 5.0


class HintsUnreachableError(KrulError):
    """The daemon does not take hints: nothing listens there, the token is wrong, or there are too many."""


class HintClient:
    """Sends hints to the daemon that listens at ``url``, such as ``http://127.0.0.1:31000``.

    Args:
        token_file: ``hints.token`` in the daemon's runtime directory. It is read for each hint, because a
            daemon that starts again makes another one.
    """

    def __init__(self, url: str, token_file: str | Path) -> None:
        self._token_file = Path(token_file).expanduser()
        # Not through a proxy: the daemon is on this machine.
        self._client = httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False)

    def send(
        self, session: str, *, extra_key: str | None = None, cache_salt: str | None = None, **hint: Any
    ) -> int | None:
        """Send the fields of a hint (``ttl_s=60``, ``demote=True``) about the conversation named ``session``.

        ``extra_key`` and ``cache_salt`` are those of its requests. Returns for how many of its pages in host
        memory the hint holds; None if nothing is stored of a conversation of this name.

        Raises:
            HintError: a field cannot be used; the message is the daemon's.
            HintsUnreachableError: the daemon cannot be asked, or refuses.
        """
        body = _body(session, extra_key, cache_salt, hint)
        try:
            return _result(self._client.post("/v1/hints", json=body, headers=_headers(self._token_file)))
        except httpx.HTTPError as error:
            raise _unreachable(self._client.base_url, error) from error

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> HintClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncHintClient:
    """As ``HintClient``, for programs that use asyncio."""

    def __init__(self, url: str, token_file: str | Path) -> None:
        self._token_file = Path(token_file).expanduser()
        self._client = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False)

    async def send(
        self, session: str, *, extra_key: str | None = None, cache_salt: str | None = None, **hint: Any
    ) -> int | None:
        """As ``HintClient.send``."""
        body = _body(session, extra_key, cache_salt, hint)
        try:
            reply = await self._client.post("/v1/hints", json=body, headers=_headers(self._token_file))
        except httpx.HTTPError as error:
            raise _unreachable(self._client.base_url, error) from error
        return _result(reply)

    async def close(self) -> None:
        await self._client.aclose()

    async def __aenter__(self) -> AsyncHintClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def tenant_of(extra_key: str | None, cache_salt: str | None) -> str:
    """A short name for the namespace of a request; empty without one. Hashed, because salts are secrets."""
    if not extra_key and not cache_salt:
        return ""
    parts = ((extra_key or "").encode(), (cache_salt or "").encode())
    digest = hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts))
    return digest.hexdigest()[:16]


def _body(
    session: str, extra_key: str | None, cache_salt: str | None, hint: dict[str, Any]
) -> dict[str, Any]:
    return {**hint, "session": session, "tenant": tenant_of(extra_key, cache_salt)}


def _headers(token_file: Path) -> dict[str, str]:
    try:
        return {"Authorization": f"Bearer {token_file.read_text().strip()}"}
    except OSError as error:
        raise HintsUnreachableError(f"no token can be read from {token_file}: {error.strerror}") from error


def _result(reply: httpx.Response) -> int | None:
    if reply.status_code == 404:
        return None
    try:
        answer = reply.json()
        if reply.status_code == 200:
            return int(answer["pages"])
        sentence = str(answer["error"])
    except (ValueError, KeyError, TypeError) as error:
        raise HintsUnreachableError(f"{reply.url} is no krul daemon: status {reply.status_code}") from error
    if reply.status_code in (400, 413, 422):
        raise HintError(sentence)
    raise HintsUnreachableError(sentence)


def _unreachable(url: httpx.URL, error: httpx.HTTPError) -> HintsUnreachableError:
    return HintsUnreachableError(f"no krul daemon takes hints at {url}: {error or type(error).__name__}")
