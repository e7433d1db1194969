"""NVSHMEM's device library, linked into kernels whose signals are NVSHMEM operations.

A kernel is compiled relocatable, without NVSHMEM's headers; one small unit (csrc/targets/cuda/nvshmem_signal.cu) holds
what it calls; nvJitLink puts kernel, unit and library together. No CUDA toolkit and no GPU are needed: the wheels
nvidia-nvshmem-cu13, nvidia-nvjitlink, nvidia-cuda-runtime and nvidia-cuda-cccl suffice.

Never for a kernel with matrix products: linked with the library, ptxas ignores setmaxnreg and serialises wgmma.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mok_modular.protocol.extension import source_dir
from mok_modular.targets.cuda import nvrtc

NEEDS = (
    "pip install 'mok-modular[cuda]' brings nvidia-nvshmem-cu13 and nvidia-nvjitlink; the headers are in "
    "nvidia-cuda-runtime and nvidia-cuda-cccl"
)
SIGNAL_UNIT = "targets/cuda/nvshmem_signal.cu"
DEFINE = "MOK_SIGNALS_NVSHMEM"
RELOCATABLE = "--relocatable-device-code=true"


@dataclass(frozen=True)
class DeviceLibrary:
    """Where NVSHMEM's device library and the headers for it are.

    include_dirs: of NVSHMEM, the CUDA runtime and CCCL. version: of NVSHMEM's headers, such as (3, 4, 5).
    """

    archive: Path
    include_dirs: tuple[Path, ...]
    version: tuple[int, int, int]

    def digest(self) -> str:
        """A hash of the archive's content."""
        return _digest(self.archive)


@cache
def find() -> DeviceLibrary:
    """The library that is installed. Raises FileNotFoundError that names what is missing, and the wheels."""
    nvshmem = _header_dir("nvshmem", "nvshmem.h", "nvshmem/include")
    runtime = _header_dir("cudart", "cuda_runtime.h", "cu13/include")
    cccl = _header_dir("cccl", "cuda/std/type_traits", "cu13/include/cccl")
    archive = nvshmem.parent / "lib" / "libnvshmem_device.a"
    if not archive.is_file():
        raise FileNotFoundError(f"NVSHMEM's device library is not at {archive}; {NEEDS}")
    text = (nvshmem / "non_abi" / "nvshmem_version.h").read_text()
    numbers = [re.search(rf"NVSHMEM_VENDOR_{name}_VERSION (\d+)", text) for name in ("MAJOR", "MINOR", "PATCH")]
    major, minor, patch = (int(found[1]) if found else 0 for found in numbers)
    return DeviceLibrary(archive, (nvshmem, runtime, cccl), (major, minor, patch))


def compile_kernel(arch: str, kernel: nvrtc.Kernel, target_defines: tuple[str, ...]) -> nvrtc.Cubin:
    """As nvrtc.compile_kernel, with signals that are NVSHMEM operations.

    Raises ImportError or FileNotFoundError where a wheel is missing, nvrtc.CompileError where a step fails.
    """
    library = find()
    root = source_dir()
    options = [*nvrtc.compile_options(arch, (*target_defines, DEFINE, *kernel.defines)), RELOCATABLE]
    unit = _signal_unit(arch, library)
    key = [kernel.source, *options, nvjitlink_version(), library.digest(), hashlib.sha256(unit.data).hexdigest()]

    def build() -> tuple[bytes, str]:
        data, log = nvrtc.compile_source(root, kernel.source, options)
        linked, link_log = link(arch, [data, unit.data], library.archive)
        return linked, f"{log}\n{link_log}"

    return nvrtc.cached(f"{Path(kernel.source).stem}-nvshmem-{arch}", key, build)


def _signal_unit(arch: str, library: DeviceLibrary) -> nvrtc.Cubin:
    root = source_dir()
    options = [*nvrtc.compile_options(arch, ()), RELOCATABLE]
    key = [SIGNAL_UNIT, *options, ".".join(map(str, library.version)), library.digest()]

    def build() -> tuple[bytes, str]:
        return nvrtc.compile_source(root, SIGNAL_UNIT, options, library.include_dirs)

    return nvrtc.cached(f"nvshmem_signal-{arch}", key, build)


def link(arch: str, cubins: Sequence[bytes], archive: Path) -> tuple[bytes, str]:
    """Links relocatable cubins with an archive; returns the cubin and nvJitLink's remarks. Raises CompileError."""
    jit = _nvjitlink()
    options = [f"-arch={arch}", "-verbose"]
    handle = jit.create(len(options), options)
    try:
        for i, cubin in enumerate(cubins):
            jit.add_data(handle, jit.InputType.CUBIN, cubin, len(cubin), f"unit{i}")
        jit.add_file(handle, jit.InputType.LIBRARY, str(archive))
        jit.complete(handle)
        linked = bytearray(jit.get_linked_cubin_size(handle))
        jit.get_linked_cubin(handle, linked)
        log = bytearray(jit.get_info_log_size(handle))
        jit.get_info_log(handle, log)
        return bytes(linked), log.rstrip(b"\0 ").decode(errors="replace")
    except jit.nvJitLinkError as error:
        text = bytearray(jit.get_error_log_size(handle))
        jit.get_error_log(handle, text)
        details = text.rstrip(b"\0 ").decode(errors="replace")
        raise nvrtc.CompileError(f"linking with {archive} failed ({error}):\n{details}") from error
    finally:
        jit.destroy(handle)


def nvjitlink_version() -> str:
    """nvJitLink's version, such as "13.0"."""
    return ".".join(map(str, _nvjitlink().version()))


def _nvjitlink() -> Any:
    try:
        from cuda.bindings import nvjitlink
    except ImportError as error:
        raise ImportError(f"signals='nvshmem' needs nvJitLink ({error}); {NEEDS}") from error
    return nvjitlink


@cache
def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _header_dir(component: str, header: str, place: str) -> Path:
    """The folder that holds `header`: as cuda.pathfinder finds it, below `nvidia/` on sys.path, or in a toolkit."""
    candidates = []
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        found = find_nvidia_header_directory(component)
        candidates += [Path(found)] if found else []
    except (ImportError, RuntimeError):  # too old, or it does not know the component
        pass
    candidates += [Path(entry) / "nvidia" / place for entry in sys.path if entry]
    toolkits = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    for toolkit in filter(None, toolkits):
        candidates += [Path(toolkit) / "include", Path(toolkit) / "include" / "cccl"]
    for candidate in candidates:
        if (candidate / header).is_file():
            return candidate
    raise FileNotFoundError(f"{header} was found nowhere (looked in {', '.join(map(str, candidates))}); {NEEDS}")
