"""What several tests of the layer share: small workloads, runs of them, and comparisons.

Sizes are pairwise different and not square, so that a swapped dimension shows.
"""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mok_modular import LocalGroup, MoE, MoEShape, MoKConfig, functional
from mok_modular.calls.precision import pack_backward, pack_forward
from mok_modular.testing import Workload, check_forward, check_tensors
from mok_modular.testing.results import ForwardResult

H, I, S, E, K = 64, 128, 192, 8, 2  # noqa: E741 - the words of the design

SMALL_RING = {"minibatch_size": 128, "macrobatch_size": 256}
"""A ring that a few hundred rows go through several times."""

FULL_RING = {"minibatch_size": 256, "macrobatch_size": 131072}
"""A ring that holds all rows, as push dispatch and pull combine need."""

GRADIENTS = (
    "d_x",
    "d_router_weights",
    "d_routed_gate",
    "d_routed_up",
    "d_routed_down",
    "d_shared_gate",
    "d_shared_up",
    "d_shared_down",
)
"""What functional.backward returns, in its order."""

Routing = Callable[[int, int, torch.Generator], Tensor]
"""(rank, number of tokens, generator) -> ids [T, K]."""


def shape(**sizes: int) -> MoEShape:
    """The test's shape; words as in the design: H, I, S, E, K."""
    return MoEShape(
        "test",
        hidden_size=sizes.get("H", H),
        intermediate_size=sizes.get("I", I),
        num_experts=sizes.get("E", E),
        topk=sizes.get("K", K),
        shared_intermediate_size=sizes.get("S", S),
    )


def make_workload(
    num_tokens: Sequence[int],
    *,
    routing: Routing | None = None,
    seed: int = 0,
    swiglu_limit: float | None = None,
    precision: str = "bf16",
    **sizes: int,
) -> Workload:
    """Random tokens; by default random experts, one route in nine missing. Weights of both signs and zero."""
    layer = shape(**sizes)
    ids, weights = [], []
    for rank, count in enumerate(num_tokens):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        if routing is None:
            ids.append(torch.randint(-1, layer.num_experts, (count, layer.topk), generator=generator))
        else:
            ids.append(routing(rank, count, generator))
        weights.append(torch.randn(count, layer.topk, generator=generator))
        weights[-1][torch.rand(count, layer.topk, generator=generator) < 0.05] = 0.0
    workload = Workload.from_ids(layer, ids, weights, seed=seed, swiglu_limit=swiglu_limit)
    return dataclasses.replace(workload, precision=precision)


def regroup(workload: Workload, num_ranks: int) -> Workload:
    """The same tokens, in the same order, on another number of ranks."""

    def split(parts: list[Tensor]) -> list[Tensor]:
        return [part.contiguous() for part in torch.cat(parts).tensor_split(num_ranks)]

    return dataclasses.replace(
        workload,
        x=split(workload.x),
        expert_ids=split(workload.expert_ids),
        router_weights=split(workload.router_weights),
        d_output=split(workload.d_outputs()),
    )


def weights_of(workload: Workload, member: Any, pack: Any = pack_forward) -> tuple[Any, ...]:
    """The six weights of a rank as functional.forward takes them, or what `pack` is for."""
    mine = workload.weights.of_rank(member.rank(), member.size())
    routed = pack(mine.routed_gate, mine.routed_up, mine.routed_down, workload.precision)
    return (mine.shared_gate, mine.shared_up, mine.shared_down, *routed)


def workspace_for(workload: Workload, member: Any, config: MoKConfig, **options: Any) -> functional.Workspace:
    """A new workspace that the workload fits into."""
    sizes = {
        "num_local_tokens": max(len(x) for x in workload.x),
        "hidden_size": workload.shape.hidden_size,
        "topk": workload.shape.topk,
    }
    return functional.create_workspace(config, member, **{**sizes, **options})


def build(workload: Workload, workspace: functional.Workspace, config: MoKConfig) -> functional.MoKSchedule:
    member = workspace.member
    return functional.build_schedule(
        workspace,
        config,
        workload.expert_ids[member.rank()],
        num_local_experts=workload.shape.num_experts // member.size(),
    )


def forward(
    workload: Workload,
    workspace: functional.Workspace,
    config: MoKConfig,
    schedule: functional.MoKSchedule,
    **options: Any,
) -> tuple[Tensor, functional.MoKForwardContext]:
    member = workspace.member
    return functional.forward(
        config,
        workspace,
        schedule,
        workload.x[member.rank()],
        workload.router_weights[member.rank()],
        *weights_of(workload, member),
        workload.swiglu_limit,
        **options,
    )


def call(workload: Workload, workspace: functional.Workspace, config: MoKConfig, **options: Any) -> Tensor:
    """build_schedule and forward: the output of this rank."""
    return forward(workload, workspace, config, build(workload, workspace, config), **options)[0]


def backward(
    workload: Workload,
    workspace: functional.Workspace,
    config: MoKConfig,
    schedule: functional.MoKSchedule,
    context: functional.MoKForwardContext,
    **options: Any,
) -> dict[str, Tensor]:
    """The gradients of this rank by name, for the workload's d_outputs. The absent ones are left out."""
    member = workspace.member
    found = functional.backward(
        config,
        workspace,
        schedule,
        context,
        workload.d_outputs()[member.rank()],
        workload.x[member.rank()],
        workload.router_weights[member.rank()],
        *weights_of(workload, member, pack_backward),
        workload.swiglu_limit,
        **options,
    )
    return {name: part for name, part in zip(GRADIENTS, found, strict=True) if part is not None}


