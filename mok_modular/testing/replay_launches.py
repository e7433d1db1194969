"""The launches of every stage that is replayed, on what the references of the stages before it leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from mok_modular.protocol.registry import Registry
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
from mok_modular.testing.workload import Workload


@dataclass(frozen=True, eq=False)
class Launch:
    """A call of `launch`, the same of `reference`, and of the reference in float64 (None where nothing is rounded)."""

    launch: Callable[[], Any]
    reference: Callable[[], Any]
    exact: Callable[[], Any] | None = None


class Inputs:
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


LAUNCHES: Registry[Callable[[Inputs], Iterator[Launch]]] = Registry()
"""What runs alone: the launches of a stage on the inputs of a workload."""


@LAUNCHES.add("schedule")
def _schedule(inputs: Inputs) -> Iterator[Launch]:
    ids, num_experts = inputs.workload.expert_ids, inputs.workload.shape.num_experts

    def launch() -> list[Tensor]:
        """Without what only a MoKSchedule has, and without rows up to the capacity."""
        found = schedule.launch(ids, num_experts=num_experts)
        return [
            getattr(rank, name)[: len(want)]
            for rank, table in zip(found, inputs.tables, strict=True)
            for name, want in vars(table).items()
        ]

    yield Launch(launch, lambda: [want for table in inputs.tables for want in vars(table).values()])


@LAUNCHES.add("dispatch")
def _dispatch(inputs: Inputs) -> Iterator[Launch]:
    arguments: Any = (inputs.workload.x, inputs.tables)
    topk = inputs.workload.shape.topk
    yield Launch(lambda: dispatch.launch(*arguments, topk=topk), lambda: inputs.rows)


@LAUNCHES.add("grouped_gemm")
def _grouped_gemm(inputs: Inputs) -> Iterator[Launch]:
    for rows, h, w, segments in zip(inputs.rows, inputs.hidden(), inputs.weights, inputs.segments, strict=True):
        for a, weight in ((rows, (w.routed_gate, w.routed_up)), (h, w.routed_down)):
            yield _arithmetic(grouped_gemm, a, weight, *segments)


@LAUNCHES.add("swiglu")
def _swiglu(inputs: Inputs) -> Iterator[Launch]:
    for gate, up in inputs.gate_up():
        yield _arithmetic(swiglu, gate, up, inputs.workload.swiglu_limit)


@LAUNCHES.add("combine")
def _combine(inputs: Inputs) -> Iterator[Launch]:
    ys = inputs.y()
    yield Launch(lambda: combine.launch(ys, inputs.tables), lambda: combine.reference(ys, inputs.tables))


@LAUNCHES.add("reduce")
def _reduce(inputs: Inputs) -> Iterator[Launch]:
    workload = inputs.workload
    cells = combine.reference(inputs.y(), inputs.tables)
    for rank_cells, ids, weights in zip(cells, workload.expert_ids, workload.router_weights, strict=True):
        yield _arithmetic(reduce, rank_cells, weights, ids >= 0, None)


@LAUNCHES.add("reverse_combine")
def _reverse_combine(inputs: Inputs) -> Iterator[Launch]:
    workload = inputs.workload
    arguments: Any = (workload.d_outputs(), workload.router_weights, inputs.tables)
    topk = workload.shape.topk
    yield Launch(lambda: reverse_combine.launch(*arguments, topk=topk), inputs.d_rows)


@LAUNCHES.add("grouped_dgrad")
def _grouped_dgrad(inputs: Inputs) -> Iterator[Launch]:
    for (d_y, _), gradients, w, segments in zip(
        inputs.d_rows(), inputs.gradients(), inputs.weights, inputs.segments, strict=True
    ):
        yield _arithmetic(grouped_dgrad, d_y, w.routed_down, *segments)
        yield _arithmetic(grouped_dgrad, gradients[:2], (w.routed_gate, w.routed_up), *segments)


@LAUNCHES.add("swiglu_backward")
def _swiglu_backward(inputs: Inputs) -> Iterator[Launch]:
    for d_h, (gate, up), (_, weights) in zip(inputs.d_hidden(), inputs.gate_up(), inputs.d_rows(), strict=True):
        yield _arithmetic(swiglu_backward, d_h, gate, up, weights, inputs.workload.swiglu_limit)


@LAUNCHES.add("reverse_dispatch")
def _reverse_dispatch(inputs: Inputs) -> Iterator[Launch]:
    gradients = inputs.gradients()
    d_xs = [
        grouped_dgrad.reference(each[:2], (w.routed_gate, w.routed_up), *segments)
        for each, w, segments in zip(gradients, inputs.weights, inputs.segments, strict=True)
    ]
    arguments: Any = (d_xs, [each[3] for each in gradients], inputs.tables)
    yield Launch(lambda: reverse_dispatch.launch(*arguments), lambda: reverse_dispatch.reference(*arguments))


@LAUNCHES.add("quantize")
def _quantize(inputs: Inputs) -> Iterator[Launch]:
    for rows, segments in zip(inputs.rows, inputs.segments, strict=True):
        yield Launch(partial(quantize.launch, rows, *segments), partial(quantize.reference, rows, *segments))


@LAUNCHES.add("wgrad")
def _wgrad(inputs: Inputs) -> Iterator[Launch]:
    """Rounded, as a layer does with the sums: float32 sums differ in their last bits by the order of rows alone."""
    for (d_y, _), gradients, x, segments in zip(
        inputs.d_rows(), inputs.gradients(), inputs.rows, inputs.segments, strict=True
    ):
        d_gate, d_up, hidden, _ = gradients
        for pair in ((d_gate, x), (d_up, x), (d_y, hidden)):
            sums = _arithmetic(wgrad, *pair, *segments)
            yield Launch(partial(_rounded, sums.launch), partial(_rounded, sums.reference), sums.exact)


def _rounded(sums: Callable[[], Tensor]) -> Tensor:
    return sums().bfloat16()


def _arithmetic(stage: Any, *arguments: Any) -> Launch:
    def double(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(double(each) for each in value)
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return Launch(
        lambda: stage.launch(*arguments),
        lambda: stage.reference(*arguments),
        lambda: stage.reference(*(double(argument) for argument in arguments)),
    )
