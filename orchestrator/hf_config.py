"""The KV-cache geometry that a Hugging Face `config.json` describes.

Only geometry is read; no code of a model repository is ever run, no weights are opened, nothing is
fetched. A file that describes a cache which the groups of `backends.config` cannot express (state
space layers, KV shared between layers, chunked attention, ...) is refused by name rather than
approximated.

Where the file leaves something out, the defaults and rules are those of the model's configuration
class in transformers 5.23 (`src/transformers/models/<model_type>/configuration_<model_type>.py`);
number of KV heads and head size follow `ModelConfig.get_total_num_kv_heads` and `get_head_size` of
vLLM (`vllm/config/model.py`).

A `quantization_config.kv_cache_scheme` is not interpreted: scales and packing belong to the
engine. It is reported as `kv_quantized`, so that nobody takes the weights' dtype for the cache's.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from backends.errors import ConfigError
from backends.layout import Finding
from orchestrator import hf_rules as rules

MAX_CONFIG_BYTES = 10 * 2**20
MAX_LAYERS = 4096
MAX_ELEMENTS = 2**20
MAX_TOKENS = 2**31
_ROPE_TEXT_CHARS = 400


class HfConfigError(ConfigError):
    """A config.json cannot be read, or describes a cache that is not supported.

    `findings` holds every reason; their keys are paths of fields inside the file, "" for the file.
    """

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("; ".join(describe(finding) for finding in self.findings))


def describe(finding: Finding) -> str:
    """One reason in one sentence."""
    return f"{finding.key}: {finding.limit}" if finding.key else finding.limit


@dataclass(frozen=True, slots=True)
class HfGeometry:
    """The cache that a config.json describes, in global (unsharded) terms.

    `name` is "" and `dtype` None where the file does not say. `mla_latent_size` is the elements of
    latent and RoPE part together, 0 without MLA; then `kv_heads` is 1 and `head_size` equals it.
    `sliding_window` (tokens) holds for `sliding_layers`; it is None where these are empty. `rope`
    is a canonical text of the RoPE settings, or its digest where that would be long.
    """

    name: str
    num_layers: int
    kv_heads: int
    head_size: int
    mla_latent_size: int
    sliding_window: int | None
    sliding_layers: tuple[int, ...]
    dtype: str | None
    kv_quantized: bool
    rope: str


def read_geometry(path: str) -> HfGeometry:
    """The geometry in the config.json at `path`. Raises HfConfigError with every reason."""
    return geometry(load_config(path))


def load_config(path: str) -> dict[str, object]:
    """The JSON object at `path`: a regular file of at most 10 MiB. Raises HfConfigError."""

    def refuse(limit: str, fix: str) -> HfConfigError:
        return HfConfigError([Finding("", path, limit, fix)])

    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        hint = "write the home directory out" if path.startswith("~") else "give a readable file"
        raise refuse(f"cannot be opened: {reason}", f"{hint}: /path/to/config.json") from None
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise refuse(
                "is a directory, expected a file", f"use {os.path.join(path, 'config.json')}"
            )
        if not stat.S_ISREG(status.st_mode):
            raise refuse("is not a regular file", "give the path of a config.json")
        # Read one byte more than allowed: the file may grow between fstat and read.
        with open(descriptor, "rb", closefd=False) as stream:
            data = stream.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror}", "give a readable file") from None
    finally:
        os.close(descriptor)
    if len(data) > MAX_CONFIG_BYTES:
        raise refuse(
            f"is larger than {MAX_CONFIG_BYTES // 2**20} MiB, expected a config.json of a few KiB",
            "give the config.json, not the weights or the tokenizer",
        )
    try:
        parsed = json.loads(data, parse_constant=_no_constant)
    except RecursionError:
        raise refuse("is nested too deeply", "give the config.json as it was published") from None
    except ValueError as error:
        raise refuse(f"is not JSON: {error}", "give the config.json as it was published") from None
    if not isinstance(parsed, dict):
        raise refuse(
            f"holds a JSON {_kind(parsed)}, expected an object",
            "give the config.json, not another file of the repository",
        )
    return parsed


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not a JSON number")


def _kind(value: object) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


class _Fields:
    """Reads fields of one JSON object and collects what is wrong with them."""

    def __init__(self, values: Mapping[str, object], prefix: str) -> None:
        self.values = values
        self.prefix = prefix
        self.findings: list[Finding] = []
        self.model_type = str(values.get("model_type") or "")
        self._defaults = rules.CLASS_DEFAULTS.get(self.model_type, {})

    def get(self, name: str) -> object:
        """The field, or the class's default; null counts as left out."""
        value = self.values.get(name)
        return self._defaults.get(name) if value is None else value

    def complain(self, name: str, value: object, limit: str, fix: str) -> None:
        self.findings.append(Finding(self.prefix + name, value, limit, fix))

    def count(
        self, names: Sequence[str], *, limit: int = MAX_ELEMENTS, least: int = 1
    ) -> int | None:
        """The first of `names` that is there, None if none is; -1 after a complaint."""
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                found = f"{_kind(value)} found, expected an integer"
                self.complain(name, value, found, f"correct {name}")
                return -1
            if not least <= value <= limit:
                self.complain(
                    name,
                    value,
                    f"{value} found, expected {least} to {limit}",
                    f"correct {name}",
                )
                return -1
            return value
        return None

    def needed(self, names: Sequence[str], *, limit: int = MAX_ELEMENTS, least: int = 1) -> int:
        """As `count`, and leaving it out is a complaint too."""
        value = self.count(names, limit=limit, least=least)
        if value is None:
            others = f" (as are {', '.join(names[1:])})" if len(names) > 1 else ""
            self.complain(
                names[0],
                None,
                f"missing{others}",
                "add it to the file with the value of the model's configuration class, or leave "
                "model.hf_config out and set the geometry under model",
            )
            return -1
        return value


