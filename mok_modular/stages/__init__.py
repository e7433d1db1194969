"""The stages of the layer, one module each: ``reference`` is the stage in plain torch, ``launch`` its kernel alone."""

from . import (
    combine,
    dispatch,
    grouped_dgrad,
    grouped_gemm,
    quantize,
    reduce,
    reverse_combine,
    reverse_dispatch,
    ring,
    schedule,
    swiglu,
    swiglu_backward,
    wgrad,
)

__all__ = [
    "combine",
    "dispatch",
    "grouped_dgrad",
    "grouped_gemm",
    "quantize",
    "reduce",
    "reverse_combine",
    "reverse_dispatch",
    "ring",
    "schedule",
    "swiglu",
    "swiglu_backward",
    "wgrad",
]