def recompute(
    workload: Workload, workspace: functional.Workspace, config: MoKConfig, schedule: functional.MoKSchedule
) -> functional.MoKForwardContext:
    """The context of this rank, computed again."""
    member = workspace.member
    s_gate, s_up, _, r_gate, r_up, _ = weights_of(workload, member)
    assert r_gate is not None and r_up is not None
    x, limit = workload.x[member.rank()], workload.swiglu_limit
    return functional.recompute_forward_context(config, workspace, schedule, x, s_gate, s_up, r_gate, r_up, limit)


def call_both(workload: Workload, workspace: functional.Workspace, config: MoKConfig) -> dict[str, Tensor]:
    """build_schedule, forward and backward: output and gradients of this rank by name."""
    schedule = build(workload, workspace, config)
    output, context = forward(workload, workspace, config, schedule)
    return {"output": output, **backward(workload, workspace, config, schedule, context)}


def run_both(workload: Workload, config: MoKConfig | None = None, **group: Any) -> list[dict[str, Tensor]]:
    """By rank: output and gradients of one call of each on a new workspace of a new group."""
    config = config or MoKConfig()

    def step(member: Any) -> dict[str, Tensor]:
        return call_both(workload, workspace_for(workload, member, config), config)

    return LocalGroup(workload.num_ranks, **group).run(step)


def all_ranks(workload: Workload, config: MoKConfig, fn: Callable[[Any], Any]) -> list[Any]:
    """fn(workspace) on every rank, each time with a new workspace of a new group."""
    return LocalGroup(workload.num_ranks).run(lambda member: fn(workspace_for(workload, member, config)))


def run(workload: Workload, config: MoKConfig | None = None, *, save_context: bool = False, **group: Any) -> Tensor:
    """Outputs of all ranks, one after the other, of one call on a new workspace of a new group."""
    config = config or MoKConfig()

    def step(member: Any) -> Tensor:
        return call(workload, workspace_for(workload, member, config), config, save_context=save_context)

    return torch.cat(LocalGroup(workload.num_ranks, **group).run(step))


def make_layer(workload: Workload, member: Any, config: MoKConfig | None = None, **options: Any) -> MoE:
    """A MoE with the workload's weights."""
    sizes = workload.shape
    options = {"precision": workload.precision, **options}
    layer = MoE(
        sizes.hidden_size,
        sizes.intermediate_size,
        sizes.num_experts,
        sizes.topk,
        group=member,
        config=config,
        shared_intermediate_size=sizes.shared_intermediate_size,
        swiglu_limit=workload.swiglu_limit,
        **options,
    )
    names = ("w_shared_gate", "w_shared_up", "w_shared_down", "w_routed_gate", "w_routed_up", "w_routed_down")
    with torch.no_grad():
        given = weights_of(dataclasses.replace(workload, precision="bf16"), member)
        for name, weight in zip(names, given, strict=True):
            if weight is not None:
                getattr(layer, name).copy_(weight)
    return layer


def run_layer(workload: Workload, config: MoKConfig | None = None, **group: Any) -> Tensor:
    """Outputs of all ranks of one call of MoE."""

    def step(member: Any) -> Tensor:
        rank = member.rank()
        with torch.no_grad():
            layer = make_layer(workload, member, config)
            return layer(workload.x[rank], workload.expert_ids[rank], workload.router_weights[rank])

    return torch.cat(LocalGroup(workload.num_ranks, **group).run(step))


def bits(tensor: Tensor) -> Tensor:
    """BF16 or float32 as integers: NaN and the sign of zero count."""
    return tensor.contiguous().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def assert_same(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *, without: Sequence[str] = ()) -> None:
    """The same names but for those in `without`, and the same bits."""
    assert set(given) == set(wanted) - set(without)
    differing = [name for name, tensor in given.items() if not same_bits(tensor, wanted[name])]
    assert not differing, differing


def assert_right(workload: Workload, output: Tensor) -> None:
    """At most 1.5 times as far from float64 as torch's BF16 matmuls at the same rounding points."""
    sizes = [len(x) for x in workload.x]
    assert output.shape == (sum(sizes), workload.shape.hidden_size)
    assert output.dtype == torch.bfloat16
    result = ForwardResult(outputs=list(output.split(sizes)), stages=[], seconds=0.0, schedule_seconds=0.0)
    check = check_forward(workload, result)["output"]
    assert check.is_ok, check


def assert_gradients_right(workload: Workload, results: Sequence[Mapping[str, Tensor]]) -> None:
    """The same for outputs and gradients by rank. Names are those of GRADIENTS, or of what a gradient belongs to (x,
    router_weights, w_routed_gate, ...). The gradient of the output is that of Workload.d_outputs."""
    by_name: dict[str, list[Tensor]] = {}
    for result in results:
        for name, tensor in result.items():
            full = name if name == "output" else f"d_{name.removeprefix('w_').removeprefix('d_')}"
            by_name.setdefault(full, []).append(tensor)
    checks = check_tensors(workload, by_name)
    assert set(checks) == set(by_name)
    wrong = {name: check for name, check in checks.items() if not check.is_ok}
    assert not wrong, wrong


def resident_bytes() -> int:
    """Of this process: now, or where the system does not tell, at most so far."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
