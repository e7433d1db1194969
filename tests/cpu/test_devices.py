"""A tensor on a wrong device, the meta device included, is named before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import FULL_RING, build, forward, make_layer, make_workload, weights_of, workspace_for
from torch import Tensor, nn

from mok_modular import LocalGroup, MoKConfig, MoKPeerError, functional, ops, stages
from mok_modular.calls.checks import check_layout
from mok_modular.calls.precision import pack_backward, pack_forward
from mok_modular.protocol.checks import is_same_device
from mok_modular.testing import contract_backward, contract_forward

WEIGHTS = ("w_shared_gate", "w_shared_up", "w_shared_down", "w_routed_gate", "w_routed_up", "w_routed_down")
INPUTS = ("x", "expert_ids", "router_weights")


# ---- the layer ----


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("name", [*INPUTS, *WEIGHTS])
def test_a_layer_names_its_tensor(name: str, precision: str) -> None:
    sizes = {"H": 128, "S": 128} if precision == "mxfp8" else {}
    workload = make_workload([5], precision=precision, **sizes)
    layer = make_layer(workload, LocalGroup(1).members[0])
    inputs = {"x": workload.x[0], "expert_ids": workload.expert_ids[0], "router_weights": workload.router_weights[0]}
    with torch.no_grad():
        expected = layer(**inputs)
    given = dict(inputs)
    if name in inputs:
        given[name] = inputs[name].to("meta")
    else:
        whole = getattr(layer, name)
        setattr(layer, name, nn.Parameter(whole.to("meta")))
    calls = [(layer, True), (layer, False)]
    if precision == "bf16" and name in ("x", "w_shared_up"):
        torch.compiler.reset()
        compiled = torch.compile(layer, backend="eager")
        calls += [(compiled, True), (compiled, False)]
    for call, is_grad in calls:
        with torch.set_grad_enabled(is_grad), pytest.raises(ValueError, match=f"{name} must be on .* cpu, got meta"):
            call(**given)
    if name in WEIGHTS:
        setattr(layer, name, whole)
    with torch.no_grad():
        assert torch.equal(layer(**inputs), expected)


@pytest.mark.parametrize("num_local_tokens", [None, 5])
@pytest.mark.parametrize("num_calls_before", [0, 1])
def test_the_peers_of_a_layer_are_told(num_calls_before: int, num_local_tokens: int | None) -> None:
    """Before the ranks have agreed on a size, before there is a workspace, and later."""
    workload = make_workload([5, 3])

    def step(member: Any) -> str:
        rank = member.rank()
        layer = make_layer(workload, member, num_local_tokens=num_local_tokens)
        inputs = workload.x[rank], workload.expert_ids[rank], workload.router_weights[rank]
        with torch.no_grad():
            for _ in range(num_calls_before):
                layer(*inputs)
            whole = layer.w_shared_up
            if rank == 1:
                layer.w_shared_up = nn.Parameter(whole.to("meta"))
            with pytest.raises(ValueError if rank == 1 else MoKPeerError) as caught:
                layer(*inputs)
            layer.w_shared_up = whole
            layer(*inputs)
        return str(caught.value)

    told, named = LocalGroup(2).run(step)
    assert named == "w_shared_up must be on the group's device, cpu, got meta"
    assert told == f"rank 1 raised ValueError: {named}"


# ---- functional ----


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_calls_name_their_tensor(precision: str) -> None:
    """Every tensor of every call on one of two ranks: it is named, the peer hears of it, the next call works."""
    sizes = {"H": 128, "S": 128} if precision == "mxfp8" else {}
    workload = make_workload([5, 3], precision=precision, **sizes)
    config = MoKConfig(**FULL_RING)

    def step(member: Any) -> None:
        rank = member.rank()
        workspace = workspace_for(workload, member, config)
        schedule = build(workload, workspace, config)
        _, context = forward(workload, workspace, config, schedule)
        ids, x, weights = workload.expert_ids[rank], workload.x[rank], workload.router_weights[rank]
        d_output = workload.d_outputs()[rank]
        forward_weights, backward_weights = (weights_of(workload, member, p) for p in (pack_forward, pack_backward))
        s_gate, s_up, _, r_gate, r_up, _ = forward_weights
        kept = functional.backward_dgrad(config, workspace, schedule, context, d_output, x, weights, *backward_weights)[
            2
        ]
        plain = weights_of(dataclasses.replace(workload, precision="bf16"), member)
        gradients = [torch.zeros_like(plain[i]) for i in (0, 3, 1, 4, 2, 5)]
        calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
            (lambda ids: functional.build_schedule(workspace, config, ids, num_local_experts=4), {"ids": ids}),
            (
                lambda schedule, x, weights, w: functional.forward(config, workspace, schedule, x, weights, *w),
                {"schedule": schedule, "x": x, "weights": weights, "w": forward_weights},
            ),
            (
                lambda schedule, x, w: functional.recompute_forward_context(config, workspace, schedule, x, *w),
                {"schedule": schedule, "x": x, "w": (s_gate, s_up, r_gate, r_up)},
            ),
            (
                lambda context, d_output, x, weights, w, main_grads: functional.backward(
                    config, workspace, schedule, context, d_output, x, weights, *w, main_grads=main_grads
                ),
                {
                    "context": context,
                    "d_output": d_output,
                    "x": x,
                    "weights": weights,
                    "w": backward_weights,
                    "main_grads": gradients,
                },
            ),
            (
                lambda kept, d_output, w: functional.backward_wgrad(
                    config, workspace, schedule, context, kept, d_output, x, *w
                ),
                {"kept": kept, "d_output": d_output, "w": backward_weights},
            ),
        ]
        for call, arguments in calls:
            call(**arguments)
            for path in paths(arguments):
                given = moved(arguments, path) if rank == 1 else arguments
                if rank == 1:
                    with pytest.raises(ValueError, match=r"must be on .*, got meta"):
                        call(**given)
                else:
                    with pytest.raises(MoKPeerError, match=r"rank 1 raised ValueError: .*, got meta"):
                        call(**given)

    LocalGroup(2).run(step)


def test_a_workspace_is_on_its_groups_device() -> None:
    with pytest.raises(ValueError, match="device must be the group's, 'cpu', got 'meta'"):
        functional.create_workspace(
            MoKConfig(), LocalGroup(1), device="meta", num_local_tokens=4, hidden_size=64, topk=2
        )


@pytest.mark.parametrize(
    ("given", "wanted", "is_same"),
    [
        ("cuda:0", "cuda:0", True),
        ("cuda:0", "cuda", True),
        ("cuda:1", "cuda:0", False),
        ("cuda:1", "cuda", False),
        ("cpu", "cuda:0", False),
        ("meta", "cpu", False),
        ("cpu", "cpu:0", True),
    ],
)
def test_indices_of_devices_count(given: str, wanted: str, is_same: bool) -> None:
    """With stand-ins for tensors and workspaces: there need not be a GPU here."""
    assert is_same_device(torch.device(given), torch.device(wanted)) is is_same
    tensor: Any = SimpleNamespace(device=torch.device(given), is_contiguous=lambda: True)
    workspace: Any = SimpleNamespace(device=torch.device(wanted))
    if is_same:
        check_layout("x", tensor, workspace)
        return
    with pytest.raises(ValueError, match=f"x must be on the workspace's device, {wanted}, got {given}"):
        check_layout("x", tensor, workspace)


# ---- stages and operations ----


@pytest.mark.parametrize("name", [*contract_forward.CASES, *contract_backward.CASES])
def test_stages_name_their_tensor(name: str) -> None:
    cases = [*({**contract_forward.CASES, **contract_backward.CASES})[name]()]
    # One case for each form of the arguments: one weight or two, with a shared expert or a carry or without.
    forms = {len(list(paths(case.args))): case for case in cases}
    for case in forms.values():
        arguments = {"args": case.args, "kwargs": case.kwargs}
        for path in paths(arguments):
            given = moved(arguments, path)
            with pytest.raises(ValueError, match="must be on the CPU or on one GPU with the other arguments, got meta"):
                getattr(stages, name).launch(*given["args"], **given["kwargs"])


def test_other_stages_and_operations_name_their_tensor() -> None:
    ids = [torch.zeros(3, 2, dtype=torch.int32) for _ in range(2)]
    for given in ([ids[0], ids[1].to("meta")], [each.to("meta") for each in ids]):
        with pytest.raises(ValueError, match=r"top_experts must be on the CPU or on one GPU for all ranks, .*meta"):
            stages.schedule.launch(given, num_experts=4)
    rows, start, count = torch.zeros(128, 128).bfloat16(), torch.tensor([0, 128]).int(), torch.tensor([128]).int()
    for given in ((rows.to("meta"), start, count), (rows, start.to("meta"), count), (rows, start, count.to("meta"))):
        with pytest.raises(ValueError, match="must be on the CPU or on one GPU with the other arguments, got meta"):
            stages.quantize.launch(*given)
    with pytest.raises(ValueError, match="x must be on the CPU in this version, got meta"):
        ops.mxfp8_quantize(rows.to("meta"))
    data, scale, _, _ = ops.mxfp8_quantize(rows)
    assert data is not None
    assert scale is not None
    with pytest.raises(ValueError, match="data must be on the CPU in this version, got meta"):
        ops.mxfp8_dequantize(data.to("meta"), scale)
    with pytest.raises(ValueError, match="scale must be on the device of data, cpu, got meta"):
        ops.mxfp8_dequantize(data, scale.to("meta"))


# ---- one tensor of many ----


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where tensors are in nested arguments."""
    if isinstance(value, Tensor):
        yield path
    for key, each in items(value):
        yield from paths(each, (*path, key))


def moved(value: Any, path: tuple[Any, ...]) -> Any:
    """The same with the tensor at `path` on the meta device."""
    if not path:
        return value.to("meta")
    key, *rest = path
    changed = {k: moved(each, tuple(rest)) if k == key else each for k, each in items(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **changed)
    return changed if isinstance(value, dict) else type(value)(changed.values())


def items(value: Any) -> list[tuple[Any, Any]]:
    if dataclasses.is_dataclass(value):
        return [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)]
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []
