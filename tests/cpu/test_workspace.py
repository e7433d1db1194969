"""Workspaces and schedules in use: in any order, several at once, growing, for long, at large offsets."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from helpers import (
    SMALL_RING,
    all_ranks,
    build,
    call,
    forward,
    make_workload,
    resident_bytes,
    run,
    same_bits,
    weights_of,
    workspace_for,
)
from torch import Tensor

from mok_modular import LocalGroup, MoKConfig, MoKPeerError, MoKSchedule, functional

MODES = ["fused", "split", "dispatch|gate_up+swiglu|down+combine"]
SHARED = ("w_shared_gate", "w_shared_up", "w_shared_down")
ROUTED = ("w_routed_gate", "w_routed_up", "w_routed_down")


@pytest.mark.parametrize("mode", MODES)
def test_schedules_outlive_each_other(mode: str) -> None:
    """Two schedules in a row; the older one is used after the newer one was built, and again after that."""
    first = make_workload([40, 90])
    second = dataclasses.replace(make_workload([70, 20], seed=7), weights=first.weights)
    config = MoKConfig(mode=mode, **SMALL_RING)
    alone = [run(workload, config) for workload in (first, second)]

    def step(member: Any) -> list[Tensor]:
        workspace = workspace_for(first, member, config)
        a, b = build(first, workspace, config), build(second, workspace, config)
        outputs = [forward(first, workspace, config, a)[0], forward(second, workspace, config, b)[0]]
        build(second, workspace, config)
        outputs += [forward(first, workspace, config, a)[0], forward(second, workspace, config, b)[0]]
        return outputs

    by_rank = LocalGroup(2).run(step)
    for i in range(4):
        assert same_bits(torch.cat([outputs[i] for outputs in by_rank]), alone[i % 2])


def test_calls_on_one_workspace_may_change_mode_and_size() -> None:
    """Fewer tokens, none at all, other experts, other widths, other plans: nothing is left over."""
    config = MoKConfig(**SMALL_RING)
    workloads = [
        make_workload([120, 80], seed=1),
        make_workload([3, 0], seed=2),
        make_workload([0, 0], seed=3),
        make_workload([60, 120], seed=4, E=20, I=320, S=0),
        make_workload([1, 1], seed=5, I=64),
    ]
    modes = ["fused", "split", "dispatch+gate_up|swiglu|down+combine"]
    alone = [run(workload, config) for workload in workloads]
    order = [0, 1, 0, 2, 3, 0, 4, 3, 1, 2, 0]

    def step(member: Any) -> list[Tensor]:
        workspace = workspace_for(workloads[0], member, config)
        return [
            call(workloads[i], workspace, dataclasses.replace(config, mode=modes[n % 3])) for n, i in enumerate(order)
        ]

    by_rank = LocalGroup(2).run(step)
    for n, i in enumerate(order):
        assert same_bits(torch.cat([outputs[n] for outputs in by_rank]), alone[i])


@pytest.mark.parametrize("other", [{"macrobatch_size": 512}, {"minibatch_size": 256}, {"row_block": 256}], ids=str)
def test_a_schedule_of_another_ring_is_refused(other: dict[str, int]) -> None:
    """It would leave rows out, or wait for windows that nobody works on."""
    workload = make_workload([200, 150])
    config = MoKConfig(**SMALL_RING)
    other_config = MoKConfig(**{**SMALL_RING, "minibatch_size": 256, **other})

    def step(member: Any) -> None:
        schedule = build(workload, workspace_for(workload, member, other_config), other_config)
        forward(workload, workspace_for(workload, member, config), config, schedule)

    with pytest.raises(ValueError, match="built for another row block, ring, dispatch or number of ranks"):
        LocalGroup(2).run(step)


def test_tensors_at_any_address() -> None:
    """Contiguous, but not aligned to more than their elements."""
    workload = make_workload([30, 9])
    config = MoKConfig(mode="split", **SMALL_RING)

    def shifted(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        room = tensor.new_empty(tensor.numel() + 1)
        room[1:] = tensor.flatten()
        return room[1:].view(tensor.shape)

    def step(workspace: functional.Workspace) -> Tensor:
        rank = workspace.member.rank()
        ids = shifted(workload.expert_ids[rank].int())
        schedule = functional.build_schedule(workspace, config, ids, num_local_experts=4)
        schedule = MoKSchedule(**{name: shifted(tensor) for name, tensor in schedule.tensors().items()})
        x, router_weights = shifted(workload.x[rank]), shifted(workload.router_weights[rank])
        weights = map(shifted, weights_of(workload, workspace.member))
        return functional.forward(config, workspace, schedule, x, router_weights, *weights)[0]

    assert same_bits(torch.cat(all_ranks(workload, config, step)), run(workload, config))


def test_growing_beyond_memory_changes_nothing() -> None:
    workload = make_workload([8, 2])
    config = MoKConfig(**SMALL_RING)

    def step(member: Any) -> None:
        workspace = workspace_for(workload, member, config, hidden_size=2**20)
        with pytest.raises(MemoryError):
            workspace.grow(2**28)  # 512 TiB for x alone
        assert workspace.num_local_tokens == 8
        assert build(workload, workspace, config).num_rows > 0
        workspace.grow(9)
        assert workspace.x.shape == (9, 2**20)

    LocalGroup(2).run(step)


def test_two_workspaces_at_once() -> None:
    small, large = make_workload([20, 5]), make_workload([40, 60], H=128, K=3)
    config, other = MoKConfig(**SMALL_RING), MoKConfig(mode="split")
    alone = [run(small, config), run(large, other)]

    def step(member: Any) -> list[Tensor]:
        first, second = workspace_for(small, member, config), workspace_for(large, member, other)
        a, b = build(small, first, config), build(large, second, other)
        outputs = [forward(small, first, config, a)[0], forward(large, second, other, b)[0]]
        return [*outputs, forward(small, first, config, a)[0], forward(large, second, other, b)[0]]

    by_rank = LocalGroup(2).run(step)
    for i in range(4):
        assert same_bits(torch.cat([outputs[i] for outputs in by_rank]), alone[i % 2])


def test_get_workspace_is_cached() -> None:
    def step(member: Any) -> None:
        config = MoKConfig()
        sizes = {"hidden_size": 64, "topk": 2}
        workspace = functional.get_workspace(config, member, device="cpu", num_local_tokens=10, **sizes)
        assert functional.get_workspace(config, member, device="cpu", num_local_tokens=7, **sizes) is workspace
        split = MoKConfig(mode="split", timeout_s=3)
        assert functional.get_workspace(split, member, num_local_tokens=10, **sizes) is workspace
        larger = functional.get_workspace(config, member, num_local_tokens=11, **sizes)
        assert larger is not workspace
        assert functional.get_workspace(config, member, num_local_tokens=3, **sizes) is larger
        assert functional.get_workspace(config, member, num_local_tokens=3, hidden_size=128, topk=2) is not larger
        assert functional.create_workspace(config, member, num_local_tokens=3, **sizes) is not larger
        functional.clear_workspace_cache(member)
        assert functional.get_workspace(config, member, num_local_tokens=3, **sizes) is not larger

    LocalGroup(2).run(step)


def test_workspace_grows_and_old_schedules_stay_valid() -> None:
    small, large = make_workload([20, 5]), make_workload([40, 130], seed=2)
    config = MoKConfig(**SMALL_RING)
    alone = [run(small, config), run(large, config)]

    def step(member: Any) -> list[Tensor]:
        workspace = workspace_for(small, member, config)
        schedule = build(small, workspace, config)
        outputs = [forward(small, workspace, config, schedule)[0]]
        old = workspace.x
        with pytest.raises((ValueError, MoKPeerError), match="num_local_tokens = 20"):
            build(large, workspace, config)
        before = workspace.num_bytes()
        workspace.grow(130)
        workspace.grow(50)  # changes nothing
        assert workspace.num_bytes() > before
        assert workspace.num_local_tokens == 130
        assert workspace.x.shape == (130, 64)
        old.fill_(3.0)  # the old view is of no use, but harmless
        outputs.append(call(large, workspace, config))
        outputs.append(forward(small, workspace, config, schedule)[0])
        return outputs

    by_rank = LocalGroup(2).run(step)
    for i in range(3):
        assert same_bits(torch.cat([outputs[i] for outputs in by_rank]), alone[i % 2])


def test_input_in_the_symmetric_buffer_is_not_copied() -> None:
    workload = make_workload([60, 33])
    config = MoKConfig(mode="split", **SMALL_RING)
    expected = run(workload, config)

    def step(workspace: functional.Workspace) -> Tensor:
        x = workspace.x[: len(workload.x[workspace.member.rank()])]
        x.copy_(workload.x[workspace.member.rank()])
        inputs = list(workload.x)
        inputs[workspace.member.rank()] = x
        zero_copy = dataclasses.replace(workload, x=inputs)
        schedule = build(workload, workspace, config)
        output = forward(zero_copy, workspace, config, schedule)[0]
        assert same_bits(forward(zero_copy, workspace, config, schedule)[0], output)
        if len(x) > 1:  # another place in the same buffer would be overwritten while it is read
            inputs[workspace.member.rank()] = workspace.x[1:]
        return output

    assert same_bits(torch.cat(all_ranks(workload, config, step)), expected)


def test_input_elsewhere_in_the_symmetric_buffer_is_refused() -> None:
    workload = make_workload([10])
    config = MoKConfig()

    def step(workspace: functional.Workspace) -> None:
        schedule = functional.build_schedule(workspace, config, workload.expert_ids[0][:9], num_local_experts=8)
        weights = weights_of(workload, workspace.member)
        x, router_weights = workspace.x[1:], workload.router_weights[0][:9]
        functional.forward(config, workspace, schedule, x, router_weights, *weights)

    with pytest.raises(ValueError, match=r"x must start where workspace\.x starts"):
        all_ranks(workload, config, step)


def test_a_thousand_calls() -> None:
    """Same bits and flat memory."""
    workload = make_workload([9, 3], E=4)
    config = MoKConfig(mode="dispatch|gate_up+swiglu|down+combine", **SMALL_RING)

    def step(workspace: functional.Workspace) -> list[int]:
        first = call(workload, workspace, config)
        sizes = []
        for n in range(1000):
            assert same_bits(call(workload, workspace, config), first)
            if n % 100 == 99:
                gc.collect()
                sizes.append(resident_bytes())
        assert workspace.shared.native.epochs(workspace.member.rank())[:3] == [1001, 1001, 2002]
        return sizes

    sizes = all_ranks(workload, config, step)[0]
    assert sizes[-1] - sizes[1] < 8 * 2**20


def test_workspaces_and_groups_are_freed() -> None:
    """Neither the group nor its cache keeps what nobody uses."""
    import weakref

    def step(member: Any) -> list[Any]:
        config = MoKConfig()
        sizes = {"num_local_tokens": 10, "hidden_size": 64, "topk": 2}
        functional.get_workspace(config, member, **sizes)
        return [weakref.ref(functional.create_workspace(config, member, **sizes).shared), weakref.ref(member.group)]

    group = LocalGroup(2)
    shared, alive = group.run(step)[0]
    gc.collect()
    assert shared() is None
    assert alive() is group
    del group
    gc.collect()
    assert alive() is None


def test_offsets_past_2_31_elements() -> None:
    """A combine buffer and weights of more than 2^31 elements and 4 GiB each, of which only the end is touched."""
    topk, hidden, width, num_tokens, num_experts = 64, 8192, 64, 4200, 4200
    assert (num_tokens - 100) * topk * hidden > 2**31
    assert num_experts * width * hidden > 2**31
    generator = torch.Generator().manual_seed(0)
    ids = torch.full((num_tokens, topk), -1, dtype=torch.int32)
    ids[-40:, -1] = num_experts - 1
    x = torch.zeros(num_tokens, hidden, dtype=torch.bfloat16)
    x[-40:] = torch.randn(40, hidden, generator=generator)
    try:
        weights = [
            torch.empty(num_experts, *sizes, dtype=torch.bfloat16)
            for sizes in [(width, hidden), (width, hidden), (hidden, width)]
        ]
    except RuntimeError as error:
        pytest.skip(f"no address space to leave untouched: {error}")
    for weight in weights:
        weight[-1] = torch.randn(weight.shape[1:], generator=generator) * weight.shape[2] ** -0.5
    config = MoKConfig(**SMALL_RING)
    member = LocalGroup(1).members[0]
    workspace = functional.create_workspace(config, member, num_local_tokens=num_tokens, hidden_size=hidden, topk=topk)
    assert workspace.num_bytes() > 2**32
    schedule = functional.build_schedule(workspace, config, ids, num_local_experts=num_experts)
    router_weights = torch.ones(num_tokens, topk)
    output, context = functional.forward(config, workspace, schedule, x, router_weights, None, None, None, *weights)
    gate, up = (x[-40:].double() @ weight[-1].double().t() for weight in weights[:2])
    expected = (torch.nn.functional.silu(gate) * up) @ weights[2][-1].double().t()
    assert (output[-40:].double() - expected).norm() < 0.01 * expected.norm()
    assert not output[:-40].any()

    # Weight gradients of experts without rows are zeros, which would touch 12 GiB: these are added to nothing instead.
    mains = [None if i % 2 == 0 else torch.empty_like(weights[i // 2]) for i in range(6)]
    for main in mains[1::2]:
        main[-1] = 0
    d_output = torch.zeros_like(x)
    d_output[-40:] = torch.randn(40, hidden, generator=generator)
    d_x, d_router, *_ = functional.backward(
        config,
        workspace,
        schedule,
        context,
        d_output,
        x,
        router_weights,
        None,
        None,
        None,
        *weights,
        main_grads=mains,
    )
    leaves = [t.double().requires_grad_() for t in (x[-40:], torch.ones(40, 1), *(weight[-1] for weight in weights))]
    exact_x, exact_weight, exact_gate, exact_up, exact_down = leaves
    hidden_values = torch.nn.functional.silu(exact_x @ exact_gate.t()) * (exact_x @ exact_up.t())
    (exact_weight * (hidden_values @ exact_down.t())).backward(d_output[-40:].double())
    found = [d_x[-40:], d_router[-40:, -1:], *(main[-1] for main in mains[1::2])]
    for given, leaf in zip(found, leaves, strict=True):
        assert (given.double() - leaf.grad).norm() < 0.01 * leaf.grad.norm()
    assert not d_x[:-40].any()
    assert not d_router[:, :-1].any()


# ---- what is refused ----


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"hidden_size": 100}, ValueError, ["hidden_size", "100"]),
        ({"hidden_size": 0}, ValueError, ["hidden_size", "0"]),
        ({"hidden_size": 64.0}, TypeError, ["hidden_size", "float"]),
        ({"topk": 0}, ValueError, ["topk", "0"]),
        ({"topk": 65}, ValueError, ["topk", "65"]),
        ({"num_local_tokens": -1}, ValueError, ["num_local_tokens", "-1"]),
        ({"num_local_tokens": True}, TypeError, ["num_local_tokens", "bool"]),
        ({"num_local_tokens": 2**30}, ValueError, ["num_local_tokens", "2147483648"]),
        ({"device": "cuda"}, ValueError, ["device", "cuda", "cpu"]),
        ({"config": None}, TypeError, ["config", "NoneType"]),
        ({"group": LocalGroup(3)}, ValueError, ["3 ranks"]),
        ({"group": "gloo"}, TypeError, ["group", "str"]),
    ],
)
@pytest.mark.parametrize("create", [functional.get_workspace, functional.create_workspace])
def test_wrong_workspaces_are_named(
    create: Any, options: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    good = {"config": MoKConfig(), "group": LocalGroup(1), "num_local_tokens": 4, "hidden_size": 64, "topk": 2}
    with pytest.raises(error) as caught:
        create(**{**good, **options})
    for word in words:
        assert word in str(caught.value)
