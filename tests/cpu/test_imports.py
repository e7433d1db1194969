"""The imports of the Python package: no circle, none upward, and files small enough to read.

Every import counts: those inside functions and those for type checkers too. A folder's `__init__` is a module like
others, but importing `a.b` does not count as an import of `a`.
"""

from __future__ import annotations

import ast
import importlib
import statistics
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import mok_modular

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "mok_modular"

FLOORS: tuple[tuple[str, ...], ...] = (
    ("protocol",),
    ("config", "full_precision", "ops", "ranks"),
    ("swap",),
    ("targets",),
    ("calls",),
    ("functional", "memory"),
    ("parameters", "stages", "torch_ops"),
    ("torch_func",),
    ("layer", "reference", "routing"),
    ("copies", "routing_capture"),
    ("testing",),
    ("",),
    ("cli",),
)
"""Folders and single files from the ground up; `""` is the package's own `__init__`. A module imports from its own
folder and from lower floors only."""

LATE = {
    "cli": "a command loads what it runs, and a test may replace what it finds there",
}
"""Where an import of the package's own modules may stand inside a function, and why."""

OPTIONAL = {"cuda", "nvshmem", "matplotlib", "covertable"}
"""What need not be installed, and is imported where it is used. (torch in cli: `doctor` reports that it is missing.)"""

MAX_LINES = 400
MAX_MEDIAN = 130


class Import(NamedTuple):
    """`module` is within the package; `is_late`: inside a function."""

    importer: str
    module: str
    line: int
    is_late: bool


def modules(root: Path) -> dict[str, Path]:
    """The files of a package by module name, without the package's own name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[tuple[str, int, bool]]:
    """What a module imports by absolute name, the line, and whether it does so inside a function."""
    folder = [PACKAGE, *name.split(".")] if name else [PACKAGE]
    if path.name != "__init__.py":
        folder.pop()

    def walk(node: ast.AST, is_late: bool) -> Iterator[tuple[str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name, child.lineno, is_late
            elif isinstance(child, ast.ImportFrom):
                start = folder[: len(folder) - child.level + 1] if child.level else []
                base = ".".join([*start, *([child.module] if child.module else [])])
                for alias in child.names:  # a module of that name, or a name in a module
                    full = f"{base}.{alias.name}"
                    is_module = full.removeprefix(f"{PACKAGE}.") in known and full.startswith(PACKAGE)
                    yield full if is_module else base, child.lineno, is_late
            yield from walk(child, is_late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    yield from walk(ast.parse(path.read_text()), False)


def own_imports(root: Path) -> list[Import]:
    """Every import of a package's module by another of its modules."""
    known = modules(root)
    found = []
    for name, path in known.items():
        for target, line, is_late in imports(name, path, known):
            module = target.removeprefix(PACKAGE).removeprefix(".")
            if target.split(".")[0] == PACKAGE and module in known and module != name:
                found.append(Import(name, module, line, is_late))
    return found


def circle(found: list[Import]) -> list[str]:
    """One circle of modules, [] if there is none."""
    graph: dict[str, set[str]] = {}
    for each in found:
        graph.setdefault(each.importer, set()).add(each.module)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def floor_of(module: str) -> int:
    """Raises StopIteration for a module that the table does not have."""
    return next(i for i, floor in enumerate(FLOORS) if module.split(".")[0] in floor)


def upward(found: list[Import]) -> list[str]:
    """Imports from a higher floor, or from another folder of the same one."""
    return [
        f"{each.importer or PACKAGE}:{each.line} imports {each.module or PACKAGE}"
        for each in found
        if floor_of(each.module) >= floor_of(each.importer) and each.module.split(".")[0] != each.importer.split(".")[0]
    ]


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / (name.replace("__", "/") + ".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return root


def test_a_circle_is_seen(tmp_path: Path) -> None:
    late = "def f():\n    from mok_modular import swap\n"
    only_types = "if TYPE_CHECKING:\n    from mok_modular.layer import MoE\n"
    write(
        tmp_path, swap="from .targets.host import run\n", targets__host=late, layer="import mok_modular.ops\n", ops=""
    )
    assert set(circle(own_imports(tmp_path))) == {"swap", "targets.host"}
    write(tmp_path, targets__host="", ops=only_types)
    assert set(circle(own_imports(tmp_path))) == {"layer", "ops"}
    write(tmp_path, ops="")
    assert circle(own_imports(tmp_path)) == []
    assert [each.module for each in own_imports(tmp_path)] == ["ops", "targets.host"]


def test_an_import_upward_is_seen(tmp_path: Path) -> None:
    write(tmp_path, swap="from mok_modular.targets import host\n", targets__host="", layer="from . import functional\n")
    write(tmp_path, functional="")
    assert upward(own_imports(tmp_path)) == ["swap:1 imports targets.host"]


def test_no_circle() -> None:
    found = own_imports(ROOT / PACKAGE)
    assert len(found) > 200
    assert circle(found) == []


def test_no_import_upward() -> None:
    assert upward(own_imports(ROOT / PACKAGE)) == []


def test_every_module_has_a_floor_and_every_floor_a_module() -> None:
    tops = {name.split(".")[0] for name in modules(ROOT / PACKAGE)}
    assert tops == {name for floor in FLOORS for name in floor}
    assert len([name for floor in FLOORS for name in floor]) == len(tops)


def test_late_imports_have_a_reason() -> None:
    known = modules(ROOT / PACKAGE)
    own = [each for each in own_imports(ROOT / PACKAGE) if each.is_late and each.importer.split(".")[0] not in LATE]
    assert own == []
    others = [
        f"{name}:{line} imports {target}"
        for name, path in known.items()
        for target, line, is_late in imports(name, path, known)
        if is_late and target.split(".")[0] not in {PACKAGE, *OPTIONAL}
        if not (target == "torch" and name.startswith("cli."))
    ]
    assert others == []


def test_optional_packages_are_imported_late() -> None:
    known = modules(ROOT / PACKAGE)
    found = [
        f"{name}:{line}"
        for name, path in known.items()
        for target, line, is_late in imports(name, path, known)
        if target.split(".")[0] in OPTIONAL and not is_late
    ]
    assert found == []


def test_files_are_short() -> None:
    num_lines = {name: len(path.read_text().splitlines()) for name, path in modules(ROOT / PACKAGE).items()}
    assert {name: num for name, num in num_lines.items() if num > MAX_LINES} == {}
    assert statistics.median(num_lines.values()) <= MAX_MEDIAN


@pytest.mark.parametrize("name", ["config", "functional", "memory", "ops", "reference", "stages", "testing"])
def test_modules_stay_where_users_import_them(name: str) -> None:
    assert importlib.import_module(f"mok_modular.{name}") is getattr(mok_modular, name)
