"""Seeded conversations: shared system prompts, histories that grow, arrivals that interleave.

Nothing here depends on the process, the platform or the Python version. Every draw is one
`random()` of a `random.Random` (Mersenne Twister, seeded with an integer), the one method whose
sequence Python promises to keep; distributions are built on it below, by formula. Each
conversation has its own generator, derived from (seed, conversation), so its content does not
depend on which others there are.

Distributions:

- system prompt lengths: uniform on [mean / 2, 3 mean / 2], one length a prompt; which one a
  conversation uses: Zipf, probability of prompt k (from 1) proportional to 1 / k;
- turns of a conversation: geometric, at least 1;
- user message and output lengths: log-normal with the given mean and sigma 0.6, at least 1 and
  at most 8 times the mean, whole tokens;
- starts of conversations: exponential gaps; from one turn's arrival to the next of the same
  conversation (reading the answer included): exponential.

All content is known, outputs too: `Request.hashes` covers prompt and output.
"""

from __future__ import annotations

import heapq
import math
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from random import Random

from orchestrator.workload.errors import WorkloadError
from orchestrator.workload.hashing import chain, chain_root
from orchestrator.workload.request import Request

LENGTH_SIGMA = 0.6
LONGEST_TIMES_MEAN = 8

_SYSTEM, _USER, _OUTPUT = range(3)
_PIECE = struct.Struct("<BQQ")
_SPAN = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Conversations:
    """The shape of the conversations.

    conversations: how many; None for as many as the limit on requests needs.
    turns: mean number a conversation. system_prompts: how many different ones, may be 0.
    system_prompt_tokens, user_tokens, output_tokens: means.
    conversations_per_s: rate of starts. think_s: mean time between turns. By default both are
    several times livelier than people are, so that a short stream still has load to balance.
    max_sequence_tokens: prompt plus output never exceeds it: a conversation ends before the turn
    that would, and its first turn is cut to fit. None for no limit.
    """

    conversations: int | None = 24
    turns: float = 4.0
    system_prompts: int = 3
    system_prompt_tokens: int = 1024
    user_tokens: int = 192
    output_tokens: int = 256
    conversations_per_s: float = 4.0
    think_s: float = 2.0
    max_sequence_tokens: int | None = None

    def problems(self) -> list[tuple[str, str]]:
        """Every field that cannot be right, each with a message."""
        found = []

        def need(name: str, value: float | None, smallest: float, largest: float) -> None:
            if value is not None and not smallest <= value <= largest:
                found.append((name, f"is {value}, expected {smallest} to {largest}"))

        need("conversations", self.conversations, 1, 1_000_000)
        need("turns", self.turns, 1, 1e6)
        need("system_prompts", self.system_prompts, 0, 100_000)
        need("system_prompt_tokens", self.system_prompt_tokens, 1, 2**24)
        need("user_tokens", self.user_tokens, 1, 2**24)
        need("output_tokens", self.output_tokens, 1, 2**24)
        need("conversations_per_s", self.conversations_per_s, 1e-6, 1e6)
        need("think_s", self.think_s, 0, 1e6)
        need("max_sequence_tokens", self.max_sequence_tokens, 2, 2**31 - 1)
        shortest = self._longest_system_prompt + 2
        limit = self.max_sequence_tokens
        if not found and limit is not None and limit < shortest:
            found.append(
                (
                    "max_sequence_tokens",
                    f"is {limit}, expected at least {shortest}: a system prompt of "
                    f"{self._longest_system_prompt} tokens, a message and an answer",
                )
            )
        return found

    @property
    def _longest_system_prompt(self) -> int:
        if self.system_prompts == 0:
            return 0
        return self.system_prompt_tokens + self.system_prompt_tokens // 2


