"""One roster: no second list of stages or edges in the sources, and an edit of a stage recompiles few files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_sources import ROOT, SUFFIXES, closing, strip_comments

from mok_modular.protocol.roster import STAGES, roster

ROSTER = "csrc/protocol/roster.h"
KINDS = {
    "stages": frozenset(roster().stage_names),
    "edges": frozenset(roster().edge_names),
    "files of stages": frozenset(stage.file for stage in roster().stages),
}
MAX_NAMES = {".py": 2, **dict.fromkeys(SUFFIXES, 5)}
"""How many names of one kind a list may hold: one statement, initializer, switch or macro; in Python one display."""

LISTS = {
    "mok_modular/protocol/roster.py": "STAGES is public, and compared with the roster when that is read",
    "mok_modular/protocol/swap_rules.py": "SIGNATURES: what can be swapped, and how each function is called",
    "mok_modular/testing/choice_calls.py": "which launches take a row_block",
    "mok_modular/testing/run_rank.py": "what a GPU's stages move and compute: no kernel counts it there",
}
"""The other lists, each with what it says that no row of the roster does."""

MAX_RECOMPILED = 4

HOST_SOURCES = ("csrc/targets/host", "csrc/targets/cuda", "csrc/explore", "csrc/split", "csrc/fused")
NOT_COMPILED = {"csrc/split/handshake.cu", "csrc/targets/cuda/nvshmem_signal.cu", "csrc/explore/happens_before.cpp"}
"""What the extension is not made of: kernels that only a GPU has, and a checker of a build of its own."""


# ---- lists ----


def code_lists(code: str) -> Iterator[tuple[int, set[str]]]:
    """Names in each statement, initializer, switch and macro of C++: its line, and the names that it holds.

    Of a macro every word counts, since a name may be its argument; elsewhere enumerators and strings.
    """
    qualified = r"\b(?:Stage|Edge)::(\w+)|\"(\w+)\""

    def names(text: str, pattern: str = qualified) -> set[str]:
        return {word for match in re.finditer(pattern, text) for word in match.groups() if word}

    macro = r"^[ \t]*#[ \t]*define\b(?:\\\n|[^\n])*"
    for match in re.finditer(macro, code, re.MULTILINE):
        yield code.count("\n", 0, match.start()) + 1, names(match.group(), r"\b(\w+)\b")
    rest = re.sub(r"^[ \t]*#(?:\\\n|[^\n])*", lambda m: re.sub(r"[^\n]", " ", m.group()), code, flags=re.MULTILINE)
    spans = [match.span() for match in re.finditer(r"[^;{}]+", rest)]
    spans += [(match.start(), closing(rest, match.end())) for match in re.finditer(r"=\s*(?=\{)", rest)]
    for match in re.finditer(r"\bswitch\s*(?=\()", rest):
        body = rest.index("{", closing(rest, match.end()))
        spans.append((match.start(), closing(rest, body)))
    for begin, end in spans:
        yield rest.count("\n", 0, begin) + 1, names(rest[begin:end])


def python_lists(text: str) -> Iterator[tuple[int, set[str]]]:
    """Strings in each tuple, list and set, and the keys of each dict."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            elements: list[ast.expr | None] = list(node.elts)
        elif isinstance(node, ast.Dict):
            elements = list(node.keys)
        else:
            continue
        strings = (each.value for each in elements if isinstance(each, ast.Constant))
        yield node.lineno, {value for value in strings if isinstance(value, str)}


def second_lists(suffix: str, text: str) -> list[tuple[int, str]]:
    """The lines with too many names of a kind, and the kind."""
    found = python_lists(text) if suffix == ".py" else code_lists(strip_comments(text))
    return [
        (line, kind) for line, words in found for kind, names in KINDS.items() if len(words & names) > MAX_NAMES[suffix]
    ]


def sources() -> Iterator[Path]:
    for folder in ("csrc", "mok_modular"):
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in MAX_NAMES)


def test_there_is_no_second_list() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): lists
        for path in sources()
        if (lists := second_lists(path.suffix, path.read_text()))
    }
    assert found.pop(ROSTER)
    assert found.keys() == LISTS.keys(), {file: lists for file, lists in found.items() if file not in LISTS}


