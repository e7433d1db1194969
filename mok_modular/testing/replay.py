"""One stage alone on a workload: its kernel on what the stages before it leave, held against its reference.

replay = replay_stage("dispatch", Workload.from_routing(mok.load_routing(), shape, num_ranks=4, num_tokens=256))
replay.is_ok, replay.seconds
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mok_modular.stages import (
    combine,
    dispatch,
    grouped_dgrad,
    grouped_gemm,
    quantize,
    reduce,
    reverse_combine,
    reverse_dispatch,
    schedule,
    swiglu,
    swiglu_backward,
    wgrad,
)
from mok_modular.testing.runs import TensorCheck, compare
from mok_modular.testing.workload import Workload

REPLAYED = (
    "schedule",
    "dispatch",
    "grouped_gemm",
    "swiglu",
    "combine",
    "reduce",
    "reverse_combine",
    "grouped_dgrad",
    "swiglu_backward",
    "reverse_dispatch",
    "quantize",
    "wgrad",
)


@dataclass(frozen=True, eq=False)
class StageReplay:
    """What a stage did. `seconds`: its launches, memory and inputs included. `num_values` of its results were compared,
    `num_differing` have other bits than the reference's. Stages that only move or count must have none; arithmetic is
    held against float64 (`check`, None for the others). `results`: every launch's, as a list of tensors."""

    name: str
    num_rows: int
    seconds: float
    num_values: int
    num_differing: int
    check: TensorCheck | None
    results: list[list[Tensor]]

    @property
    def is_ok(self) -> bool:
        """Whether the stage keeps to its reference."""
        return self.num_differing == 0 if self.check is None else self.check.is_ok

    def to_json(self) -> dict[str, Any]:
        """Everything but the tensors."""
        check = None if self.check is None else vars(self.check)
        return {
            "name": self.name,
            "ok": self.is_ok,
            "num_rows": self.num_rows,
            "seconds": self.seconds,
            "num_values": self.num_values,
            "num_differing": self.num_differing,
            "check": check,
        }


@dataclass(frozen=True, eq=False)
class _Launch:
    """A call of `launch`, the same of `reference`, and of the reference in float64 (None where nothing is rounded)."""

    launch: Callable[[], Any]
    reference: Callable[[], Any]
    exact: Callable[[], Any] | None = None


def replay_stage(name: str, workload: Workload) -> StageReplay:
    """Runs a stage of REPLAYED alone on all ranks of the workload. Raises ValueError for another name, and for quantize
    where the workload's sizes are none for MXFP8."""
    if name not in REPLAYED:
        raise ValueError(f"a stage that runs alone is one of {', '.join(REPLAYED)}, got {name!r}")
    inputs = _Inputs(workload)
    seconds, results, num_values, num_differing = 0.0, [], 0, 0
    found: list[Tensor] = []
    rounded: list[Tensor] = []
    exact: list[Tensor] = []
    for call in _LAUNCHES[name](inputs):
        start_s = time.perf_counter()
        given = _tensors(call.launch())
        seconds += time.perf_counter() - start_s
        wanted = _tensors(call.reference())
        results.append(given)
        for a, b in zip(given, wanted, strict=True):
            num_values += a.numel()
            is_other = (a.view(torch.uint8) != b.view(torch.uint8)).view(*a.shape, a.element_size())
            num_differing += int(is_other.any(-1).sum())
        if call.exact is not None:
            found += [t.flatten() for t in given]
            rounded += [t.flatten() for t in wanted]
            exact += [t.flatten() for t in _tensors(call.exact())]
    check = compare(torch.cat(found), torch.cat(rounded), torch.cat(exact)) if exact else None
    num_rows = sum(int(table.segment_num_rows.sum()) for table in inputs.tables)
    return StageReplay(name, num_rows, seconds, num_values, num_differing, check, results)