class MultiTurnGenerator:
    """Requests of seeded conversations, in order of arrival.

    `requests` is how many are made: the stream ends there, and where the conversations hold
    fewer, the same number of new conversations begins once the earlier ones are over. With
    None, every conversation is played once to its end.

    Raises WorkloadError where the shape cannot be right.
    """

    skipped = 0
    skip_reasons: tuple[str, ...] = ()

    def __init__(
        self,
        shape: Conversations,
        *,
        seed: int,
        tokens_per_hash: int,
        salt: str = "",
        requests: int | None = None,
    ) -> None:
        if problems := shape.problems():
            raise WorkloadError("; ".join(f"{name} {message}" for name, message in problems))
        if tokens_per_hash < 1 or (requests is not None and requests < 1):
            raise WorkloadError(
                f"tokens_per_hash is {tokens_per_hash} and requests is {requests}, expected both "
                "at least 1 (requests may be None)"
            )
        if shape.conversations is None and requests is None:
            raise WorkloadError("conversations and requests are both None, expected one of them")
        self._shape = shape
        self._seed = seed
        self._requests = requests
        self._tokens_per_hash = tokens_per_hash
        # The seed decides the content, so two seeds must not share a hash.
        self._root = chain_root(salt, f"multi_turn/{seed}")
        self._prompt_lengths = _system_prompt_lengths(shape, seed)
        weights = [1 / rank for rank in range(1, shape.system_prompts + 1)]
        self._popularity = list(accumulate(weights))

    def __iter__(self) -> Iterator[Request]:
        return self.select(lambda request: True)

    def select(self, wanted: Callable[[Request], bool]) -> Iterator[Request]:
        """The requests that `wanted` accepts; it is called with every one, hashes left empty."""
        for index, (arrival_us, talk) in enumerate(self._turns()):
            arrival_s = arrival_us / 1e6
            prompt, output = talk.prompt_tokens, talk.output_tokens
            if wanted(Request(index, arrival_s, prompt, output, ())):
                yield Request(index, arrival_s, prompt, output, talk.hashes())

    def count(self) -> int:
        """How many requests the stream has. Draws every length, hashes nothing."""
        if self._requests is not None:
            return self._requests
        return sum(1 for _ in self._turns())

    def _turns(self) -> Iterator[tuple[int, _Conversation]]:
        """(arrival in us, conversation whose latest turn arrives), in order of arrival."""
        shape = self._shape
        starts = _generator(self._seed, "starts")
        started, made, start_us = 0, 0, 0
        may_start = math.inf if shape.conversations is None else shape.conversations
        waiting: list[tuple[int, int, _Conversation]] = []
        while True:
            if started < may_start and (not waiting or start_us <= waiting[0][0]):
                talk = self._conversation(started)
                heapq.heappush(waiting, (start_us, started, talk))
                started += 1
                start_us += _exponential_us(starts, 1 / shape.conversations_per_s)
                continue
            if not waiting:
                return
            now_us, number, talk = heapq.heappop(waiting)
            talk.speak()
            yield now_us, talk
            made += 1
            if made == self._requests:
                return
            if talk.goes_on():
                later_us = now_us + _exponential_us(talk.random, shape.think_s)
                heapq.heappush(waiting, (later_us, number, talk))
            elif not waiting and started == may_start and self._requests is not None:
                may_start += started if shape.conversations is None else shape.conversations
                start_us = now_us + _exponential_us(starts, 1 / shape.conversations_per_s)

    def _conversation(self, number: int) -> _Conversation:
        random = _generator(self._seed, f"conversation/{number}")
        system = None
        draw = random.random()
        if self._prompt_lengths:
            which = bisect_right(self._popularity, draw * self._popularity[-1])
            which = min(which, len(self._prompt_lengths) - 1)
            system = (which, self._prompt_lengths[which])
        content = _Content(self._root, self._tokens_per_hash)
        return _Conversation(number, random, self._shape, system, content)


