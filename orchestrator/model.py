"""The model's KV geometry: what a user declares, and the backends' objects it comes to.

`model.hf_config` names a Hugging Face config.json. The file then wins over every field of geometry
(layers, heads, head size, MLA, windows, groups, RoPE): which of them came from a YAML default and
which from a user cannot be known here. `name` and `dtype` are choices rather than geometry, so
what is set stays, and the file decides where `name` is empty or `dtype` is `auto`. `revision` is
never in such a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from backends.config import DTYPE_BYTES, KvGroup, ModelConfig
from backends.errors import ConfigError
from backends.layout import Finding
from orchestrator.hf_config import HfConfigError, HfGeometry, describe, read_geometry
from orchestrator.model_check import check_geometry, named, window
from orchestrator.problems import did_you_mean

_TEXT_CHARS = 256
# What people call these elsewhere; difflib alone finds none of them.
_DTYPE_NICKNAMES = {
    "bf16": "bfloat16",
    "float": "float32",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "half": "float16",
}


# Not frozen: OmegaConf makes list entries of a frozen class read-only, and then an override such as
# model.groups.0.sliding_window=64 is refused.
@dataclass
class KvGroupConf:
    """Layers that share one kind of KV cache. None: the model's own value."""

    name: str = ""  # empty: the kind, numbered where it is not the only one
    kind: str = "full"  # full, sliding_window or mla
    layers: list[int] = field(default_factory=list)
    kv_heads: int | None = None
    head_size: int | None = None
    sliding_window: int | None = None  # tokens
    tokens_per_block: int | None = None  # of one worker; None: engine.tokens_per_block


@dataclass(frozen=True)
class ModelConf:
    """Geometry of a model's KV cache, before any parallelism."""

    name: str = ""
    revision: str = "main"
    num_layers: int = 0
    kv_heads: int = 0
    head_size: int = 0  # elements
    dtype: str = "bfloat16"  # of the KV cache; auto: as the config.json has it
    mla_latent_size: int = 0  # elements of latent and RoPE part per token; 0: no MLA
    sliding_window: int | None = None  # tokens; of all layers, where groups are not given
    groups: list[KvGroupConf] = field(default_factory=list)  # empty: one group of all layers
    hf_config: str | None = None  # path of a config.json that the geometry is read from
    rope: str = ""  # RoPE settings, as text: part of the namespace of stored blocks


def check_model(conf: ModelConf) -> list[Finding]:
    """Everything that is wrong with `conf` (and with the config.json it names), at once."""
    return _examine(conf)[1]


def expand_model(conf: ModelConf) -> ModelConf:
    """`conf` with what its config.json says filled in, and `hf_config` None.

    The result stands for itself: it stays the same when the file changes or is not there. Raises
    ConfigError with everything that `check_model` finds.
    """
    expanded, findings = _examine(conf)
    if findings:
        raise ConfigError(
            "\n".join(f"{f.key} is {f.value!r}: {f.limit}; {f.fix}" for f in findings)
        )
    return expanded


def resolve_model(conf: ModelConf) -> tuple[ModelConfig, tuple[KvGroup, ...]]:
    """The backends' objects. Raises ConfigError with everything that `check_model` finds."""
    expanded = expand_model(conf)
    model = ModelConfig(expanded.name, expanded.revision, expanded.dtype, expanded.num_layers)
    groups = tuple(
        KvGroup(
            name=name,
            kind=group.kind,
            # The order in which a file lists layers must not change where their bytes lie.
            layers=tuple(sorted(group.layers)),
            kv_heads=_kv_heads(expanded, group),
            head_size=_head_size(expanded, group),
            planes=1 if group.kind == "mla" else 2,
            sliding_window=window(expanded, group),
            tokens_per_block=group.tokens_per_block,
        )
        for name, group in named(_groups(expanded))
    )
    return model, groups


def _groups(conf: ModelConf) -> list[KvGroupConf]:
    """The declared groups, or the one that stands for all layers."""
    if conf.groups:
        return list(conf.groups)
    if conf.mla_latent_size:
        kind = "mla"
    elif conf.sliding_window is not None:
        kind = "sliding_window"
    else:
        kind = "full"
    return [KvGroupConf(kind=kind, layers=list(range(conf.num_layers)))]


