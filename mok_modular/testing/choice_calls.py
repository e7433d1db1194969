"""The calls of one rank for any choice of options (mok_modular.testing.options): by functions or by the layer, called
or captured in a CUDA graph, forward alone or with a backward of either form.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from mok_modular import functional, stages
from mok_modular.calls.precision import pack_backward, pack_forward
from mok_modular.layer import MoE
from mok_modular.protocol.config import DEFAULT_ROW_BLOCK, MoKConfig
from mok_modular.protocol.shapes import MoEShape
from mok_modular.protocol.swap_rules import SIGNATURES
from mok_modular.reference import LayerGradients
from mok_modular.testing.options import ALL, Choice
from mok_modular.testing.workload import Weights, Workload

TIMEOUTS: dict[str, Any] = {"timeout_s": 60.0, "start_timeout_s": 60.0}
"""Of CPU ranks: fibers see a hang at once, and threads may wait for a processor."""
GPU_TIMEOUTS: dict[str, Any] = {"timeout_s": 3.0, "start_timeout_s": 15.0}
MORE_ROOM = 13
"""Tokens of a workspace that nobody uses, with room="more"."""
NUM_CALLS = 2
"""Calls of a run: their words and counters stand in two banks, which they use in turn."""

Tensors = dict[str, Tensor]
"""Output, gradients (as Workload.reference_gradients names them) and context (context_x, ...) of a rank."""

WEIGHTS = ("shared_gate", "routed_gate", "shared_up", "routed_up", "shared_down", "routed_down")
"""In the order of main_grads."""


def make_config(choice: Choice, workload: Workload) -> MoKConfig:
    """The config of a choice for the inputs that it will be given."""
    multiplier = None
    if choice["capacity"] == "enough":
        multiplier = enough_capacity(workload)
    minibatch = choice["minibatch_size"]
    config = MoKConfig(
        mode=choice["mode"],
        dispatch=choice["dispatch"],
        combine=choice["combine"],
        signal_grain=choice["signal_grain"],
        ring=choice["ring"],
        minibatch_size=minibatch,
        macrobatch_size=131072 if choice["windows"] == ALL else minibatch * choice["windows"],
        row_block=choice["row_block"],
        fwd_num_comm_sms=choice["fwd_num_comm_sms"],
        bwd_num_comm_sms=choice["bwd_num_comm_sms"],
        num_reserved_sms=choice["num_reserved_sms"],
        schedule_capacity_multiplier=multiplier,
        wire=choice["wire"],
        trace=choice["trace"],
        **(GPU_TIMEOUTS if workload.expert_ids[0].is_cuda else TIMEOUTS),
    )
    return config if choice["stages"] == "own" else dataclasses.replace(config, stages=_swappable(config))


def enough_capacity(workload: Workload) -> float:
    """A schedule_capacity_multiplier that leaves room for just the routes of the rank that gets the most."""
    num_local = workload.shape.num_experts // workload.num_ranks
    ids = torch.cat([ids.flatten() for ids in workload.expert_ids])
    owners = torch.bincount(ids[ids >= 0].long() // num_local, minlength=workload.num_ranks)
    share = max(len(x) for x in workload.x) * workload.shape.topk
    return max(0.5, float(owners.max()) - 0.5) / max(1, share)


def _swappable(config: MoKConfig) -> dict[str, Any]:
    """The library's own kernels as functions, for all stages that this config lets one swap."""
    found = {}
    for name in SIGNATURES:
        launch = getattr(stages, name).launch
        if name in ("grouped_gemm", "grouped_dgrad", "wgrad"):  # the others see it in their tables, or need none
            launch = functools.partial(launch, row_block=config.row_block or DEFAULT_ROW_BLOCK)
        try:
            dataclasses.replace(config, stages={name: launch})
        except ValueError:
            continue
        found[name] = launch
    return found