class _Conversation:
    """Its history so far, and the turn to come."""

    def __init__(
        self,
        number: int,
        random: Random,
        shape: Conversations,
        system: tuple[int, int] | None,
        content: _Content,
    ) -> None:
        self.random = random
        self.prompt_tokens = 0
        self.output_tokens = 0
        self._number = number
        self._shape = shape
        self._content = content
        self._unhashed: list[tuple[bytes, int]] = []
        self._history_tokens = 0
        self._turn = 0
        self._turns = _geometric(random, shape.turns)
        if system is not None:
            self._add(_PIECE.pack(_SYSTEM, system[0], 0), system[1])
        self._next_user, self._next_output = self._draw()
        if shape.max_sequence_tokens is not None:
            room = shape.max_sequence_tokens - self._history_tokens
            self._next_user = min(self._next_user, room - 1)
            self._next_output = min(self._next_output, room - self._next_user)

    def _draw(self) -> tuple[int, int]:
        user = _length(self.random, self._shape.user_tokens)
        return user, _length(self.random, self._shape.output_tokens)

    def _add(self, piece: bytes, tokens: int) -> None:
        self._unhashed.append((piece, tokens))
        self._history_tokens += tokens

    def speak(self) -> None:
        """The drawn turn takes place: `prompt_tokens` and `output_tokens` are its lengths."""
        self._add(_PIECE.pack(_USER, self._number, self._turn), self._next_user)
        self.prompt_tokens = self._history_tokens
        self._add(_PIECE.pack(_OUTPUT, self._number, self._turn), self._next_output)
        self.output_tokens = self._next_output
        self._turn += 1

    def goes_on(self) -> bool:
        """Whether another turn follows; draws it if so."""
        if self._turn == self._turns:
            return False
        self._next_user, self._next_output = self._draw()
        limit = self._shape.max_sequence_tokens
        ahead = self._history_tokens + self._next_user + self._next_output
        return limit is None or ahead <= limit

    def hashes(self) -> tuple[bytes, ...]:
        """Of all full units so far."""
        for piece, tokens in self._unhashed:
            self._content.append(piece, tokens)
        self._unhashed.clear()
        return tuple(self._content.hashes)


class _Content:
    """Chained hashes of a sequence that is put together from named pieces.

    A unit's content is written as the spans of pieces that it covers, so equal content gives
    equal hashes without a single token being made up.
    """

    def __init__(self, root: bytes, tokens_per_hash: int) -> None:
        self.hashes: list[bytes] = []
        self._latest = root
        self._tokens_per_hash = tokens_per_hash
        self._missing = tokens_per_hash
        self._open = b""

    def append(self, piece: bytes, tokens: int) -> None:
        start = 0
        while tokens - start >= self._missing:
            unit = self._open + piece + _SPAN.pack(start, self._missing)
            self._latest = chain(self._latest, unit)
            self.hashes.append(self._latest)
            start += self._missing
            self._missing = self._tokens_per_hash
            self._open = b""
        if start < tokens:
            self._open += piece + _SPAN.pack(start, tokens - start)
            self._missing -= tokens - start


def _generator(seed: int, purpose: str) -> Random:
    digest = blake2b(f"{seed}/{purpose}".encode(), digest_size=16).digest()
    return Random(int.from_bytes(digest, "little"))


def _system_prompt_lengths(shape: Conversations, seed: int) -> list[int]:
    random = _generator(seed, "system_prompts")
    mean = shape.system_prompt_tokens
    shortest, longest = max(1, mean - mean // 2), mean + mean // 2
    return [
        shortest + int(random.random() * (longest - shortest + 1))
        for _ in range(shape.system_prompts)
    ]


def _exponential_us(random: Random, mean_s: float) -> int:
    return round(-math.log(1 - random.random()) * mean_s * 1e6)


def _geometric(random: Random, mean: float) -> int:
    draw = 1 - random.random()
    if mean == 1:
        return 1
    return 1 + int(math.log(draw) / math.log(1 - 1 / mean))


def _length(random: Random, mean: int) -> int:
    """Log-normal by Box-Muller; the shift by sigma^2 / 2 makes `mean` the mean."""
    radius = math.sqrt(-2 * math.log(1 - random.random()))
    normal = radius * math.cos(2 * math.pi * random.random())
    tokens = mean * math.exp(LENGTH_SIGMA * normal - LENGTH_SIGMA**2 / 2)
    return max(1, min(round(tokens), LONGEST_TIMES_MEAN * mean))
