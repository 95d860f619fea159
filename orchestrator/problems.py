"""What is wrong with a configuration, all of it at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from backends.errors import KvquayError


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that cannot work: where it stands, what it is, what it must be, how to mend it.

    `value` is None where there is none or `limit` tells it itself.
    """

    key: str
    value: Any
    limit: str
    fix: str

    def __post_init__(self) -> None:
        for name in ("key", "value", "limit", "fix"):
            text = getattr(self, name)
            if isinstance(text, str) and "://" in text:
                object.__setattr__(self, name, redact(text))

    def __str__(self) -> str:
        what = self.key if self.value is None else f"{self.key} is {self.value!r}:"
        return f"{what} {self.limit}\n      fix: {self.fix}"


class ConfigProblems(KvquayError):
    """The configuration is bad; carries every problem that was found. Exit status 2."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = [f"{count} problem{'s' if count != 1 else ''} in the configuration:"]
        lines += [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        super().__init__("\n".join(lines))


# What stands before the last @ of a URL, or behind its ? or #. A password may hold any of / : @.
_BEFORE_HOST = re.compile(r"\b(?!file:)([A-Za-z][A-Za-z0-9+.-]*://)[^\s'\"]*@")
_BEHIND_PATH = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]*://[^\s'\"?#]*[?#])[^\s'\"]+")


def redact(text: str) -> str:
    """A text in which URLs keep neither a user name and password nor a query and fragment."""
    return _BEHIND_PATH.sub(r"\1***", _BEFORE_HOST.sub(r"\1***@", text))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the closest known word, else the list of what is known."""
    choices = sorted(known)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known: " + ", ".join(choices) if choices else "nothing is known here"
