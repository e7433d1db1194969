"""The GPU generations that the CUDA target has kernels for: one entry each (csrc/targets/README.md)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """A GPU generation, as csrc/targets/ and the launcher must agree on it."""

    name: str
    """What kernels are compiled for, such as "sm_90a"; the name of the target."""
    label: str
    capabilities: frozenset[tuple[int, int]]
    """Compute capabilities of the GPUs that run these kernels."""
    define: str
    """The macro that chooses this generation in csrc/targets/."""
    row_block: int
    """Rows of the unit of padding and signals: `MOK_ROW_BLOCK`."""
    gemm_threads: int
    """`Arch::kThreads` of its arch.h."""
    gemm_smem_bytes: int
    """Dynamic shared memory of a GEMM CTA, at least sizeof(Shared<Arch>) of csrc/targets/cuda/gemm/shared.h."""
    operand_box: tuple[int, int]
    """Columns (k) and rows of an operand that one TMA load brings."""

    @property
    def defines(self) -> tuple[str, ...]:
        """The macros of all its kernels."""
        return ("MOK_TARGET_CUDA", self.define, f"MOK_GEMM_SMEM_BYTES={self.gemm_smem_bytes}")


SM_90A = Arch(
    name="sm_90a",
    label="Hopper",
    capabilities=frozenset({(9, 0)}),
    define="MOK_ARCH_SM90",
    row_block=128,
    gemm_threads=384,
    gemm_smem_bytes=231424,
    operand_box=(64, 64),
)
ARCHES = (SM_90A,)


def describe() -> str:
    """All of them, for messages, such as "sm_90a (Hopper)"."""
    return ", ".join(f"{arch.name} ({arch.label})" for arch in ARCHES)


def arch_of(capability: tuple[int, int]) -> Arch | None:
    """The generation whose kernels run on a GPU of this compute capability; None: this version has none."""
    return next((arch for arch in ARCHES if capability in arch.capabilities), None)


def arch_named(name: str) -> Arch:
    """Raises ValueError where this version has no kernels for `name`."""
    for arch in ARCHES:
        if arch.name == name:
            return arch
    raise ValueError(f"target {name!r} is not compiled at run time; {', '.join(arch.name for arch in ARCHES)} is")
