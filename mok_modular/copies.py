"""Over all ranks: the norm of a model's gradients, and the same values in what every rank has a copy of.

Of a model that every rank builds alike, the routed experts of a MoE layer are this rank's own. Everything else is a
copy: the shared expert, and whatever stands around the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mok_modular.calls.values import ROUTED_WEIGHTS
from mok_modular.layer import MoE, live_layers, moe_layers
from mok_modular.parameters import is_dtensor
from mok_modular.ranks.member import Member

COPIES_RTOL = 1e-3
"""By how much the norms of one gradient's copies may differ between ranks. Sums over ranks give every rank the same
bits; a gradient that was not summed is further away."""


class _Gradient(NamedTuple):
    name: str
    tensor: Tensor | None
    is_owned: bool


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ for a model that holds MoE layers: the norm over all ranks. Collective.

    Gradients of routed experts are counted on the rank that owns them, those of copies once. The norm, float32 [], is
    the same on every rank, and so is the factor min(1, max_norm / (norm + 1e-6)) that all gradients are multiplied by.
    Sum the gradients of copies over the ranks before: `member.all_reduce`, or torch.distributed.

    parameters: the model, or parameters of it; some of them must be a MoE layer's. A layer's main_grads are its
    gradients where it has them, so a model with main_grads is passed itself and not its optimizer's masters.
    norm_type: p > 0, or infinity. Norms are computed in float32 at least. Synchronises on a GPU.

    Raises ValueError on every rank, before anything is changed, that names the copies whose gradients are not the same
    on all ranks (norms further apart than COPIES_RTOL); with error_if_nonfinite, RuntimeError on every rank where the
    norm is not finite.
    """
    norm_type, max_norm = float(norm_type), float(max_norm)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0, got {norm_type}")
    gradients, layers = _gradients(parameters)
    member, timeout_s = layers[0].member, layers[0].config.start_timeout_s
    device = torch.device(member.group.device)
    norms = [_norm(each.tensor, norm_type, device) for each in gradients]
    owned = [norm for norm, each in zip(norms, gradients, strict=True) if each.is_owned]
    copies = [norm for norm, each in zip(norms, gradients, strict=True) if not each.is_owned]
    by_rank = _gather(member, torch.stack([_joined(owned, norm_type, device), *copies]), timeout_s)
    is_same = torch.isclose(by_rank, by_rank[:1], rtol=COPIES_RTOL, atol=0, equal_nan=True).all(0)[1:].tolist()
    if not all(is_same):
        names = [each.name for each in gradients if not each.is_owned]
        wrong = ", ".join(name for name, same in zip(names, is_same, strict=True) if not same)
        raise ValueError(
            f"clip_grad_norm_: every rank has a copy of these parameters, but their gradients differ: {wrong}. Sum "
            "them over the ranks before: member.all_reduce, or torch.distributed.all_reduce"
        )
    total = _joined([*by_rank[:, 0], *by_rank[0, 1:]], norm_type, device).float()
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite on all ranks, so it "
            "cannot be clipped. Set error_if_nonfinite=False to scale the gradients by it all the same"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for each in gradients:
        if each.tensor is not None:
            each.tensor.mul_(factor.to(each.tensor.device))
    return total


