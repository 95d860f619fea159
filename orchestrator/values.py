"""What each key may hold by itself, whatever the other keys hold.

Checked twice: as typed on a command line, before Hydra makes a directory, and over the whole
composed configuration, whose values may also come from files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any

from backends.errors import ConfigError
from backends.policy.registry import PolicyRegistry
from backends.region.spec import BACKINGS, HUGE_PAGES
from backends.stack.settings import EDGE_WORDS, LOAD_FROM, Edge
from backends.units import parse_size
from orchestrator.object_store import URL_KEYS, check_url
from orchestrator.problems import Problem, did_you_mean
from orchestrator.schema import Config

# What is known to come, so that it is refused as not there yet instead of as a misspelling.
NOT_YET: dict[str, tuple[str, ...]] = {
    "spawn": ("ray", "slurm"),
    "spawn.kind": ("ray", "slurm"),
    "spawn.scope": ("node",),
}

TIERS = ("shm", "fs", "object")
CPU_KERNELS = ("auto", "numpy", "c-portable", "c-avx2", "c-avx512")
CUDA_KERNELS = ("auto", "cuda", "cuda-pinned", "cuda-pageable")
CHOICES: dict[str, tuple[str, ...]] = {
    "action": ("run", "plan", "doctor", "simulate", "clean", "export"),
    "view": ("auto", "live", "plain", "quiet"),
    "sweep.on_failure": ("continue", "stop"),
    "region.backing": BACKINGS,
    "region.scope": ("replica", "node"),
    "region.huge_pages": HUGE_PAGES,
    "region.numa": ("auto", "off"),
    "region.pin": ("auto", "off"),
    "tiers.load_from": LOAD_FROM,
    "tiers.stack.shm.admission": ("all", "second_hit", "tinylfu"),
    "engine.kind": ("reference", "vllm"),
    "engine.device": ("cpu", "cuda"),
    "engine.layout": ("layers_first", "blocks_first"),
    "engine.verify": ("all", "sample", "off"),
    "engine.copy_kernel": (*CPU_KERNELS, *CUDA_KERNELS[1:]),
    "spawn.kind": ("torchrun", "inline"),
    "spawn.scope": ("replica",),
    "spawn.start_method": ("auto", "fork", "spawn"),
    "spawn.on_failure": ("stop", "continue"),
    "events.hashes": ("int64", "bytes"),
    "simulate.admission": ("all", "second_hit", "tinylfu"),
}

ADDRESSES = ("metrics.host", "events.host")
SIZES = ("region.size", "engine.device_cache_size")
LARGEST_SIZE = "1PiB"

_WEEK_S = 7 * 24 * 3600
# key: (smallest, largest)
RANGES: dict[str, tuple[int, int]] = {
    "parallel.data_parallel_size": (1, 2**20),
    "parallel.pipeline_parallel_size": (1, 2**20),
    "parallel.prefill_context_parallel_size": (1, 2**20),
    "parallel.tensor_parallel_size": (1, 2**20),
    "parallel.decode_context_parallel_size": (1, 2**20),
    "region.blocks_per_chunk": (1, 2**20),
    "engine.tokens_per_block": (1, 2**20),
    "engine.tokens_per_hash": (1, 2**30),
    "engine.max_tokens_per_step": (1, 2**31),
    "engine.prefill_tokens_per_s": (1, 2**40),
    "engine.copy_threads": (1, 256),
    "simulate.tokens_per_chunk": (1, 2**30),
    "engine.vllm.port": (1, 65535),
    "engine.vllm.max_model_len": (1, 2**31),
    "engine.vllm.max_num_seqs": (1, 2**20),
    "engine.vllm.max_output_tokens": (1, 2**20),
    "engine.vllm.start_timeout_s": (1, _WEEK_S),
    "spawn.nnodes": (1, 2**20),
    "spawn.node_rank": (0, 2**20),
    "spawn.devices_per_node": (1, 2**20),
    "spawn.rdzv_port": (0, 65535),
    "spawn.start_timeout_s": (1, _WEEK_S),
    "spawn.group_timeout_s": (1, _WEEK_S),
    "spawn.stop_timeout_s": (0, 3600),
    "metrics.port": (0, 65535),
    "metrics.refresh_s": (0, 3600),
    "metrics.linger_s": (0, 3600),
    "events.port": (0, 65535),
    "events.replay_port": (0, 65535),
    "events.queue_batches": (1, 2**20),
    "events.replay_batches": (1, 2**20),
    "tiers.promotion_share": (0, 1),
    "tiers.lookup_timeout_s": (0, _WEEK_S),
    "tiers.load_timeout_s": (0, _WEEK_S),
    "tiers.store_timeout_s": (0, _WEEK_S),
    # The tier itself says more of each; that it is a number at all is said here.
    "tiers.stack.fs.probe_interval_s": (0, _WEEK_S),
    "tiers.stack.fs.stagger_s": (0, _WEEK_S),
    "tiers.stack.fs.touch_interval_s": (0, _WEEK_S),
    "tiers.stack.fs.spare_files": (0, 2**20),
    "tiers.stack.fs.lease_blocks": (0, 2**20),
    "tiers.stack.fs.snapshot_interval_s": (0, _WEEK_S),
    "tiers.stack.fs.retry_s": (0, _WEEK_S),
    "tiers.stack.fs.retry_most_s": (0, _WEEK_S),
    "tiers.stack.fs.stuck_s": (0, _WEEK_S),
    "tiers.stack.fs.close_timeout_s": (0, _WEEK_S),
    **{
        f"tiers.stack.object.{name}_s": (0, _WEEK_S)
        for name in (
            *("connect_timeout", "read_timeout", "request_timeout", "retry", "retry_most"),
            *("breaker", "breaker_most", "stagger", "absent_ttl", "probe_interval", "rescan"),
            *("recency_interval", "close_timeout"),
        )
    },
}
# Plans are JSON, where larger numbers are not exact.
_LARGEST_INTEGER = 2**53


def not_yet(key: str, value: str) -> Problem:
    return Problem(
        key,
        value,
        "is not there yet in this version of kvquay",
        "see the README for what works now; leave it out",
    )


def leaves(node: Any = None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key that holds a value, and the value: of a configuration, or of the defaults."""
    node = Config() if node is None else node
    for field in dataclasses.fields(node):
        key, value = prefix + field.name, getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, key + ".")
        else:
            yield key, value


