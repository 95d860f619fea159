"""Geometry from Hugging Face config.json files: the files under tests/data/hf hold public facts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.layout import Finding
from orchestrator.hf_config import (
    MAX_CONFIG_BYTES,
    HfConfigError,
    HfGeometry,
    geometry,
    load_config,
    read_geometry,
)

DATA = Path(__file__).parents[1] / "data" / "hf"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
SLIDING, FULL = "sliding_attention", "full_attention"


def known(name: str) -> HfGeometry:
    return read_geometry(str(DATA / f"{name}.json"))


def variant(**changes: Any) -> dict[str, Any]:
    return LLAMA | changes


def reasons(config: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(HfConfigError) as caught:
        geometry(config)
    return {finding.key: finding.limit for finding in caught.value.findings}


@pytest.mark.parametrize(
    ("name", "layers", "kv_heads", "head_size", "latent", "dtype"),
    [
        ("llama_3_1_8b", 32, 8, 128, 0, "bfloat16"),
        ("llama_3_1_70b", 80, 8, 128, 0, "bfloat16"),
        ("qwen3_32b", 64, 8, 128, 0, "bfloat16"),
        ("qwen2_5_72b", 80, 8, 128, 0, "bfloat16"),
        ("mistral_7b_v0_1", 32, 8, 128, 0, "bfloat16"),
        ("gemma_2_9b", 42, 8, 256, 0, "bfloat16"),
        ("gemma_3_4b", 34, 4, 256, 0, "bfloat16"),
        ("gpt_oss_20b", 24, 8, 64, 0, None),
        ("deepseek_v3", 61, 1, 576, 576, "bfloat16"),
        ("gpt2", 12, 12, 64, 0, None),
        ("falcon_7b", 32, 1, 64, 0, "bfloat16"),
    ],
)
def test_published_files_give_their_models_geometry(
    name: str, layers: int, kv_heads: int, head_size: int, latent: int, dtype: str | None
) -> None:
    read = known(name)
    assert (read.num_layers, read.kv_heads, read.head_size) == (layers, kv_heads, head_size)
    assert (read.mla_latent_size, read.dtype) == (latent, dtype)


@pytest.mark.parametrize(
    ("name", "window", "layers"),
    [
        ("llama_3_1_8b", None, []),
        ("qwen3_32b", None, []),
        ("qwen2_5_72b", None, []),  # sliding_window is set, use_sliding_window is false
        ("mistral_7b_v0_1", 4096, range(32)),
        ("gemma_2_9b", 4096, range(0, 42, 2)),
        ("gemma_3_4b", 1024, [layer for layer in range(34) if layer % 6 != 5]),
        ("gpt_oss_20b", 128, range(0, 24, 2)),
        ("deepseek_v3", None, []),
    ],
)
def test_published_files_give_the_layers_that_have_a_window(
    name: str, window: int | None, layers: range
) -> None:
    read = known(name)
    assert (read.sliding_window, read.sliding_layers) == (window, tuple(layers))


def test_a_file_without_layer_types_follows_its_class() -> None:
    listed = json.loads((DATA / "gpt_oss_20b.json").read_text())
    unlisted = {key: value for key, value in listed.items() if key != "layer_types"}
    assert geometry(unlisted) == geometry(listed)


@pytest.mark.parametrize(
    ("changes", "sliding"),
    [
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}, [3]),
        # QwQ-32B as some publish it: switched on, but for no layer.
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4}, []),
        ({"model_type": "qwen2"}, []),
        ({"model_type": "mistral", "use_sliding_window": False}, []),
        ({"sliding_window_pattern": 3}, [0, 1, 3]),
        ({"sliding_window_pattern": 1}, []),
        ({"sliding_window_pattern": "LLG"}, [0, 1]),
        ({"model_type": "cohere2"}, [0, 1, 2]),
        ({"layer_types": [FULL, SLIDING, "attention", SLIDING]}, [1, 3]),
        ({"layer_types": [FULL] * 4}, []),
        ({"model_type": "phi3"}, [0, 1, 2, 3]),
    ],
)
def test_every_way_to_say_which_layers_slide(changes: dict[str, Any], sliding: list[int]) -> None:
    read = geometry(variant(sliding_window=8, **changes))
    assert list(read.sliding_layers) == sliding
    assert read.sliding_window == (8 if sliding else None)


def test_a_lone_window_of_an_unknown_type_is_not_guessed() -> None:
    found = reasons(variant(model_type="brand_new", sliding_window=8))
    assert "which layers" in found["sliding_window"]


def test_an_unknown_model_type_with_the_usual_fields_works() -> None:
    assert geometry(variant(model_type="brand_new")) == geometry(LLAMA)
    without = {key: value for key, value in LLAMA.items() if key != "model_type"}
    assert geometry(without) == geometry(LLAMA)


@pytest.mark.parametrize(
    ("changes", "kv_heads", "head_size"),
    [
        ({"num_key_value_heads": None}, 4, 16),
        ({"head_dim": 40}, 2, 40),
        ({"head_dim": 40, "hidden_size": None}, 2, 40),
        ({"num_key_value_heads": None, "num_kv_heads": 1}, 1, 16),
        ({"multi_query": True}, 1, 16),
        ({"multi_query": True, "new_decoder_architecture": True}, 2, 16),
        ({"attn_config": {"kv_n_heads": 4}}, 4, 16),
        ({"num_attention_heads": None, "head_dim": 8}, 2, 8),
        ({"kv_channels": 24}, 2, 24),
    ],
)
def test_heads_are_found_under_every_name(
    changes: dict[str, Any], kv_heads: int, head_size: int
) -> None:
    read = geometry(variant(**changes))
    assert (read.kv_heads, read.head_size) == (kv_heads, head_size)


@pytest.mark.parametrize("part", ["text_config", "llm_config", "language_config"])
def test_the_language_model_of_a_multimodal_file_is_read(part: str) -> None:
    nested = {"model_type": "some_vlm", "num_hidden_layers": 99, part: LLAMA}
    assert geometry(nested) == geometry(LLAMA)
    assert geometry({"thinker_config": nested}) == geometry(LLAMA)


def test_the_outer_dtype_holds_where_the_inner_part_has_none() -> None:
    inner = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    assert geometry({"dtype": "torch.float16", "text_config": inner}).dtype == "float16"


def test_a_local_path_is_not_taken_for_the_models_name() -> None:
    assert known("llama_3_1_8b").name == "meta-llama/Llama-3.1-8B"
    assert geometry(variant(_name_or_path="/data/checkpoints/step-4")).name == ""
    assert geometry(LLAMA).name == ""


@pytest.mark.parametrize(
    "quantization", [{"kv_cache_scheme": {"num_bits": 8}}, {"kv_cache_quant_algo": "FP8"}]
)
def test_a_quantised_kv_cache_is_noticed(quantization: dict[str, Any]) -> None:
    assert geometry(variant(quantization_config=quantization)).kv_quantized
    assert not known("deepseek_v3").kv_quantized  # its weights are fp8, its cache is not


def test_rope_text_is_canonical_and_tells_settings_apart() -> None:
    assert geometry(LLAMA).rope == ""
    whole = geometry(variant(rope_theta=500000)).rope
    assert whole == geometry(variant(rope_theta=500000.0, rope_scaling=None)).rope
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert len({whole, geometry(variant(rope_theta=10000.0)).rope}) == 2
    assert (
        geometry(variant(rope_scaling=yarn)).rope
        == geometry(variant(rope_scaling=dict(reversed(yarn.items())))).rope
    )
    assert geometry(variant(rope_scaling=yarn | {"factor": 8})).rope != (
        geometry(variant(rope_scaling=yarn)).rope
    )


def test_long_rope_settings_become_a_digest_that_still_tells_them_apart() -> None:
    def rope(last: float) -> str:
        factors = [1.0625] * 63 + [last]
        return geometry(variant(rope_scaling={"type": "longrope", "long_factor": factors})).rope

    assert rope(1.0).startswith("sha256:")
    assert rope(1.0) != rope(2.0)


def test_context_length_matters_only_where_rope_depends_on_it() -> None:
    def rope(kind: str, context: int) -> str:
        scaling = {"rope_type": kind, "factor": 2.0}
        return geometry(variant(rope_scaling=scaling, max_position_embeddings=context)).rope

    assert rope("dynamic", 4096) != rope("dynamic", 8192)
    assert rope("yarn", 4096) == rope("yarn", 8192)


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"layer_types": ["linear_attention", FULL] * 2}, "layer_types", "hybrid state models"),
        ({"layer_types": ["mamba", FULL] * 2}, "layer_types", "hybrid state models"),
        ({"mamba_d_state": 16}, "mamba_d_state", "hybrid state models"),
        ({"layers_block_type": ["mamba", "attention"]}, "layers_block_type", "hybrid state"),
        ({"attn_type_list": [0, 0, 0, 1]}, "attn_type_list", "hybrid state models"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types", "chunked_attention"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size", "chunked attention"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers", "share another layer's KV"),
        ({"index_topk": 2048}, "index_topk", "indexer"),
        ({"cross_attention_layers": [1]}, "cross_attention_layers", "cross-attention"),
        ({"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config", "different heads"),
        ({"v_head_dim": 24}, "v_head_dim", "two sizes"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder", "encoder-decoder"),
        ({"model_type": "minicpm3"}, "model_type", "expand their latent"),
    ],
)
def test_a_cache_of_another_kind_is_refused_by_name(
    changes: dict[str, Any], field: str, words: str
) -> None:
    found = reasons(variant(**changes))
    assert words in found[field]
    assert "not there yet" in found[field]


def test_a_published_hybrid_is_refused() -> None:
    with pytest.raises(HfConfigError, match="hybrid state models are not there yet"):
        known("qwen3_next_80b")


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["attention"] * 4, "mamba_d_state": 128},  # granite 4.0 without mamba
        {"attn_type_list": [1, 1, 1, 1]},  # MiniMax-M2
        {"num_kv_shared_layers": 0, "use_cla": False, "cla_share_factor": 2},
        {"v_head_dim": 16},
    ],
)
def test_leftover_fields_of_other_kinds_do_not_get_in_the_way(changes: dict[str, Any]) -> None:
    assert geometry(variant(**changes)) == geometry(LLAMA)


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers", "missing"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers", "string found, expected an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers", "boolean found"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", "0 found, expected 1 to"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers", "expected 1 to 4096"),
        ({"num_key_value_heads": 2.5}, "num_key_value_heads", "number found"),
        ({"num_key_value_heads": [4, 2]}, "num_key_value_heads", "list found"),
        ({"attn_config": {"kv_n_heads": -1}}, "attn_config.kv_n_heads", "-1 found"),
        ({"num_attention_heads": None}, "num_attention_heads", "missing"),
        ({"hidden_size": 65}, "hidden_size", "expected a multiple of the 4 heads"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim", "missing"),
        ({"layer_types": [FULL] * 3}, "layer_types", "3 entries found, expected a list of 4"),
        ({"layer_types": FULL}, "layer_types", "string found"),
        ({"layer_types": [SLIDING] * 4}, "sliding_window", "missing"),
        ({"sliding_window": 0, "model_type": "mistral"}, "sliding_window", "0 found"),
        ({"sliding_window": 8, "sliding_window_pattern": "XL"}, "sliding_window_pattern", "'XL'"),
        ({"torch_dtype": {"text": "bfloat16"}}, "torch_dtype", "object found"),
    ],
)
def test_wrong_fields_are_named_with_what_was_found(
    changes: dict[str, Any], field: str, words: str
) -> None:
    assert words in reasons(variant(**changes))[field]


def test_all_wrong_fields_are_reported_at_once() -> None:
    wrong = variant(num_hidden_layers="x", num_key_value_heads=0, hidden_size=None, torch_dtype=1)
    assert set(reasons({"text_config": wrong})) == {
        "text_config.num_hidden_layers",
        "text_config.num_key_value_heads",
        "text_config.hidden_size",
        "text_config.torch_dtype",
    }


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b'{"rope_theta": NaN}', "NaN is not a JSON number"),
        (b"\xff\xfe\xff", "is not JSON"),
        (b'{"num_hidden_layers": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[1]", "holds a JSON list, expected an object"),
        (b"null", "holds a JSON null, expected an object"),
        (b'{"a": "' + b"x" * MAX_CONFIG_BYTES + b'"}', "larger than 10 MiB"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(HfConfigError, match=words):
        load_config(str(path))


def test_a_path_that_is_no_readable_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path, words in (
        (str(tmp_path / "absent.json"), "No such file"),
        (str(tmp_path), "is a directory"),
        (str(pipe), "is not a regular file"),
        ("/dev/zero", "is not a regular file"),
        (str(loop), "cannot be opened"),
        ("", "cannot be opened"),
        ("nul\0byte", "null byte"),
    ):
        with pytest.raises(HfConfigError, match=words):
            load_config(path)


def test_the_fix_for_a_directory_names_the_file_in_it(tmp_path: Path) -> None:
    with pytest.raises(HfConfigError) as caught:
        load_config(str(tmp_path))
    assert str(tmp_path / "config.json") in caught.value.findings[0].fix


def test_links_are_followed_as_the_hub_cache_has_them(tmp_path: Path) -> None:
    link = tmp_path / "config.json"
    link.symlink_to(DATA / "gpt2.json")
    assert read_geometry(str(link)) == known("gpt2")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
FIELDS = sorted(
    {
        *LLAMA,
        *("head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "layer_types"),
        *("sliding_window", "sliding_window_pattern", "use_sliding_window", "max_window_layers"),
        *("rope_scaling", "rope_parameters", "attn_config", "text_config", "thinker_config"),
        *("quantization_config", "attn_type_list", "mamba_d_state", "multi_query", "dtype"),
    }
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6))
def test_any_json_gives_a_geometry_or_findings_and_nothing_else(changes: dict[str, Any]) -> None:
    findings: tuple[Finding, ...] = ()
    read = None
    try:
        read = geometry(LLAMA | changes)
    except HfConfigError as error:
        findings = error.findings
    if read is None:
        assert findings
        assert all(finding.limit and finding.fix for finding in findings)
    else:
        assert min(read.num_layers, read.kv_heads, read.head_size) >= 1
        assert set(read.sliding_layers) <= set(range(read.num_layers))
        assert (read.sliding_window is not None) == bool(read.sliding_layers)
