"""Run-time compilation of the device sources with NVRTC, and its cache.

No CUDA toolkit and no GPU are needed: the wheels nvidia-cuda-nvrtc and cuda-bindings suffice. A compiled kernel is
kept under `cache_dir()` in a file whose name is a hash of everything that decides its bits: the content of all of
csrc/, the options, and the compiler's version.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

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


def source_dir() -> Path:
    """Where csrc/ is: in the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    for candidate in (package / "csrc", package.parent / "csrc"):
        if (candidate / "layout.h").is_file():
            return candidate
    raise FileNotFoundError(f"the device sources (csrc/) are neither in {package} nor beside it")


def cache_dir() -> Path:
    """$MOK_CACHE_DIR, or mok_modular under the user's cache folder."""
    if os.environ.get("MOK_CACHE_DIR"):
        return Path(os.environ["MOK_CACHE_DIR"])
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "mok_modular"


@cache
def sources_hash(root: Path) -> str:
    """A hash over the names and contents of all files below `root`."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


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


def compile_kernel(arch: str, kernel: Kernel, target_define: str) -> Cubin:
    """The cubin of `kernel` for `arch` (such as "sm_90a"), from the cache where it is.

    Raises ImportError where NVRTC is missing, CompileError with its log where it refuses the source.
    """
    root = source_dir()
    options = compile_options(arch, (target_define, *kernel.defines))

    def build() -> tuple[bytes, str]:
        return compile_source(root, kernel.source, options)

    return cached(f"{Path(kernel.source).stem}-{arch}", [kernel.source, *options], build)


def cached(stem: str, key: Sequence[str], build: Callable[[], tuple[bytes, str]]) -> Cubin:
    """The result of `build()` (code and log) for this `key`, the sources as they are and this compiler, from the cache
    where it is. `build` runs under the cache's lock, so it must not ask the cache itself."""
    whole_key = "\0".join([sources_hash(source_dir()), nvrtc_version(), *key])
    path = cache_dir() / f"{stem}-{hashlib.sha256(whole_key.encode()).hexdigest()[:24]}.cubin"
    found = _read(path)
    if found is None:
        with _lock(cache_dir() / "lock"):  # one compiling process a node: the others find its result
            found = _read(path)
            if found is None:
                data, log = build()
                _write(path, data, log)
                return Cubin(data, log, path, is_from_cache=False)
    return Cubin(found[0], found[1], path, is_from_cache=True)


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


def _read(path: Path) -> tuple[bytes, str] | None:
    """Code and log of a cache file, None where it is missing or damaged: then it is compiled again."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, _, rest = content.partition(b"\n")
    if hashlib.sha256(rest).hexdigest().encode() != digest:
        return None
    num_log, _, body = rest.partition(b"\n")
    return body[int(num_log) :], body[: int(num_log)].decode()


def _write(path: Path, data: bytes, log: str) -> None:
    """Atomically: a reader sees the whole file or none."""
    text = log.encode()
    rest = str(len(text)).encode() + b"\n" + text + data
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
