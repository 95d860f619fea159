"""Whether a declared KV geometry makes sense: every reason why not, at once.

Only what the declaration says by itself; whether it can be divided over ranks is
`backends.layout.check_sharding`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from backends.config import GROUP_KINDS
from backends.layout import Finding
from orchestrator.hf_config import MAX_ELEMENTS, MAX_LAYERS, MAX_TOKENS
from orchestrator.problems import did_you_mean

if TYPE_CHECKING:
    from orchestrator.model import KvGroupConf, ModelConf


def named(groups: Sequence[KvGroupConf]) -> list[tuple[str, KvGroupConf]]:
    """Each group with its name: its own, or its kind, numbered where there are several."""
    kinds = [group.kind for group in groups]
    result = []
    for index, group in enumerate(groups):
        number = kinds[:index].count(group.kind)
        numbered = f"{group.kind}_{number}" if kinds.count(group.kind) > 1 else group.kind
        result.append((group.name or numbered, group))
    return result


def window(conf: ModelConf, group: KvGroupConf) -> int | None:
    """The group's sliding window in tokens; None where its attention is full or nothing says."""
    if group.kind != "sliding_window":
        return None
    return conf.sliding_window if group.sliding_window is None else group.sliding_window


def check_geometry(conf: ModelConf) -> list[Finding]:
    """What is wrong with layers, heads, windows and groups; `conf.hf_config` is not read."""
    findings = _out_of_range("model.num_layers", conf.num_layers, MAX_LAYERS)
    if conf.mla_latent_size:
        findings += _check_mla(conf)
    else:
        findings += _out_of_range("model.kv_heads", conf.kv_heads, MAX_ELEMENTS)
        findings += _out_of_range("model.head_size", conf.head_size, MAX_ELEMENTS)
    if conf.sliding_window is not None:
        findings += _check_window(conf)
    for index, group in enumerate(conf.groups):
        findings += _check_group(conf, group, f"model.groups[{index}]")
    if conf.groups:
        findings += _check_names(conf)
        if 1 <= conf.num_layers <= MAX_LAYERS:
            findings += _check_coverage(conf)
    return findings


def _out_of_range(key: str, value: int, limit: int) -> list[Finding]:
    if 1 <= value <= limit:
        return []
    fix = f"set {key}, or model.hf_config=/path/to/config.json"
    return [Finding(key, value, f"must be between 1 and {limit}", fix)]


def _check_mla(conf: ModelConf) -> list[Finding]:
    findings = _out_of_range("model.mla_latent_size", conf.mla_latent_size, MAX_ELEMENTS)
    if conf.kv_heads not in (0, 1):
        findings.append(
            Finding(
                "model.kv_heads",
                conf.kv_heads,
                "must be 1 with model.mla_latent_size: every head reads the same latent",
                "set model.kv_heads=1, or model.mla_latent_size=0 for ordinary attention",
            )
        )
    if conf.head_size not in (0, conf.mla_latent_size):
        findings.append(
            Finding(
                "model.head_size",
                conf.head_size,
                f"must equal model.mla_latent_size = {conf.mla_latent_size}, or be 0",
                "set both to latent plus RoPE elements (DeepSeek-V3: 512 + 64 = 576)",
            )
        )
    return findings


def _check_window(conf: ModelConf) -> list[Finding]:
    tokens = conf.sliding_window
    assert tokens is not None
    findings = []
    if not 1 <= tokens <= MAX_TOKENS:
        findings.append(
            Finding(
                "model.sliding_window",
                tokens,
                f"must be between 1 and {MAX_TOKENS} tokens",
                "set model.sliding_window=null where attention is full",
            )
        )
    if conf.mla_latent_size and not conf.groups:
        findings.append(
            Finding(
                "model.sliding_window",
                tokens,
                "cannot hold for latent attention (model.mla_latent_size)",
                "set model.sliding_window=null, or put its layers in a group of their own",
            )
        )
    if conf.groups and all(group.kind != "sliding_window" for group in conf.groups):
        findings.append(
            Finding(
                "model.sliding_window",
                tokens,
                "is used by no group: none in model.groups is of kind sliding_window",
                "set model.sliding_window=null, or kind: sliding_window for its layers",
            )
        )
    return findings


