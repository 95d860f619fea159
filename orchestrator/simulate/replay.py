"""One cache, one policy: every request looked up, and what it missed stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from backends.policy.admission import AdmissionPolicy
from backends.policy.base import EvictionPolicy
from orchestrator.simulate.access import Access

REPORT_EVERY = 256


@dataclass(slots=True)
class Tally:
    """What a stretch of requests came to, in tokens of their prompts."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0

    @property
    def share(self) -> float:
        """Hit tokens of all prompt tokens, 0 to 1."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(slots=True)
class Replay:
    """The result of one replay. Counts are chunks; `seconds` is what the replay took."""

    first_half: Tally = field(default_factory=Tally)
    second_half: Tally = field(default_factory=Tally)
    stored: int = 0
    evicted: int = 0
    refused: int = 0
    seconds: float = 0.0

    @property
    def total(self) -> Tally:
        one, two = self.first_half, self.second_half
        return Tally(
            one.requests + two.requests,
            one.prompt_tokens + two.prompt_tokens,
            one.hit_tokens + two.hit_tokens,
        )


def replay(
    requests: Sequence[Access],
    policy: EvictionPolicy,
    admission: AdmissionPolicy,
    tokens_per_chunk: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Replay:
    """Replay `requests` on an empty cache of `policy.capacity` chunks.

    A hit is the longest run of a request's first chunks that are all there. `progress` is told the
    number of requests done, now and then. The halves are halves of the requests; the cache is not
    emptied between them.
    """
    result, tally = Replay(), Tally()
    result.first_half = tally
    present: set[bytes] = set()
    began_s = time.perf_counter()
    for number, request in enumerate(requests):
        if number == len(requests) // 2:
            tally = result.second_half
        if number % REPORT_EVERY == 0:
            progress(number)
        found = _leading(request.keys, present)
        tally.requests += 1
        tally.prompt_tokens += request.prompt_tokens
        hit = min(found, request.may_hit) * tokens_per_chunk
        tally.hit_tokens += min(hit, request.prompt_tokens)
        policy.touch(request.keys[:found], request.arrival_s)
        _store(request, found, policy, admission, present, result)
    progress(len(requests))
    result.seconds = time.perf_counter() - began_s
    return result


def _leading(keys: Sequence[bytes], present: set[bytes]) -> int:
    found = 0
    for key in keys:
        if key not in present:
            break
        found += 1
    return found


def _store(
    request: Access,
    found: int,
    policy: EvictionPolicy,
    admission: AdmissionPolicy,
    present: set[bytes],
    result: Replay,
) -> None:
    """Store what was not found, as far as it is admitted and has room."""
    now_s, keys = request.arrival_s, request.keys
    admission.seen(keys)
    missing = keys[found:]
    if not missing:
        return
    parent = keys[found - 1] if found else None
    wanted = missing[: admission.admit(missing)]
    room = policy.capacity - len(present)
    if len(wanted) > room:
        wanted = wanted[: policy.admit(wanted, room, now_s, found, parent)]
        wanted = wanted[: policy.capacity - found]
        gone = policy.victims(max(0, len(wanted) - room), set(keys[:found]))
        admission.gone(gone)
        present.difference_update(gone)
        result.evicted += len(gone)
    result.refused += len(missing) - len(wanted)
    if wanted:
        policy.insert(wanted, now_s, found, parent)
        present.update(wanted)
        result.stored += len(wanted)
