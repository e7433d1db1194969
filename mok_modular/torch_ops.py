"""The layer's collective calls as torch operators, so that autograd, checkpointing and torch.compile see them.

    schedule = torch_ops.build_schedule(expert_ids, handle)
    output, *context = torch_ops.forward(x, router_weights, *weights, *schedule, handle, saves_context, has_main_grads)

An operator takes tensors and numbers only, so everything else (member, config, sizes, workspace) stands in a
LayerState, which `handle`, an int64 tensor on the CPU, names. It is a tensor and not a number so that a compiled graph
holds for every layer and rank. Sizes that depend on the workspace (rows that may come, rows of the ring) are unknown
to a compiler until the call: the fake implementations leave them open.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mok_modular import functional
from mok_modular.calls.checks import LAYER_NAMES
from mok_modular.calls.copies import compare_copies
from mok_modular.calls.functional_backward import MAIN_GRADS
from mok_modular.calls.precision import pack_backward, pack_forward
from mok_modular.calls.values import SHARED_WEIGHTS
from mok_modular.calls.workspace import Workspace, agree_on_num_tokens, get_workspace
from mok_modular.functional import MoKForwardContext, MoKSchedule
from mok_modular.protocol.config import MoKConfig
from mok_modular.ranks.group import Member

_states: WeakValueDictionary[int, LayerState] = WeakValueDictionary()
_next_handle = itertools.count()

Recorder = Callable[[Tensor, Tensor], None]
"""Gets the expert ids and router weights of a forward, as `mok.capture_routing` keeps them."""


class LayerState:
    """What the operators of one layer need beside tensors. A copy is a state of its own, of the same rank.

    handle: the tensor that names it. num_local_tokens: None until the ranks have agreed on it, in the first call.
    main_grads: by parameter name, where weight gradients are added to instead of being returned. recorders: who listens
    to the routing. are_copies_checked: whether a call has compared the ranks' copies of the shared expert.
    """

    def __init__(
        self,
        member: Member,
        config: MoKConfig,
        hidden_size: int,
        topk: int,
        num_local_experts: int,
        swiglu_limit: float | None,
        num_local_tokens: int | None,
        precision: str,
    ) -> None:
        self.member = member
        self.config = config
        self.hidden_size = hidden_size
        self.topk = topk
        self.num_local_experts = num_local_experts
        self.swiglu_limit = swiglu_limit
        self.num_local_tokens = num_local_tokens
        self.precision = precision
        self.main_grads: dict[str, Tensor] | None = None
        self.are_copies_checked = False
        self.recorders: list[Recorder] = []
        key = next(_next_handle)
        self.handle = torch.tensor(key, dtype=torch.int64)
        _states[key] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerState:
        return LayerState(
            self.member,
            self.config,
            self.hidden_size,
            self.topk,
            self.num_local_experts,
            self.swiglu_limit,
            self.num_local_tokens,
            self.precision,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        first = self.member.rank() * self.num_local_experts
        raise TypeError(
            f"a MoE layer (hidden_size={self.hidden_size}, experts {first} to {first + self.num_local_experts - 1}, "
            f"rank {self.member.rank()} of {self.member.size()}) cannot be pickled, since it belongs to the ranks of "
            "this process: save its state_dict(), and load that into a layer that the other process makes"
        )

    def workspace(self) -> Workspace:
        """Layers with the same sizes and config share one. The first use is collective."""
        if self.num_local_tokens is None:
            raise RuntimeError("the workspace is created in the first call, or give num_local_tokens to the layer")
        return get_workspace(
            self.config,
            self.member,
            num_local_tokens=self.num_local_tokens,
            hidden_size=self.hidden_size,
            topk=self.topk,
        )

    def check_copies(self, *shared: Tensor | None) -> None:
        """In the first call, raises ValueError on every rank where the ranks' copies of the shared expert differ.

        Waits for the peers and, on a GPU, for the device: not while a CUDA graph is captured; then a later call checks.
        """
        device = torch.device(self.member.group.device)
        if self.are_copies_checked or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return
        compare_copies(self.member, dict(zip(SHARED_WEIGHTS, shared, strict=True)), self.config.start_timeout_s)
        self.are_copies_checked = True

    def record(self, expert_ids: Tensor, router_weights: Tensor) -> None:
        """Tells the recorders; not of a forward that a checkpoint repeats inside a backward."""
        if self.recorders and torch._C._current_graph_task_id() == -1:
            for recorder in self.recorders:
                recorder(expert_ids, router_weights)


def state_of(handle: Tensor) -> LayerState:
    """The state that a handle names. Raises RuntimeError when its layer is gone."""
    state = _states.get(int(handle))
    if state is None:
        raise RuntimeError(
            "the MoE layer of this call is gone: keep it until the last backward, and use an exported program in the "
            "process that exported it"
        )
    return state


# ---- build_schedule ----

Schedule = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("mok_modular::build_schedule", mutates_args=())
def build_schedule(expert_ids: Tensor, handle: Tensor) -> Schedule:
    """functional.build_schedule on the layer's workspace: the fields of a MoKSchedule."""
    state = state_of(handle)
    if state.num_local_tokens is None:
        state.num_local_tokens = agree_on_num_tokens(state.config, state.member, expert_ids.shape[0])
    schedule = functional.build_named_schedule(
        state.workspace(), state.config, expert_ids, state.num_local_experts, LAYER_NAMES
    )
    return tuple(schedule.tensors().values())  # type: ignore[return-value]