def _check_group(conf: ModelConf, group: KvGroupConf, key: str) -> list[Finding]:
    if group.kind not in GROUP_KINDS:
        hint = did_you_mean(group.kind, GROUP_KINDS)
        kinds = f"must be one of {', '.join(GROUP_KINDS)}"
        return [Finding(f"{key}.kind", group.kind, kinds, hint)]
    findings = []
    if not group.layers:
        findings.append(
            Finding(f"{key}.layers", [], "must not be empty", "list its layers, or drop the group")
        )
    for name, limit in (
        ("kv_heads", MAX_ELEMENTS),
        ("head_size", MAX_ELEMENTS),
        ("sliding_window", MAX_TOKENS),
        ("tokens_per_block", MAX_TOKENS),
    ):
        value = getattr(group, name)
        if value is not None:
            findings += _out_of_range(f"{key}.{name}", value, limit)
    if group.kind != "sliding_window" and group.sliding_window is not None:
        findings.append(
            Finding(
                f"{key}.sliding_window",
                group.sliding_window,
                f"has no meaning for a group of kind {group.kind}",
                f"remove it, or set {key}.kind=sliding_window",
            )
        )
    if group.kind == "sliding_window" and window(conf, group) is None:
        findings.append(
            Finding(
                f"{key}.sliding_window",
                None,
                "must be set for a group of kind sliding_window",
                f"set {key}.sliding_window, or model.sliding_window for all such groups",
            )
        )
    if group.kind == "mla":
        if group.kv_heads not in (None, 1):
            findings.append(
                Finding(f"{key}.kv_heads", group.kv_heads, "must be 1 for kind mla", "remove it")
            )
        if group.head_size is None and not conf.mla_latent_size:
            findings.append(
                Finding(
                    f"{key}.head_size",
                    None,
                    "must be set for kind mla where model.mla_latent_size is 0",
                    "set model.mla_latent_size to latent plus RoPE elements",
                )
            )
    elif conf.mla_latent_size:
        findings += [
            Finding(
                f"{key}.{name}",
                None,
                f"must be set for kind {group.kind}: the model's own value is that of its latent",
                f"set {key}.{name}",
            )
            for name in ("kv_heads", "head_size")
            if getattr(group, name) is None
        ]
    return findings


def _check_names(conf: ModelConf) -> list[Finding]:
    names = [name for name, _ in named(conf.groups)]
    return [
        Finding(
            f"model.groups[{index}].name",
            name,
            f"is also the name of model.groups[{names.index(name)}]",
            "give each group a name of its own",
        )
        for index, name in enumerate(names)
        if names.index(name) != index
    ]


def _check_coverage(conf: ModelConf) -> list[Finding]:
    """Groups divide the layers: each layer is in exactly one."""
    findings = []
    owners: dict[int, int] = {}
    for index, group in enumerate(conf.groups):
        key = f"model.groups[{index}].layers"
        outside = sorted({layer for layer in group.layers if not 0 <= layer < conf.num_layers})
        if outside:
            findings.append(
                Finding(
                    key,
                    _spans(outside),
                    f"must be between 0 and {conf.num_layers - 1}, as model.num_layers is "
                    f"{conf.num_layers}",
                    "correct the layers, or model.num_layers",
                )
            )
        taken: dict[int, list[int]] = {}
        for layer in group.layers:
            if layer in owners:
                taken.setdefault(owners[layer], []).append(layer)
            owners.setdefault(layer, index)
        for owner, layers in taken.items():
            other = "twice in this group" if owner == index else f"in model.groups[{owner}] too"
            findings.append(
                Finding(
                    key,
                    _spans(sorted(set(layers))),
                    f"must hold each layer once; these are {other}",
                    "leave each layer in exactly one group",
                )
            )
    missing = [layer for layer in range(conf.num_layers) if layer not in owners]
    if missing:
        findings.append(
            Finding(
                "model.groups",
                None,
                f"must cover every layer; in no group: {_spans(missing)}",
                "add them to a group, or correct model.num_layers",
            )
        )
    return findings


def _spans(layers: Iterable[int]) -> str:
    """Ascending numbers in short: `0-3, 7`."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and layer == spans[-1][1] + 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in spans[:12]]
    return ", ".join(shown + ["..."] * (len(spans) > 12))
