"""Model geometry from YAML or a config.json: what it resolves to, and every way to get it wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from backends.config import KvGroup, ModelConfig
from backends.errors import ConfigError
from orchestrator.model import KvGroupConf, ModelConf, check_model, expand_model, resolve_model

ROOT = Path(__file__).parents[2]
HF = ROOT / "tests" / "data" / "hf"
GOOD = ModelConf(name="m", num_layers=4, kv_heads=2, head_size=16)
LATENT = ModelConf(name="m", num_layers=4, kv_heads=1, head_size=576, mla_latent_size=576)


def shipped(name: str) -> ModelConf:
    """A file of conf/model, through the types that Hydra checks it against."""
    values = OmegaConf.load(ROOT / "conf" / "model" / f"{name}.yaml")
    conf = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConf), values))
    assert isinstance(conf, ModelConf)
    return conf


def grouped(*groups: KvGroupConf, **changes: Any) -> ModelConf:
    return replace(GOOD, groups=list(groups), **changes)


def found(conf: ModelConf) -> dict[str, str]:
    return {finding.key: finding.limit for finding in check_model(conf)}


def bytes_per_token(name: str) -> int:
    model, groups = resolve_model(shipped(name))
    elements = sum(g.planes * len(g.layers) * g.kv_heads * g.head_size for g in groups)
    return elements * model.itemsize_bytes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3_1_8b", 128 * 1024),
        ("llama3_1_70b", 320 * 1024),
        ("qwen3_32b", 256 * 1024),
        ("deepseek_v3", 61 * 576 * 2),
        ("gpt_oss_20b", 48 * 1024),
        ("tiny", 4 * 2 * 16 * 2 * 2),
    ],
)
def test_shipped_models_keep_the_bytes_per_token_they_are_known_for(
    name: str, expected: int
) -> None:
    assert bytes_per_token(name) == expected


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (ROOT / "conf" / "model").glob("*.yaml"))
)
def test_every_shipped_model_is_sound_and_carries_no_import_path(name: str) -> None:
    model = shipped(name)
    if name == "hf":  # the one that has to be told where its config.json is
        assert check_model(model)
        model = replace(model, hf_config=str(HF / "llama_3_1_8b.json"))
        assert expand_model(model).name == "meta-llama/Llama-3.1-8B"
    assert check_model(model) == []
    assert "_target_" not in (ROOT / "conf" / "model" / f"{name}.yaml").read_text()


@pytest.mark.parametrize(
    "name", ["llama3_1_8b", "llama3_1_70b", "qwen3_32b", "deepseek_v3", "gpt_oss_20b"]
)
def test_shipped_models_equal_what_their_config_json_says(name: str) -> None:
    file = HF / f"{name.replace('llama3', 'llama_3')}.json"
    read = expand_model(ModelConf(hf_config=str(file)))
    assert resolve_model(read) == resolve_model(shipped(name))
    assert read.rope == shipped(name).rope != ""


def test_without_groups_all_layers_are_one_group_of_the_models_kind() -> None:
    layers = tuple(range(4))
    assert resolve_model(GOOD) == (
        ModelConfig("m", "main", "bfloat16", 4),
        (KvGroup("full", "full", layers, 2, 16, 2),),
    )
    assert resolve_model(replace(GOOD, sliding_window=8))[1] == (
        KvGroup("sliding_window", "sliding_window", layers, 2, 16, 2, 8),
    )
    assert resolve_model(LATENT)[1] == (KvGroup("mla", "mla", layers, 1, 576, 1),)
    left_out = replace(LATENT, kv_heads=0, head_size=0)
    assert resolve_model(left_out) == resolve_model(LATENT)


def test_one_value_of_one_group_can_be_overridden() -> None:
    values = OmegaConf.load(ROOT / "conf" / "model" / "gpt_oss_20b.yaml")
    composed = OmegaConf.merge(OmegaConf.structured(ModelConf), values)
    OmegaConf.set_readonly(composed, None)  # as the schema thaws the class itself
    OmegaConf.update(composed, "groups.0.sliding_window", 64)
    conf = OmegaConf.to_object(composed)
    assert isinstance(conf, ModelConf)
    assert resolve_model(conf)[1][0].sliding_window == 64


def test_groups_take_what_they_leave_out_from_the_model() -> None:
    conf = grouped(
        KvGroupConf(kind="sliding_window", layers=[2, 0]),
        KvGroupConf(kind="sliding_window", layers=[1], sliding_window=4, kv_heads=8),
        KvGroupConf(name="last", layers=[3], head_size=32),
        sliding_window=8,
    )
    assert resolve_model(conf)[1] == (
        KvGroup("sliding_window_0", "sliding_window", (0, 2), 2, 16, 2, 8),
        KvGroup("sliding_window_1", "sliding_window", (1,), 8, 16, 2, 4),
        KvGroup("last", "full", (3,), 2, 32, 2),
    )


def test_latent_and_ordinary_layers_can_be_mixed() -> None:
    conf = replace(
        LATENT,
        groups=[
            KvGroupConf(kind="mla", layers=[0, 1]),
            KvGroupConf(kind="full", layers=[2, 3], kv_heads=4, head_size=64),
        ],
    )
    assert resolve_model(conf)[1] == (
        KvGroup("mla", "mla", (0, 1), 1, 576, 1),
        KvGroup("full", "full", (2, 3), 4, 64, 2),
    )


@pytest.mark.parametrize(
    ("conf", "key", "words"),
    [
        (replace(GOOD, name=" "), "model.name", "printable text"),
        (replace(GOOD, name="a\nb"), "model.name", "printable text"),
        (replace(GOOD, name="\ud800"), "model.name", "printable text"),
        (replace(GOOD, revision=""), "model.revision", "printable text"),
        (replace(GOOD, num_layers=0), "model.num_layers", "between 1 and 4096"),
        (replace(GOOD, num_layers=10**9), "model.num_layers", "between 1 and 4096"),
        (replace(GOOD, kv_heads=-2), "model.kv_heads", "between 1 and"),
        (replace(GOOD, head_size=0), "model.head_size", "between 1 and"),
        (replace(GOOD, dtype="bflaot16"), "model.dtype", "not a known dtype"),
        (replace(GOOD, dtype="auto"), "model.dtype", "needs model.hf_config"),
        (replace(GOOD, sliding_window=0), "model.sliding_window", "between 1 and"),
        (replace(GOOD, mla_latent_size=-1, kv_heads=1), "model.mla_latent_size", "between 1 and"),
        (replace(LATENT, kv_heads=8), "model.kv_heads", "must be 1 with model.mla_latent_size"),
        (replace(LATENT, head_size=128), "model.head_size", "must equal model.mla_latent_size"),
        (replace(LATENT, sliding_window=8), "model.sliding_window", "latent attention"),
    ],
)
def test_wrong_values_are_named_with_their_limit(conf: ModelConf, key: str, words: str) -> None:
    assert words in found(conf)[key]


ALL = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("conf", "key", "words"),
    [
        (grouped(KvGroupConf(layers=ALL, kind="ful")), "groups[0].kind", "must be one of full"),
        (grouped(KvGroupConf(layers=[0, 3])), "groups", "in no group: 1-2"),
        (grouped(KvGroupConf(layers=[*ALL, 4, 5, 9])), "groups[0].layers", "between 0 and 3"),
        (grouped(KvGroupConf(layers=[-1, *ALL])), "groups[0].layers", "between 0 and 3"),
        (grouped(KvGroupConf(layers=[*ALL, 2])), "groups[0].layers", "twice in this group"),
        (
            grouped(KvGroupConf(name="a", layers=ALL), KvGroupConf(name="b", layers=[1])),
            "groups[1].layers",
            "in model.groups[0] too",
        ),
        (
            grouped(
                KvGroupConf(name="a", layers=ALL),
                KvGroupConf(name="b", layers=[1]),
                KvGroupConf(name="c", layers=[1]),
            ),
            "groups[2].layers",
            "in model.groups[0] too",
        ),
        (
            grouped(KvGroupConf(name="a", layers=ALL), KvGroupConf(name="b")),
            "groups[1].layers",
            "must not be empty",
        ),
        (
            grouped(KvGroupConf(name="a", layers=[0, 1]), KvGroupConf(name="a", layers=[2, 3])),
            "groups[1].name",
            "also the name of model.groups[0]",
        ),
        (grouped(KvGroupConf(layers=ALL, kv_heads=0)), "groups[0].kv_heads", "between 1 and"),
        (grouped(KvGroupConf(layers=ALL, head_size=-1)), "groups[0].head_size", "between 1 and"),
        (
            grouped(KvGroupConf(layers=ALL, sliding_window=8)),
            "groups[0].sliding_window",
            "no meaning for a group of kind full",
        ),
        (
            grouped(KvGroupConf(layers=ALL, kind="sliding_window")),
            "groups[0].sliding_window",
            "must be set",
        ),
        (grouped(KvGroupConf(layers=ALL, kind="mla")), "groups[0].head_size", "must be set"),
        (
            grouped(KvGroupConf(layers=ALL, kind="mla", head_size=576, kv_heads=2)),
            "groups[0].kv_heads",
            "must be 1 for kind mla",
        ),
        (
            replace(LATENT, groups=[KvGroupConf(layers=ALL)]),
            "groups[0].kv_heads",
            "must be set for kind full",
        ),
        (
            grouped(KvGroupConf(layers=ALL), sliding_window=8),
            "sliding_window",
            "is used by no group",
        ),
    ],
)
def test_wrong_groups_are_named_with_their_limit(conf: ModelConf, key: str, words: str) -> None:
    assert words in found(conf)[f"model.{key}"]


def test_all_errors_are_reported_at_once_each_with_a_fix() -> None:
    conf = grouped(
        KvGroupConf(name="a", layers=[0], kind="window"),
        KvGroupConf(name="a", layers=[0, 9], sliding_window=4),
        name="",
        dtype="float61",
        kv_heads=0,
    )
    assert set(found(conf)) == {
        "model.name",
        "model.dtype",
        "model.kv_heads",
        "model.groups",
        "model.groups[0].kind",
        "model.groups[1].layers",
        "model.groups[1].name",
        "model.groups[1].sliding_window",
    }
    assert all(finding.fix for finding in check_model(conf))
    with pytest.raises(ConfigError, match=r"(?s)model\.name.*model\.groups\[1\]\.name"):
        resolve_model(conf)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("bfloat61", "bfloat16"), ("fp8", "float8_e4m3fn"), ("half", "float16"), ("bf16", "bfloat16")],
)
def test_a_misspelt_dtype_gets_a_suggestion(wrong: str, meant: str) -> None:
    (finding,) = check_model(replace(GOOD, dtype=wrong))
    assert finding.fix == f"did you mean {meant!r}?"


def test_a_misspelt_group_kind_gets_a_suggestion() -> None:
    (finding,) = check_model(grouped(KvGroupConf(kind="sliding", layers=ALL)))
    assert finding.fix == "did you mean 'sliding_window'?"


def write(path: Path, **changes: Any) -> str:
    config = json.loads((HF / "llama_3_1_8b.json").read_text()) | changes
    path.write_text(json.dumps(config))
    return str(path)


def test_a_config_json_wins_over_the_geometry_of_the_yaml() -> None:
    conf = replace(shipped("gpt_oss_20b"), hf_config=str(HF / "llama_3_1_8b.json"))
    expanded = expand_model(conf)
    assert resolve_model(conf)[1] == resolve_model(shipped("llama3_1_8b"))[1]
    assert expanded.rope == shipped("llama3_1_8b").rope


def test_wrong_geometry_beside_a_config_json_is_no_error() -> None:
    conf = ModelConf(num_layers=-1, sliding_window=-5, hf_config=str(HF / "llama_3_1_8b.json"))
    assert check_model(conf) == []


def test_name_dtype_and_revision_stay_as_set_beside_a_config_json(tmp_path: Path) -> None:
    path = write(tmp_path / "config.json", torch_dtype="float16")
    asked = ModelConf(name="mine", revision="v2", dtype="float8_e4m3fn", hf_config=path)
    assert resolve_model(asked)[0] == ModelConfig("mine", "v2", "float8_e4m3fn", 32)
    auto = ModelConf(dtype="auto", hf_config=path)
    assert resolve_model(auto)[0] == ModelConfig("meta-llama/Llama-3.1-8B", "main", "float16", 32)


def test_an_expanded_model_does_not_need_its_file_any_more(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "config.json", torch_dtype="float32"))
    conf = ModelConf(dtype="auto", hf_config=str(path))
    expanded, resolved = expand_model(conf), resolve_model(conf)
    path.unlink()
    assert expanded.hf_config is None
    assert expand_model(expanded) == expanded
    assert resolve_model(expanded) == resolved


def test_layers_that_alternate_become_two_groups_in_the_order_of_their_first_layer() -> None:
    conf = ModelConf(name="g", hf_config=str(HF / "gemma_3_4b.json"))
    groups = resolve_model(conf)[1]
    assert [(g.name, g.layers[0], len(g.layers), g.sliding_window) for g in groups] == [
        ("sliding_window", 0, 29, 1024),
        ("full", 5, 5, None),
    ]


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"num_hidden_layers": None}, "model.hf_config", "num_hidden_layers: missing"),
        ({"ssm_state_size": 16}, "model.hf_config", "hybrid state models are not there yet"),
        ({"torch_dtype": None}, "model.dtype", "names no dtype"),
        ({"torch_dtype": "float64"}, "model.dtype", "not a known dtype in the config.json"),
        ({"_name_or_path": ""}, "model.name", "printable text"),
        (
            {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}},
            "model.dtype",
            "quantises the KV cache",
        ),
    ],
)
def test_what_a_config_json_lacks_is_an_error_of_the_key_that_can_mend_it(
    tmp_path: Path, changes: dict[str, Any], key: str, words: str
) -> None:
    path = write(tmp_path / "config.json", **changes)
    problems = found(ModelConf(dtype="auto", hf_config=path))
    assert list(problems) == [key]
    assert words in problems[key]


def test_an_explicit_dtype_settles_a_quantised_cache(tmp_path: Path) -> None:
    path = write(tmp_path / "c.json", quantization_config={"kv_cache_scheme": {"num_bits": 8}})
    assert check_model(ModelConf(dtype="float8_e4m3fn", hf_config=path)) == []


def test_every_fault_of_a_config_json_comes_with_the_users_own_errors(tmp_path: Path) -> None:
    path = write(tmp_path / "config.json", num_hidden_layers=0, num_key_value_heads="8")
    problems = check_model(ModelConf(revision="", dtype="fp8", hf_config=path))
    assert [(p.key, p.limit.split(":")[0]) for p in problems if p.key == "model.hf_config"] == [
        ("model.hf_config", "num_hidden_layers"),
        ("model.hf_config", "num_key_value_heads"),
    ]
    assert {"model.revision", "model.dtype"} < {p.key for p in problems}


def test_a_missing_config_json_is_reported_with_its_path(tmp_path: Path) -> None:
    path = str(tmp_path / "absent.json")
    (finding,) = check_model(replace(GOOD, hf_config=path))
    assert (finding.key, finding.value) == ("model.hf_config", path)
    assert "No such file" in finding.limit


def test_planning_imports_neither_torch_nor_hydra() -> None:
    code = (
        "import sys, orchestrator.model, backends.layout;"
        "print(sorted({'torch', 'hydra', 'omegaconf', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[]\n", done.stderr
