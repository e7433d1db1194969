"""The errors of a call that went wrong after its arguments were accepted.

Wrong arguments are plain `TypeError` and `ValueError`, raised before anything is launched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

WAIT_FIELDS = ("rank", "stage", "task", "edge", "index", "have", "want", "peer")
"""What is known of one wait, in the order of the table: `rank` waits in `stage` (its task number `task`) for
word `index` of `edge`, which holds `have` and should hold `want`; `peer` is the rank that should write it."""

MAX_PRINTED_WAITS = 24

_NUMBER = re.compile(r"[-+]?(\d[\d.,]*(e[-+]?\d+)?|nan|inf)")


def format_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Aligned columns, two spaces apart: numbers, formatted ones too, to the right, everything else to the left."""
    body = [list(row) for row in rows]
    cells = [list(header)] + [["-" if cell is None else str(cell) for cell in row] for row in body]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    is_number = [
        bool(body) and all(row[i] is None or _NUMBER.fullmatch(str(row[i])) is not None for row in body)
        for i in range(len(header))
    ]
    lines = []
    for line in cells:
        padded = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, is_number, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def format_waits(waits: Sequence[Mapping[str, Any]]) -> str:
    """The waits as a table of at most `MAX_PRINTED_WAITS` lines; fields that a wait lacks show as `-`."""
    table = format_table(
        WAIT_FIELDS, [[wait.get(field) for field in WAIT_FIELDS] for wait in waits[:MAX_PRINTED_WAITS]]
    )
    num_hidden = len(waits) - MAX_PRINTED_WAITS
    return table if num_hidden <= 0 else f"{table}\n... and {num_hidden} more"


class MoKTimeoutError(RuntimeError):
    """A wait of a collective call ended before the word that it waits for arrived.

    `waits` lists all waits that were open then, one dict each with the keys of `WAIT_FIELDS`; the message
    ends with them as a table. Outputs of the call are NaN. The workspace works again after
    `workspace.reset()` on every rank.
    """

    waits: list[dict[str, Any]]

    def __init__(self, message: str, waits: Iterable[Mapping[str, Any]] = ()) -> None:
        self.waits = [dict(wait) for wait in waits]
        super().__init__(f"{message}\n{format_waits(self.waits)}" if self.waits else message)


class MoKDeadlockError(MoKTimeoutError):
    """Every worker of every rank waits, so no word can change any more: the scheduler sees it at once."""


class MoKSignalError(MoKTimeoutError):
    """A counter does not hold what was waited for when the call is over, so somebody may have gone on too early: a
    broken stage or protocol. Seen at the end of a call on the host target, when no wait was left open."""


class MoKPeerError(RuntimeError):
    """Another rank failed, so this call cannot end; `rank` is that rank, None if unknown."""

    rank: int | None

    def __init__(self, message: str, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__(message)
