"""Functions by the name of what they are for, each registered where it is defined."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Registry(dict[str, T]):
    """By name, in the order of definition."""

    def add(self, name: str) -> Callable[[T], T]:
        """Decorates what belongs to `name`. Raises ValueError where something does already."""

        def register(value: T) -> T:
            if name in self:
                raise ValueError(f"{name} is registered twice")
            self[name] = value
            return value

        return register
