"""Asks the daemon on a thread of its own, so that the scheduler's thread waits for an answer only briefly."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

PATIENCE_S = 0.25
"""Longest wait of the scheduler's thread for an answer. An idle daemon takes 0.3 ms, a miss costs seconds."""
TRIAL_INTERVAL_S = 0.1
"""Seconds between trials whether a daemon that answered late is prompt again."""

T = TypeVar("T")


class DaemonPatience:
    """Says how long the scheduler's thread may wait for the daemon now. Thread-safe.

    ``seconds`` is ``longest_s`` while answers are prompt. After one that took longer it is 0, until another
    one is prompt again: a daemon that is slow delays one scheduling round, not each.
    """

    def __init__(self, longest_s: float = PATIENCE_S) -> None:
        self.longest_s = longest_s
        self.is_prompt = True

    @property
    def seconds(self) -> float:
        return self.longest_s if self.is_prompt else 0.0

    def note(self, seconds: float) -> None:
        """An answer took so long, or has not come within that time."""
        self.is_prompt = seconds <= self.longest_s


class Question(Generic[T]):
    """A call to the store, and its answer once there is one."""

    def __init__(self, call: Callable[[], T], *, is_urgent: bool = True) -> None:
        self.is_urgent = is_urgent
        self._call = call
        self._future: Future[T] = Future()
        self._asked_s = time.monotonic()

    @property
    def is_answered(self) -> bool:
        return self._future.done() and not self._future.cancelled()

    def wait(self, patience: DaemonPatience, longest_s: float | None = None) -> bool:
        """Whether it is answered, after at most the time of ``patience`` since it was asked.

        ``longest_s`` replaces that time while answers are prompt.
        """
        if self._future.done():
            return self.is_answered
        may_wait_s = patience.longest_s if longest_s is None else longest_s
        left_s = self._asked_s + may_wait_s - time.monotonic() if patience.is_prompt else 0.0
        if left_s > 0:
            wait([self._future], left_s)
            if not self._future.done():
                patience.note(time.monotonic() - self._asked_s)
        return self.is_answered

    def answer(self, otherwise: T) -> T:
        """The answer of a question that ``is_answered``; ``otherwise`` if it is an error, which is logged."""
        error = self._future.exception(timeout=0)
        if error is None:
            return self._future.result(timeout=0)
        logger.error("krul: the store could not answer: %s", error, exc_info=error)
        return otherwise

    def drop_unasked(self) -> bool:
        """Drop it if it has not been asked yet; whether that is so."""
        return self._future.cancel()

    def drop(self, discard: Callable[[T], object] | None = None) -> None:
        """Nobody waits for the answer any more.

        If it has been asked already, ``discard`` is called with the answer: at once, or when it comes, in the
        thread that asks.
        """
        if not self.drop_unasked() and discard is not None:
            self._future.add_done_callback(lambda future: future.exception() or discard(future.result()))

    def run(self) -> None:
        """Ask, in the calling thread, unless it was dropped."""
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            self._future.set_result(self._call())
        except BaseException as error:
            self._future.set_exception(error)


class AskingThread:
    """Asks questions one after the other, in a thread of its own: urgent ones first, else in their order.

    Answers to urgent ones tell ``patience`` how prompt the store is. After a late one, ``trial`` is called
    now and then while there is nothing to ask, so that the next request is not the one that finds out.
    """

    def __init__(self, patience: DaemonPatience, trial: Callable[[], object]) -> None:
        self.patience = patience
        self._trial = trial
        self._numbers = itertools.count()
        self._questions: queue.PriorityQueue[tuple[int, int, Question[Any] | None]] = queue.PriorityQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="krul-ask", daemon=True)
        self._thread.start()

    def ask(self, call: Callable[[], T], *, is_urgent: bool = True) -> Question[T]:
        """Have ``call()`` answered. Never waits. After ``close`` there will be no answer."""
        question = Question(call, is_urgent=is_urgent)
        if self._is_closed:
            question.drop()
        else:
            self._questions.put((1 if is_urgent else 2, next(self._numbers), question))
        return question

    def close(self) -> None:
        """Wait for the question that is being asked, and drop all others."""
        self._is_closed = True
        self._questions.put((0, next(self._numbers), None))
        self._thread.join()
        with suppress(queue.Empty):
            while True:
                _, _, question = self._questions.get_nowait()
                if question is not None:
                    question.drop()

    def _run(self) -> None:
        while True:
            try:
                timeout_s = None if self.patience.is_prompt else TRIAL_INTERVAL_S
                _, _, question = self._questions.get(timeout=timeout_s)
            except queue.Empty:
                question = Question(self._trial)
            if question is None:
                return
            begin_s = time.monotonic()
            question.run()
            if question.is_urgent and question.is_answered:
                self.patience.note(time.monotonic() - begin_s)


class LatestAnswer(Generic[T]):
    """Keeps the latest answer to a question that is asked again and again."""

    def __init__(
        self, asking: AskingThread, call: Callable[[], T], before: T, longest_s: float | None = None
    ) -> None:
        """``before``: what is returned until there is an answer; ``longest_s``: see ``Question.wait``."""
        self._asking = asking
        self._call = call
        self._latest = before
        self._longest_s = longest_s
        self._question: Question[T] | None = None

    def __call__(self) -> T:
        """The answer of now if it comes in time, else the last one there was."""
        self._use_answer()
        if self._question is None:
            self._question = self._asking.ask(self._call)
        self._question.wait(self._asking.patience, self._longest_s)
        self._use_answer()
        return self._latest

    def _use_answer(self) -> None:
        question = self._question
        if question is not None and question.is_answered:
            self._question, self._latest = None, question.answer(self._latest)