BAD = (
    (".h", "a(s == Stage::{} || s == Stage::{} || s == Stage::{} || s == Stage::{} || s == Stage::{} || s == {});"),
    (
        ".cpp",
        "constexpr Row kRows[] = {{{{Stage::{}, 1}}, {{Stage::{}, f(2)}}, {{Stage::{}}}, {{Stage::{}}}, "
        "{{Stage::{}}}, {{{}}}}};",
    ),
    (
        ".cpp",
        "switch (stage) {{ case Stage::{}: a(); case Stage::{}: b(); case Stage::{}: case Stage::{}: case Stage::{}: "
        "case {}: c(); }}",
    ),
    (".cpp", "#define ALL(X) \\\n  X({}) X({}) X({}) \\\n X({}) X({}) X({})"),
    (".py", "x = ({!r}, {!r}, {!r}, {!r}, {!r}, {!r})"),
    (".py", "x = {{{!r}: 1, {!r}: 2, {!r}: 3, {!r}: 4, {!r}: 5, {!r}: 6}}"),
)


@pytest.mark.parametrize(("suffix", "bad"), BAD)
def test_a_second_list_is_seen(suffix: str, bad: str) -> None:
    names = [*STAGES, "Stage::quantize" if "Stage" in bad else "quantize"]
    assert {kind for _, kind in second_lists(suffix, bad.format(*names))} >= {"stages"}
    same = ["dispatch"] * 5
    assert not second_lists(suffix, bad.format(*same, "Stage::dispatch" if "Stage" in bad else "dispatch"))


# ---- includes ----


def includes(path: Path) -> list[Path]:
    """What a file includes of csrc/, read as the host target does: not the headers of another target."""
    found = re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', strip_comments(path.read_text()), re.MULTILINE)
    return [ROOT / "csrc" / name for name in found if not name.startswith(("targets/cuda/", "targets/sm90/"))]


def closure(path: Path) -> set[Path]:
    """All headers of csrc/ that a file is made of."""
    seen: set[Path] = set()
    todo = [path]
    while todo:
        new = [each for each in includes(todo.pop()) if each not in seen]
        seen.update(new)
        todo += new
    return seen


def compiled() -> list[Path]:
    """What the extension is compiled from."""
    files = [path for folder in HOST_SOURCES for path in sorted((ROOT / folder).iterdir())]
    return [
        path
        for path in files
        if path.suffix in (".cpp", ".cu") and path.relative_to(ROOT).as_posix() not in NOT_COMPILED
    ]


def stage_headers() -> list[Path]:
    return sorted({ROOT / "csrc" / "stages" / f"{stage.file}.h" for stage in roster().stages})


@pytest.mark.parametrize("header", stage_headers(), ids=lambda path: path.stem)
def test_an_edit_of_a_stage_recompiles_few_files(header: Path) -> None:
    users = [path.relative_to(ROOT).as_posix() for path in compiled() if header in closure(path)]
    assert f"csrc/split/{header.stem}.cu" in users
    assert len(users) <= MAX_RECOMPILED, users


def test_protocol_and_targets_include_no_stage() -> None:
    """But for a GPU's role loops: a kernel with products holds publish, dispatch, swiglu and combine too."""
    headers = {f"stages/{header.name}" for header in stage_headers()}
    held = {"csrc/targets/cuda/gemm/communicator.h", "csrc/targets/cuda/gemm/stage_set.h"}
    for folder in ("protocol", "targets"):
        for path in sorted((ROOT / "csrc" / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.relative_to(ROOT).as_posix() not in held:
                included = set(re.findall(r'#include "(stages/\w+\.h)"', path.read_text()))
                assert not included & headers, path


def test_the_sources_compiled_are_those_of_the_build() -> None:
    """Every file above is in CMakeLists.txt, by name or by its glob."""
    text = (ROOT / "CMakeLists.txt").read_text()
    assert 'list(FILTER MOK_SHELLS EXCLUDE REGEX "handshake")' in text
    for path in compiled():
        name = path.relative_to(ROOT).as_posix()
        assert name in text or f"{Path(name).parent.as_posix()}/*.cu" in text, name
