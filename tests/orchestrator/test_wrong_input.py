"""Everything that people type wrong: a clear error, all of it at once, and nothing left behind.

Most rows go through the parts that `launch.py` calls, in this process; those that only a real start
can show are real starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from backends import machine
from orchestrator.compose import register, to_config
from orchestrator.overrides import check_overrides, explain
from orchestrator.problems import ConfigProblems
from orchestrator.validate import validate
from tests.kit import CONF, REPO

HF = REPO / "tests" / "data" / "hf" / "llama_3_1_8b.json"


@dataclass(frozen=True)
class Row:
    """What is typed, and what the error must hold: the key first, then value, limit and fix."""

    typed: tuple[str, ...]
    told: tuple[str, ...]

    @property
    def name(self) -> str:
        return " ".join(self.typed)[:70] or "(nothing)"


def row(*typed: str, told: Sequence[str]) -> Row:
    return Row(typed, tuple(told))


NOT_YET = "is not there yet in this version of kvquay"
UNKNOWN = "is not a key of the configuration"
SIZE = "is not a size: expected a number and a unit, such as 512MiB"
LARGEST = "must be more than 0 and at most 1PiB"
WHOLE = "must be a whole number"

KEYS = [
    row("region.sizee=1GiB", told=["region.sizee", UNKNOWN, "did you mean 'region.size'?"]),
    row("regionsize=1GiB", told=["regionsize", UNKNOWN, "did you mean 'region.size'?"]),
    row("Region.size=1GiB", told=["Region.size", UNKNOWN, "did you mean 'region.size'?"]),
    row("size=1GiB", told=["size", UNKNOWN, "--help lists every key"]),
    row("+foo=1", told=["foo", UNKNOWN, "--help lists every key"]),
    row("++foo=1", told=["foo", UNKNOWN]),
    row("foo.bar.baz=1", told=["foo.bar.baz", UNKNOWN]),
    row("region.size.bytes=1", told=["region.size.bytes", UNKNOWN, "region.size holds one value"]),
    row(
        "tiers.stack.shm.evicton=lru",
        told=["tiers.stack.shm.evicton", "'tiers.stack.shm.eviction'"],
    ),
    row("paralel.data_parallel_size=2", told=["'parallel.data_parallel_size'?"]),
    row("parallel.tp=2", told=["parallel.tp", UNKNOWN, "parallel.tensor_parallel_size"]),
    row("workload.request=2", told=["workload.request", "'workload.requests'?"]),
    row("hydra.run.dirr=/x", told=["hydra.run.dirr"]),
    row("hydra.run.dir=", told=["hydra.run.dir is ''", "must name a directory"]),
    row("hydra.sweep.dir=null", told=["hydra.sweep.dir", "must name a directory"]),
    row("hydra.job.chdir=true", told=["hydra.job.chdir is True", "must stay false"]),
    row("hydra/launcher=nope", told=["hydra/launcher/nope", "basic"]),
    row("~region", told=["region is a group and cannot be deleted", "default, node, shm"]),
    row("~region.size", told=["region.size cannot be deleted", "set region.size to another"]),
    row("~foo", told=["foo", UNKNOWN]),
    row("+region.size=1GiB", told=["region.size is in the", "leave out the +: region.size=1GiB"]),
    row("region.size", told=["region.size cannot be read", "write KEY=VALUE"]),
    row("=3", told=["=3 has no key", "write KEY=VALUE"]),
    row("a=[1", told=["a=[1 cannot be read", "write KEY=VALUE"]),
    row("region.size='8GiB", told=["region.size='8GiB cannot be read"]),
    row("a b=1", told=["a b=1 cannot be read"]),
    row("region.size=\udcff", told=["cannot be read"]),
    row("model.groups=[{nam: x}]", told=["model.groups[0].nam", "did you mean 'name'?"]),
    row("model.groups=[{layers: 3}]", told=["model.groups[0].layers is '3'", "must be a list"]),
    row("model=gpt_oss_20b", "model.groups.0.nam=x", told=["model.groups[0].nam", "not in"]),
    row("model.groups.0.name=x", told=["model.groups[0]"]),
]
OPTIONS = [
    row(
        "region=shmm",
        told=["region is 'shmm'", "did you mean 'shm'? (options: default, node, shm)"],
    ),
    row("parallel=tp2", told=["parallel is 'tp2'", "dp2_tp2"]),
    row("regoin=shm", told=["regoin", "did you mean 'region'?"]),
    row("model=nope", told=["model is 'nope'", "options: deepseek_v3", "tiny"]),
    row("model=null", told=["model must be one option", "tiny"]),
    row("parallel=", told=["parallel is '': must be one option"]),
    row("parallel={a: 1}", told=["parallel is {'a': 1}: is not an option"]),
    row("experiment=nope", told=["experiment is 'nope'", "tight_region"]),
    row("experiment=[tight_region,nope]", told=["experiment is 'nope'", "shared_prompts"]),
    row("+experiment=nope", told=["experiment is 'nope'"]),
    row("profile=cii", told=["profile is 'cii'", "did you mean 'ci'?"]),
    row("engine@foo=reference", told=["engine@foo", "Did you mean to override engine?"]),
    row("tier=shm", told=["'tier'", "tier@tiers.stack.shm"]),
    row("experiment/nope=1", told=["experiment/nope", "did you mean 'experiment'?"]),
]
TO_COME = [
    row("tiers=shm_objects", told=["tiers is 'shm_objects'", "did you mean 'shm_object'?"]),
    row("tiers.order=[shm,objects]", told=["tiers.order is 'objects'", "did you mean 'object'?"]),
    row("tiers.order=[fs]", told=["tiers.order is ['fs']", "begin with 'shm'"]),
    row("tiers.stack.object.url=[x]", told=["tiers.stack.object.url is '[x]'", "must be text"]),
    row("tiers=shm_fs", "tiers.stack.fs.paths=[]", told=["tiers.stack.fs", "paths is empty"]),
    row("tiers=shm_fs", "tiers.stack.fs.paths=[/proc/version/x]", told=["not a directory"]),
    row(
        "tiers=shm_fs", "tiers.stack.fs.capacity=8gigs", told=["tiers.stack.fs.capacity is '8gigs'"]
    ),
    row("tiers=shm_fs", "tiers.stack.fs.capacity=1000TiB", told=["tiers.stack.fs.capacity"]),
    row("tiers=shm_fs", "tiers.stack.fs.durability=ful", told=["durability is 'ful'", "'full'"]),
    row("tiers=shm_fs", "tiers.stack.fs.high_watermark=2", told=["watermarks"]),
    row("tiers=shm_fs", "tiers.stack.fs.path=[a]", told=["tiers.stack.fs.paths"]),
    row("tiers=shm_fs", "tiers.stack.fs.retry_s=nan", told=["retry_s is nan", "must be between"]),
    row("tiers=shm_fs", "tiers.stack.fs.retry_s=60", told=["retry_s is 60", "retry_most_s 30"]),
    row("tiers.stack.fs.affinity=kvcache", told=["affinity is 'kvcache'", "{KEY:VALUE}"]),
    row("tiers.stack.fs.affinity={a:b}", told=["affinity is '{a:b}'", "each KEY a whole number"]),
    row("+tiers.stack.fs.affinity.0=b", told=["affinity.0", "set tiers.stack.fs.affinity={KEY:"]),
    row("tiers=shm_fs", "tiers.stack.fs.affinity={1:elsewhere}", told=["not among paths"]),
    row(
        *("tiers=shm_fs", "tiers.stack.fs.affinity={2:kvcache}"),
        told=["tiers.stack.fs.affinity.2 is 'kvcache'", "data_parallel_rank_local is 0 to 1"],
    ),
    row("spawn=ray", told=["spawn is 'ray'", NOT_YET]),
    row("spawn.kind=ray", told=["spawn.kind is 'ray'", NOT_YET]),
    row("spawn.scope=node", told=["spawn.scope is 'node'", NOT_YET]),
    row("engine=vllm", told=["engine.model must be the directory of a model"]),
    row("engine=vllm", "engine.model=nowhere", told=["engine.model is", "with a config.json"]),
    row("engine.model=m", told=["engine.model is", "the reference engine has no model"]),
    row("action=export", told=["action is 'export'", "add engine=vllm"]),
    row("spawn.nnodes=2", told=["spawn.nnodes is 2", "is not there yet", "action=plan"]),
]
TYPES = [
    row("parallel.data_parallel_size=two", told=["parallel.data_parallel_size is 'two'", WHOLE]),
    row("parallel.data_parallel_size=2.5", told=["parallel.data_parallel_size is '2.5'", WHOLE]),
    row("parallel.data_parallel_size=true", told=["parallel.data_parallel_size is 'true'", WHOLE]),
    row("parallel.data_parallel_size=", told=["parallel.data_parallel_size is ''", WHOLE]),
    row("parallel.data_parallel_size=null", told=["is 'null': must have a value", "=VALUE"]),
    row("parallel.data_parallel_size=[2]", told=["parallel.data_parallel_size is '[2]'", WHOLE]),
    row("workload.requests=all", told=["workload.requests is 'all'", f"{WHOLE} or null"]),
    row("workload.turns=many", told=["workload.turns is 'many'", "must be a number"]),
    row("region.prefault=maybe", told=["region.prefault is 'maybe'", "must be true or false"]),
    row("region.size=[1GiB]", told=["region.size is '[1GiB]'", "must be text"]),
    row("region.size={a: 1}", told=["region.size is '{a: 1}'", "must be text"]),
    row("region.size=null", told=["region.size is 'null'", "must have a value"]),
    row("region.backing=", told=["region.backing is ''", "must be one of memfd, shm"]),
    row("tiers.order=shm", told=["tiers.order is 'shm'", "must be a list in brackets"]),
    row("tiers.order=[[shm]]", told=["tiers.order is '[[shm]]'", "must be a list in brackets"]),
    row("spawn.devices=3", told=["spawn.devices is '3'", "must be a list", "or null"]),
    row("spawn.devices=[a,b]", told=["spawn.devices is '[a,b]'", "each entry a whole number"]),
    row("region.size=1GiB,2GiB", told=["region.size=1GiB,2GiB", "add --multirun"]),
    row("region.size=glob(*)", told=["region.size cannot be swept with glob"]),
    row("region.size=${nope}", told=["region.size has no usable value", "'nope' not found"]),
    row("region.size=${nope:1}", told=["region.size", "Unsupported interpolation type nope"]),
    row("region.size=${oc.env:KVQUAY_NOPE}", told=["region.size", "'KVQUAY_NOPE' not found"]),
    row("region.size=${engine.device}", told=["region.size is 'cpu'", SIZE]),
    row("engine.copy_threads=${region.size}", told=["engine.copy_threads", "'256MiB'"]),
    row("engine.copy_threads=${engine.copy_threads}", told=["engine.copy_threads", "Recursive"]),
]
VALUES = [
    row(
        "action=rum", told=["action is 'rum'", "run, plan, doctor, simulate", "did you mean 'run'?"]
    ),
    row("view=loud", told=["view is 'loud'", "auto, live, plain, quiet"]),
    row("region.backing=hugetlb", told=["region.backing is 'hugetlb'", "memfd, shm"]),
    row("region.huge_pages=yes", told=["region.huge_pages is 'yes'", "off, try, require"]),
    row("region.numa=3", told=["region.numa is '3'", "auto, off"]),
    row("region.pin=true", told=["region.pin is 'true'", "auto, off"]),
    row("engine.device=gpu", told=["engine.device is 'gpu'", "cpu, cuda"]),
    row("engine.device=cuda:0", told=["engine.device is 'cuda:0'", "did you mean 'cuda'?"]),
    row("engine.layout=hnd", told=["engine.layout is 'hnd'", "layers_first, blocks_first"]),
    row("engine.verify=some", told=["engine.verify is 'some'", "all, sample, off"]),
    row("engine.copy_kernel=fast", told=["engine.copy_kernel is 'fast'", "numpy"]),
    row("engine.copy_kernel=cuda", told=["engine.copy_kernel is 'cuda'", "engine.device=cpu"]),
    row("spawn.start_method=forkserver", told=["spawn.start_method", "auto, fork, spawn"]),
    row("spawn.on_failure=ignore", told=["spawn.on_failure is 'ignore'", "stop, continue"]),
    row("tiers.stack.shm.eviction=lrux", told=["tiers.stack.shm.eviction is 'lrux'", "'lru'"]),
    row("tiers.load_from=nearest", told=["tiers.load_from is 'nearest'", "recompute_if_slower"]),
    row("tiers.promotion_share=0.0", told=["tiers.promotion_share", "0 < promotion_share <= 1"]),
    row("tiers.edges.fs=write_thru", told=["tiers.edges.fs is 'write_thru'", "'write_through'"]),
    row(
        *("tiers=shm_fs_object", "tiers.edges.object=write_on_evict"),
        told=["tiers.edges", "does not tell what it is about to evict"],
    ),
    row("tiers.order=[]", told=["tiers.order is []", "must begin with 'shm'"]),
    row("tiers.order=[shm,shm]", told=["tiers.order", "names a tier twice"]),
    row("tiers.order=[dram]", told=["tiers.order is 'dram'", "is not a tier"]),
    *(
        row(f"{key}={value}", told=[f"{key} is {value!r}", SIZE, f"write it like {key}=256MiB"])
        for key in ("region.size", "engine.device_cache_size")
        for value in ("8 gigs", "-1", "8G", "GiB")
    ),
    row("region.size=nan", told=["region.size is 'nan'", SIZE]),
    row("region.size=1e400", told=["region.size", SIZE]),
    row("region.size=0", told=["region.size is '0'", LARGEST]),
    row("region.size=0.4B", told=["region.size is '0.4B'", LARGEST]),
    row("region.size=10PiB", told=["region.size is '10PiB'", LARGEST]),
    row(f"region.size={'9' * 400}.5GiB", told=["region.size", SIZE]),
    row("workload.seed=" + "9" * 30, told=["workload.seed is 99999", "must be at most"]),
    row("spawn.start_timeout_s=0", told=["spawn.start_timeout_s is 0", "between 1 and 604800"]),
    row("spawn.start_timeout_s=inf", told=["spawn.start_timeout_s is inf", "between 1 and"]),
    row("spawn.group_timeout_s=nan", told=["spawn.group_timeout_s is nan", "between 1 and"]),
    row("spawn.stop_timeout_s=-1", told=["spawn.stop_timeout_s is -1", "between 0 and 3600"]),
    row("engine.copy_threads=0", told=["engine.copy_threads is 0", "between 1 and 256"]),
    row("engine.copy_threads=100000", told=["engine.copy_threads is 100000", "between 1 and 256"]),
]
PARALLEL = [
    *(
        row(
            f"parallel.{axis}_parallel_size={size}",
            told=[f"parallel.{axis}_parallel_size is {size}"],
        )
        for axis in ("data", "pipeline", "prefill_context", "tensor", "decode_context")
        for size in (0, -1)
    ),
    row("parallel.tensor_parallel_size=1048577", told=["must be between 1 and 1048576"]),
    row(
        *("parallel.data_parallel_size=1000000", "parallel.tensor_parallel_size=1000000"),
        told=["parallel.data_parallel_size is 1000000", "at most 262144 are planned"],
    ),
    row(
        *("model=llama3_1_8b", "parallel.tensor_parallel_size=3"),
        told=["parallel.tensor_parallel_size is 3", "8 KV heads", "choose 1, 2, 4, 8"],
    ),
    row(
        *("parallel.tensor_parallel_size=4", "parallel.decode_context_parallel_size=3"),
        told=["parallel.decode_context_parallel_size is 3", "tensor_parallel_size = 4", "1, 2, 4"],
    ),
    row(
        *("model=llama3_1_8b", "parallel.tensor_parallel_size=8"),
        *("parallel.decode_context_parallel_size=2",),
        told=["parallel.decode_context_parallel_size is 2", "copies of each KV head", "=16"],
    ),
    row(
        "parallel.pipeline_parallel_size=5",
        told=["parallel.pipeline_parallel_size is 5", "at most the model's 4 layers", "1 to 4"],
    ),
    row(
        *("action=plan", "spawn.nnodes=3", "parallel.data_parallel_size=4"),
        told=["spawn.nnodes is 3", "must divide parallel.data_parallel_size = 4"],
    ),
    row(
        *("action=plan", "spawn.nnodes=6", "parallel.data_parallel_size=2"),
        told=["spawn.nnodes is 6", "3 nodes", "world_size = PP x PCP x TP = 1 x 1 x 2 = 2"],
    ),
    row("spawn.nnodes=0", told=["spawn.nnodes is 0", "must be between 1 and"]),
    row("spawn.node_rank=1", told=["spawn.node_rank is 1", "less than spawn.nnodes = 1"]),
    row("spawn.node_rank=-1", told=["spawn.node_rank is -1", "must be between 0"]),
    row("parallel.nodes=2", told=["parallel.nodes is 2", "differs from spawn.nnodes = 1"]),
    row("spawn.devices_per_node=0", told=["spawn.devices_per_node is 0", "must be between 1"]),
    row(
        "spawn.devices_per_node=3",
        told=["spawn.devices_per_node is 3", "2 replicas x 2 workers on a node need 4 devices"],
    ),
    row("spawn.devices=[0,1]", told=["spawn.devices is [0, 1]", "each of the 4 workers"]),
    row("spawn.devices=[]", told=["spawn.devices is []", "each of the 4 workers"]),
    row("spawn.devices=[0,1,1,2]", told=["spawn.devices is [0, 1, 1, 2]", "different numbers"]),
    row("spawn.devices=[0,1,2,-3]", told=["spawn.devices is [0, 1, 2, -3]", "at least 0"]),
    row("spawn.rdzv_port=70000", told=["spawn.rdzv_port is 70000", "between 0 and 65535"]),
    row("spawn.rdzv_port=-1", told=["spawn.rdzv_port is -1", "between 0 and 65535"]),
    row(
        "spawn.rdzv_port=65535",
        told=["spawn.rdzv_port is 65535", "65535 to 65536", "in 1 to 65535"],
    ),
]
ENGINE = [
    row("engine.tokens_per_block=0", told=["engine.tokens_per_block is 0", "between 1 and"]),
    row("engine.tokens_per_hash=0", told=["engine.tokens_per_hash is 0", "between 1 and"]),
    row(
        "engine.tokens_per_hash=5",
        told=["engine.tokens_per_hash is 5", "must divide", "engine.tokens_per_block = 16"],
    ),
    row(
        *("engine.tokens_per_hash=12", "parallel.prefill_context_parallel_size=2"),
        told=["engine.tokens_per_hash is 12", "x PCP x DCP = 2 = 32 tokens"],
    ),
    row(
        "engine.max_tokens_per_step=100",
        told=["engine.max_tokens_per_step is 100", "one chunk of 512 tokens", "=512"],
    ),
    row("engine.max_tokens_per_step=0", told=["engine.max_tokens_per_step is 0", "between 1 and"]),
    row("region.blocks_per_chunk=0", told=["region.blocks_per_chunk is 0", "between 1 and"]),
    row("region.size=100KiB", told=["region.size is '100KiB'", "holds 0 rows of", "MiB or more"]),
    row(
        *("model=gpt_oss_20b", "region.size=8MiB"),
        told=[
            "region.size is '8MiB'",
            "at least 2 are needed (one a chunk of each KV-cache group)",
        ],
    ),
    row(
        "engine.device_cache_size=64KiB",
        told=[
            "engine.device_cache_size is '64KiB'",
            "holds 16 blocks",
            "one chunk of 32",
            "per rank",
        ],
    ),
    row(
        "region.persist_name=true",
        told=["region.persist_name is True", "has no name to keep", "region.backing=shm"],
    ),
    row(
        *("region.huge_pages=require", "region.backing=shm", "region.size=1MiB"),
        "region.blocks_per_chunk=4",
        told=["region.huge_pages is 'require'", "none are granted", "huge_pages to 'try'"],
    ),
]
MODEL = [
    row(
        *("model.num_layers=0", "model.kv_heads=0", "model.head_size=-1", "model.dtype=bf16"),
        *("model.name=", "model.sliding_window=0"),
        told=[
            *("model.num_layers is 0", "model.kv_heads is 0", "model.head_size is -1"),
            *("model.sliding_window is 0", "must be between 1 and"),
            *("model.dtype is 'bf16'", "did you mean 'bfloat16'?"),
            *("model.name is ''", "must be printable text", "6 problems"),
        ],
    ),
    row("model.head_size=3", told=["model.head_size is 3", "multiple of 8"]),
    row("model.mla_latent_size=-5", told=["model.mla_latent_size is -5", "between 1 and"]),
    row("model.groups=[{layers: [0, 1]}]", told=["model.groups", "in no group: 2-3"]),
    row("model.groups=[{layers: [0], kind: x}]", told=["model.groups[0].kind is 'x'", "full"]),
    row("model=hf", told=["model.dtype is 'auto'", "needs model.hf_config"]),
    row("model=hf", "model.hf_config=/nope.json", told=["model.hf_config is '/nope.json'"]),
    row("model=hf", "model.hf_config=/", told=["model.hf_config is '/'"]),
    row("model=hf", f"model.hf_config={__file__}", told=["model.hf_config is", "JSON"]),
]
WORKLOAD = [
    row(
        *("workload.kind=replay", "workload.policy=random", "workload.on_bad_line=x"),
        *("workload.requests=0", "workload.tokens_per_s=0", "workload.max_imbalance=0.5"),
        told=[
            *("workload.kind", "'replay'", "trace, multi_turn"),
            *("workload.policy", "'random'", "round_robin"),
            *("workload.on_bad_line", "'x'", "skip"),
            *("workload.requests is 0", "at least 1", "6 problems"),
            *("workload.tokens_per_s is 0", "workload.max_imbalance is 0.5"),
        ],
    ),
    row(
        *("workload.conversations=0", "workload.turns=0", "workload.user_tokens=-1"),
        *("workload.think_s=-1", "workload.conversations_per_s=0", "workload.path=/x"),
        "workload.offset=5",
        told=[
            *("workload.conversations is 0", "workload.turns is 0", "workload.user_tokens is -1"),
            *("workload.think_s is -1", "workload.conversations_per_s is 0"),
            *("workload.path is '/x'", "only workload=trace reads a file"),
            *("workload.offset is 5", "7 problems"),
        ],
    ),
    row("workload.conversations=null", told=["workload.conversations", "no end"]),
    row("workload.turns=nan", told=["workload.turns is nan"]),
    row("workload=trace", told=["workload.path", "is not set", "give the path of a trace"]),
    row("workload=trace", "workload.path=/nope", told=["workload.path is '/nope'"]),
    row("workload=trace", "workload.path=/tmp", told=["workload.path is '/tmp'", "directory"]),
    row("workload=trace", "workload.path=/dev/null", told=["workload.path is '/dev/null'"]),
    row(
        *("workload=trace", f"workload.path={HF}", "workload.offset=-1"),
        told=["workload.path is", "line 1 is bad", "workload.offset is -1", "at least 0"],
    ),
]
TABLE = [
    *(KEYS + OPTIONS + TO_COME + TYPES + VALUES + PARALLEL + ENGINE + MODEL + WORKLOAD),
]


def refusal(typed: Sequence[str], run_dir: Path) -> ConfigProblems:
    """What `launch.py` would say, found the way it finds it, but in this process."""
    if problems := check_overrides(typed, CONF):
        return ConfigProblems(problems)
    register()
    OmegaConf.register_new_resolver("kvquay.run_id", lambda: "run", replace=True)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = compose("config", overrides=list(typed))
    except Exception as error:  # as launch.py does
        return ConfigProblems([explain(error)])
    with pytest.raises(ConfigProblems) as caught:
        validate(to_config(composed), run_dir)
    return caught.value


def assert_clear(text: str, told: Sequence[str]) -> None:
    for expected in told:
        assert expected in text
    assert "Traceback" not in text
    assert text.count("      fix: ") == text.count("\n  ") - text.count("      fix: ")
    assert re.match(r"\d+ problems? in the configuration:\n  1\. ", text)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, which must still be empty at the end."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    yield here
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("wrong", TABLE, ids=lambda wrong: wrong.name)
def test_is_refused_with_key_value_limit_and_fix(
    wrong: Row, elsewhere: Path, tmp_path: Path
) -> None:
    assert_clear(str(refusal(wrong.typed, tmp_path)), wrong.told)


def test_errors_of_unlike_kinds_are_all_told_at_once(elsewhere: Path, tmp_path: Path) -> None:
    typed = (
        *("model=llama3_1_8b", "parallel.tensor_parallel_size=3", "engine.tokens_per_hash=5"),
        *("engine.max_tokens_per_step=8", "workload.turns=0", "region.persist_name=true"),
        *("spawn.devices=[1,1]", "parallel.nodes=2", "spawn.node_rank=4", "tiers.order=[]"),
        *("spawn.rdzv_port=65535", "engine.copy_kernel=cuda"),
    )
    # Typed values that are wrong by themselves are told before the rest is composed.
    assert_clear(str(refusal(typed, tmp_path)), ["1 problem ", "tiers.order"])
    found = refusal([text for text in typed if not text.startswith("tiers")], tmp_path)
    assert sorted({problem.key for problem in found.problems}) == [
        *("engine.copy_kernel", "engine.max_tokens_per_step", "engine.tokens_per_hash"),
        *("parallel.nodes", "parallel.tensor_parallel_size", "region.persist_name"),
        *("spawn.devices", "spawn.node_rank", "spawn.rdzv_port", "workload.turns"),
    ]
    assert_clear(str(found), [])


def test_unknown_keys_wrong_types_and_wrong_values_are_told_together(
    elsewhere: Path, tmp_path: Path
) -> None:
    typed = (
        *("region.sizee=1GiB", "foo=1", "region.size=8gigs", "parallel.tensor_parallel_size=two"),
        *("engine=vlm", "model=nope", "action=rum", "tiers.order=[shm,objects]", "a=[", "~spawn"),
    )
    found = refusal(typed, tmp_path)
    assert [problem.key for problem in found.problems] == [
        *("region.sizee", "foo", "region.size", "parallel.tensor_parallel_size", "engine"),
        *("model", "action", "tiers.order", "a=[", "spawn"),
    ]
    assert_clear(str(found), [])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", ["is empty"]),
        (b"\n\n", ["line 1"]),
        (b"not json\n", ["line 1 is bad"]),
        (b"\x80\x81\xff\n", ["line 1 is bad"]),
        (b'{"timestamp": 0}\n', ["line 1 is bad", "input_length"]),
    ],
)
def test_a_file_that_is_no_trace_is_refused(
    elsewhere: Path, tmp_path: Path, content: bytes, told: Sequence[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(content)
    found = refusal(["workload=trace", f"workload.path={trace}"], tmp_path)
    assert_clear(str(found), ["workload.path", str(trace), *told])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("parallel: {data_parallel_size: two}", ["parallel.data_parallel_size", "'two'"]),
        ("region: {size: 8gigs}", ["region.size is '8gigs'", SIZE]),
        ("region: 3", ["RegionConf", "3"]),
        ("region: {size: null}", ["region.size", "Incompatible value 'None'"]),
    ],
)
def test_what_stands_wrong_in_a_file_is_refused(
    elsewhere: Path, tmp_path: Path, content: str, told: Sequence[str]
) -> None:
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(f"# @package _global_\n{content}\n")
    typed = [f"hydra.searchpath=[file://{folder.parent}]", "experiment=mine"]
    assert_clear(str(refusal(typed, tmp_path)), told)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"num_hidden_layers": "many"}'])
def test_a_file_that_is_no_model_is_refused(elsewhere: Path, tmp_path: Path, content: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    found = refusal(["model=hf", f"model.hf_config={file}"], tmp_path)
    assert_clear(str(found), ["model.hf_config", str(file)])


def test_regions_that_dev_shm_cannot_hold_are_refused(elsewhere: Path, tmp_path: Path) -> None:
    size = machine.shm_free_bytes() // 2 + 2**30
    if size > 2**50:
        pytest.skip("/dev/shm has no limit here")
    found = refusal(["region=shm", f"region.size={size}"], tmp_path)
    told = [f"region.size is '{size}'", "/dev/shm: 2 replicas on this node ask", "memfd"]
    assert_clear(str(found), told)


def test_regions_that_memory_cannot_hold_are_refused(elsewhere: Path, tmp_path: Path) -> None:
    size = machine.tightest_memory_limit().limit_bytes
    found = refusal(["action=plan", "parallel=dp1_tp1", f"region.size={size}"], tmp_path)
    told = [f"region.size is '{size}'", "memory", "too much", "spawn.check_machine=false"]
    assert_clear(str(found), told)


def test_all_that_a_node_needs_is_counted_together(elsewhere: Path, tmp_path: Path) -> None:
    """Neither the regions nor the caches are too much, but both are."""
    mib = machine.tightest_memory_limit().available_bytes // 2**20
    typed = [f"region.size={mib * 3 // 10}MiB", f"engine.device_cache_size={mib // 6}MiB"]
    found = refusal(typed, tmp_path)
    told = ["engine.device_cache_size", "of memory: 2 regions of", "4 device caches", "can be used"]
    assert_clear(str(found), told)


def test_a_port_in_use_is_refused(elsewhere: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = str(refusal([f"spawn.rdzv_port={port - 1}"], tmp_path))
    # Whoever else is on this machine may be at the port before it.
    found = found.replace(f": {port - 1}, {port}", f": {port}")
    told = [f"spawn.rdzv_port is {port - 1}", f"in use on this machine: {port}", "rdzv_port=0"]
    assert_clear(found, told)


@pytest.mark.skipif(machine.cuda_device_count() > 0, reason="this machine has CUDA devices")
@pytest.mark.parametrize("more", [[], ["spawn.devices=[0,1,2,3]"]])
def test_cuda_is_refused_where_there_is_none(
    elsewhere: Path, tmp_path: Path, more: list[str]
) -> None:
    found = refusal(["engine.device=cuda", *more], tmp_path)
    assert_clear(str(found), ["engine.device is 'cuda'", "no CUDA device", "engine.device=cpu"])


@dataclass(frozen=True)
class Said:
    """What a real start left: exit status, output, and files under its working directory."""

    status: int
    text: str
    files: list[str]


class Shell:
    """A user at a prompt, in an empty directory and with a home and a /tmp of their own."""

    def __init__(self, home: Path) -> None:
        self.here = home / "here"
        self._quiet = [home / "tmp", home / "home"]
        for path in (self.here, *self._quiet):
            path.mkdir()

    def launch(
        self, *typed: str, before: str = "", environment: dict[str, str] | None = None
    ) -> Said:
        command = [sys.executable, str(REPO / "launch.py"), *typed]
        if before:
            command = ["bash", "-c", f'{before}; exec "$@"', "bash", *command]
        done = subprocess.run(
            command,
            cwd=self.here,
            env=os.environ
            | {"TMPDIR": str(self._quiet[0]), "HOME": str(self._quiet[1])}
            | (environment or {}),
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=120,
        )
        for path in self._quiet:
            assert list(path.iterdir()) == []
        files = sorted(str(p.relative_to(self.here)) for p in self.here.rglob("*") if p.is_file())
        return Said(done.returncode, done.stderr + done.stdout, files)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


RUN_FILES = [
    *("run/.hydra/config.yaml", "run/.hydra/hydra.yaml", "run/.hydra/overrides.yaml"),
    *("run/launch.log", "run/report.html", "run/report.json"),
]
STARTS = [
    row("region.sizee=1GiB", "foo=1", "region.size=8 gigs", told=["3 problems", "did you mean"]),
    row("hydra.run.dir=/proc/kvquay/run", told=["hydra.run.dir is '/proc/kvquay", "No such file"]),
    row(f"hydra.run.dir={HF}/run", told=["hydra.run.dir is '", "Not a directory", "=PATH"]),
    row("-m", f"hydra.sweep.dir={HF}", told=["hydra.run.dir is '", "hydra.sweep.dir=PATH"]),
    row("--config-name", "nope", told=["Cannot find primary config 'nope'"]),
    row("--resolve", told=["--resolve flag can only be used"]),
]


@pytest.mark.multiproc
@pytest.mark.parametrize("wrong", STARTS, ids=lambda wrong: wrong.name)
def test_a_start_is_refused_with_status_2_and_leaves_nothing(wrong: Row, shell: Shell) -> None:
    said = shell.launch(*wrong.typed)
    assert said.status == 2
    assert_clear(said.text.rstrip("\n"), wrong.told)
    assert said.files == []


@pytest.mark.multiproc
def test_what_is_found_late_stands_in_the_report_of_the_run(shell: Shell) -> None:
    said = shell.launch("hydra.run.dir=run", "region.size=${nope}")
    assert said.status == 2
    assert_clear(
        said.text.rstrip("\n"), ["region.size", "'nope' not found", "to a key that exists"]
    )
    assert said.files == RUN_FILES
    report = json.loads((shell.here / "run" / "report.json").read_text())
    assert report["status"] == "invalid_configuration"
    assert [problem["key"] for problem in report["problems"]] == ["region.size"]


@pytest.mark.multiproc
def test_an_unknown_option_is_told_once(shell: Shell) -> None:
    said = shell.launch("--nope")
    assert said.status == 2
    assert said.text.count("unrecognized arguments: --nope") == 1
    assert said.files == []


@pytest.mark.multiproc
def test_a_bad_job_of_a_sweep_is_told_and_the_others_are_done(shell: Shell) -> None:
    typed = ("-m", "action=plan", "hydra.sweep.dir=sweep", "parallel.tensor_parallel_size=3,2")
    said = shell.launch(*typed)
    assert said.status == 2
    assert "parallel.tensor_parallel_size is 3" in said.text
    assert "Traceback" not in said.text
    assert "2 jobs, 1 failed" in said.text
    assert "sweep/1/plan.json" in said.files
    assert "sweep/0/plan.json" not in said.files


@pytest.mark.multiproc
def test_too_few_open_files_are_found_before_a_process_starts(shell: Shell) -> None:
    said = shell.launch("hydra.run.dir=run", before="ulimit -n 70")
    assert said.status == 2
    assert_clear(said.text.rstrip("\n"), ["4 workers on a node", "the limit is 70", "ulimit -n"])
    assert said.files == RUN_FILES


@pytest.mark.multiproc
def test_a_traceback_is_shown_to_those_who_ask_for_it(shell: Shell) -> None:
    typed = ("hydra.run.dir=/proc/kvquay",)
    said = shell.launch(*typed, environment={"HYDRA_FULL_ERROR": "1"})
    assert said.status == 2
    assert "Traceback" in said.text
    assert "hydra.run.dir is '/proc/kvquay'" in said.text


@pytest.mark.multiproc
@pytest.mark.parametrize("typed", [["--cfg", "job"], ["action=plan", "hydra.run.dir=run"]])
def test_a_reader_that_has_gone_away_gets_no_traceback(tmp_path: Path, typed: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, str(REPO / "launch.py"), *typed],
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode not in (0, 2)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with options; only root can."""
    point = tmp_path / "disk"
    point.mkdir()
    done = []

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(point)]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"cannot mount: {made.stderr}")
        done.append(point)
        return point

    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("mounting a file system needs root")
    yield mount
    for path in done:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("options", "fill", "told"),
    [
        ("size=1m", False, ["hydra.run.dir is '", "free, logs and reports want 64 MiB"]),
        ("size=64k", True, ["hydra.run.dir", "No space left on device", "=PATH"]),
        ("ro,size=1m", False, ["hydra.run.dir is '", "Read-only file system", "=PATH"]),
    ],
)
def test_a_disk_that_cannot_take_a_run_is_refused(
    shell: Shell, mounted: Callable[[str], Path], options: str, fill: bool, told: Sequence[str]
) -> None:
    disk = mounted(options)
    if fill:
        with contextlib.suppress(OSError), open(disk / "full", "wb", 0) as file:
            while True:
                file.write(bytes(4096))
    said = shell.launch("action=plan", f"hydra.run.dir={disk}/run")
    assert said.status == 2
    assert_clear(said.text.rstrip("\n"), told)
