"""What a probe has found so far. A probe that hangs leaves its notes, and what it was doing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from orchestrator.doctor.result import Check, Verdict


class Notes:
    """Checks in the order in which they were made. `tell` gets each new step, for a progress."""

    def __init__(self, where: str = "", tell: Callable[[str], None] = lambda step: None) -> None:
        self.where = where
        self.checks: list[Check] = []
        self.step = "starting"
        self._tell = tell

    def doing(self, step: str) -> None:
        """What comes next, as in "no answer while ..."."""
        self.step = step
        self._tell(step)

    def ok(self, name: str, found: str) -> None:
        self._add(name, "ok", found, "", "")

    def warn(self, name: str, found: str, expected: str, fix: str) -> None:
        """It works, but slower, or not for long."""
        self._add(name, "warn", found, expected, fix)

    def fail(self, name: str, found: str, expected: str, fix: str) -> None:
        """A run would not start, or this tier would be of no use."""
        self._add(name, "fail", found, expected, fix)

    def withdraw(self, name: str) -> None:
        """What was said of this is not so any more."""
        self.checks = [check for check in self.checks if check.name != name]

    def _add(self, name: str, verdict: Verdict, found: str, expected: str, fix: str) -> None:
        self.checks.append(
            Check(
                name=name,
                verdict=verdict,
                where=self.where,
                found=found,
                expected=expected,
                fix=fix,
            )
        )


def failed(checks: Iterable[Check], *groups: str) -> bool:
    """Whether a check of one of these groups (`fs`, `object`) failed."""
    return any(
        check.verdict == "fail" and check.name.partition(".")[0] in groups for check in checks
    )
