"""The layer's parameters: how they start, and which experts a state dict holds."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from mok_modular.calls.values import ROUTED_WEIGHTS, SHARED_WEIGHTS

RESHARD = (
    "For another number of ranks, concatenate the w_routed weights of all ranks' state dicts in the order of the "
    "ranks, give every rank its own experts, and leave _extra_state out"
)


@torch.no_grad()
def draw(parameters: Mapping[str, Tensor], experts: range) -> None:
    """Fills the parameters of the layer, by name, whose own experts are `experts`; see MoE.reset_parameters."""
    if not any(has_data(weight) for weight in parameters.values()):
        return
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    # A DTensor gets its shards of a whole tensor.
    whole = {
        name: torch.empty(weight.shape, dtype=weight.dtype, device="cpu") if is_dtensor(weight) else weight
        for name, weight in parameters.items()
    }
    for local, expert in enumerate(experts):
        generator = torch.Generator().manual_seed((seed + 7919 * (expert + 1)) % 2**63)
        for name in ROUTED_WEIGHTS:
            _fill(whole[name][local], generator)
    generator = torch.Generator().manual_seed(seed)
    for name in SHARED_WEIGHTS:
        if name in whole:
            _fill(whole[name], generator)
    for name, weight in parameters.items():
        if is_dtensor(weight) and has_data(weight):
            weight.copy_(_shards(whole[name], weight))


def _fill(weight: Tensor, generator: torch.Generator) -> None:
    values = torch.randn(weight.shape, generator=generator, device="cpu") / weight.shape[-1] ** 0.5
    if has_data(weight):
        weight.copy_(values)


def _shards(whole: Tensor, like: Any) -> Tensor:
    """`whole`, which every rank of the mesh has, as a DTensor like `like`; without communication."""
    mesh = like.device_mesh
    distribute = torch.distributed.tensor.distribute_tensor
    return distribute(whole.to(mesh.device_type), mesh, like.placements, src_data_rank=None)


def has_data(tensor: Tensor) -> bool:
    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)


def is_dtensor(tensor: Tensor) -> bool:
    # Whoever has made one has imported the module, which takes a second.
    return "torch.distributed.tensor" in sys.modules and isinstance(tensor, torch.distributed.tensor.DTensor)


def experts_entry(experts: range, num_experts: int) -> Tensor:
    """What a state dict says of the experts in it: int64 [the first, how many, of how many]."""
    return torch.tensor([experts.start, len(experts), num_experts], dtype=torch.int64, device="cpu")


def other_experts(entry: Any, gate: Any, experts: range, num_experts: int) -> str | None:
    """What is wrong with a state dict of this entry and w_routed_gate for a rank that owns `experts`; None: nothing."""
    wanted = f"this rank holds experts {_words(experts.start, len(experts), num_experts)}"
    if entry is None:
        num_given = gate.shape[0] if isinstance(gate, Tensor) and gate.dim() == 3 else len(experts)
        if num_given == len(experts):
            return None
        return f"the state dict holds {num_given} experts, {wanted}. {RESHARD}"
    if not isinstance(entry, Tensor) or entry.numel() != 3:
        return f"_extra_state must be a tensor of 3 numbers that says which experts these are, got {entry!r}"
    if not has_data(entry) or torch.equal(entry.cpu(), experts_entry(experts, num_experts).to(entry.dtype)):
        return None  # whoever casts a whole state dict rounds the entry too
    first, num_given, num_given_in_all = (int(value) for value in entry.tolist())
    text = f"the state dict holds experts {_words(first, num_given, num_given_in_all)}, {wanted}. "
    if num_given_in_all != num_experts:
        return text + "It belongs to a layer with another num_experts"
    return text + (RESHARD if num_given != len(experts) else "Every rank loads the state dict that it saved")


def _words(first: int, num_local: int, num_experts: int) -> str:
    return f"{first} to {first + num_local - 1} of {num_experts}"
