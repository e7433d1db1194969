"""The arguments of a stage's kernel alone: tables of rows in one window, and checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

ROW_BLOCKS = (128, 256)
_INT32 = torch.int32


def segment_tables(segment_start: Tensor, segment_num_rows: Tensor, row_block: int) -> dict[str, Tensor]:
    """What a kernel needs to know of a rank's segments (int32 [El+1] and [El]), in one window; on the CPU.

    Raises ValueError unless every segment is just as many row blocks as its rows need: no row block is all padding.
    """
    segment_start, segment_num_rows = segment_start.cpu(), segment_num_rows.cpu()
    starts = torch.nn.functional.pad(
        ((segment_num_rows.long() + row_block - 1) // row_block * row_block).cumsum(0), (1, 0)
    )
    if not torch.equal(starts, segment_start.long()):
        raise ValueError(
            f"segment_start must be {starts.tolist()} for segment_num_rows {segment_num_rows.tolist()} and "
            f"row_block={row_block}, got {segment_start.tolist()}"
        )
    num_rows = int(starts[-1])
    num_blocks = segment_start.diff() // row_block
    experts = torch.arange(len(segment_num_rows), dtype=_INT32)
    return {
        "segment_start": segment_start.to(_INT32).contiguous(),
        "segment_num_rows": segment_num_rows.to(_INT32).contiguous(),
        "row_block_expert": experts.repeat_interleave(num_blocks),
        "window_start": torch.tensor([0, num_rows // row_block], dtype=_INT32),
        "generation_window": torch.tensor([0, 1], dtype=_INT32),
        "counts": torch.tensor([num_rows, 1, 0, num_rows, 0], dtype=_INT32),
    }


def check_devices(**arguments: Any) -> torch.device:
    """The device of a launch: all tensors of its arguments are on the CPU or on one GPU; those of integers and bools
    (tables, masks, numbers of rows) may be on the CPU either way. Arguments may be sequences of tensors, or of tables
    that hold some.

    Raises ValueError that names the argument: a kernel would read an address of another device.
    """
    found = [each for name, value in arguments.items() for each in _named_tensors(name, value)]
    device = next((tensor.device for _, tensor in found), torch.device("cpu"))
    for name, tensor in found:
        is_table = not tensor.is_floating_point() and tensor.device.type == "cpu"
        if tensor.device.type not in ("cpu", "cuda") or (tensor.device != device and not is_table):
            raise ValueError(f"{name} must be on the CPU or on one GPU with the other arguments, got {tensor.device}")
    return device


def _named_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Sequence):
        for i, each in enumerate(value):
            yield from _named_tensors(f"{name}[{i}]", each)
    elif hasattr(value, "__dict__"):
        for field, each in vars(value).items():
            yield from _named_tensors(f"{name}.{field}", each)


def check_bfloat16(**tensors: Tensor) -> None:
    """Raises TypeError that names the argument unless kernels take its dtype."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.bfloat16:
            raise TypeError(f"{name} must be torch.bfloat16 for the kernel, got {tensor.dtype}")


def check_float32(name: str, tensor: Tensor) -> None:
    """Raises TypeError unless the tensor is what a kernel takes as float."""
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name} must be torch.float32 for the kernel, got {tensor.dtype}")


def check_width(name: str, width: int) -> None:
    """Raises ValueError unless `width` is one that kernels take."""
    if width < 64 or width % 64:
        raise ValueError(f"{name} must be a positive multiple of 64 for the kernel, got {width}")
