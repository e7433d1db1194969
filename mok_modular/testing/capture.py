"""One stage's arguments out of a run, and the stage replayed on them alone.

config = MoKConfig(mode="split", stages={"swiglu": capture("swiglu", "swiglu.pt")})
... one forward, or a forward and a backward ...
mok-modular stages --only swiglu --input swiglu.pt --dump out/
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from mok_modular import stages
from mok_modular.protocol.checks import check_int
from mok_modular.protocol.swap_rules import SIGNATURES
from mok_modular.routing import read_dict
from mok_modular.swap.window import WindowTables, place


def capture(name: str, path: str | os.PathLike[str], *, rank: int = 0, generation: int = 0) -> Callable[..., Any]:
    """A function for `MoKConfig(stages={name: ...})`: the reference, which writes the arguments of one call to `path`.

    That is the first one on `rank` in the `generation`-th launch of the stage (0: its first in a call of the layer),
    whatever the other ranks do; where one name stands for several stages or products, the first of them. The file says
    which it was. A file of an earlier capture is deleted at once; nothing is written where no such call comes, as where
    the rank has no rows.

    Raises ValueError for a stage that cannot be swapped, TypeError or ValueError for a rank or generation that is none,
    FileExistsError where `path` is something else than a captured stage, FileNotFoundError where its folder is missing.
    """
    if name not in SIGNATURES:
        raise ValueError(f"stages that can be captured are {', '.join(SIGNATURES)}; got {name!r}")
    check_int("rank", rank, minimum=0)
    check_int("generation", generation, minimum=0)
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is no folder: make it first, {path.name} is written there")
    _delete_captured(path)
    reference = getattr(stages, name).reference
    lock, is_written = Lock(), False

    @functools.wraps(reference)
    def f(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_written
        here = place.get()
        if here is not None and (here.rank, here.generation) == (rank, generation):
            with lock:
                if not is_written:
                    copies = {"args": _copy(args), "kwargs": _copy(kwargs)}
                    _write(path, {"stage": name, **copies, "place": vars(here)})
                    is_written = True
        return reference(*args, **kwargs)

    return f


def _write(path: Path, content: dict[str, Any]) -> None:
    """The whole file or none."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(content, part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _delete_captured(path: Path) -> None:
    if not path.exists():
        return
    try:
        with torch.serialization.safe_globals([WindowTables]):
            found = torch.load(path, weights_only=True, mmap=True)
        is_captured = isinstance(found, dict) and found.keys() >= {"stage", "args"}
    except Exception:  # torch.load raises many kinds
        is_captured = False
    if not is_captured:
        raise FileExistsError(f"{path} exists and holds no captured stage: delete it, or give another path")
    path.unlink()


def replay(name: str, path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Runs the compiled stage and its reference on captured arguments; writes arguments and results to `folder`.

    Returns `num_results`, `shapes`, `is_same` (the same bits), `max_error` and `place`: the rank, call, stage,
    generation and macrobatch that the arguments come from. Raises ValueError if the file holds another stage, no
    capture, or arguments that the stage does not take.
    """
    with torch.serialization.safe_globals([WindowTables]):
        found = read_dict(path, "captured stage")
    if not found.keys() >= {"stage", "args", "kwargs"}:
        raise ValueError(f"{path} holds no captured stage (see mok_modular.testing.capture)")
    if found["stage"] != name:
        raise ValueError(f"{path} holds {found['stage']!r}, not {name!r}")
    module = getattr(stages, name)
    try:
        launched = _as_list(module.launch(*found["args"], **found["kwargs"]))
    except TypeError as error:
        raise ValueError(f"{path} holds arguments that {name} does not take: {error}") from error
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
        "place": found.get("place"),
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
