"""The stages of the layer, one module each: ``reference`` is the stage in plain torch, ``launch`` its kernel alone."""

from . import combine, dispatch, grouped_gemm, quantize, reduce, ring, schedule, swiglu

__all__ = ["combine", "dispatch", "grouped_gemm", "quantize", "reduce", "ring", "schedule", "swiglu"]
