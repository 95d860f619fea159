"""A workload as plain values, as it stands in a plan and is given to every leader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from orchestrator.problems import did_you_mean
from orchestrator.workload.errors import WorkloadError
from orchestrator.workload.multi_turn import Conversations

KINDS = ("trace", "multi_turn")


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """Everything that decides the stream of requests and who takes which.

    path, offset, on_bad_line belong to kind "trace"; seed and the fields from `conversations` on
    to "multi_turn". A relative path is taken from the reader's working directory: a plan holds
    an absolute one. `requests` None means all. `tokens_per_s` and `max_imbalance` are the
    router's.
    """

    kind: str = "multi_turn"
    policy: str = "prefix_affinity"
    requests: int | None = None
    tokens_per_hash: int = 16
    salt: str = ""
    path: str | None = None
    offset: int = 0
    on_bad_line: str = "error"
    tokens_per_s: float = 20_000.0
    max_imbalance: float = 1.5
    seed: int = 0
    conversations: int | None = 24
    turns: float = 4.0
    system_prompts: int = 3
    system_prompt_tokens: int = 1024
    user_tokens: int = 192
    output_tokens: int = 256
    conversations_per_s: float = 4.0
    think_s: float = 2.0
    max_sequence_tokens: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` gives back an equal spec."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> WorkloadSpec:
        """Raises WorkloadError for an unknown field or a value of the wrong type."""
        known = {field.name: str(field.type) for field in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise WorkloadError(f"workload has no field {name!r}; {did_you_mean(name, known)}")
            if not _fits(value, known[name]):
                raise WorkloadError(f"workload field {name!r} is {value!r}, expected {known[name]}")
        return cls(**values)

    def shape(self) -> Conversations:
        """The part that the multi-turn generator takes."""
        return Conversations(
            **{field.name: getattr(self, field.name) for field in fields(Conversations)}
        )


def _fits(value: Any, annotation: str) -> bool:
    if value is None:
        return annotation.endswith("| None")
    if annotation.startswith("float"):
        return type(value) in (int, float)
    return type(value).__name__ == annotation.removesuffix(" | None")
