"""Which targets this installation can run, and how they were compiled.

The host target is compiled when the package is installed, so there is nothing to do here but to say whether
the extension loads and what made it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

TARGETS = ("host",)
"""The targets that this version has."""

REINSTALL = "install the package again with a C++20 compiler on PATH: pip install --force-reinstall --no-deps ."


@dataclass(frozen=True)
class BuildInfo:
    """How a target was compiled. `build_hash` stands for sources, flags and compiler together."""

    target: str
    compiler: str
    flags: str
    build_hash: str
    path: str


class BuildError(RuntimeError):
    """A target cannot be used; the text says why and how to mend it."""


def check_target(target: str) -> str:
    """Returns `target`.

    Raises ValueError if this version does not have it.
    """
    if target not in TARGETS:
        raise ValueError(f"target {target!r} is not available in this version; available: {', '.join(TARGETS)}")
    return target


def host_build_info() -> BuildInfo:
    """Loads the host extension.

    Raises BuildError if it is missing or does not load.
    """
    try:
        host = importlib.import_module("mok_modular._host")
        info = host.build_info()
    except (ImportError, AttributeError) as error:
        raise BuildError(f"the host extension does not load ({error}); {REINSTALL}") from error
    flags = info["flags"]
    return BuildInfo(
        target="host",
        compiler=str(info["compiler"]),
        flags=flags if isinstance(flags, str) else " ".join(map(str, flags)),
        build_hash=str(info["hash"]),
        path=str(host.__file__),
    )
