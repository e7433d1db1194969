"""MoKConfig and MoEShape: defaults, and an error that names argument, value and rule for everything else."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from mok_modular.config import PRESETS, MoEShape, MoKConfig
from mok_modular.protocol.errors import MAX_PRINTED_WAITS, MoKDeadlockError, MoKPeerError, MoKTimeoutError


def test_defaults() -> None:
    assert dataclasses.asdict(MoKConfig()) == {
        "mode": "fused",
        "minibatch_size": 4096,
        "macrobatch_size": 131072,
        "fwd_num_comm_sms": None,
        "bwd_num_comm_sms": None,
        "schedule_capacity_multiplier": None,
        "all_gather_top_experts_chunk_bytes": 2048,
        "dispatch": "pull",
        "combine": "push",
        "wire": "bf16",
        "signal_grain": "row_block",
        "ring": "interleaved",
        "row_block": None,
        "start_timeout_s": 300,
        "timeout_s": 10,
        "num_reserved_sms": 0,
        "signals": "direct",
        "allow_shared_gpu": False,
        "trace": False,
        "stages": {},
    }


def test_frozen_hashable_and_equal() -> None:
    assert MoKConfig(mode="split") == MoKConfig(mode="split")
    assert hash(MoKConfig(mode="split")) == hash(MoKConfig(mode="split"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        MoKConfig().mode = "split"  # type: ignore[misc]


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "split"},
        {"mode": "dispatch|gate_up+swiglu|down+combine"},
        {"minibatch_size": 128, "macrobatch_size": 128},
        {"minibatch_size": 384, "macrobatch_size": 1152, "row_block": 128},
        {"minibatch_size": 256, "macrobatch_size": 512, "row_block": 256},
        {"fwd_num_comm_sms": 16},
        {"schedule_capacity_multiplier": 2},
        {"schedule_capacity_multiplier": 1.25},
        {"dispatch": "push", "combine": "pull"},
        {"signal_grain": "minibatch", "ring": "serial"},
        {"start_timeout_s": 0, "timeout_s": 0.5, "num_reserved_sms": 4},
    ],
)
def test_accepted(options: dict[str, Any]) -> None:
    config = MoKConfig(**options)
    for name, value in options.items():
        assert getattr(config, name) == value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "turbo"}, ["mode", "'turbo'", "fused"]),
        ({"mode": "dispatch|down|gate_up|swiglu|combine"}, ["mode", "'gate_up'", "'down'", "order"]),
        ({"minibatch_size": 0}, ["minibatch_size", "0", "at least 1"]),
        ({"minibatch_size": 100}, ["minibatch_size", "100", "128"]),
        ({"minibatch_size": 128, "macrobatch_size": 256, "row_block": 256}, ["minibatch_size", "128", "256"]),
        ({"minibatch_size": 4096, "macrobatch_size": 6144}, ["macrobatch_size", "6144", "4096"]),
        ({"minibatch_size": 4096, "macrobatch_size": 2048}, ["macrobatch_size", "2048", "4096"]),
        ({"macrobatch_size": -4096}, ["macrobatch_size", "-4096"]),
        ({"minibatch_size": 2**31, "macrobatch_size": 2**31}, ["macrobatch_size", "2147483648"]),
        ({"row_block": 64}, ["row_block", "64", "128, 256"]),
        ({"dispatch": "pul"}, ["dispatch", "'pul'", "'pull'", "'push'"]),
        ({"combine": "both"}, ["combine", "'both'", "'push'", "'pull'"]),
        ({"signal_grain": "row"}, ["signal_grain", "'row'", "'row_block'"]),
        ({"ring": "lag"}, ["ring", "'lag'", "'serial'"]),
        ({"fwd_num_comm_sms": 0}, ["fwd_num_comm_sms", "0"]),
        ({"schedule_capacity_multiplier": 0.0}, ["schedule_capacity_multiplier", "0.0"]),
        ({"schedule_capacity_multiplier": float("inf")}, ["schedule_capacity_multiplier", "inf"]),
        ({"all_gather_top_experts_chunk_bytes": 0}, ["all_gather_top_experts_chunk_bytes", "0"]),
        ({"timeout_s": -1}, ["timeout_s", "-1"]),
        ({"start_timeout_s": float("nan")}, ["start_timeout_s", "nan"]),
        ({"num_reserved_sms": -1}, ["num_reserved_sms", "-1"]),
    ],
)
def test_wrong_values_are_named(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        MoKConfig(**options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", None),
        ("minibatch_size", 4096.0),
        ("minibatch_size", True),
        ("macrobatch_size", "131072"),
        ("fwd_num_comm_sms", 1.0),
        ("schedule_capacity_multiplier", "2"),
        ("schedule_capacity_multiplier", True),
        ("all_gather_top_experts_chunk_bytes", None),
        ("dispatch", 1),
        ("ring", None),
        ("row_block", 128.0),
        ("start_timeout_s", None),
        ("timeout_s", False),
        ("num_reserved_sms", None),
    ],
)
def test_wrong_types_are_named(name: str, value: Any) -> None:
    with pytest.raises(TypeError) as caught:
        MoKConfig(**{name: value})
    assert name in str(caught.value)
    assert type(value).__name__ in str(caught.value)


@pytest.mark.parametrize("name", ["wire"])
def test_no_option_before_its_feature(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        MoKConfig(**{name: None})


def test_plan_of_mode() -> None:
    assert MoKConfig(mode="split").plan.is_split
    assert str(MoKConfig(mode="dispatch+gate_up|swiglu+down+combine").plan) == ("dispatch+gate_up|swiglu+down+combine")


def test_presets() -> None:
    sizes = {
        name: (s.hidden_size, s.intermediate_size, s.num_experts, s.topk, s.shared_intermediate_size)
        for name, s in PRESETS.items()
    }
    assert sizes == {
        "kimi-k2.7": (7168, 2048, 384, 8, 2048),
        "glm-5.2": (6144, 2048, 256, 8, 2048),
        "qwen3.5-397b": (4096, 1024, 512, 10, 1024),
        "deepseek-v4-pro": (7168, 3072, 384, 6, 3072),
        "tiny": (256, 384, 16, 4, 128),
    }
    assert all(shape.name == name for name, shape in PRESETS.items())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"hidden_size": 100}, ValueError, ["hidden_size", "100", "64"]),
        ({"intermediate_size": 0}, ValueError, ["intermediate_size", "0"]),
        ({"shared_intermediate_size": 65}, ValueError, ["shared_intermediate_size", "65"]),
        ({"topk": 65}, ValueError, ["topk", "65", "64"]),
        ({"topk": 0}, ValueError, ["topk", "0"]),
        ({"num_experts": 0}, ValueError, ["num_experts", "0"]),
        ({"num_experts": 8.0}, TypeError, ["num_experts", "float"]),
        ({"name": 3}, TypeError, ["name", "int"]),
    ],
)
def test_shape_errors(options: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    sizes = {"name": "s", "hidden_size": 64, "intermediate_size": 128, "num_experts": 8, "topk": 2}
    with pytest.raises(error) as caught:
        MoEShape(**{**sizes, **options})
    for word in words:
        assert word in str(caught.value)


WAIT = {
    "rank": 2,
    "stage": "gate_up",
    "task": 17,
    "edge": "x_ready",
    "index": 5,
    "have": 96,
    "want": 128,
    "peer": 0,
}


def test_timeout_error_shows_its_waits() -> None:
    error = MoKDeadlockError("nobody will publish x_ready", [WAIT, {**WAIT, "task": 18, "peer": None}])
    assert isinstance(error, MoKTimeoutError)
    assert isinstance(error, RuntimeError)
    assert error.waits[0] == WAIT
    first, header, row, other = str(error).splitlines()
    assert first == "nobody will publish x_ready"
    assert header.split() == list(WAIT)
    assert row.split() == [str(value) for value in WAIT.values()]
    assert other.split()[-1] == "-"


def test_timeout_error_is_short_and_survives_pickling() -> None:
    error = MoKTimeoutError("late", [{**WAIT, "task": i} for i in range(MAX_PRINTED_WAITS + 40)])
    assert len(str(error).splitlines()) == MAX_PRINTED_WAITS + 3
    assert str(error).endswith("... and 40 more")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is MoKTimeoutError
    assert (str(copy), copy.waits) == (str(error), error.waits)
    assert str(MoKTimeoutError("late")) == "late"


def test_peer_error_names_its_rank() -> None:
    error = pickle.loads(pickle.dumps(MoKPeerError("rank 3: ValueError: H is 100", rank=3)))
    assert error.rank == 3
    assert str(error) == "rank 3: ValueError: H is 100"
