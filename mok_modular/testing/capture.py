"""One stage's arguments out of a run, and the stage replayed on them alone.

config = MoKConfig(mode="split", stages={"swiglu": capture("swiglu", "swiglu.pt")})
... one forward, or a forward and a backward ...
mok-modular stages --only swiglu --input swiglu.pt --dump out/
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mok_modular import stages
from mok_modular.protocol.swap_rules import STAGES_OF
from mok_modular.swap.window import WindowTables


def capture(name: str, path: str | os.PathLike[str]) -> Callable[..., Any]:
    """A function for `MoKConfig(stages={name: ...})`: the reference, which writes the arguments of its first call to
    `path`. Raises ValueError for a stage that cannot be swapped."""
    if name not in STAGES_OF:
        raise ValueError(f"stages that can be captured are {', '.join(STAGES_OF)}; got {name!r}")
    reference = getattr(stages, name).reference

    def f(*args: Any, **kwargs: Any) -> Any:
        if not Path(path).exists():
            torch.save({"stage": name, "args": _copy(args), "kwargs": _copy(kwargs)}, path)
        return reference(*args, **kwargs)

    return f


def replay(name: str, path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Runs the compiled stage and its reference on captured arguments; writes arguments and results to `folder`.

    Returns `num_results`, `shapes`, `is_same` (the same bits) and `max_error`. Raises ValueError if the file holds
    another stage or no capture.
    """
    with torch.serialization.safe_globals([WindowTables]):
        found = torch.load(path, weights_only=True)
    if not isinstance(found, dict) or "stage" not in found:
        raise ValueError(f"{path} holds no captured stage (see mok_modular.testing.capture)")
    if found["stage"] != name:
        raise ValueError(f"{path} holds {found['stage']!r}, not {name!r}")
    module = getattr(stages, name)
    launched = _as_list(module.launch(*found["args"], **found["kwargs"]))
    wanted = _as_list(module.reference(*found["args"], **found["kwargs"]))
    # Rows that do not count may differ: a kernel leaves them alone.
    pairs = list(zip(launched, wanted, strict=True))
    errors = [float((a.double() - b.double()).abs().nan_to_num().max()) if a.numel() else 0.0 for a, b in pairs]
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(found["args"], Path(folder) / "args.pt")
        for i, (a, b) in enumerate(pairs):
            torch.save(a, Path(folder) / f"launched_{i}.pt")
            torch.save(b, Path(folder) / f"reference_{i}.pt")
    return {
        "num_results": len(pairs),
        "shapes": [list(a.shape) for a, _ in pairs],
        "is_same": all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs),
        "max_error": max(errors, default=0.0),
    }


def _as_list(result: Any) -> list[Tensor]:
    return [t for each in result for t in _as_list(each)] if isinstance(result, list | tuple) else [result.contiguous()]


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, WindowTables):
        return WindowTables(**{key: _copy(part) for key, part in vars(value).items()})
    if isinstance(value, list | tuple):
        return type(value)(_copy(part) for part in value)
    return {key: _copy(part) for key, part in value.items()} if isinstance(value, dict) else value
