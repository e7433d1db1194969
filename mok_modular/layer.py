"""MoE: the layer as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mok_modular import torch_ops
from mok_modular.calls.checks import check_inputs, check_mxfp8_sizes
from mok_modular.calls.collective import tell_peers_of_layer
from mok_modular.calls.precision import PRECISIONS
from mok_modular.calls.values import ROUTED_WEIGHTS, SHARED_WEIGHTS
from mok_modular.calls.workspace import Workspace
from mok_modular.protocol.config import MoKConfig
from mok_modular.protocol.shapes import MAX_TOPK, MoEShape
from mok_modular.ranks.group import as_member


class MoE(nn.Module):
    """An expert-parallel mixture of SwiGLU experts, with an optional shared expert. Collective over `group`.

    This rank owns experts rank*El .. (rank+1)*El - 1, El = num_experts / R. Parameters (bf16): w_routed_gate and
    w_routed_up [El, I, H], w_routed_down [El, H, I]; w_shared_gate, w_shared_up [S, H], w_shared_down [H, S] where
    shared_intermediate_size = S > 0. Expert e starts from the same values whatever R is, by torch.initial_seed().

    group: a LocalMember, a LocalGroup of one rank or a torch ProcessGroup. precision: "bf16", or "mxfp8": the routed
    experts' products have MXFP8 operands in both passes, parameters and gradients stay bf16; H, I and S are multiples
    of 128. swiglu_limit: clamps gate above and up on both sides; None: no clamp. num_local_tokens: the largest T of any
    rank in any call; None: the ranks agree on the largest T of their first call, and a larger one later is a ValueError
    (`layer.workspace.grow` makes room).

    Differentiable on CPU ranks, for x, router_weights and the parameters: several calls in flight, checkpointing,
    retain_graph, torch.compile. A backward is collective as a forward is: every rank makes the same ones in the same
    order, on the schedule of their forward. Without gradients (torch.no_grad, or nothing requires any) no context is
    kept. `main_grads`: see there.

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
        self.shape = MoEShape("layer", hidden_size, intermediate_size, num_experts, topk, shared_intermediate_size)
        self.member = as_member(group)
        self.config = config if config is not None else MoKConfig()
        if not isinstance(self.config, MoKConfig):
            raise TypeError(f"config must be a MoKConfig, got {type(config).__name__}")
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(map(repr, PRECISIONS))}, got {precision!r}")
        if precision == "mxfp8":
            check_mxfp8_sizes(vars(self.shape), self.member.group.device)
        elif self.config.wire != "bf16":
            raise ValueError(f"config.wire={self.config.wire!r} needs precision='mxfp8', got {precision!r}")
        if num_experts % self.member.size():
            raise ValueError(
                f"num_experts must be divisible by the number of ranks, got {num_experts} experts on "
                f"{self.member.size()} ranks"
            )
        if not 1 <= topk <= MAX_TOPK:
            raise ValueError(f"topk must be 1 to {MAX_TOPK}, got {topk}")
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_experts = num_experts
        self.num_local_experts = num_experts // self.member.size()
        self.topk = topk
        self.shared_intermediate_size = shared_intermediate_size
        self.precision = precision
        self.swiglu_limit = swiglu_limit
        self._is_on_cpu = torch.device(self.member.group.device).type == "cpu"
        self._state = torch_ops.LayerState(
            self.member,
            self.config,
            hidden_size,
            topk,
            self.num_local_experts,
            swiglu_limit,
            num_local_tokens,
            precision,
        )

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=self.member.group.device))

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

    def reset_parameters(self) -> None:
        """Normal weights of standard deviation 1/sqrt(fan-in); expert by expert, so that they do not depend on R."""
        seed = torch.initial_seed()
        first = self.member.rank() * self.num_local_experts
        with torch.no_grad():
            for local in range(self.num_local_experts):
                generator = torch.Generator().manual_seed((seed + 7919 * (first + local + 1)) % 2**63)
                for weight in (self.w_routed_gate, self.w_routed_up, self.w_routed_down):
                    _fill(weight[local], generator)
            generator = torch.Generator().manual_seed(seed % 2**63)
            for shared in (self.w_shared_gate, self.w_shared_up, self.w_shared_down):
                if shared is not None:
                    _fill(shared, generator)

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
        state = self._state
        expert_ids = expert_ids.contiguous()
        schedule = torch_ops.build_schedule(expert_ids, state.handle)
        output, *_ = torch_ops.forward(
            x.contiguous(),
            router_weights.contiguous(),
            *weights,
            list(schedule),
            expert_ids,
            state.handle,
            needs_grad,
            state.main_grads is not None,
        )
        return output

    def _weights(self) -> tuple[Tensor | None, ...]:
        """In the order of functional.forward."""
        shared = (self.w_shared_gate, self.w_shared_up, self.w_shared_down)
        return (*shared, self.w_routed_gate, self.w_routed_up, self.w_routed_down)

    @property
    def num_local_tokens(self) -> int | None:
        """The largest T of any rank in any call; None until the ranks have agreed on it."""
        return self._state.num_local_tokens

    @property
    def recorders(self) -> list[torch_ops.Recorder]:
        """Who is told what a forward routes by; see `capture_routing`."""
        return self._state.recorders

    @property
    def main_grads(self) -> tuple[Tensor | None, ...] | None:
        """Where backward adds the gradients of the weights, in place of their `.grad`: six tensors (bf16 or fp32) of
        the weights' shapes, shared gate, routed gate, shared up, routed up, shared down, routed down (None for those of
        a shared expert that is not there). Set before the forward; None: gradients are returned as ever.

        The addition is one fp32 add a value; an expert without rows leaves its part untouched. torch.compile does not
        see it: there x or router_weights must require a gradient too.
        """
        return self._state.main_grads

    @main_grads.setter
    def main_grads(self, main_grads: Sequence[Tensor | None] | None) -> None:
        self._state.main_grads = None if main_grads is None else tuple(main_grads)

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

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, "
            f"num_experts={self.num_experts}, topk={self.topk}, shared_intermediate_size="
            f"{self.shared_intermediate_size}, rank={self.member.rank()} of {self.member.size()}, "
            f"mode={str(self.config.plan)!r}, precision={self.precision!r}"
        )


def _fill(weight: Tensor, generator: torch.Generator) -> None:
    values = torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5
    weight.copy_(values)
