"""The compiled host target: which file it is loaded from, whether it was compiled from these sources, and for this
processor.

An installed package holds its extension. A source tree has none, unless it was built in place: it takes the one that is
installed in the same environment, or that an editable install has put there, if it was compiled from the same sources
as the tree has under csrc/.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shlex
import sys
import threading
from collections.abc import Iterable
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

NAME = "mok_modular._host"
PACKAGE = Path(__file__).resolve().parents[1]
SOURCE_SUFFIXES = (".cpp", ".cu", ".h")
_LOCK = threading.Lock()

LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"},
    "x86-64-v2": {"popcnt", "sse3", "sse4_1", "sse4_2", "ssse3"},
    "x86-64": set[str](),
}
"""What compilers call the processors of several years, from the newest; each has what follows too."""


class ExtensionError(ImportError):
    """The extension cannot be used: `reason`, and `mend`, the command that helps."""

    def __init__(self, reason: str, mend: str) -> None:
        super().__init__(f"{reason}; {mend}")
        self.reason, self.mend = reason, mend


def extension() -> Any:
    """The compiled host target, loaded once.

    Raises ExtensionError where there is none, where it does not load, where it was compiled from other sources than
    those of this source tree, or for a processor that has instructions which this one lacks.
    """
    if sys.modules.get(NAME) is None:
        with _LOCK:  # two threads that load it would register its types twice
            if sys.modules.get(NAME) is None:
                sys.modules[NAME] = _load(PACKAGE)
    return sys.modules[NAME]


def source_dir(package: Path = PACKAGE) -> Path:
    """Where csrc/ is: in the installed package, or beside it in a source tree. Raises FileNotFoundError."""
    for candidate in (package / "csrc", package.parent / "csrc"):
        if (candidate / "layout.h").is_file():
            return candidate
    raise FileNotFoundError(f"the device sources (csrc/) are neither in {package} nor beside it")


@cache
def source_hash(root: Path) -> str:
    """The hash of the sources below `root`, 16 digits: what CMakeLists.txt compiles into the extension."""
    return hash_files(root, (path for path in root.rglob("*") if path.suffix in SOURCE_SUFFIXES))


def hash_files(root: Path, paths: Iterable[Path]) -> str:
    """A hash of the contents of files and of their names below `root`, 16 digits. The order does not matter."""
    by_name = {path.relative_to(root).as_posix(): path for path in paths}
    lines = [f"{hashlib.sha256(by_name[name].read_bytes()).hexdigest()}  {name}\n" for name in sorted(by_name)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


# ---- loading ----


def _load(package: Path) -> Any:
    """The extension of `package`, its own or the installed one."""
    tree = package.parent if (package.parent / "CMakeLists.txt").is_file() else None
    spec, is_editable = _find(package, is_tree=tree is not None)
    mend = f"install it with a C++20 compiler on PATH: {_install(tree, is_editable)}"
    if spec is None or spec.loader is None or spec.origin is None:
        if tree is None:
            raise ExtensionError(f"{package} has no compiled extension for this Python, {sys.executable}", mend)
        raise ExtensionError(
            f"{package} is a source tree without a compiled extension, and no other mok_modular is installed for "
            f"{sys.executable}",
            mend,
        )
    is_own = Path(spec.origin).parent.resolve() == package
    _check_processor(Path(spec.origin), mend, _install(tree, is_editable))
    try:
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        compiled_hash = module.build_info()["hash"]
    except (ImportError, AttributeError) as error:
        if is_own and tree is not None:
            mend = f"build it in place again, or delete it and {mend}"
        raise ExtensionError(f"{spec.origin} does not load ({error})", mend) from error
    if not is_own and compiled_hash != (own_hash := source_hash(source_dir(package))):
        raise ExtensionError(
            f"{package} is a source tree without a compiled extension, and the installed one, {spec.origin}, was "
            f"compiled from other sources (hash {compiled_hash}; {source_dir(package)} has {own_hash})",
            mend,
        )
    return module


def _check_processor(path: Path, mend: str, install: str) -> None:
    """Of the extension at `path`, which is not loaded yet: an instruction that is missing would end the process."""
    probe = path.with_name(path.name.replace("_host.", "_host_processor.", 1))
    try:
        missing, flags, level = _missing_instructions(probe)
    except (ImportError, AttributeError) as error:
        raise ExtensionError(f"{probe} does not load ({error})", mend) from error
    if missing:
        raise ExtensionError(
            f"{path} was compiled for another processor: it may use {', '.join(missing)}, which this one does not have "
            f"(flags: {flags})",
            f"compile it on this machine: {install}; or once for all {level} processors: {install} "
            f"-Ccmake.define.MOK_HOST_ARCH={level}",
        )


def _missing_instructions(probe: Path) -> tuple[list[str], str, str]:
    """The instruction sets that the extension may use and this processor lacks, the extension's flags, and the highest
    of LEVELS that this processor has."""
    spec = importlib.util.spec_from_file_location(f"{NAME}_processor", probe)
    if spec is None or spec.loader is None:
        raise ImportError("no such module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    here = set(module.here())
    level = next(name for name, needed in LEVELS.items() if needed <= here)
    return [name for name in module.built_for() if name not in here], module.flags(), level


def _find(package: Path, *, is_tree: bool) -> tuple[ModuleSpec | None, bool]:
    """In `package` or where an editable install has it; for a source tree, then in the installed packages. Also whether
    it is an editable install."""
    if NAME in sys.modules:  # None: it must not be imported
        return None, False
    found = importlib.util.find_spec(NAME)
    if found is not None:
        return found, found.origin is not None and Path(found.origin).parent.resolve() != package
    if is_tree:
        found = PathFinder.find_spec(NAME, [str(Path(folder) / package.name) for folder in sys.path])
    return found, False


def _install(tree: Path | None, is_editable: bool) -> str:
    """The command that compiles and installs the extension; for a package of unknown origin, to be run in a clone."""
    words = [sys.executable, "-m", "pip", "install", "--force-reinstall", "--no-deps"]
    return shlex.join([*words, *(["-e"] if is_editable else []), str(tree or ".")])