def geometry(config: Mapping[str, object]) -> HfGeometry:
    """The geometry in a parsed config.json. Raises HfConfigError with every reason."""
    values, prefix = _text_part(config)
    fields = _Fields(values, prefix)
    if config.get("is_encoder_decoder") or values.get("is_encoder_decoder"):
        fields.complain("is_encoder_decoder", True, *_not_there("encoder-decoder models"))
    _refuse_unsupported(fields)
    if fields.findings:
        # What else is missing from a file of another kind of model would only distract.
        raise HfConfigError(fields.findings)
    num_layers = fields.needed(rules.LAYERS, limit=MAX_LAYERS)
    latent = _mla_latent(fields)
    kv_heads, head_size = (1, latent) if latent else _heads(fields)
    window, sliding = _sliding(fields, num_layers)
    if latent and sliding:
        what = "latents with a sliding window"
        fields.complain("sliding_window", window, *_not_there(what))
    dtype = _dtype(fields, config)
    if fields.findings:
        raise HfConfigError(fields.findings)
    return HfGeometry(
        name=_name(config),
        num_layers=num_layers,
        kv_heads=kv_heads,
        head_size=head_size,
        mla_latent_size=latent,
        sliding_window=window if sliding else None,
        sliding_layers=sliding,
        dtype=dtype,
        kv_quantized=_kv_quantized(config) or _kv_quantized(values),
        rope=_rope(fields),
    )


def _not_there(what: str) -> tuple[str, str]:
    return (
        f"{what} are not there yet",
        "choose a model whose layers each keep K and V, or a latent, for every token",
    )


def _text_part(config: Mapping[str, object]) -> tuple[Mapping[str, object], str]:
    """The language model's part and its path in the file."""
    thinker = config.get("thinker_config")
    if isinstance(thinker, dict):
        values, prefix = _text_part(thinker)
        return values, "thinker_config." + prefix
    for name in rules.TEXT_PARTS:
        part = config.get(name)
        if isinstance(part, dict):
            return part, name + "."
    return config, ""


