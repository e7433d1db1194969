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

from collections.abc import Callable, Sequence

import torch

from mok_modular.full_precision import no_autocast
from mok_modular.protocol.call import Call
from mok_modular.protocol.plan import STAGES
from mok_modular.protocol.swap_rules import SIGNATURES, name_of
from mok_modular.swap import backward, forward
from mok_modular.swap.window import Memory, Place, SwappedCall, Window, place

_REDUCING = ("forward", "backward", "backward_dgrad")  # the calls that have an output


def _signature(name: str) -> str:
    """How a function is called, for whoever has written another one."""
    return f"mok_modular.stages.{name}.reference({SIGNATURES[name]})"


class Swap(SwappedCall):
    """The swapped stages of one collective call, and what went wrong in them, by rank."""

    def __init__(self, shared: Memory, calls: Sequence[Call], ring_rows: int) -> None:
        super().__init__(shared, calls, ring_rows)
        self.errors: dict[int, BaseException] = {}

    def function(self, rank: int, stages: Sequence[str], generation: int | None) -> Callable[[], bool] | None:
        """What does the work of a launch; None: the library's own kernel."""
        call = self.calls[rank]
        stage = stages[0]
        name = name_of(stage) if len(stages) == 1 else ""
        if name not in call.config.stages or (name == "reduce" and call.kind not in _REDUCING):
            return None
        function = call.config.stages[name]
        is_backward = call.is_backward and stage not in STAGES
        work: Callable[..., None] = (backward if is_backward else forward).WORK[stage]

        def run() -> bool:
            window = Window(self, rank, generation or 0)
            token = place.set(Place(rank, len(self.calls), call.kind, stage, generation or 0, window.macrobatch))
            try:
                with torch.no_grad(), no_autocast(), self.shared.group.as_rank(rank):
                    work(function, window)
            except BaseException as error:  # SystemExit too: raised again on its own rank when all have stopped
                what = "" if stage == name else f" for {stage}"
                error.add_note(f"in stages[{name!r}]{what} on rank {rank}; it is called as {_signature(name)}")
                self.errors[rank] = error
                return False
            finally:
                place.reset(token)
            return True

        return run

    def describe(self, rank: int) -> str:
        """What went wrong on a rank, for its peers."""
        error = self.errors[rank]
        return f"rank {rank} raised {type(error).__name__}: {error} ({error.__notes__[-1].partition(';')[0]})"