class _Inputs:
    """What every stage gets, from the references of those before it, by rank."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        shape, ids = workload.shape, workload.expert_ids
        self.tables = schedule.reference(ids, num_experts=shape.num_experts)
        self.rows = dispatch.reference(workload.x, self.tables, topk=shape.topk)
        self.weights = [workload.weights.of_rank(rank, workload.num_ranks) for rank in range(workload.num_ranks)]
        self.segments = [(table.segment_start, table.segment_num_rows) for table in self.tables]

    def gate_up(self) -> list[tuple[Tensor, Tensor]]:
        return [
            grouped_gemm.reference(rows, (w.routed_gate, w.routed_up), *segments)
            for rows, w, segments in zip(self.rows, self.weights, self.segments, strict=True)
        ]

    def hidden(self) -> list[Tensor]:
        return [swiglu.reference(gate, up, self.workload.swiglu_limit) for gate, up in self.gate_up()]

    def y(self) -> list[Tensor]:
        return [
            grouped_gemm.reference(h, w.routed_down, *segments)
            for h, w, segments in zip(self.hidden(), self.weights, self.segments, strict=True)
        ]

    def d_rows(self) -> list[tuple[Tensor, Tensor]]:
        """d_y and router weight of every row."""
        given = self.workload
        return reverse_combine.reference(given.d_outputs(), given.router_weights, self.tables, topk=given.shape.topk)

    def d_hidden(self) -> list[Tensor]:
        return [
            grouped_dgrad.reference(d_y, w.routed_down, *segments)
            for (d_y, _), w, segments in zip(self.d_rows(), self.weights, self.segments, strict=True)
        ]

    def gradients(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """What swiglu_backward leaves."""
        return [
            swiglu_backward.reference(d_h, gate, up, weights, self.workload.swiglu_limit)
            for d_h, (gate, up), (_, weights) in zip(self.d_hidden(), self.gate_up(), self.d_rows(), strict=True)
        ]


def _schedule(inputs: _Inputs) -> Iterator[_Launch]:
    ids, num_experts = inputs.workload.expert_ids, inputs.workload.shape.num_experts

    def launch() -> list[Tensor]:
        """Without what only a MoKSchedule has, and without rows up to the capacity."""
        found = schedule.launch(ids, num_experts=num_experts)
        return [
            getattr(rank, name)[: len(want)]
            for rank, table in zip(found, inputs.tables, strict=True)
            for name, want in vars(table).items()
        ]

    yield _Launch(launch, lambda: [want for table in inputs.tables for want in vars(table).values()])


def _dispatch(inputs: _Inputs) -> Iterator[_Launch]:
    arguments: Any = (inputs.workload.x, inputs.tables)
    topk = inputs.workload.shape.topk
    yield _Launch(lambda: dispatch.launch(*arguments, topk=topk), lambda: inputs.rows)


def _grouped_gemm(inputs: _Inputs) -> Iterator[_Launch]:
    for rows, h, w, segments in zip(inputs.rows, inputs.hidden(), inputs.weights, inputs.segments, strict=True):
        for a, weight in ((rows, (w.routed_gate, w.routed_up)), (h, w.routed_down)):
            yield _arithmetic(grouped_gemm, a, weight, *segments)


def _swiglu(inputs: _Inputs) -> Iterator[_Launch]:
    for gate, up in inputs.gate_up():
        yield _arithmetic(swiglu, gate, up, inputs.workload.swiglu_limit)


def _combine(inputs: _Inputs) -> Iterator[_Launch]:
    ys = inputs.y()
    yield _Launch(lambda: combine.launch(ys, inputs.tables), lambda: combine.reference(ys, inputs.tables))


def _reduce(inputs: _Inputs) -> Iterator[_Launch]:
    workload = inputs.workload
    cells = combine.reference(inputs.y(), inputs.tables)
    for rank_cells, ids, weights in zip(cells, workload.expert_ids, workload.router_weights, strict=True):
        yield _arithmetic(reduce, rank_cells, weights, ids >= 0, None)


def _quantize(inputs: _Inputs) -> Iterator[_Launch]:
    for rows, segments in zip(inputs.rows, inputs.segments, strict=True):
        yield _Launch(partial(quantize.launch, rows, *segments), partial(quantize.reference, rows, *segments))


def _reverse_combine(inputs: _Inputs) -> Iterator[_Launch]:
    workload = inputs.workload
    arguments: Any = (workload.d_outputs(), workload.router_weights, inputs.tables)
    topk = workload.shape.topk
    yield _Launch(lambda: reverse_combine.launch(*arguments, topk=topk), inputs.d_rows)


def _grouped_dgrad(inputs: _Inputs) -> Iterator[_Launch]:
    for (d_y, _), gradients, w, segments in zip(
        inputs.d_rows(), inputs.gradients(), inputs.weights, inputs.segments, strict=True
    ):
        yield _arithmetic(grouped_dgrad, d_y, w.routed_down, *segments)
        yield _arithmetic(grouped_dgrad, gradients[:2], (w.routed_gate, w.routed_up), *segments)


def _swiglu_backward(inputs: _Inputs) -> Iterator[_Launch]:
    for d_h, (gate, up), (_, weights) in zip(inputs.d_hidden(), inputs.gate_up(), inputs.d_rows(), strict=True):
        yield _arithmetic(swiglu_backward, d_h, gate, up, weights, inputs.workload.swiglu_limit)


def _reverse_dispatch(inputs: _Inputs) -> Iterator[_Launch]:
    gradients = inputs.gradients()
    d_xs = [
        grouped_dgrad.reference(each[:2], (w.routed_gate, w.routed_up), *segments)
        for each, w, segments in zip(gradients, inputs.weights, inputs.segments, strict=True)
    ]
    arguments: Any = (d_xs, [each[3] for each in gradients], inputs.tables)
    yield _Launch(lambda: reverse_dispatch.launch(*arguments), lambda: reverse_dispatch.reference(*arguments))


def _wgrad(inputs: _Inputs) -> Iterator[_Launch]:
    """Rounded, as a layer does with the sums: float32 sums differ in their last bits by the order of rows alone."""
    for (d_y, _), gradients, x, segments in zip(
        inputs.d_rows(), inputs.gradients(), inputs.rows, inputs.segments, strict=True
    ):
        d_gate, d_up, hidden, _ = gradients
        for pair in ((d_gate, x), (d_up, x), (d_y, hidden)):
            sums = _arithmetic(wgrad, *pair, *segments)
            yield _Launch(partial(_rounded, sums.launch), partial(_rounded, sums.reference), sums.exact)


def _rounded(sums: Callable[[], Tensor]) -> Tensor:
    return sums().bfloat16()


_LAUNCHES: dict[str, Callable[[_Inputs], Iterator[_Launch]]] = {
    "schedule": _schedule,
    "dispatch": _dispatch,
    "grouped_gemm": _grouped_gemm,
    "swiglu": _swiglu,
    "combine": _combine,
    "reduce": _reduce,
    "reverse_combine": _reverse_combine,
    "grouped_dgrad": _grouped_dgrad,
    "swiglu_backward": _swiglu_backward,
    "reverse_dispatch": _reverse_dispatch,
    "quantize": _quantize,
    "wgrad": _wgrad,
}


def _arithmetic(stage: Any, *arguments: Any) -> _Launch:
    def double(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(double(each) for each in value)
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return _Launch(
        lambda: stage.launch(*arguments),
        lambda: stage.reference(*arguments),
        lambda: stage.reference(*(double(argument) for argument in arguments)),
    )


def _tensors(result: Any) -> list[Tensor]:
    return [result.contiguous()] if isinstance(result, Tensor) else [t.contiguous() for t in _flat(result)]


def _flat(results: Sequence[Any]) -> Iterator[Tensor]:
    for result in results:
        if isinstance(result, Tensor):
            yield result
        else:
            yield from _flat(result)
