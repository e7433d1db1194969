"""The whole layer in plain torch, put together from the references of its stages. Differentiable, any device.

With bfloat16 tensors it rounds where the library rounds: gate, up, h, y and the shared expert's y, each once,
from float32. What autograd makes of that forward is the same gradients mathematically, but not the library's own
rounding points; `layer_backward` has those. float32 and float64 tensors are computed without extra rounding, for
gradient checks.
"""

from mok_modular.reference import mxfp8
from mok_modular.reference.backward import LayerGradients, layer_backward
from mok_modular.reference.forward import moe, moe_ranks

__all__ = ["LayerGradients", "layer_backward", "moe", "moe_ranks", "mxfp8"]
