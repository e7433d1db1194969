"""A rank as callers hold it, whichever transport joins it to the others."""

from __future__ import annotations

from typing import Any


class Member:
    """One rank of a group, whichever transport joins it to the others."""

    group: Any  # what all members share: device, size(), meet(), workspaces

    def __init__(self, group: Any, rank: int) -> None:
        self.group = group
        self._rank = rank

    def rank(self) -> int:
        """This member's rank, 0..size()-1."""
        return self._rank

    def size(self) -> int:
        """The number of ranks in the group."""
        return self.group.size()

    def __deepcopy__(self, memo: dict[int, Any]) -> Member:
        """A copied layer belongs to the same rank of the same group."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self._rank}, size={self.size()})"
