"""The source rules: what each folder of csrc/ may say. Every checker is also shown a bad and a good snippet.

Checkers read code without comments. They look at text, not at types, so they know the names that the sources
use today for a load of a signal word, an architecture or a fusion flag; a new name for one of these belongs
into its pattern.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = {".h", ".cuh", ".cu", ".cpp"}

_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def strip_comments(text: str) -> str:
    """The code with every comment blanked, at the same line numbers; strings stay (they hold assembly)."""

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)

    return _COMMENT_OR_STRING.sub(blank, text)


def lines_of(pattern: str, code: str) -> list[int]:
    """Numbers of the lines on which a match of `pattern` starts."""
    return [code.count("\n", 0, match.start()) + 1 for match in re.finditer(pattern, code, re.MULTILINE)]


def closing(code: str, start: int) -> int:
    """The index just behind the bracket that closes the one at `start`."""
    pairs = {"(": ")", "{": "}"}
    depth = 0
    for i in range(start, len(code)):
        if code[i] == code[start]:
            depth += 1
        elif code[i] == pairs[code[start]]:
            depth -= 1
            if depth == 0:
                return i + 1
    raise ValueError(f"bracket at {start} is never closed")


def loops(code: str) -> Iterator[tuple[int, str]]:
    """Every loop: its line and its text, header and body."""
    for match in re.finditer(r"\b(?:(?:while|for)\s*(?=\()|do\s*(?=\{))", code):
        end = closing(code, match.end())
        if code[match.end()] == "(":
            body = end + len(code[end:]) - len(code[end:].lstrip())
            end = closing(code, body) if code[body : body + 1] == "{" else code.find(";", body) + 1
        elif tail := re.compile(r"\s*while\s*(?=\()").match(code, end):
            end = closing(code, tail.end())
        yield code.count("\n", 0, match.start()) + 1, code[match.start() : end]


RAW_LOADS = (
    r"\b(?:load_relaxed|load_acquire|load_word|nvshmemx?_signal_\w+)\s*\(|"
    r"\bld\.(?:relaxed|acquire|volatile)"
)
ANY_LOADS = RAW_LOADS + r"|\.load\s*\(|\bvolatile\b|\bis_(?:satisfied|over|mismatch)\s*\("


def polls(pattern: str) -> Callable[[str], list[int]]:
    """A checker that finds the loops with a load of `pattern` in header or body."""
    return lambda code: [line for line, text in loops(code) if re.search(pattern, text)]


def matches(pattern: str) -> Callable[[str], list[int]]:
    """A checker that finds `pattern`."""
    return lambda code: lines_of(pattern, code)


def flags_outside_includes(code: str) -> list[int]:
    """Any word with fused or split in it, other than the path of a header."""
    code = re.sub(r"^[ \t]*#[ \t]*include[^\n]*", "", code, flags=re.MULTILINE)
    return lines_of(r"\b\w*(?:[Ff]used|[Ss]plit|FUSED|SPLIT)\w*\b", code)


def reads_without_writes(code: str) -> list[int]:
    """Bulk waits for reads only, except in the helper itself and where a wait for the writes follows."""
    code = re.sub(r"void bulk_wait_read\(\) \{[^}]*\}", lambda m: re.sub(r"[^\n]", " ", m.group()), code)
    found = lines_of(r"\bwait_group(?:\.sync\.aligned)?\.read\b|\btma_store_wait\b|\bbulk_wait_group_read\b", code)
    last_write = max([0, *lines_of(r"\bbulk_wait_written\(\)", code)])
    return found + [line for line in lines_of(r"\bbulk_wait_read<", code) if line >= last_write]


@dataclass(frozen=True)
class Rule:
    """`find` gives the lines that break the rule; it holds in `folders` (or all of csrc/) less `exempt`."""

    name: str
    find: Callable[[str], list[int]]
    bad: tuple[str, ...]
    good: tuple[str, ...]
    folders: tuple[str, ...] = ()
    exempt: tuple[str, ...] = ()

    def files(self) -> list[Path]:
        tops = [ROOT / "csrc" / folder for folder in self.folders] or [ROOT / "csrc"]
        exempt = [ROOT / "csrc" / folder for folder in self.exempt]
        return sorted(
            path
            for top in tops
            for path in top.rglob("*")
            if path.suffix in SUFFIXES and not any(path.is_relative_to(folder) for folder in exempt)
        )


RULES = [
    Rule(
        "only protocol/ loops on a signal word",
        polls(RAW_LOADS),
        bad=(
            "while (load_relaxed(word) < want) {\n  yield();\n}",
            "for (;;) {\n  if (load_acquire(word) >= want) break;\n}",
            "do {\n  have = load_relaxed(word);\n} while (have < want);",
            "while (nvshmem_signal_fetch(word) < want) ;",
            'for (;;) { asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(have) : "l"(word)); }',
        ),
        good=(
            "for (int i = 0; i < n; ++i) wait(edge, i);\nWord have = load_relaxed(word);",
            "// while (load_relaxed(word) < want)\nreturn load_relaxed(word);",
        ),
        exempt=("protocol",),
    ),
    Rule(
        "stages and shells loop on nothing that another worker changes",
        polls(ANY_LOADS),
        bad=(
            "while (flag.load() == 0) {\n}",
            "for (;;) {\n  if (*(volatile int*)p) break;\n}",
            "while (!wait.is_over()) worker.pause();",
        ),
        good=("const int have = flag.load();", "while (next < n) next += step;"),
        folders=("stages", "split", "fused"),
    ),
    Rule(
        "only targets/ tests the architecture",
        matches(
            r"\b(?:__CUDA_ARCH\w*|__CUDACC\w*|__NVCC__|__aarch64__|__arm\w*__|__ARM_\w+|__x86_64__|__i386__|_M_\w+|"
            r"__AVX\w*|__SSE\w*|__FMA__|__F16C__|__AMX\w*)"
        ),
        bad=(
            "#if __CUDA_ARCH__ >= 900",
            "#ifdef __aarch64__",
            "#if defined(__x86_64__)",
            "#ifdef __AVX512F__",
            "#if defined(__CUDA_ARCH_FEAT_SM90_ALL)",
            "#ifdef __CUDACC__",
        ),
        good=("#if defined(MOK_TARGET_HOST)", "// __CUDA_ARCH__ is tested in targets/ alone"),
        exempt=("targets",),
    ),
    Rule(
        "the fused/split flag stands in shells alone",
        flags_outside_includes,
        bad=(
            "if constexpr (kIsFused) wait();",
            "#ifdef MOK_FUSED",
            "template <bool is_split> void tile();",
            "using split::publish;",
        ),
        good=('#include "fused/forward.h"', "// same bits in fused and in split plans"),
        folders=("stages", "protocol"),
    ),
    Rule(
        "no fused/split flag in targets either",
        matches(r"\b(?:MOK_(?:FUSED|SPLIT)\w*|k?[Ii]s_?(?:[Ff]used|[Ss]plit)|k(?:Fused|Split)\w*)\b"),
        bad=(
            "if (is_fused) run();",
            "#if MOK_FUSED",
            "template <bool kFused>",
            "constexpr bool kIsSplit = true;",
        ),
        good=("fused::forward(plan);", "launch(plan.group_masks);"),
        exempt=("split", "fused"),
    ),
    Rule(
        "stages/ names no thread or block index",
        matches(r"\b(?:threadIdx|blockIdx|blockDim|gridDim|warpSize|clusterIdx)\b|%(?:tid|ctaid|ntid|laneid)\b"),
        bad=(
            "int i = threadIdx.x;",
            "row += blockIdx.y * gridDim.y;",
            'asm("mov.u32 %0, %tid.x;" : "=r"(i));',
        ),
        good=("int i = worker.index();", "// threadIdx is the target's business"),
        folders=("stages",),
    ),
    Rule(
        "stages/ includes no standard or CuTe header",
        matches(r"^[ \t]*#[ \t]*include[ \t]*(?:<|\"(?:cute|cutlass|cuda|nvshmem)\w*[/.])"),
        bad=(
            "#include <cmath>",
            '#include "cute/tensor.hpp"',
            "  #  include <cuda_bf16.h>",
            '#include "cuda.h"',
        ),
        good=('#include "numeric.h"', "// #include <cmath>"),
        folders=("stages",),
    ),
    Rule(
        "no cached or hoistable read of a region",
        matches(r"\bconst\b[^;,(){}]*\b__restrict(?:__)?\b|\b__ldg\b|\bld\.[\w.:]*\.nc\b|\.nc\."),
        bad=(
            "void tile(const bf16* __restrict__ x);",
            "const float *__restrict x = base;",
            "float v = __ldg(p);",
            'asm("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];");',
            'asm("ld.global.L1::no_allocate.nc.u32 %0, [%1];");',
        ),
        good=("void tile(const bf16* x, bf16* __restrict__ y);", 'asm("ld.global.v4.u32 {%0}, [%1];");'),
        folders=("stages", "protocol", "split", "fused"),
    ),
    Rule(
        "a bulk wait for reads is followed by one for writes",
        reads_without_writes,
        bad=(
            'asm volatile("cp.async.bulk.wait_group.read 0;");',
            "cute::tma_store_wait<0>();",
            "bulk_wait_written();\nbulk_wait_read<0>();\npublish();",
        ),
        good=(
            'asm volatile("cp.async.bulk.wait_group 0;");',
            "// not wait_group.read",
            "bulk_wait_read<1>();\nbulk_wait_written();",
        ),
    ),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_sources_keep_the_rule(rule: Rule) -> None:
    files = rule.files()
    assert files, f"no source file in {rule.folders or 'csrc'}: the rule would hold for want of a reader"
    broken = [
        f"{path.relative_to(ROOT)}:{line}" for path in files for line in rule.find(strip_comments(path.read_text()))
    ]
    assert not broken, f"{rule.name}: {', '.join(broken)}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_checker_fires_on_the_right_line(rule: Rule) -> None:
    assert rule.bad
    for snippet in rule.bad:
        assert rule.find(strip_comments("int before;\n\n" + snippet + "\n"))[0] >= 3, snippet
    for snippet in rule.good:
        assert rule.find(strip_comments(snippet + "\n")) == [], snippet


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_fires_in_its_folders_only(rule: Rule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    for folder in ("stages", "protocol", "targets/host", "split", "fused"):
        path = tmp_path / "csrc" / folder / "planted.h"
        path.parent.mkdir(parents=True)
        path.write_text(rule.bad[0])
    tops = {path.relative_to(tmp_path / "csrc").parts[0] for path in rule.files()}
    everywhere = {"stages", "protocol", "targets", "split", "fused"}
    assert tops == (set(rule.folders) or everywhere - set(rule.exempt))
    with pytest.raises(AssertionError, match=re.escape(rule.name)):
        test_sources_keep_the_rule(rule)


def untraced(code: str) -> str:
    """What is left of a source without MOK_TRACE=1."""
    code = re.sub(r"^#if MOK_TRACE\n.*?^#endif\n", "", code, flags=re.MULTILINE | re.DOTALL)
    while (start := code.find("MOK_TRACED(")) >= 0:
        code = code[:start] + code[closing(code, start + len("MOK_TRACED")) :]
    return code


def test_a_kernel_without_a_timeline_has_nothing_of_it() -> None:
    """Not even an empty call: the compiler sees the same tokens as if there were no timelines."""
    names = r"\b(?:Track|Trace\w+|InnerWait|[Tt]imeline|\w*track\w*|\w*[Tt]raced?(?:_\w+)?)\b"
    good = "a();\nMOK_TRACED(track.end(b(1)); c();)\n#if MOK_TRACE\nint track;\n#endif\nd();"
    assert lines_of(names, untraced(good)) == []
    assert lines_of(names, untraced("MOK_TRACED(x;)\nworker.trace(kind);")) == [2]
    found = []
    for path in [*sorted((ROOT / "csrc/targets/cuda").rglob("*.h")), *sorted((ROOT / "csrc/targets/sm90").glob("*.h"))]:
        code = re.sub(r"#include[^\n]*", "", strip_comments(path.read_text()))
        if path.name != "timeline.h":
            found += [f"{path.name}:{line}" for line in lines_of(names, untraced(code))]
    assert not found


ARCHITECTURE_CALLS = r"\bget_device_capability\b|\bplatform\.machine\b|\bos\.uname\b"


def test_python_tests_the_architecture_in_targets_and_doctor_alone() -> None:
    assert lines_of(ARCHITECTURE_CALLS, "x = 1\nif platform.machine() == 'x86_64':") == [2]
    files = sorted((ROOT / "mok_modular").rglob("*.py"))
    assert files
    found = {
        path.relative_to(ROOT / "mok_modular").as_posix()
        for path in files
        if lines_of(ARCHITECTURE_CALLS, path.read_text())
    }
    assert {path for path in found if not path.startswith("targets/")} <= {"cli/doctor.py"}


def test_comments_go_and_strings_and_lines_stay() -> None:
    text = 'a(); // b\n/* c\n d */ e("// f");\n'
    assert strip_comments(text).split() == ["a();", 'e("//', 'f");']
    assert strip_comments(text).count("\n") == text.count("\n")


def test_loops_are_read_with_header_and_body() -> None:
    code = "for (int i = 0; i < f(1); ++i) {\n  g();\n}\nwhile (h()) k();\ndo { l(); } while (m());\nn();"
    found = [(line, " ".join(text.split())) for line, text in loops(code)]
    assert found == [
        (1, "for (int i = 0; i < f(1); ++i) { g(); }"),
        (4, "while (h()) k();"),
        (5, "do { l(); } while (m())"),
        (5, "while (m());"),
    ]
