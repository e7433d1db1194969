"""Run-time compilation of the device sources with NVRTC.

No CUDA toolkit and no GPU are needed: the wheels nvidia-cuda-nvrtc and cuda-bindings suffice. A compiled kernel is
kept (kernel_cache.py) in a file whose name is a hash of everything that decides its bits: the sources below csrc/, the
options, and the compiler's version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mok_modular.protocol.extension import source_dir, source_hash
from mok_modular.targets.cuda.kernel_cache import find_or_build

NEEDS = "pip install 'mok-modular[cuda]' brings the wheels cuda-python and nvidia-cuda-nvrtc"


class CompileError(RuntimeError):
    """NVRTC refused a source; the message ends with its log."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of one target: the file that it stands in, and its entry points."""

    source: str  # relative to csrc/
    entries: tuple[str, ...]
    defines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cubin:
    """Compiled code. `log` is NVRTC's, with ptxas' remarks on registers and spills."""

    data: bytes
    log: str
    path: Path
    is_from_cache: bool


def compile_options(arch: str, defines: tuple[str, ...]) -> list[str]:
    """NVRTC's options. No contraction of a*b+c anywhere: the same bits in every kernel."""
    return [
        f"--gpu-architecture={arch}",
        "--std=c++20",
        "--fmad=false",
        "--device-as-default-execution-space",
        "--ptxas-options=-v",
        *(f"--define-macro={define}" for define in defines),
    ]


def compile_kernel(arch: str, kernel: Kernel, target_defines: tuple[str, ...]) -> Cubin:
    """The cubin of `kernel` for `arch` (such as "sm_90a"), from the cache where it is.

    Raises ImportError where NVRTC is missing, CompileError with its log where it refuses the source.
    """
    root = source_dir()
    options = compile_options(arch, (*target_defines, *kernel.defines))

    def build() -> tuple[bytes, str]:
        return compile_source(root, kernel.source, options)

    return cached(f"{Path(kernel.source).stem}-{arch}", [kernel.source, *options], build)


def cached(stem: str, key: Sequence[str], build: Callable[[], tuple[bytes, str]]) -> Cubin:
    """The result of `build()` (code and log) for this `key`, the sources as they are and this compiler, from the cache
    where it is. `build` runs under the lock of this result, so it must not ask for it itself. Raises
    kernel_cache.CacheError."""
    whole_key = "\0".join([source_hash(source_dir()), nvrtc_version(), *key])
    name = f"{stem}-{hashlib.sha256(whole_key.encode()).hexdigest()[:24]}.cubin"
    return Cubin(*find_or_build(name, build))


def nvrtc_version() -> str:
    """NVRTC's version, such as "13.0"."""
    nvrtc = _nvrtc()
    major, minor = _checked(nvrtc, nvrtc.nvrtcVersion())
    return f"{major}.{minor}"


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ImportError(f"compiling for a GPU needs NVRTC ({error}); {NEEDS}") from error
    return nvrtc


def _checked(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    code, *values = result
    if int(code) != 0:
        raise CompileError(f"NVRTC: {nvrtc.nvrtcGetErrorString(code)[1].decode()}")
    return values[0] if len(values) == 1 else values


def compile_source(
    root: Path, source: str, options: Sequence[str], include_dirs: Sequence[Path] = ()
) -> tuple[bytes, str]:
    """Code and log of a source below `root`. Raises CompileError."""
    nvrtc = _nvrtc()
    text = (root / source).read_bytes()
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(text, source.encode(), 0, [], []))
    try:
        encoded = [
            option.encode() for option in [*options, *(f"--include-path={each}" for each in (root, *include_dirs))]
        ]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = b" " * _checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
        text_log = log.rstrip(b"\0 ").decode(errors="replace")
        if int(code) != 0:
            raise CompileError(f"{source} does not compile:\n{text_log}")
        data = b" " * _checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program))
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, data))
        return data, text_log
    finally:
        nvrtc.nvrtcDestroyProgram(program)