def _refuse_unsupported(fields: _Fields) -> None:
    if fields.model_type in rules.UNSUPPORTED_TYPES:
        what = rules.UNSUPPORTED_TYPES[fields.model_type]
        fields.complain("model_type", fields.model_type, *_not_there(what))
    for name, what in rules.UNSUPPORTED_FIELDS.items():
        if fields.get(name):
            fields.complain(name, fields.get(name), *_not_there(what))
    if fields.get("layer_types") is not None:
        return
    if fields.get("attention_chunk_size"):
        chunk = fields.get("attention_chunk_size")
        fields.complain("attention_chunk_size", chunk, *_not_there(rules.CHUNKED))
    for name in rules.STATE_FIELDS:
        value = fields.get(name)
        if isinstance(value, list):
            value = [entry for entry in value if entry not in rules.ATTENTION_ENTRIES]
        if value:
            fields.complain(name, fields.get(name), *_not_there(rules.HYBRID))
            return


def _mla_latent(fields: _Fields) -> int:
    """Elements that MLA keeps per token and layer (DeepSeek-V3: 512 + 64); 0 without MLA."""
    rank = fields.count(["kv_lora_rank"])
    if rank is None:
        return 0
    # 0 is a model without a decoupled RoPE part.
    return rank + fields.needed(["qk_rope_head_dim"], least=0)


def _heads(fields: _Fields) -> tuple[int, int]:
    """KV heads and head size of ordinary attention; negative after a complaint."""
    attention_config = fields.get("attn_config")
    kv_heads: int | None
    if fields.get("multi_query") is True and not fields.get("new_decoder_architecture"):
        kv_heads = 1
    elif isinstance(attention_config, dict) and attention_config.get("kv_n_heads") is not None:
        nested = _Fields(attention_config, f"{fields.prefix}attn_config.")
        kv_heads = nested.count(["kv_n_heads"])
        fields.findings += nested.findings
    else:
        kv_heads = fields.count(rules.KV_HEADS)
    head_size = fields.count(rules.HEAD_SIZE)
    if kv_heads is None or head_size is None:
        heads = fields.needed(rules.HEADS)
        kv_heads = heads if kv_heads is None else kv_heads
        if head_size is None:
            head_size = _divided_head_size(fields, heads)
    if (value_size := fields.count(["v_head_dim"])) not in (None, -1, head_size):
        fields.complain("v_head_dim", value_size, *_not_there("heads with K and V of two sizes"))
    return kv_heads, head_size


def _divided_head_size(fields: _Fields, heads: int) -> int:
    hidden = fields.needed(rules.HIDDEN)
    if min(hidden, heads) < 1:
        return -1
    if hidden % heads:
        fields.complain(
            "hidden_size",
            hidden,
            f"{hidden} found, expected a multiple of the {heads} heads, as head_dim is missing",
            "add head_dim to the file",
        )
        return -1
    return hidden // heads