@torch.no_grad()
def broadcast_copies(module: nn.Module) -> None:
    """Gives every rank rank 0's values of the copies: parameters and buffers, but no routed experts. Collective.

    For ranks that seed differently, after the model is built or loaded. Raises ValueError on every rank if names,
    shapes or dtypes differ.
    """
    layers = moe_layers(module)
    member, timeout_s = layers[0].member, layers[0].config.start_timeout_s
    owned = {id(weight) for layer in layers for weight in _owned(layer).values()}
    named = [*module.named_parameters(), *module.named_buffers()]
    copies = {name: tensor.detach() for name, tensor in named if id(tensor) not in owned}
    kinds = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in copies.items()]
    process_group = getattr(member.group, "process_group", None)

    def act(ranks: list[Any]) -> Sequence[Any]:
        for rank, (given, _) in enumerate(ranks):
            if given != ranks[0][0]:
                differing = sorted({name for name, *_ in set(given) ^ set(ranks[0][0])})
                raise ValueError(
                    f"broadcast_copies: names, shapes and dtypes must be the same on every rank, but rank {rank}'s "
                    f"differ from rank 0's: {', '.join(differing) or 'their order'}"
                )
        source = ranks[0][1]
        return [source and [tensor.clone() for tensor in source]] * len(ranks)

    sent = None if process_group is not None else list(copies.values())
    received = member.group.meet(member.rank(), "broadcast_copies", (kinds, sent), act, timeout_s)
    if process_group is None:
        for tensor, value in zip(copies.values(), received, strict=True):
            tensor.copy_(value)
        return
    for tensor in copies.values():
        local: Any = tensor
        if is_dtensor(tensor):
            local = local.to_local()
        torch.distributed.broadcast(local, group=process_group, group_src=0)


def _owned(layer: MoE) -> dict[str, nn.Parameter]:
    return {name: getattr(layer, name) for name in ROUTED_WEIGHTS}


def _gradients(parameters: Any) -> tuple[list[_Gradient], list[MoE]]:
    """The gradients of `parameters`, and the MoE layers that some of them belong to."""
    if isinstance(parameters, nn.Module):
        layers = moe_layers(parameters)
        named: list[tuple[str, Tensor]] = list(parameters.named_parameters())
    else:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        named = [(f"parameter {i} of shape {list(p.shape)}", p) for i, p in enumerate(given)]
        ids = {id(p) for p in given}
        layers = [layer for layer in live_layers() if any(id(p) in ids for p in layer.parameters(recurse=False))]
        if not layers:
            raise ValueError(
                "parameters must hold parameters of a MoE layer, got none (of master copies nothing says whose they "
                "are: pass the model); without a MoE layer torch.nn.utils.clip_grad_norm_ is right"
            )
        if len({id(layer.member) for layer in layers}) > 1:
            raise ValueError("parameters must hold MoE layers of one group, got layers of several")
    main_grads = {
        id(weight): layer.main_grads[name]
        for layer in layers
        if layer.main_grads is not None
        for name, weight in layer.named_parameters(recurse=False)
    }
    owned = {id(weight) for layer in layers for weight in _owned(layer).values()}
    return [_Gradient(name, main_grads.get(id(p), p.grad), id(p) in owned) for name, p in named], layers


def _norm(gradient: Tensor | None, norm_type: float, device: torch.device) -> Tensor:
    """float64 [] on `device`; 0 where there is no gradient."""
    if gradient is None:
        return torch.zeros((), dtype=torch.float64, device=device)
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norm = torch.linalg.vector_norm(gradient, norm_type, dtype=dtype)
    return (norm.full_tensor() if is_dtensor(norm) else norm).to(device, torch.float64)


def _joined(norms: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm of what these are the norms of."""
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else _norm(None, norm_type, device)


def _gather(member: Member, values: Tensor, timeout_s: float) -> Tensor:
    """Every rank's `values` [n], as [R, n]. Raises ValueError on every rank if n differs."""

    def check(lengths: list[int]) -> None:
        if len(set(lengths)) > 1:
            counts = ", ".join(f"rank {rank}: {length - 1}" for rank, length in enumerate(lengths))
            raise ValueError(f"clip_grad_norm_: every rank must give the same number of copies, got {counts}")

    def act(parts: list[Tensor]) -> list[Tensor]:
        check([len(part) for part in parts])
        return [torch.stack(parts)] * len(parts)

    process_group = getattr(member.group, "process_group", None)
    if process_group is None:
        return member.group.meet(member.rank(), "clip_grad_norm_", values, act, timeout_s)

    def sum_rows(row: Tensor) -> Tensor:  # every row is one value and zeros; every backend can add
        by_rank = row.new_zeros(member.size(), *row.shape)
        by_rank[member.rank()] = row
        torch.distributed.all_reduce(by_rank, group=process_group)
        return by_rank

    check(sum_rows(torch.tensor(len(values), device=values.device)).tolist())
    return sum_rows(values)
