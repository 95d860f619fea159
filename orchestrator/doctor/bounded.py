"""Run a probe for so long and no longer, whatever it waits for, and let signals end it early.

A probe is a function in a thread of its own. It is asked to end when its time is up, and one that
cannot hear, because a disk or a server does not answer, is left behind: its thread ends with this
process.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final, TypeVar

from orchestrator.supervise import SIGNALS

T = TypeVar("T")
GRACE_S: Final = 4.0
"""What a probe has to take its traces away, once it was asked to end."""
_LOOK_S: Final = 0.02


class NoAnswer(Exception):
    """A probe did not end in its time, nor when it was asked to."""


class Interrupted(Exception):
    """A signal came. The probe that was running has ended, or is left behind."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Stop:
    """What a probe looks at between its steps."""

    def __init__(self, limit_s: float) -> None:
        self._until_s = time.monotonic() + limit_s
        self._asked = threading.Event()

    def ask(self) -> None:
        self._asked.set()

    def asked(self) -> bool:
        """Whether to end now, and take all traces away."""
        return self._asked.is_set() or time.monotonic() >= self._until_s

    def remaining_s(self) -> float:
        return 0.0 if self._asked.is_set() else max(0.0, self._until_s - time.monotonic())


class Bounds:
    """All probes of one doctor: `limit_s` is for them together."""

    def __init__(self, limit_s: float, grace_s: float = GRACE_S) -> None:
        self._until_s = time.monotonic() + limit_s
        self._grace_s = grace_s
        self._caught: list[int] = []

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Catch signals, but for those that we were started to ignore; `run` raises Interrupted."""
        before = {
            signum: signal.signal(signum, self._catch)
            for signum in SIGNALS
            if signal.getsignal(signum) != signal.SIG_IGN
        }
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def run(self, probe: Callable[[Stop], T], limit_s: float) -> T:
        """What `probe` gives. Raises what it raises, NoAnswer, and Interrupted."""
        limit_s = max(0.0, min(limit_s, self._until_s - time.monotonic()))
        stop, answers, errors = Stop(limit_s), list[T](), list[BaseException]()

        def work() -> None:
            try:
                answers.append(probe(stop))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work, daemon=True, name="kvquay-doctor")
        thread.start()
        end_s = time.monotonic() + limit_s + self._grace_s
        while thread.is_alive() and time.monotonic() < end_s and not self._caught:
            thread.join(_LOOK_S)
        stop.ask()
        if self._caught:
            thread.join(self._grace_s)
            raise Interrupted(self._caught[0])
        if errors:
            raise errors[0]
        if not answers:
            raise NoAnswer
        return answers[0]

    def _catch(self, signum: int, _frame: FrameType | None) -> None:
        self._caught.append(signum)