@build_schedule.register_fake
def _(expert_ids: Tensor, handle: Tensor) -> Schedule:
    new_size = torch.library.get_ctx().new_dynamic_size
    num_routes = expert_ids.numel()
    sizes: dict[str, Any] = dict.fromkeys(("peer_rank", "peer_token_idx"), new_size())
    sizes |= dict.fromkeys(("route_rank", "route_row", "sorted_route"), num_routes)
    names = MoKSchedule.__dataclass_fields__
    empty = [expert_ids.new_empty(sizes[n] if n in sizes else new_size(), dtype=torch.int32) for n in names]
    return tuple(empty)  # type: ignore[return-value]


# ---- forward ----


@torch.library.custom_op("mok_modular::forward", mutates_args=())
def forward(
    x: Tensor,
    router_weights: Tensor,
    w_shared_gate: Tensor | None,
    w_shared_up: Tensor | None,
    w_shared_down: Tensor | None,
    w_routed_gate: Tensor,
    w_routed_up: Tensor,
    w_routed_down: Tensor,
    schedule: list[Tensor],
    expert_ids: Tensor,
    handle: Tensor,
    saves_context: bool,
    has_main_grads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """functional.forward: the output and the fields of a MoKForwardContext, empty without saves_context.

    expert_ids are those that the schedule was built from; has_main_grads: the backward adds weight gradients to the
    state's main_grads and returns none.
    """
    state = state_of(handle)
    state.check_copies(w_shared_gate, w_shared_up, w_shared_down)
    output, context = functional.forward(
        state.config,
        state.workspace(),
        MoKSchedule(*schedule),
        x,
        router_weights,
        w_shared_gate,
        w_shared_up,
        w_shared_down,
        *pack_forward(w_routed_gate, w_routed_up, w_routed_down, state.precision),
        state.swiglu_limit,
        save_context=saves_context,
    )
    state.record(expert_ids, router_weights)
    return output, context.x, context.gate, context.up, context.shared_gate, context.shared_up


@forward.register_fake
def _(
    x: Tensor,
    router_weights: Tensor,
    w_shared_gate: Tensor | None,
    w_shared_up: Tensor | None,
    w_shared_down: Tensor | None,
    w_routed_gate: Tensor,
    w_routed_up: Tensor,
    w_routed_down: Tensor,
    schedule: list[Tensor],
    expert_ids: Tensor,
    handle: Tensor,
    saves_context: bool,
    has_main_grads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size() if saves_context else 0
    tokens = x.shape[0] if saves_context else 0
    inter, shared = w_routed_gate.shape[1], 0 if w_shared_gate is None else w_shared_gate.shape[0]
    return (
        torch.empty_like(x),
        x.new_empty(rows, x.shape[1]),
        x.new_empty(rows, inter),
        x.new_empty(rows, inter),
        x.new_empty(tokens, shared),
        x.new_empty(tokens, shared),
    )


# ---- backward ----

NUM_DIFFERENTIABLE = 8
"""The first inputs of forward: x, router_weights, the six weights. The gradients stand in the same order."""

NUM_SCHEDULE_FIELDS = len(MoKSchedule.__dataclass_fields__)


@torch.library.custom_op("mok_modular::backward", mutates_args=())
def backward(
    d_output: Tensor,
    x: Tensor,
    router_weights: Tensor,
    w_shared_gate: Tensor | None,
    w_shared_up: Tensor | None,
    w_shared_down: Tensor | None,
    w_routed_gate: Tensor,
    w_routed_up: Tensor,
    w_routed_down: Tensor,
    schedule: list[Tensor],
    context: list[Tensor],
    handle: Tensor,
    has_main_grads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """functional.backward: the gradients in the order of forward's inputs, empty where there are none."""
    state = state_of(handle)
    if has_main_grads and state.main_grads is None:
        raise RuntimeError("main_grads were set in the forward and are gone: keep them until its backward")
    main_grads = None
    if has_main_grads and state.main_grads is not None:
        main_grads = [state.main_grads.get(name.replace("d_", "w_", 1)) for name in MAIN_GRADS]
    d_x, d_router_weights, *d_weights = functional.backward(
        state.config,
        state.workspace(),
        MoKSchedule(*schedule),
        MoKForwardContext(*context),
        d_output,
        x,
        router_weights,
        w_shared_gate,
        w_shared_up,
        w_shared_down,
        *pack_backward(w_routed_gate, w_routed_up, w_routed_down, state.precision),
        state.swiglu_limit,
        main_grads=main_grads,
    )
    in_order = (*d_weights[3:], *d_weights[:3])  # shared ones first
    found = [x.new_empty(0) if gradient is None else gradient for gradient in in_order]
    return d_x, d_router_weights, *found  # type: ignore[return-value]


@backward.register_fake
def _(
    d_output: Tensor,
    x: Tensor,
    router_weights: Tensor,
    w_shared_gate: Tensor | None,
    w_shared_up: Tensor | None,
    w_shared_down: Tensor | None,
    w_routed_gate: Tensor,
    w_routed_up: Tensor,
    w_routed_down: Tensor,
    schedule: list[Tensor],
    context: list[Tensor],
    handle: Tensor,
    has_main_grads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    weights = (w_shared_gate, w_shared_up, w_shared_down, w_routed_gate, w_routed_up, w_routed_down)
    gradients = [x.new_empty(0) if w is None or has_main_grads else torch.empty_like(w) for w in weights]
    return torch.empty_like(x), torch.empty_like(router_weights), *gradients  # type: ignore[return-value]


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, schedule, handle = inputs[:NUM_DIFFERENTIABLE], inputs[8], inputs[10]
    ctx.has_main_grads = inputs[12]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors, *schedule, *output[1:], handle)


def gradients_of(
    ctx: Any, run: Callable[..., Any], d_output: Tensor, is_needed: tuple[bool, ...]
) -> list[Tensor | None]:
    """The gradients of the first NUM_DIFFERENTIABLE inputs, None where not needed. `run`: calls `backward`."""
    saved = ctx.saved_tensors
    tensors, rest, handle = saved[:NUM_DIFFERENTIABLE], saved[NUM_DIFFERENTIABLE:-1], saved[-1]
    schedule, context = list(rest[:NUM_SCHEDULE_FIELDS]), list(rest[NUM_SCHEDULE_FIELDS:])
    gradients = run(d_output.contiguous(), *tensors, schedule, context, handle, ctx.has_main_grads)
    return [
        gradient if needed and not (ctx.has_main_grads and i >= 2) else None
        for i, (gradient, needed) in enumerate(zip(gradients, is_needed, strict=False))
    ]


def _differentiate(ctx: Any, d_output: Tensor, *_: Any) -> tuple[Any, ...]:
    gradients = gradients_of(ctx, backward, d_output, ctx.needs_input_grad)
    return *gradients, [None] * NUM_SCHEDULE_FIELDS, None, None, None, None


def refuse_second_derivative(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError("a MoE layer has first derivatives only, not the gradient of a gradient")


def refuse_vmap(*_: Any) -> Any:
    raise NotImplementedError("a MoE layer cannot be vmapped: its calls are collective; flatten the batch into tokens")


forward.register_autograd(_differentiate, setup_context=save_for_backward)
backward.register_autograd(refuse_second_derivative)
for _operator in (build_schedule, forward, backward):
    _operator.register_vmap(refuse_vmap)


# ---- FLOP counts (torch.utils.flop_counter) ----


def _forward_flops(x: Any, router_weights: Any, w_shared_gate: Any, _: Any, __: Any, w_routed_gate: Any) -> int:
    """Of the three products of each of the T*K routes and of the shared expert, by the shapes of forward's inputs."""
    (num_tokens, hidden_size), topk, intermediate_size = x, router_weights[1], w_routed_gate[1]
    shared_size = 0 if w_shared_gate is None else w_shared_gate[0]
    return 2 * num_tokens * 3 * hidden_size * (topk * intermediate_size + shared_size)


@register_flop_formula(torch.ops.mok_modular.forward)
def forward_flops(*shapes: Any, **_: Any) -> int:
    """Floating-point operations of the products for this rank's own tokens, wherever they are computed.

    Shapes do not tell which routes are missing (-1), so those count too.
    """
    return _forward_flops(*shapes[:6])


@register_flop_formula(torch.ops.mok_modular.backward)
def backward_flops(*shapes: Any, **_: Any) -> int:
    """Two products for each of the forward's: the gradients of its input and its weight. What is computed again where
    the ring does not hold all rows depends on the routing and is left out."""
    return 2 * _forward_flops(*shapes[1:7])
