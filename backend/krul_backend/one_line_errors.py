"""How the command lines of krul end when something goes wrong: with one line on stderr, never a traceback."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from krul_backend.errors import ConfigError, KrulError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

# typer ships its own copy of click since 0.26 and uses the installed one before: take the class it raises.
_ClickException: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


class OneLineErrors(TyperGroup):
    """Ends a command that fails with ``<name>: error: <what is wrong>`` and an exit status.

    The status is 2 for a ``ConfigError``, 1 for any other ``KrulError``, 130 after Ctrl-C, and click's own
    for options that it refuses. If the message has several lines (a quoted log), all are printed.
    """

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            status = super().main(*args, **kwargs)
        except _ClickException as error:
            self._fail(error.format_message(), error.exit_code)
        except ConfigError as error:
            self._fail(str(error), EXIT_USAGE)
        except KrulError as error:
            self._fail(str(error), EXIT_FAILED)
        sys.exit(status if isinstance(status, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        # Here, because versions of typer differ in what they make of an interrupt further out.
        with _noted_interrupts() as interrupts:
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                self._fail("interrupted", EXIT_INTERRUPTED)
            except Exception:
                if interrupts:
                    # The interrupt made what was being done, or its clean-up, fail.
                    self._fail("interrupted", EXIT_INTERRUPTED)
                raise

    def _fail(self, message: str, status: int) -> NoReturn:
        typer.echo(f"{self.name}: error: {message}", err=True)
        sys.exit(status)


@contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Lets Ctrl-C raise KeyboardInterrupt as always, and notes it in the list, whatever becomes of that."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
