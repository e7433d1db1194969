"""MoE against the reference in float64: counts, experts, sizes, dtypes, layouts, and what a user may do with it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import CASES, missing, nobody
from helpers import SMALL_RING, assert_right, make_layer, make_workload, regroup, run_layer, same_bits
from torch import Tensor

from mok_modular import LocalGroup, MoE, MoKConfig, MoKPeerError
from mok_modular.testing import Workload

MODES = ["fused", "split", "dispatch|gate_up+swiglu|down+combine"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_right(case: str, mode: str) -> None:
    num_tokens, options = CASES[case]
    workload = make_workload(num_tokens, **options)
    output = run_layer(workload, MoKConfig(mode=mode, minibatch_size=256, macrobatch_size=1024))
    assert_right(workload, output)


def test_no_routes_give_the_shared_expert_or_zeros() -> None:
    workload = make_workload([20, 3], routing=missing)
    shared_only = make_workload([20, 3], routing=nobody)
    lonely = torch.cat(workload.expert_ids).lt(0).all(1)
    assert 0 < lonely.sum() < len(lonely)
    assert same_bits(run_layer(workload)[lonely], run_layer(shared_only)[lonely])
    assert run_layer(shared_only).abs().sum() > 0
    zeros = run_layer(make_workload([20, 3], routing=nobody, S=0))
    assert same_bits(zeros, torch.zeros_like(zeros))


def test_a_missing_route_is_not_read() -> None:
    """Its router weight may be anything."""
    workload = make_workload([40, 41])
    plain = run_layer(workload)
    for ids, weights in zip(workload.expert_ids, workload.router_weights, strict=True):
        weights[ids < 0] = float("nan")
    assert same_bits(run_layer(workload), plain)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weights", [[2.0**27, -(2.0**27), 1, 0, 0, 0], [0, 0, 2.0**27, 0, -(2.0**27), 1]], ids=str)
def test_routes_are_summed_in_order(mode: str, weights: list[float]) -> None:
    """In float32, k ascending: the large terms cancel exactly before the small one comes, and only then."""
    workload = make_workload(
        [30, 3], K=6, S=0, routing=lambda rank, count, generator: torch.arange(count)[:, None].expand(count, 6) % 8
    )
    outputs = []
    for row in (weights, [float(weight == 1) for weight in weights]):
        workload.router_weights[:] = [torch.tensor(row).expand(len(x), 6).contiguous() for x in workload.x]
        outputs.append(run_layer(workload, MoKConfig(mode=mode, **SMALL_RING)))
    assert outputs[0].abs().sum() > 0
    assert same_bits(*outputs)


@pytest.mark.parametrize("mode", MODES)
def test_a_nan_stays_in_its_token(mode: str) -> None:
    """Rows share tiles, ring slots and padding, but no value."""
    workload = make_workload([130, 130])
    config = MoKConfig(mode=mode, **SMALL_RING)
    plain = run_layer(workload, config)
    workload.x[0][17] = float("nan")
    workload.x[1][129] = float("inf")
    poisoned = run_layer(workload, config)
    rest = torch.ones(260, dtype=torch.bool)
    rest[[17, 259]] = False
    assert same_bits(poisoned[rest], plain[rest])
    assert not poisoned[~rest].isfinite().all()


def test_strided_inputs() -> None:
    """MoE copies what is not contiguous: a transposed x, a slice of ids, a column slice of weights."""
    workload = make_workload([50, 20])
    plain = run_layer(workload)
    strided = Workload(
        workload.shape,
        [x.t().contiguous().t() for x in workload.x],
        [torch.stack([ids, ids + 1], dim=2)[..., 0] for ids in workload.expert_ids],
        [torch.cat([w, w + 1], dim=1)[:, :2] for w in workload.router_weights],
        workload.weights,
    )
    assert not strided.x[0].is_contiguous()
    assert not strided.expert_ids[0].is_contiguous()
    assert not strided.router_weights[0].is_contiguous()
    assert same_bits(run_layer(strided), plain)


def test_strided_weights_are_named() -> None:
    workload = make_workload([10])

    def step(member: Any) -> None:
        layer = make_layer(workload, member)
        layer.w_routed_down.data = layer.w_routed_down.data.transpose(1, 2).contiguous().transpose(1, 2)
        with torch.no_grad():
            layer(workload.x[0], workload.expert_ids[0], workload.router_weights[0])

    with pytest.raises(ValueError, match="w_routed_down must be contiguous"):
        LocalGroup(1).run(step)


def test_deterministic_algorithms() -> None:
    """torch then fills fresh memory with NaN."""
    workload = make_workload([50, 0, 31, 7])
    plain = run_layer(workload, MoKConfig(mode="split", **SMALL_RING))
    torch.use_deterministic_algorithms(True)
    try:
        assert same_bits(run_layer(workload, MoKConfig(mode="split", **SMALL_RING)), plain)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("x", lambda x: x.half(), TypeError, ["x must be torch.bfloat16", "torch.float16"]),
        ("x", lambda x: x.float(), TypeError, ["x must be torch.bfloat16", "torch.float32"]),
        ("x", lambda x: x[:, :32], ValueError, ["x must be [T, H]", "64", "[10, 32]"]),
        ("x", lambda x: x[None], ValueError, ["x must be a tensor of two dimensions", "[1, 10, 64]"]),
        ("x", lambda x: x.tolist(), TypeError, ["x must be a tensor of two dimensions", "list"]),
        ("ids", lambda ids: None, TypeError, ["expert_ids must be a tensor of two dimensions", "NoneType"]),
        ("weights", lambda w: w[0], ValueError, ["router_weights must be a tensor of two dimensions", "[2]"]),
        ("x", lambda x: x[:9], ValueError, ["x has 9 tokens", "10"]),
        ("ids", lambda ids: ids.short(), TypeError, ["expert_ids must be torch.int32 or torch.int64", "torch.int16"]),
        ("ids", lambda ids: ids.float(), TypeError, ["expert_ids must be torch.int32 or torch.int64", "torch.float32"]),
        ("ids", lambda ids: ids.clamp(max=6) + 2, ValueError, ["expert_ids holds ", "ids out of range", "0..7"]),
        ("ids", lambda ids: ids * 0 - 2, ValueError, ["20 ids out of range", "-1 (no route)"]),
        ("ids", lambda ids: ids + 2**32, ValueError, ["20 ids out of range"]),
        ("ids", lambda ids: ids[:, :1], ValueError, ["expert_ids must be [T, K]", "K = 2", "[10, 1]"]),
        ("ids", lambda ids: ids[:9], ValueError, ["x has 10 tokens", "9"]),
        ("weights", lambda w: w.double(), TypeError, ["router_weights", "torch.float32", "torch.float64"]),
        ("weights", lambda w: w[:, :1], ValueError, ["router_weights", "[10, 2]", "[10, 1]"]),
    ],
)
def test_wrong_inputs_are_named_and_the_peers_hear_it(
    name: str, value: Any, error: type[Exception], words: list[str]
) -> None:
    workload = make_workload([10, 10])
    seen: dict[int, Exception] = {}

    def step(member: Any) -> Tensor:
        rank = member.rank()
        layer = make_layer(workload, member)
        arguments = {
            "x": workload.x[rank],
            "ids": workload.expert_ids[rank],
            "weights": workload.router_weights[rank],
        }
        wrong = {**arguments, name: value(arguments[name])} if rank == 1 else arguments
        with torch.no_grad():
            try:
                layer(*wrong.values())
            except Exception as caught:
                seen[rank] = caught
            return layer(*arguments.values())  # nothing was launched: the next call works

    outputs = LocalGroup(2).run(step)
    assert_right(workload, torch.cat(outputs))
    assert type(seen[1]) is error
    assert type(seen[0]) is MoKPeerError
    assert seen[0].rank == 1
    for word in words:
        assert word in str(seen[1])
        assert word in str(seen[0])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"hidden_size": 100}, ValueError, ["hidden_size", "100", "64"]),
        ({"intermediate_size": 96}, ValueError, ["intermediate_size", "96", "64"]),
        ({"shared_intermediate_size": 1}, ValueError, ["shared_intermediate_size", "1", "64"]),
        ({"num_experts": 9}, ValueError, ["num_experts", "9", "2 ranks"]),
        ({"num_experts": 8.0}, TypeError, ["num_experts", "float"]),
        ({"topk": 65}, ValueError, ["topk", "65", "64"]),
        ({"precision": "mxfp8"}, ValueError, ["hidden_size", "MXFP8", "128"]),
        ({"precision": "fp64"}, ValueError, ["precision", "fp64"]),
        ({"config": {"mode": "fused"}}, TypeError, ["config", "dict"]),
        ({"group": None}, TypeError, ["group", "NoneType"]),
        ({"group": LocalGroup(2)}, ValueError, ["group has 2 ranks", "member"]),
        ({"biases": True}, TypeError, ["biases"]),
    ],
)
def test_wrong_sizes_are_named(options: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_experts": 8,
        "topk": 2,
        "group": LocalGroup(2).members[0],
    }
    with pytest.raises(error) as caught:
        MoE(**{**sizes, **options})
    for word in words:
        assert word in str(caught.value)


def test_the_callers_grad_mode_holds_in_members() -> None:
    workload = make_workload([10, 4])

    def step(member: Any) -> Tensor:
        rank = member.rank()
        layer = make_layer(workload, member)
        return layer(workload.x[rank], workload.expert_ids[rank], workload.router_weights[rank])

    with torch.no_grad():
        assert_right(workload, torch.cat(LocalGroup(2).run(step)))
    with torch.inference_mode():
        outputs = LocalGroup(2).run(step)
    assert_right(workload, torch.cat(outputs).clone())
    assert all(output.requires_grad for output in LocalGroup(2).run(step))


def test_largest_t_is_agreed_on_in_the_first_call() -> None:
    workload = make_workload([30, 5])

    def step(member: Any) -> tuple[int, str]:
        rank = member.rank()
        layer = make_layer(workload, member)
        with torch.no_grad():
            with pytest.raises(RuntimeError, match="first call"):
                _ = layer.workspace
            arguments = [part[rank] for part in (workload.x, workload.expert_ids, workload.router_weights)]
            first = layer(*arguments)
            fewer = layer(*(part[:3] for part in arguments))
            assert same_bits(fewer, first[:3])
            more = [torch.cat([part, part, part]) for part in arguments]
            with pytest.raises((ValueError, MoKPeerError)) as caught:
                layer(*more)
            layer.workspace.grow(90)
            assert same_bits(layer(*more), torch.cat([first, first, first]))
        assert layer.workspace.num_local_tokens == 90
        return layer.num_local_tokens, str(caught.value)

    for num_local_tokens, text in LocalGroup(2).run(step):
        assert num_local_tokens == 30
        assert text.endswith(
            "expert_ids has 90 tokens, the workspace has room for num_local_tokens = 30; call "
            "layer.workspace.grow(90) on every rank, with the largest number of any rank"
        )


def test_layers_share_a_workspace_and_interleave() -> None:
    """Another width and another number of experts: other counters and larger regions on the same memory."""
    first = make_workload([90, 20], K=2)
    second = make_workload([20, 90], K=2, E=20, I=320, S=64, seed=5)
    alone = [run_layer(first), run_layer(second)]

    def step(member: Any) -> list[Tensor]:
        rank = member.rank()
        with torch.no_grad():
            layers = [make_layer(w, member, num_local_tokens=90) for w in (first, second)]
            assert layers[0].workspace is layers[1].workspace
            outputs = []
            for i in (0, 1, 0, 1, 1, 0, 0):
                workload = (first, second)[i]
                outputs.append(layers[i](workload.x[rank], workload.expert_ids[rank], workload.router_weights[rank]))
            return outputs

    by_rank = LocalGroup(2).run(step)
    for call, i in enumerate((0, 1, 0, 1, 1, 0, 0)):
        assert same_bits(torch.cat([outputs[call] for outputs in by_rank]), alone[i])


def test_copies_and_state() -> None:
    workload = make_workload([10])
    member = LocalGroup(1).members[0]
    with torch.no_grad():
        layer = make_layer(workload, member)
        arguments = (workload.x[0], workload.expert_ids[0], workload.router_weights[0])
        output = layer(*arguments)
        twin = copy.deepcopy(layer)
        assert twin.member is layer.member
        twin.w_routed_up.mul_(2)
        assert not same_bits(twin(*arguments), output)
        twin.load_state_dict(layer.state_dict())
        assert same_bits(twin(*arguments), output)
    assert "rank=0 of 1" in repr(layer)
    assert sum(p.numel() for p in layer.parameters()) == 3 * 64 * (8 * 128 + 192)


def test_regrouped_tokens_are_the_same_layer() -> None:
    """The layer's own way to the experts: E/R experts a rank, in order."""
    workload = make_workload([64, 64])
    assert same_bits(run_layer(regroup(workload, 4)), run_layer(workload))
