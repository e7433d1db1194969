"""The stages of the layer, one module each; ``reference`` is the stage in plain torch."""

from . import combine, dispatch, grouped_gemm, reduce, schedule, swiglu

__all__ = ["combine", "dispatch", "grouped_gemm", "reduce", "schedule", "swiglu"]
