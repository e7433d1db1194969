"""docs/where.md keeps its word: every function that it names is defined or called in the file beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = [line for line in (ROOT / "docs" / "where.md").read_text().splitlines() if line.startswith("| ")][1:]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES]


def test_enough_questions() -> None:
    assert len(ROWS) >= 10


@pytest.mark.parametrize(("question", "file", "functions"), ROWS, ids=[row[0] for row in ROWS])
def test_an_answer_is_where_it_says(question: str, file: str, functions: str) -> None:
    text = (ROOT / file.strip("`")).read_text()
    names = re.findall(r"`(\w+)`", functions)
    assert question.endswith("?") and names
    for name in names:  # a definition: a return type or `def` before it, a parameter list and a body after it
        defined = rf"^[ ]*(def|MOK_DEVICE|constexpr)\b[^;\n]*\b{name}\("
        assert re.search(defined, text, flags=re.M), f"{name} is not defined in {file}"