def check_values(config: Config) -> list[Problem]:
    """Every value of a configuration that cannot be right by itself."""
    return [problem for key, value in leaves(config) for problem in check_value(key, value)]


def check_value(key: str, value: Any) -> list[Problem]:
    """What is wrong with one value of the right type; None is never wrong here."""
    if value is None:
        return []
    if isinstance(value, str) and not _is_text(value):
        return [Problem(key, value, "is not valid UTF-8 text", "type it in UTF-8")]
    if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        return [Problem(key, value, f"must be at most {_LARGEST_INTEGER}", "choose less")]
    if key in CHOICES:
        return _check_choice(key, str(value))
    if key in SIZES:
        return _check_size(key, str(value))
    if key in RANGES:
        return _check_range(key, value)
    if key in ADDRESSES:
        return _check_address(key, str(value))
    if key == "tiers.order":
        return _check_order(key, value)
    if key == "tiers.stack.shm.eviction":
        return _check_eviction(key, str(value))
    if key.startswith("tiers.edges."):
        return _check_edge(key, str(value))
    if key in URL_KEYS:
        return check_url(key, str(value))
    return []


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_choice(key: str, value: str) -> list[Problem]:
    known = CHOICES[key]
    if value in known:
        return []
    if value in NOT_YET.get(key, ()):
        return [not_yet(key, value)]
    hint = did_you_mean(value, known)
    fix = hint if hint.startswith("did you") else f"set {key}={known[0]}, say"
    return [Problem(key, value, f"must be one of {', '.join(known)}", fix)]


def _check_size(key: str, value: str) -> list[Problem]:
    try:
        nbytes = parse_size(value)
    except ValueError as error:
        limit = str(error).removeprefix(f"{value!r} ")
        return [Problem(key, value, limit, f"write it like {key}=256MiB")]
    if not 1 <= nbytes <= parse_size(LARGEST_SIZE):
        limit = f"must be more than 0 and at most {LARGEST_SIZE}"
        return [Problem(key, value, limit, f"write it like {key}=256MiB")]
    return []


def _check_range(key: str, value: float) -> list[Problem]:
    smallest, largest = RANGES[key]
    if smallest <= value <= largest:  # a NaN is not
        return []
    limit = f"must be between {smallest} and {largest}"
    near = largest if value > largest else smallest
    return [Problem(key, value, limit, f"set {key}={near}, or something between")]


def _check_address(key: str, value: str) -> list[Problem]:
    try:
        ip_address(value)
    except ValueError:
        limit = "must be an IP address: a name may come to mean another one"
        return [Problem(key, value, limit, f"set {key}=127.0.0.1, or 0.0.0.0 for all addresses")]
    return []


def _check_eviction(key: str, value: str) -> list[Problem]:
    names = PolicyRegistry().names()
    if value in names:
        return []
    return [Problem(key, value, "is not an eviction policy", did_you_mean(value, names))]


def _check_edge(key: str, value: str) -> list[Problem]:
    try:
        Edge.parse(value)
    except ConfigError:
        limit = f"must be one of {', '.join(EDGE_WORDS)}"
        return [Problem(key, value, limit, did_you_mean(value, EDGE_WORDS))]
    return []


def _check_order(key: str, order: list[str]) -> list[Problem]:
    problems = []
    for name in order:
        if name not in TIERS:
            problems.append(Problem(key, name, "is not a tier", did_you_mean(str(name), TIERS)))
    if not order or (order[0] != "shm" and not problems):
        problems.append(Problem(key, list(order), "must begin with 'shm'", f"set {key}=[shm]"))
    if len(set(order)) != len(order):
        problems.append(Problem(key, list(order), "names a tier twice", "name each tier once"))
    return problems
