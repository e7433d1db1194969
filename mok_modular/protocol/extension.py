"""The compiled host target, loaded when it is first needed: `doctor` reports where it is missing."""

from __future__ import annotations

import importlib
from typing import Any


def extension() -> Any:
    """The compiled host target. Raises ImportError with the way to mend it."""
    try:
        _host = importlib.import_module("mok_modular._host")
    except ImportError as error:
        raise ImportError(
            f"the host target is not compiled ({error}); it is built when the package is installed: pip install ."
        ) from error
    return _host