# ---- one rank ----


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a rank gives to its calls."""

    x: Tensor
    ids: Tensor
    router_weights: Tensor
    d_output: Tensor | None
    weights: Weights

    @classmethod
    def of(cls, workload: Workload, rank: int, choice: Choice) -> Inputs:
        ids = workload.expert_ids[rank].to(getattr(torch, choice["ids_dtype"]))
        x, router_weights = workload.x[rank], workload.router_weights[rank]
        if choice["input"] == "strided":
            x, ids, router_weights = (_strided(t) for t in (x, ids, router_weights))
        d_output = None if choice["passes"] == "forward" else workload.d_outputs()[rank]
        return cls(x, ids, router_weights, d_output, workload.weights.of_rank(rank, workload.num_ranks))

    @property
    def shared(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        weights = self.weights
        return weights.shared_gate, weights.shared_up, weights.shared_down

    @property
    def routed(self) -> tuple[Tensor, Tensor, Tensor]:
        weights = self.weights
        return weights.routed_gate, weights.routed_up, weights.routed_down


def run_rank(member: Any, workload: Workload, config: MoKConfig, choice: Choice) -> list[Tensors]:
    """NUM_CALLS calls of one rank; every one's output, gradients and context."""
    inputs = Inputs.of(workload, member.rank(), choice)
    most = max(len(x) for x in workload.x)
    sizes = most, workload.shape
    if choice["api"] == "layer":
        return _run_layer(member, inputs, config, choice, *sizes, workload.swiglu_limit)
    workspace = _workspace(member, config, choice, *sizes)
    x = inputs.x
    if choice["input"] == "workspace":
        x = workspace.x[: len(x)]
        x.copy_(inputs.x)
    inputs = dataclasses.replace(inputs, x=x)
    return _repeat(lambda: _call(workspace, inputs, config, choice, workload), lambda: workspace, choice)


def _repeat(
    call: Callable[[], Tensors], workspace: Callable[[], functional.Workspace], choice: Choice
) -> list[Tensors]:
    """The results of NUM_CALLS calls, or replays of a CUDA graph of one."""
    results = []
    if choice["launch"] == "graph":
        replay = _capture(call, workspace)
    for _ in range(NUM_CALLS):
        results.append(call() if choice["launch"] == "call" else replay())
        if workspace().device.type == "cuda":
            workspace().check()
    return results


def _capture(call: Callable[[], Tensors], workspace: Callable[[], functional.Workspace]) -> Callable[[], Tensors]:
    """A graph of a call, as a function that replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # the first call allocates, which a capture may not
    torch.cuda.current_stream().wait_stream(stream)
    workspace().check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()

    def replay() -> Tensors:
        captured["output"].fill_(math.nan)
        graph.replay()
        return {name: tensor.clone() for name, tensor in captured.items()}

    return replay


def _workspace(member: Any, config: MoKConfig, choice: Choice, most: int, shape: MoEShape) -> functional.Workspace:
    sizes: dict[str, Any] = {"hidden_size": shape.hidden_size, "topk": shape.topk}
    if choice["room"] == "cached":
        return functional.get_workspace(config, member, num_local_tokens=most, **sizes)
    if choice["room"] == "grown":
        workspace = functional.create_workspace(config, member, num_local_tokens=most // 2, **sizes)
        workspace.grow(most)
        return workspace
    room = most + (MORE_ROOM if choice["room"] == "more" else 0)
    return functional.create_workspace(config, member, num_local_tokens=room, **sizes)


def _call(
    workspace: functional.Workspace, inputs: Inputs, config: MoKConfig, choice: Choice, workload: Workload
) -> Tensors:
    """build_schedule, forward and what belongs to it."""
    num_local_experts = len(inputs.weights.routed_gate)
    schedule = functional.build_schedule(workspace, config, inputs.ids, num_local_experts=num_local_experts)
    packed = pack_forward(*inputs.routed, choice["precision"])
    limit = workload.swiglu_limit
    output, context = functional.forward(
        config,
        workspace,
        schedule,
        inputs.x,
        inputs.router_weights,
        *inputs.shared,
        *packed,
        limit,
        save_context=choice["context"] == "kept",
    )
    if choice["context"] == "recomputed":
        context = functional.recompute_forward_context(
            config, workspace, schedule, inputs.x, *inputs.shared[:2], *packed[:2], limit
        )
    found = {"output": output}
    if choice["passes"] != "forward":
        found |= _gradients(workspace, inputs, config, choice, schedule, context, limit)
    if choice["context"] != "none":
        found |= {f"context_{name}": tensor for name, tensor in vars(context).items()}
        found["num_rows"] = schedule.counts[0]
    return found


def _gradients(
    workspace: functional.Workspace,
    inputs: Inputs,
    config: MoKConfig,
    choice: Choice,
    schedule: functional.MoKSchedule,
    context: functional.MoKForwardContext,
    limit: float | None,
) -> Tensors:
    weights: tuple[Any, ...] = *inputs.shared, *pack_backward(*inputs.routed, choice["precision"])
    d_output: Any = inputs.d_output
    tensors: tuple[Any, ...] = inputs.x, inputs.router_weights, *weights, limit
    main_grads = _main_grads(inputs.weights, choice["main_grads"], workspace.member.rank())
    if choice["passes"] == "halves":
        d_x, d_router_weights, kept = functional.backward_dgrad(
            config, workspace, schedule, context, d_output, *tensors
        )
        rest = functional.backward_wgrad(
            config, workspace, schedule, context, kept, d_output, inputs.x, *weights, main_grads=main_grads
        )
        found = (d_x, d_router_weights, *rest)
    else:
        found = functional.backward(config, workspace, schedule, context, d_output, *tensors, main_grads=main_grads)
    named = {f"d_{name}": tensor for name, tensor in zip(LayerGradients._fields, found, strict=True)}
    named |= {f"d_{name}": tensor for name, tensor in zip(WEIGHTS, main_grads or (), strict=bool(main_grads))}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _main_grads(weights: Weights, kind: str | None, rank: int) -> list[Tensor | None] | None:
    """Tensors to which the weights' gradients are added; "sums": zeros, so that the sums themselves are left."""
    if kind is None:
        return None
    found = [getattr(weights, name) for name in WEIGHTS]
    if kind == "sums":
        return [None if w is None else torch.zeros_like(w, dtype=torch.float32) for w in found]
    return [None if w is None else start_of(i, rank, w.shape, kind, w.device) for i, w in enumerate(found)]


