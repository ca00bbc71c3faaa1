"""Takes hints about named conversations over HTTP on this machine, and serves the daemon's web page there."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from aiohttp import web

from krul_backend.daemon.server.status_page import STATUS_PATH, StatusPage
from krul_backend.errors import HintError, KrulError
from krul_backend.tiers.common.hint import MAX_SESSION_LENGTH, Hint, SessionName, parse_hint

logger = logging.getLogger(__name__)

HINTS_HOST, HINTS_PATH = "127.0.0.1", "/v1/hints"

MAX_BODY_BYTES = 16 << 10
MAX_AT_ONCE = 64
MAX_PER_SECOND = 1000
MAX_CONNECTIONS = 256

_START_TIMEOUT_S = 10.0
_BODY_TIMEOUT_S = 5.0
_IDLE_S = 10.0
"""A connection that says nothing for so long is closed."""

TakeHint = Callable[[SessionName, Hint], int]


class HintEndpoint:
    """Answers ``POST /v1/hints`` and the page's questions on a port of 127.0.0.1, for whoever has the token,
    until ``close``. The page's own files are for everybody.

    If the port is taken, this logs one line: the daemon serves without it.

    Args:
        port: of 127.0.0.1.
        token_path: where the token is written, for this user only.
        take: called in threads of the endpoint with each hint; returns how many pages it holds for, and
            raises KeyError for a name of which nothing is stored.
        page: what the page shows.
    """

    def __init__(self, port: int, token_path: Path, take: TakeHint, page: StatusPage) -> None:
        self._token_path = token_path
        self._take = take
        self._page = page
        self._token = secrets.token_urlsafe(32)
        self._num_running = 0
        self._second = 0
        self._num_in_second = 0
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(port,), name="krul-hints", daemon=True)
        write_token(token_path, self._token)
        self._thread.start()
        self._has_begun.wait(_START_TIMEOUT_S)

    def close(self) -> None:
        """Stop, and remove the token. May be called again."""
        self._token_path.unlink(missing_ok=True)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _serve(self, port: int) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run(port))
        except OSError as error:
            logger.error(
                "no hints over HTTP: port %d of %s cannot be had (%s); choose another hints_port, or 0",
                port,
                HINTS_HOST,
                error.strerror or error,
            )
        finally:
            self._has_begun.set()
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _run(self, port: int) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post(HINTS_PATH, self._answer)
        app.router.add_get(STATUS_PATH, self._answer_page)
        self._page.add_files(app.router)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=_IDLE_S)
        await runner.setup()
        server = runner.server
        assert server is not None, "it was set up"

        def new_protocol() -> asyncio.BaseProtocol:
            return server() if len(server.connections) < MAX_CONNECTIONS else _Refused()

        listening: asyncio.Server | None = None
        sampling = asyncio.create_task(self._page.note_samples())
        try:
            listening = await self._loop.create_server(new_protocol, HINTS_HOST, port)
            logger.info(
                "hints at http://%s:%d%s, and a page at /; token in %s",
                HINTS_HOST,
                port,
                HINTS_PATH,
                self._token_path,
            )
            self._has_begun.set()
            await self._stop.wait()
        finally:
            sampling.cancel()
            if listening is not None:
                listening.close()
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        if not self._is_allowed(request):
            return self._unauthorized()
        if not self._is_within_rate():
            return _refusal(
                429, f"too many hints, accepted are {MAX_PER_SECOND} a second and {MAX_AT_ONCE} at a time"
            )
        self._num_running += 1
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                body = await request.read()
            session, hint = parse_body(body)
            num_pages = await asyncio.to_thread(self._take, session, hint)
        except TimeoutError:
            return _refusal(408, f"the body did not come within {_BODY_TIMEOUT_S:g} s")
        except web.HTTPRequestEntityTooLarge:
            return _refusal(413, f"a body of more than {MAX_BODY_BYTES} bytes, accepted are {MAX_BODY_BYTES}")
        except msgspec.DecodeError as error:
            return _refusal(400, f"the body is no JSON: {error}")
        except HintError as error:
            return _refusal(422, str(error))
        except KeyError as error:
            return _refusal(404, str(error.args[0]))
        except KrulError as error:
            return _refusal(503, str(error))
        finally:
            self._num_running -= 1
        return web.json_response({"pages": num_pages})

    async def _answer_page(self, request: web.Request) -> web.Response:
        if not self._is_allowed(request):
            return self._unauthorized()
        try:
            return web.Response(body=await self._page.status(), content_type="application/json")
        except KrulError as error:
            return _refusal(503, str(error))

    def _unauthorized(self) -> web.Response:
        name = self._token_path.name
        refusal = _refusal(401, f"no token, or a wrong one: send 'Authorization: Bearer' with that of {name}")
        # Whoever guesses connects again for each guess.
        refusal.force_close()
        return refusal

    def _is_allowed(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode(errors="replace"), f"Bearer {self._token}".encode())

    def _is_within_rate(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._num_in_second = second, 0
        self._num_in_second += 1
        return self._num_in_second <= MAX_PER_SECOND and self._num_running < MAX_AT_ONCE


class _Refused(asyncio.Protocol):
    """Ends a connection at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def parse_body(body: bytes) -> tuple[SessionName, Hint]:
    """The name and the hint that a request's JSON object states.

    Raises:
        HintError: a field cannot be used.
        msgspec.DecodeError: it is no JSON.
    """
    try:
        given = msgspec.json.decode(body)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
    if not isinstance(given, dict):
        raise HintError(
            f"the body: got a {type(given).__name__}, accepted is an object with session and fields of a hint"
        )
    session, tenant = given.pop("session", None), given.pop("tenant", "")
    if not isinstance(session, str):
        raise HintError(
            f"session: got {session!r:.80}, accepted is a name of 1 to {MAX_SESSION_LENGTH} characters"
        )
    if not isinstance(tenant, str):
        raise HintError(f"tenant: got {tenant!r:.80}, accepted is a text")
    return SessionName(tenant, session), parse_hint(given)


def write_token(path: Path, token: str) -> None:
    """Write a file that only this user can read, in place of any that is there."""
    path.unlink(missing_ok=True)
    descriptor = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode=0o600
    )
    with os.fdopen(descriptor, "w") as file:
        file.write(token)


def _refusal(status: int, sentence: str) -> web.Response:
    return web.json_response({"error": sentence}, status=status)
