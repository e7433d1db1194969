"""Which stages a function of the caller's can stand in for, how it is called, and the check of `MoKConfig.stages`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

from mok_modular.protocol.plan import STAGES, Plan
from mok_modular.protocol.roster import roster

SIGNATURES = {
    "dispatch": "xs, schedules, topk=",
    "grouped_gemm": "rows, weight, segment_start, segment_num_rows",
    "swiglu": "gate, up, limit, num_rows=",
    "combine": "ys, schedules",
    "reduce": "combined, router_weights, route_mask, shared",
    "reverse_combine": "d_outputs, router_weights, schedules, topk=",
    "grouped_dgrad": "rows, weight, segment_start, segment_num_rows",
    "swiglu_backward": "d_hidden, gate, up, row_weights, limit, num_rows=",
    "reverse_dispatch": "d_xs, router_partials, schedules",
    "wgrad": "left, right, segment_start, segment_num_rows, carry",
}
"""What can be swapped, and the arguments of the function: as of `mok_modular.stages.<name>.reference`, without
`direction`."""

BACKWARD_OF = {
    "dispatch": ("reverse_dispatch",),
    "grouped_gemm": ("grouped_dgrad", "wgrad"),
    "swiglu": ("swiglu_backward",),
    "combine": ("reverse_combine",),
}
"""The stages of a backward that differentiate a stage of the forward. (reduce serves both passes.)"""


@cache
def stages_of() -> dict[str, tuple[str, ...]]:
    """Which stages of a plan a swapped function stands in for, by its name; reduce always stands alone."""
    places = ("windowed", "last")
    return {
        name: tuple(stage.name for stage in roster().stages if stage.file == name and stage.place in places)
        for name in SIGNATURES
    }


def name_of(stage: str) -> str:
    """The swapped function that stands in for a stage of a plan, "" if there is none."""
    return next((name for name, stages in stages_of().items() if stage in stages), "")


def check_stages(stages: Any, plan: Plan, *, is_push_dispatch: bool, is_pull_combine: bool) -> None:
    """Raises TypeError or ValueError unless every entry is a function for a stage that stands alone in its kernel."""
    if not isinstance(stages, Mapping):
        raise TypeError(f"stages must be a dict of functions by stage, got {type(stages).__name__}")
    for name, function in stages.items():
        if name not in SIGNATURES:
            stands_for = name_of(name)
            hint = f" (swapped by {stands_for!r})" if stands_for else ""
            raise ValueError(f"stages can be {', '.join(SIGNATURES)}; got {name!r}{hint}")
        if not callable(function):
            raise TypeError(f"stages[{name!r}] must be a function, got {type(function).__name__}")
        for stage in stages_of()[name]:
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


def half_swapped(stages: Mapping[str, Any]) -> dict[str, list[str]]:
    """Swapped stages of the forward, each with those of the backward that differentiate it and are the library's own.

    Not those that compute what the library's stage does: functions of mok_modular.stages, or wrapped ones
    (functools.wraps).
    """
    missing = {
        name: [each for each in backward if each not in stages]
        for name, backward in BACKWARD_OF.items()
        if name in stages and getattr(inspect.unwrap(stages[name]), "__module__", "") != f"mok_modular.stages.{name}"
    }
    return {name: each for name, each in missing.items() if each}


def warn_of_half_swapped(stages: Mapping[str, Any]) -> None:
    """To be called at the first backward."""
    for name, missing in half_swapped(stages).items():
        warnings.warn(
            f"stages[{name!r}] is swapped and {' and '.join(missing)} not: this backward differentiates the library's "
            f"own {name}. Gradients are right only if your function computes the same, which "
            f"mok_modular.testing.check_stage({name!r}, f) tells; else swap {' and '.join(missing)} too",
            UserWarning,
            stacklevel=2,
        )


def _group_of(stage: str, plan: Plan) -> tuple[str, ...]:
    """What shares a kernel with a stage in the pass that it belongs to."""
    kernels = plan.launches(1, False) if stage in STAGES else plan.backward_launches(1, False)
    group = next((launch.stages for launch in kernels if stage in launch.stages), (stage,))
    return tuple(each for each in group if each == stage or each in roster().windowed)
