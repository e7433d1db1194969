"""The planted one-line faults still have their places: a fault that fits nowhere tests nothing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("mutations", ROOT / "tests" / "mutations" / "mutations.py")
assert _spec is not None and _spec.loader is not None
mutations = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mutations)


def test_there_are_enough() -> None:
    assert len(mutations.MUTATIONS) >= 25


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda m: f"{m.file}: {m.old.strip().splitlines()[0]}")
def test_a_fault_has_its_place(mutation: tuple[str, str, str, str]) -> None:
    file, old, new, tests = mutation
    assert old != new
    assert old in (ROOT / file).read_text()
    assert (ROOT / tests.split()[0]).is_file()