def _sliding(fields: _Fields, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """The window in tokens and the layers that have it."""
    if num_layers < 1:
        return None, ()
    if fields.get("layer_types") is not None:
        layers = _sliding_by_types(fields, num_layers)
    elif _window_is_off(fields):
        layers = ()
    else:
        layers = _sliding_by_rule(fields, num_layers)
    if not layers:
        return None, ()
    return fields.needed(["sliding_window"], limit=MAX_TOKENS), layers


def _window_is_off(fields: _Fields) -> bool:
    """Qwen and SmolLM3 files carry a sliding_window that holds only if `use_sliding_window`."""
    off_by_default = fields.model_type.startswith(("qwen", "smollm3"))
    used = fields.get("use_sliding_window")
    return not used if isinstance(used, bool) else off_by_default


def _sliding_by_types(fields: _Fields, num_layers: int) -> tuple[int, ...]:
    types = fields.get("layer_types")
    if not isinstance(types, list) or len(types) != num_layers:
        found = f"{len(types)} entries" if isinstance(types, list) else _kind(types)
        fields.complain(
            "layer_types",
            None,
            f"{found} found, expected a list of {num_layers}, one entry for each layer",
            "correct layer_types or the number of layers",
        )
        return ()
    names = [str(name) for name in types]
    for name in sorted(set(names) - rules.ATTENTION_LAYERS):
        what = rules.HYBRID if name in rules.STATE_LAYERS else f"layers of type {name!r}"
        fields.complain("layer_types", name, *_not_there(what))
    return tuple(layer for layer, name in enumerate(names) if name == "sliding_attention")


def _sliding_by_rule(fields: _Fields, num_layers: int) -> tuple[int, ...]:
    """The layers with a window where the file does not list them, as transformers does it."""
    if fields.get("sliding_window") is None:
        return ()
    if fields.get("use_sliding_window") is True and fields.get("max_window_layers") is not None:
        first = fields.count(["max_window_layers"], least=0)
        return tuple(range(first or 0, num_layers)) if first != -1 else ()
    pattern = fields.get("sliding_window_pattern")
    if pattern is None:
        pattern = fields.get("_sliding_window_pattern")
    if pattern is None:
        pattern = rules.FULL_EVERY.get(fields.model_type)
    if isinstance(pattern, str) and pattern and not set(pattern) - {"L", "G"}:
        # As EXAONE 4 has it: L local, G global, repeated; the last layer is global always.
        kinds = (pattern[layer % len(pattern)] for layer in range(num_layers - 1))
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "L")
    if pattern is not None:
        if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
            fields.complain(
                "sliding_window_pattern",
                pattern,
                f"{pattern!r} found, expected a positive integer or a text such as LLLG",
                "correct sliding_window_pattern, or add layer_types",
            )
            return ()
        return tuple(layer for layer in range(num_layers) if (layer + 1) % pattern)
    if fields.model_type in rules.UNIFORM_WINDOW:
        return tuple(range(num_layers))
    fields.complain(
        "sliding_window",
        fields.get("sliding_window"),
        f"set, but nothing says for which layers of a model of type {fields.model_type!r}",
        "add layer_types to the file: sliding_attention or full_attention for each layer",
    )
    return ()


def _dtype(fields: _Fields, config: Mapping[str, object]) -> str | None:
    for values, prefix in ((fields.values, fields.prefix), (config, "")):
        for name in ("torch_dtype", "dtype"):
            value = values.get(name)
            if isinstance(value, str):
                return value.removeprefix("torch.")
            if value is not None:
                fields.findings.append(
                    Finding(
                        prefix + name,
                        value,
                        f"{_kind(value)} found, expected a string such as bfloat16",
                        f"correct {name}, or remove it and set model.dtype",
                    )
                )
                return None
    return None


def _kv_quantized(values: Mapping[str, object]) -> bool:
    for name in ("quantization_config", "compression_config"):
        quantization = values.get(name)
        if isinstance(quantization, dict) and (
            quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
        ):
            return True
    return False


def _name(config: Mapping[str, object]) -> str:
    """The model's name in the hub, if the file has one; a local path names nothing."""
    name = config.get("_name_or_path")
    if not isinstance(name, str) or name.startswith(("/", ".", "~")) or "\\" in name:
        return ""
    return name


def _rope(fields: _Fields) -> str:
    """Canonical JSON of what decides the rotation of K; equal settings give equal text."""
    settings = {name: fields.get(name) for name in rules.ROPE_FIELDS}
    scaling = settings["rope_scaling"] or settings["rope_parameters"]
    if isinstance(scaling, dict):
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind in ("dynamic", "longrope", "su"):
            settings["max_position_embeddings"] = fields.get("max_position_embeddings")
    present = {name: value for name, value in settings.items() if value is not None}
    if not present:
        return ""
    text = json.dumps(_canonical(present), sort_keys=True, separators=(",", ":"))
    if len(text) <= _ROPE_TEXT_CHARS:
        return text
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _canonical(value: object) -> object:
    """Numbers as floats, so that 500000 and 500000.0 are one setting."""
    if isinstance(value, dict):
        return {key: _canonical(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_canonical(entry) for entry in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
        return float(value)
    return value