def _kv_heads(conf: ModelConf, group: KvGroupConf) -> int:
    if group.kind == "mla":
        return 1
    return conf.kv_heads if group.kv_heads is None else group.kv_heads


def _head_size(conf: ModelConf, group: KvGroupConf) -> int:
    if group.head_size is not None:
        return group.head_size
    return conf.mla_latent_size if group.kind == "mla" else conf.head_size


def _examine(conf: ModelConf) -> tuple[ModelConf, list[Finding]]:
    """The expanded configuration and what is wrong; geometry is checked only where it is known."""
    findings: list[Finding] = []
    expanded: ModelConf | None = conf
    quantized = False
    if conf.hf_config is not None:
        expanded = None
        try:
            read = read_geometry(conf.hf_config)
        except HfConfigError as error:
            findings += [
                Finding("model.hf_config", conf.hf_config, describe(found), found.fix)
                for found in error.findings
            ]
        else:
            expanded, quantized = _filled(conf, read), read.kv_quantized
    known = expanded or conf
    if expanded or conf.name:
        findings += _check_text("model.name", known.name)
    findings += _check_text("model.revision", known.revision)
    if expanded or conf.dtype != "auto":
        findings += _check_dtype(conf, known.dtype, quantized)
    if expanded:
        findings += check_geometry(expanded)
    return known, findings


def _filled(conf: ModelConf, read: HfGeometry) -> ModelConf:
    groups: list[KvGroupConf] = []
    if 0 < len(read.sliding_layers) < read.num_layers:
        sliding = set(read.sliding_layers)
        full = [layer for layer in range(read.num_layers) if layer not in sliding]
        groups = [
            KvGroupConf(name="full", kind="full", layers=full),
            KvGroupConf(
                name="sliding_window",
                kind="sliding_window",
                layers=list(read.sliding_layers),
                sliding_window=read.sliding_window,
            ),
        ]
        # The group of layer 0 first, as vLLM orders them.
        groups.sort(key=lambda group: group.layers[0])
    return replace(
        conf,
        name=conf.name or read.name,
        num_layers=read.num_layers,
        kv_heads=read.kv_heads,
        head_size=read.head_size,
        dtype=conf.dtype if conf.dtype != "auto" else read.dtype or "auto",
        mla_latent_size=read.mla_latent_size,
        sliding_window=None if groups else read.sliding_window,
        groups=groups,
        hf_config=None,
        rope=read.rope,
    )


def _check_text(key: str, value: str) -> list[Finding]:
    """Name and revision keep the stored blocks of two models apart, and stand in manifests."""
    if value.strip() and value.isprintable() and len(value) <= _TEXT_CHARS:
        return []
    limit = f"must be printable text of 1 to {_TEXT_CHARS} characters"
    return [Finding(key, value[:_TEXT_CHARS], limit, f"set {key}")]


def _check_dtype(conf: ModelConf, dtype: str, quantized: bool) -> list[Finding]:
    if dtype == "auto":
        reason = (
            "needs model.hf_config to read it from"
            if conf.hf_config is None
            else "cannot be decided: the config.json names no dtype"
        )
        fix = f"set model.dtype to one of {', '.join(DTYPE_BYTES)}"
        return [Finding("model.dtype", conf.dtype, reason, fix)]
    if conf.dtype == "auto" and quantized:
        return [
            Finding(
                "model.dtype",
                conf.dtype,
                "cannot be decided: the config.json quantises the KV cache (kv_cache_scheme)",
                "set model.dtype to the elements that the engine keeps, such as float8_e4m3fn",
            )
        ]
    if dtype not in DTYPE_BYTES:
        nickname = _DTYPE_NICKNAMES.get(dtype)
        hint = f"did you mean {nickname!r}?" if nickname else did_you_mean(dtype, DTYPE_BYTES)
        source = " in the config.json" if conf.dtype == "auto" else ""
        return [Finding("model.dtype", dtype, f"is not a known dtype{source}", hint)]
    return []
