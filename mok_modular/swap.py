"""Stages swapped for functions of the caller's: `MoKConfig(stages={"swiglu": f, "wgrad": g})`.

A function is called as `mok_modular.stages.<name>.reference` is, once per generation of the ring on each rank. Forward:

    dispatch(xs, tables, topk=K)                      -> rows of every rank; those of this one are taken
    grouped_gemm(rows, (w_gate, w_up), start, count)  -> gate, up; with one weight the down projection
    swiglu(gate, up, limit, num_rows=n)               -> h; rows from n on are not used
    combine(ys, tables)                               -> cells of every rank; those of this rank's rows are taken
    reduce(combined, router_weights, mask, shared)    -> output, once a call

Backward, which also repeats dispatch and gate_up where it replays:

    reverse_combine(d_outputs, router_weights, tables, topk=K)  -> (d_y, weights of the rows) of every rank
    grouped_dgrad(d_y, w_down, start, count)                    -> d_h
    grouped_dgrad((d_gate, d_up), (w_gate, w_up), start, count) -> d_x of the rows
    swiglu_backward(d_h, gate, up, weights, limit, num_rows=n)  -> d_gate, d_up, w * h, d_router by 32 columns
    reverse_dispatch(d_xs, router_partials, tables)             -> (d_x cells, d_router cells) of every rank
    wgrad(left, right, start, count, carry)                     -> float32 sums of every expert, for each of the weights
    reduce(combined, ones, mask, shared)                        -> d_x: the same function, every router weight one

Rows are those of the ring in one generation: sizes do not depend on the routing, the number of rows is in a tensor
(`num_rows`, or the last of `segment_start`). What lies behind it, and padding where a stage may not read it, can hold
anything. Waits and signals of the stage are done around the function; so are the rounding of weight gradients, their
addition to main_grads, and in an MXFP8 layer every quantization: a function is the same in both precisions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mok_modular.full_precision import no_autocast
from mok_modular.plan import STAGES, WINDOWED_STAGES

if TYPE_CHECKING:
    from mok_modular.plan import Plan
    from mok_modular.targets.host import Call, SharedWorkspace

STAGES_OF = {
    "dispatch": ("dispatch",),
    "grouped_gemm": ("gate_up", "down"),
    "swiglu": ("swiglu",),
    "combine": ("combine",),
    "reduce": ("reduce",),
    "reverse_combine": ("reverse_combine",),
    "grouped_dgrad": ("down_dgrad", "gate_up_dgrad"),
    "swiglu_backward": ("swiglu_backward",),
    "reverse_dispatch": ("reverse_dispatch",),
    "wgrad": ("wgrad",),
}
"""Which stages of a plan a swapped function stands in for; reduce always stands alone."""

_NAME_OF = {stage: name for name, stages in STAGES_OF.items() for stage in stages}
_REDUCING = ("forward", "backward", "backward_dgrad")  # the calls that have an output


def check_stages(stages: Any, plan: Plan, *, is_push_dispatch: bool, is_pull_combine: bool) -> None:
    """Raises TypeError or ValueError unless every entry is a function for a stage that stands alone in its kernel."""
    if not isinstance(stages, Mapping):
        raise TypeError(f"stages must be a dict of functions by stage, got {type(stages).__name__}")
    for name, function in stages.items():
        if name not in STAGES_OF:
            stands_for = _NAME_OF.get(name)
            hint = f" (swapped by {stands_for!r})" if stands_for else ""
            raise ValueError(f"stages can be {', '.join(STAGES_OF)}; got {name!r}{hint}")
        if not callable(function):
            raise TypeError(f"stages[{name!r}] must be a function, got {type(function).__name__}")
        for stage in STAGES_OF[name]:
            group = _group_of(stage, plan)
            if len(group) > 1:
                raise ValueError(
                    f"stages[{name!r}]: {stage} must stand alone in its kernel, in mode {str(plan)!r} it is in "
                    f"{'+'.join(group)}; in mode 'split' every stage stands alone"
                )
    if "dispatch" in stages and is_push_dispatch:
        raise ValueError("stages['dispatch'] stands in for a pull dispatch, got dispatch='push'")
    if "combine" in stages and is_pull_combine:
        raise ValueError("stages['combine'] stands in for a push combine, got combine='pull'")


def _group_of(stage: str, plan: Plan) -> tuple[str, ...]:
    """What shares a kernel with a stage in the pass that it belongs to."""
    kernels = plan.launches(1, False) if stage in STAGES else plan.backward_launches(1, False)
    group = next((launch.stages for launch in kernels if stage in launch.stages), (stage,))
    return tuple(each for each in group if each == stage or each in WINDOWED_STAGES)


def _signature(name: str) -> str:
    """How a function is called, for whoever has written another one."""
    from mok_modular import stages

    given = inspect.signature(getattr(stages, name).reference).parameters.values()
    arguments = [
        f"{each.name}=" if each.kind is each.KEYWORD_ONLY else each.name for each in given if each.name != "direction"
    ]
    return f"mok_modular.stages.{name}.reference({', '.join(arguments)})"


class Swap:
    """The swapped stages of one collective call, and what went wrong in them, by rank."""

    def __init__(self, shared: SharedWorkspace, calls: Sequence[Call], ring_rows: int) -> None:
        self.shared = shared
        self.calls = calls
        self.ring_rows = ring_rows
        self.errors: dict[int, BaseException] = {}
        # By rank and weight: the expert whose rows go on in the next generation, and its sums so far.
        self.carries: dict[tuple[int, str], tuple[int, Tensor]] = {}

    def function(self, rank: int, stages: Sequence[str], generation: int | None) -> Callable[[], bool] | None:
        """What does the work of a launch; None: the library's own kernel."""
        from mok_modular import swap_backward, swap_forward
        from mok_modular.swap_window import Window

        call = self.calls[rank]
        stage = stages[0]
        name = _NAME_OF.get(stage, "") if len(stages) == 1 else ""
        if name not in call.config.stages or (name == "reduce" and call.kind not in _REDUCING):
            return None
        function = call.config.stages[name]
        is_backward = call.is_backward and stage not in STAGES
        work: Callable[..., None] = (swap_backward if is_backward else swap_forward).WORK[stage]

        def run() -> bool:
            try:
                with torch.no_grad(), no_autocast(), self.shared.group.as_rank(rank):
                    work(function, Window(self, rank, generation or 0))
            except BaseException as error:  # SystemExit too: raised again on its own rank when all have stopped
                what = "" if stage == name else f" for {stage}"
                error.add_note(f"in stages[{name!r}]{what} on rank {rank}; it is called as {_signature(name)}")
                self.errors[rank] = error
                return False
            return True

        return run

    def describe(self, rank: int) -> str:
        """What went wrong on a rank, for its peers."""
        error = self.errors[rank]
        return f"rank {rank} raised {type(error).__name__}: {error} ({error.__notes__[-1].partition(';')[0]})"

    def region(self, rank: int, name: str, num_rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The first rows of a region."""
        return self.shared.region(rank, name, dtype)[: num_rows * width].view(num_rows, width)
