"""The routed experts' weights as a call takes them: BF16 tensors, or MXFP8 as (data, scale).

Targets without block-scaled products multiply BF16, so MXFP8 weights are dequantized once a call. A forward sums over a
row of each weight and wants them quantized by row; a backward's input gradients sum over a column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mok_modular.ops import check_quantized, dequantize_to_bfloat16, mxfp8_quantize

RoutedWeight = Tensor | Sequence[Tensor]
"""BF16, or MXFP8: (data, scale), for a backward with (data_t, scale_t) behind, or these two alone."""

PRECISIONS = ("bf16", "mxfp8")

_GRADIENT_NAMES = {"w_routed_gate": "w_dgrad_gate", "w_routed_up": "w_dgrad_up"}


def pack_forward(gate: Tensor, up: Tensor, down: Tensor, precision: str) -> tuple[Any, Any, Any]:
    """BF16 weights as a forward takes them in this precision."""
    if precision == "bf16":
        return gate, up, down
    gate_parts, up_parts, down_parts = (mxfp8_quantize(weight, rowwise=True) for weight in (gate, up, down))
    return gate_parts[:2], up_parts[:2], down_parts[:2]


def pack_backward(gate: Tensor, up: Tensor, down: Tensor, precision: str) -> tuple[Any, Any, Any]:
    """BF16 weights as a backward takes them in this precision."""
    if precision == "bf16":
        return gate, up, down
    both = [mxfp8_quantize(weight, rowwise=True, columnwise=True) for weight in (gate, up)]
    return both[0], both[1], mxfp8_quantize(down, rowwise=False, columnwise=True)[2:]


def unpack_forward(weights: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Returns the weights by name in BF16, and whether the routed ones were MXFP8, (data, scale) each.

    Raises TypeError or ValueError that names the weight and the rule. BF16 weights are not looked at here.
    """
    is_mxfp8 = _is_mxfp8(weights)
    if not is_mxfp8:
        return dict(weights), False
    for name in _routed(weights):
        _check_parts(name, weights[name], ("data", "scale"))
    return {name: _dequantize(weights[name]) if name in _routed(weights) else weights[name] for name in weights}, True


def unpack_backward(
    weights: Mapping[str, Any], *, needs_values: bool = True, can_replay: bool = True
) -> tuple[dict[str, Any], bool]:
    """The same for a backward: gate and up are (data, scale, data_t, scale_t), down is (data_t, scale_t).

    In MXFP8 w_routed_gate and w_routed_up are what a replay of the forward multiplies, w_dgrad_gate, w_dgrad_up and
    w_routed_down what gives gradients. Without can_replay the first two are not made, and the others take their names.
    Without needs_values only shapes count: a wgrad apart multiplies no weights.
    """
    if not _is_mxfp8(weights):
        return dict(weights), False
    unpacked = dict(weights)
    for name in _routed(weights):
        parts = weights[name]
        is_down = name == "w_routed_down"
        _check_parts(name, parts, ("data_t", "scale_t") if is_down else ("data", "scale", "data_t", "scale_t"))
        if not is_down and parts[2].shape != parts[0].mT.shape:
            raise ValueError(
                f"{name}: data_t must be {list(parts[0].mT.shape)}, data transposed, got {list(parts[2].shape)}"
            )
        if not needs_values:
            unpacked[name] = torch.empty(parts[-2].mT.shape, dtype=torch.bfloat16, device=parts[-2].device)
            continue
        by_column = _dequantize(parts[-2:]).mT.contiguous()
        if is_down or not can_replay:
            unpacked[name] = by_column
        else:
            unpacked[name], unpacked[_GRADIENT_NAMES[name]] = _dequantize(parts[:2]), by_column
    return unpacked, True


def _routed(weights: Mapping[str, Any]) -> list[str]:
    return [name for name in weights if name.startswith("w_routed")]


def _is_mxfp8(weights: Mapping[str, Any]) -> bool:
    """Raises TypeError where some routed weights are MXFP8 and others are not."""
    given = {name: isinstance(weights[name], tuple | list) for name in _routed(weights)}
    if any(given.values()) and not all(given.values()):
        mxfp8 = ", ".join(name for name, is_mxfp8 in given.items() if is_mxfp8)
        raise TypeError(
            f"the routed weights must all be BF16 tensors or all be MXFP8 tuples, got MXFP8 only for {mxfp8}"
        )
    return any(given.values())


def _check_parts(name: str, parts: Sequence[Any], names: tuple[str, ...]) -> None:
    if len(parts) != len(names):
        raise ValueError(f"{name} must be ({', '.join(names)}) here, got {len(parts)} tensors")
    for i in range(0, len(names), 2):
        check_quantized(f"{name}: {names[i]}", parts[i], f"{name}: {names[i + 1]}", parts[i + 1])
        if parts[i].dim() != 3:
            raise ValueError(f"{name}: {names[i]} must have three dimensions, got {list(parts[i].shape)}")


def _dequantize(parts: Sequence[Tensor]) -> Tensor:
    data, scale = parts
    return dequantize_to_bfloat16(data, scale)
