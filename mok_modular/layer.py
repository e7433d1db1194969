"""MoE: the layer as a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from mok_modular import torch_ops
from mok_modular.calls.checks import check_inputs, check_mxfp8_sizes, check_swiglu_limit
from mok_modular.calls.collective import tell_peers_of_layer
from mok_modular.calls.precision import PRECISIONS
from mok_modular.calls.values import ROUTED_WEIGHTS, SHARED_WEIGHTS
from mok_modular.calls.workspace import Workspace
from mok_modular.parameters import draw, experts_entry, other_experts
from mok_modular.protocol.config import MoKConfig
from mok_modular.protocol.shapes import MAX_TOPK, MoEShape
from mok_modular.ranks.group import as_member
from mok_modular.ranks.member import Member
from mok_modular.torch_func import call_layer

_layers: WeakSet[MoE] = WeakSet()


class MoE(nn.Module):
    """An expert-parallel mixture of SwiGLU experts, with an optional shared expert. Collective over `group`.

    This rank owns experts rank*El .. (rank+1)*El - 1, El = num_experts / R. Parameters (bf16): w_routed_gate and
    w_routed_up [El, I, H], w_routed_down [El, H, I]; w_shared_gate, w_shared_up [S, H], w_shared_down [H, S] where
    shared_intermediate_size = S > 0. They live on the group's device, or on meta inside `with torch.device("meta")`.
    How they start: `reset_parameters`. Every rank has a copy of the shared expert; the first call raises ValueError on
    all ranks where the copies differ. A state dict says which experts it holds: `get_extra_state`.

    group: a LocalMember, a LocalGroup of one rank or a torch ProcessGroup. precision: "bf16", or "mxfp8": the routed
    experts' products have MXFP8 operands in both passes, parameters and gradients stay bf16; H, I and S are multiples
    of 128. swiglu_limit: clamps gate above and up on both sides; None: no clamp. num_local_tokens: the largest T of any
    rank in any call; None: the ranks agree on the largest T of their first call, and a larger one later is a ValueError
    (`layer.workspace.grow` makes room).

    Differentiable on CPU ranks, for x, router_weights and the parameters: several calls in flight, checkpointing,
    retain_graph, torch.compile, torch.export, torch.func.grad and vjp. Forward-mode derivatives, vmap and second
    derivatives raise NotImplementedError. A backward is collective as a forward is: every rank makes the same ones in
    the same order, on the schedule of their forward. Without gradients (torch.no_grad, or nothing requires any) no
    context is kept. `main_grads`: see there.

    Raises TypeError or ValueError that names the argument, the value and the rule.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        topk: int,
        group: Any,
        config: MoKConfig | None = None,
        shared_intermediate_size: int = 0,
        precision: str = "bf16",
        swiglu_limit: float | None = None,
        *,
        num_local_tokens: int | None = None,
    ) -> None:
        super().__init__()
        # MoEShape checks every size and names the one that is wrong.
        shape = MoEShape("layer", hidden_size, intermediate_size, num_experts, topk, shared_intermediate_size)
        member = as_member(group)
        if config is None:
            config = MoKConfig()
        if not isinstance(config, MoKConfig):
            raise TypeError(f"config must be a MoKConfig, got {type(config).__name__}")
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(map(repr, PRECISIONS))}, got {precision!r}")
        if precision == "mxfp8":
            check_mxfp8_sizes(vars(shape), member.group.device)
        elif config.wire != "bf16":
            raise ValueError(f"config.wire={config.wire!r} needs precision='mxfp8', got {precision!r}")
        if num_experts % member.size():
            raise ValueError(
                f"num_experts must be divisible by the number of ranks, got {num_experts} experts on "
                f"{member.size()} ranks"
            )
        if not 1 <= topk <= MAX_TOPK:
            raise ValueError(f"topk must be 1 to {MAX_TOPK}, got {topk}")
        check_swiglu_limit(swiglu_limit)
        # Before anything that holds the member: who pickles the layer meets this first, and it says what to do instead.
        self._state = torch_ops.LayerState(
            member,
            config,
            hidden_size,
            topk,
            num_experts // member.size(),
            swiglu_limit,
            num_local_tokens,
            precision,
        )
        self.shape = shape
        self.config = config
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_experts = num_experts
        self.num_local_experts = num_experts // member.size()
        self.topk = topk
        self.shared_intermediate_size = shared_intermediate_size
        self.precision = precision
        self.swiglu_limit = swiglu_limit
        self._is_on_cpu = torch.device(member.group.device).type == "cpu"
        # An explicit device overrides `with torch.device("meta")`.
        device = "meta" if torch.get_default_device().type == "meta" else member.group.device

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=device))

        local, wide, inner, shared = (
            self.num_local_experts,
            hidden_size,
            intermediate_size,
            shared_intermediate_size,
        )
        self.w_routed_gate = parameter(local, inner, wide)
        self.w_routed_up = parameter(local, inner, wide)
        self.w_routed_down = parameter(local, wide, inner)
        self.w_shared_gate = parameter(shared, wide) if shared else None
        self.w_shared_up = parameter(shared, wide) if shared else None
        self.w_shared_down = parameter(wide, shared) if shared else None
        self.reset_parameters()
        _layers.add(self)

    def reset_parameters(self) -> None:
        """Normal weights of standard deviation 1/sqrt(fan-in), from one number of torch's default CPU generator.

        As with torch.nn.Linear, the same torch.manual_seed gives the same values, and another call gives others. Ranks
        that draw the same number get the same shared expert, and the same expert e whatever R is. Where scripts seed by
        rank, the experts of a rank follow its seed, and mok.broadcast_copies makes the shared expert the same.
        DTensors are filled without communication. Parameters on meta stay as they are; if all are, nothing is drawn.
        """
        draw(dict(self.named_parameters(recurse=False)), self.local_experts)

    def forward(self, x: Tensor, expert_ids: Tensor, router_weights: Tensor) -> Tensor:
        """x [T, H] bf16, expert_ids [T, K] int32 or int64 (-1 = no route), router_weights [T, K] float32 -> [T, H]
        bf16. Strided inputs are copied. T may differ by rank. Raises as functional.build_schedule and forward do."""
        self._check_tensors(x=x, expert_ids=expert_ids, router_weights=router_weights)
        weights = self._weights()
        needs_grad = torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in (x, router_weights, *weights)
        )
        if needs_grad and not self._is_on_cpu:
            raise RuntimeError("there is no backward on GPUs yet: call the layer under torch.no_grad()")
        tensors = (x.contiguous(), router_weights.contiguous(), *weights)
        return call_layer(self._state, tensors, expert_ids.contiguous(), saves_context=needs_grad)

    def _weights(self) -> tuple[Tensor | None, ...]:
        """In the order of functional.forward."""
        shared = (self.w_shared_gate, self.w_shared_up, self.w_shared_down)
        return (*shared, self.w_routed_gate, self.w_routed_up, self.w_routed_down)

    @property
    def member(self) -> Member:
        """This rank of the layer's group."""
        return self._state.member

    @property
    def local_experts(self) -> range:
        """The experts that this rank owns."""
        first = self.member.rank() * self.num_local_experts
        return range(first, first + self.num_local_experts)

    @property
    def num_local_tokens(self) -> int | None:
        """The largest T of any rank in any call; None until the ranks have agreed on it."""
        return self._state.num_local_tokens

    @property
    def recorders(self) -> list[torch_ops.Recorder]:
        """Who is told what a forward routes by; see `capture_routing`."""
        return self._state.recorders

    @property
    def main_grads(self) -> dict[str, Tensor] | None:
        """Where backward adds the gradients of the weights, in place of their `.grad`: a tensor of its shape for every
        parameter's name, all bf16 or all fp32. Set before the forward; None: gradients are returned as ever.

            layer.main_grads = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in layer.named_parameters()}

        The addition is one fp32 add a value; an expert without rows leaves its part untouched. torch.compile does not
        see it: there x or router_weights must require a gradient too.

        Raises TypeError for what is no mapping, ValueError for other names; the backward, for other dtypes and shapes.
        """
        return self._state.main_grads

    @main_grads.setter
    def main_grads(self, main_grads: Mapping[str, Tensor] | None) -> None:
        if main_grads is None:
            self._state.main_grads = None
            return
        if not isinstance(main_grads, Mapping):
            raise TypeError(f"main_grads must map names of parameters to tensors, got {type(main_grads).__name__}")
        names = {name for name, _ in self.named_parameters(recurse=False)}
        if set(main_grads) != names:
            raise ValueError(f"main_grads must have the names {sorted(names)}, got {sorted(map(str, main_grads))}")
        self._state.main_grads = dict(main_grads)

    def _check_tensors(self, **tensors: Any) -> None:
        """What would fail before the first collective call: the peers hear of it all the same."""
        weights = dict(zip((*SHARED_WEIGHTS, *ROUTED_WEIGHTS), self._weights(), strict=True))
        try:
            check_inputs(torch.device(self.member.group.device), tensors, weights)
        except (TypeError, ValueError) as error:
            num_local_tokens = self._state.num_local_tokens
            tell_peers_of_layer(self.config, self.member, num_local_tokens, self.hidden_size, self.topk, error)
            raise

    @property
    def workspace(self) -> Workspace:
        """The workspace of this layer; layers with the same sizes and config share it. The first use is collective.

        Raises RuntimeError before the first call of a layer that was made without num_local_tokens.
        """
        return self._state.workspace()

    # ---- state dicts and copies ----

    def get_extra_state(self) -> Tensor:
        """Which experts a state dict holds: int64 [the first, how many, of how many], the entry `_extra_state`.

        `load_state_dict` refuses other experts than this rank's by name, strict or not, and copies nothing of them. A
        state dict without the entry is loaded where the shapes fit, strict or not.
        """
        return experts_entry(self.local_experts, self.num_experts)

    def set_extra_state(self, state: Any) -> None:
        """Nothing is left to do: it was compared before anything was copied."""

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}_extra_state"
        entry, gate = state_dict.get(key), state_dict.get(f"{prefix}w_routed_gate")
        error = other_experts(entry, gate, self.local_experts, self.num_experts)
        if error is not None:
            error_msgs.append(f"{prefix.removesuffix('.') or type(self).__name__}: {error}.")
            return
        if entry is None:
            state_dict = {**state_dict, key: self.get_extra_state()}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _layers.add(self)

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, "
            f"num_experts={self.num_experts}, topk={self.topk}, shared_intermediate_size="
            f"{self.shared_intermediate_size}, rank={self.member.rank()} of {self.member.size()}, "
            f"mode={str(self.config.plan)!r}, precision={self.precision!r}"
        )


def live_layers() -> list[MoE]:
    """Every layer of this process that has not been deleted."""
    return list(_layers)


def moe_layers(module: nn.Module) -> list[MoE]:
    """The MoE layers that a module is or holds. Raises ValueError when there are none, or of several groups."""
    layers = [layer for layer in module.modules() if isinstance(layer, MoE)]
    if not layers:
        raise ValueError(f"module must be a MoE layer or hold one, got a {type(module).__name__} without any")
    if len({id(layer.member) for layer in layers}) > 1:
        raise ValueError("module must hold MoE layers of one group, got layers of several")
    return layers
