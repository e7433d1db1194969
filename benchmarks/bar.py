"""A bar: a figure that a command must reach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Rule = Literal["at most", "at least"]


@dataclass(frozen=True)
class Bar:
    """`value` must be `rule` (at most, at least) `bar`; NaN never is."""

    name: str
    value: float
    rule: Rule
    bar: float
    unit: str = ""

    @property
    def is_ok(self) -> bool:
        return self.value <= self.bar if self.rule == "at most" else self.value >= self.bar

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "ok": self.is_ok}
