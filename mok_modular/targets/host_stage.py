"""One stage's kernel alone on the host target: memory of its own, every wait satisfied beforehand, one launch.

`launch` of stages/*.py is made of this: lay out the stage's inputs in the regions that the kernel reads, run the
very kernel of a split plan, read its outputs. All rows are in one ring generation and one window (but for wgrad with a
carry), so a region holds all rows of its rank. Regions are full of NaN until something writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mok_modular.errors import MoKDeadlockError, MoKTimeoutError
from mok_modular.group import LocalGroup
from mok_modular.plan import Plan, group_mask
from mok_modular.targets.host import extension

ROW_BLOCKS = (128, 256)

_INT32 = torch.int32


class StageRun:
    """The ranks of one launch on the host target (on a GPU: cuda_stage.CudaStageRun).

    `tables` holds every rank's tables of rows (see `segment_tables`), with El local experts each; a width that the
    stage does not use may stay 0. `ring_rows` and `generation` (-1: all) are for rows that do not fit into one
    generation.

    Raises ValueError if `group` has another number of ranks or device, or `row_block` is none that the target has.
    """

    row_blocks: tuple[int, ...] = ROW_BLOCKS

    def __init__(
        self,
        stage: str,
        tables: Sequence[Mapping[str, Tensor]],
        *,
        row_block: int,
        num_tokens: Sequence[int],
        topk: int = 1,
        hidden_size: int = 0,
        intermediate_size: int = 0,
        shared_size: int = 0,
        ring_rows: int | None = None,
        generation: int = -1,
        is_push_dispatch: bool = False,
        is_pull_combine: bool = False,
        kind: str = "forward",
        is_mxfp8: bool = False,
        group: LocalGroup | None = None,
    ) -> None:
        self.stage = stage
        self.tables = tables
        self.num_tokens = num_tokens
        self.group = group or LocalGroup(len(tables))
        if self.group.size() != len(tables):
            raise ValueError(f"group has {self.group.size()} ranks, the arguments are for {len(tables)}")
        if row_block not in self.row_blocks:
            raise ValueError(f"row_block must be one of {self.row_blocks} here, got {row_block}")
        shape = self.shape = extension().Shape()
        shape.num_ranks = len(tables)
        shape.max_tokens = max(num_tokens)
        shape.topk = topk
        shape.hidden_size = hidden_size
        shape.intermediate_size = intermediate_size
        shape.shared_size = shared_size
        shape.num_local_experts = tables[0]["segment_num_rows"].numel()
        shape.row_block = row_block
        shape.capacity_rows = max(row_block, *(int(t["counts"][0]) for t in tables))
        shape.ring_rows = shape.minibatch = ring_rows or shape.capacity_rows
        shape.is_push_dispatch = is_push_dispatch
        shape.is_pull_combine = is_pull_combine
        shape.is_mxfp8 = is_mxfp8
        shape.has_backward = kind != "forward"
        self.kind = kind
        self.generation = generation
        self.native = self._make_memory()

    def _make_memory(self) -> Any:
        memory = extension().Workspace(len(self.tables))
        memory.reserve(self.shape)
        return memory

    def region(self, rank: int, name: str, width: int) -> Tensor:
        """A region of a rank as bfloat16 [rows, width], shared with the kernel."""
        if self.native.region_bytes(rank, name) == 0:
            return torch.empty(0, width, dtype=torch.bfloat16)
        return torch.from_dlpack(self.native.region(rank, name)).view(torch.bfloat16).view(-1, width)

    def floats(self, rank: int, name: str) -> Tensor:
        """A region of a rank that holds float32, flat, shared with the kernel."""
        return self.region(rank, name, 2).view(torch.float32).flatten()

    def fill(self, rank: int, name: str, rows: Tensor) -> None:
        """Writes `rows` to the start of a region."""
        self.region(rank, name, rows.shape[1])[: len(rows)] = rows.detach()

    def launch(
        self, tensors: Sequence[Mapping[str, Tensor]] | None = None, swiglu_limit: float | None = None
    ) -> list[list[dict[str, Any]]]:
        """Runs the kernel on all ranks, with every rank's `tensors` by the names of csrc/layout.h (contiguous).

        Returns the statistics of the stage by rank: one dict with `num_rows`, `num_bytes`, `flops`, `busy_s`,
        `wait_s`. Raises MoKDeadlockError (on threads MoKTimeoutError) if the stage waits for something after all.
        """
        programs = self._programs(tensors, swiglu_limit)
        self.native.satisfy(0, self.kind)
        group = self.group
        is_threads = group.executor == "threads"
        result = extension().run(self.native, programs, group.order, group.seed, is_threads, 10.0, 10.0)
        if result["reason"] != "ok":
            kind = MoKDeadlockError if result["reason"] == "deadlock" else MoKTimeoutError
            waits = [dict(wait, task=f"{wait['block']}.{wait['part']}") for wait in result["waits"]]
            raise kind(f"{self.stage} alone: {result['reason']}", waits)
        return result["stats"]

    def _programs(self, tensors: Sequence[Mapping[str, Tensor]] | None, swiglu_limit: float | None) -> list[Any]:
        programs = []
        for rank, tables in enumerate(self.tables):
            program = extension().Program(
                self.kind,
                self.shape,
                rank,
                self.num_tokens[rank],
                0,
                list(Plan.parse("split").group_masks),
                _pointers(tables),
                _pointers(tensors[rank] if tensors else {}),
                swiglu_limit,
            )
            mask = group_mask((self.stage,))
            num_workers = self.group.num_workers
            program.add_launch(self.stage, mask, self.stage, self.generation, False, False, False, 0, num_workers, 0)
            programs.append(program)
        return programs


def open_run(
    stage: str,
    tables: Sequence[Mapping[str, Tensor]],
    *,
    device: torch.device,
    group: LocalGroup | None = None,
    **sizes: Any,
) -> StageRun:
    """A StageRun where the arguments are, on the CPU or a GPU.

    Raises ValueError if `group` is somewhere else, or the stage is one of a backward and not on the CPU, and what
    StageRun raises.
    """
    if device.type != "cpu" and sizes.get("kind", "forward") != "forward":
        raise ValueError(f"{stage} runs alone on the CPU only, as a backward does; the arguments are on {device}")
    group = group or LocalGroup(len(tables), device="cpu" if device.type == "cpu" else str(device))
    given = torch.device(group.device)
    if given.type != device.type or (given.index or 0) != (device.index or 0):
        raise ValueError(f"group must be where the arguments are, on {device}, got {group.device}")
    if device.type == "cpu":
        return StageRun(stage, tables, group=group, **sizes)
    from mok_modular.targets.cuda_stage import CudaStageRun  # needs a driver

    return CudaStageRun(stage, tables, group=group, **sizes)


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


def _pointers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor.numel()}