def start_of(index: int, rank: int, shape: Sequence[int], kind: str, device: torch.device | str) -> Tensor:
    """What a tensor of main_grads holds before the first addition."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    values = torch.randn(shape, generator=generator).to(device)
    return values.bfloat16() if kind == "bf16" else values


class _Layer(MoE):
    """A layer whose weights are given: drawing them takes longer than all calls of a run."""

    def reset_parameters(self) -> None:
        """Nothing."""


def _run_layer(
    member: Any, inputs: Inputs, config: MoKConfig, choice: Choice, most: int, shape: MoEShape, limit: float | None
) -> list[Tensors]:
    """The same by the module and autograd."""
    room = {"exact": most, "more": most + MORE_ROOM, "grown": most // 2, "cached": None}[choice["room"]]
    layer = _Layer(
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_experts,
        shape.topk,
        member,
        config,
        shape.shared_intermediate_size,
        choice["precision"],
        limit,
        num_local_tokens=room,
    )
    with torch.no_grad():
        for name in WEIGHTS:
            if (weight := getattr(inputs.weights, name)) is not None:
                getattr(layer, f"w_{name}").copy_(weight)
    if choice["room"] == "grown":
        layer.workspace.grow(most)

    def call() -> Tensors:
        if choice["passes"] != "forward":
            return _train(layer, inputs, choice, member.rank())
        return {"output": layer(inputs.x, inputs.ids, inputs.router_weights)}

    return _repeat(call, lambda: layer.workspace, choice)


def _train(layer: MoE, inputs: Inputs, choice: Choice, rank: int) -> Tensors:
    main_grads = _main_grads(inputs.weights, choice["main_grads"], rank)
    if main_grads is None:
        layer.main_grads = None
    else:
        named = zip(WEIGHTS, main_grads, strict=True)
        layer.main_grads = {f"w_{name}": tensor for name, tensor in named if tensor is not None}
    layer.zero_grad()
    x, router_weights = (t.detach().requires_grad_() for t in (inputs.x, inputs.router_weights))
    if choice["context"] == "recomputed":
        output = torch.utils.checkpoint.checkpoint(
            layer, x, inputs.ids, router_weights, use_reentrant=False, preserve_rng_state=False
        )
    else:
        output = layer(x, inputs.ids, router_weights)
    output.backward(inputs.d_output)
    found = {"output": output.detach(), "d_x": x.grad, "d_router_weights": router_weights.grad}
    for i, name in enumerate(WEIGHTS):
        weight = getattr(layer, f"w_{name}")
        if weight is not None:
            found[f"d_{name}"] = weight.grad if main_grads is None else main_grads[i]
    return found


def _strided(tensor: Tensor) -> Tensor:
    """The same values, every other column of a larger tensor."""
    wide = tensor.new_zeros(len(tensor), 2 * tensor.shape[1])
    wide[:, ::2] = tensor
    return wide[:, ::2]
