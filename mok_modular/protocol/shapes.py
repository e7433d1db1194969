"""How large a layer is (`MoEShape`), and the sizes of known models (`PRESETS`)."""

from __future__ import annotations

from dataclasses import dataclass

from mok_modular.protocol.checks import check_int

MAX_TOPK = 64


@dataclass(frozen=True)
class MoEShape:
    """The sizes of a layer: H, I, E, K and S (0 without a shared expert).

    Raises TypeError or ValueError that names the field, the value and the rule.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    topk: int
    shared_intermediate_size: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name must be a str, got {type(self.name).__name__}")
        for name, minimum in (
            ("hidden_size", 64),
            ("intermediate_size", 64),
            ("num_experts", 1),
            ("topk", 1),
            ("shared_intermediate_size", 0),
        ):
            check_int(name, getattr(self, name), minimum=minimum)
        for name in ("hidden_size", "intermediate_size", "shared_intermediate_size"):
            if getattr(self, name) % 64 != 0:
                raise ValueError(f"{name} must be a multiple of 64, got {getattr(self, name)}")
        if self.topk > MAX_TOPK:
            raise ValueError(f"topk must be 1..{MAX_TOPK}, got {self.topk}")


PRESETS: dict[str, MoEShape] = {
    shape.name: shape
    for shape in (
        # E, K and S as published for Kimi K2, of which K2.7 is assumed to keep the MoE layer.
        MoEShape("kimi-k2.7", 7168, 2048, num_experts=384, topk=8, shared_intermediate_size=2048),
        # E 256, K 8 and 1 shared expert as published; the shared width is assumed to be a routed expert's.
        MoEShape("glm-5.2", 6144, 2048, num_experts=256, topk=8, shared_intermediate_size=2048),
        # E 512, K 10 and 1 shared expert as published; the shared width is assumed to be a routed expert's.
        MoEShape("qwen3.5-397b", 4096, 1024, num_experts=512, topk=10, shared_intermediate_size=1024),
        # E 384, K 6 and 1 shared expert as published; the shared width is assumed to be a routed expert's.
        MoEShape("deepseek-v4-pro", 7168, 3072, num_experts=384, topk=6, shared_intermediate_size=3072),
        MoEShape("tiny", 256, 384, num_experts=16, topk=4, shared_intermediate_size=128),
    )
}
"""Shapes of known models by name, and `tiny`, which runs on any laptop."""
