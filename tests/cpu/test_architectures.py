"""The table of GPU generations agrees with the sources, and a new generation needs the listed edits and no other."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from mok_modular.targets.cuda import nvrtc
from mok_modular.targets.cuda.arch import ARCHES, SM_90A, Arch, arch_named, arch_of

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
BRANCHES = ("targets/cuda/target.h", "targets/gemm_driver.h")
"""The shared sources that name a generation."""


def folder_of(arch: Arch) -> str:
    return arch.define.removeprefix("MOK_ARCH_").lower()


def number(path: str, pattern: str) -> int:
    (found,) = re.findall(pattern + r" = (\d+)|" + pattern + r" (\d+)", (CSRC / path).read_text())
    return int(found[0] or found[1])


@pytest.mark.parametrize("arch", ARCHES, ids=lambda arch: arch.name)
def test_the_table_agrees_with_the_sources(arch: Arch) -> None:
    folder = f"targets/{folder_of(arch)}"
    assert number(f"{folder}/target.h", "MOK_ROW_BLOCK") == arch.row_block
    assert number(f"{folder}/arch.h", r"\bkThreads") == arch.gemm_threads
    assert number(f"{folder}/arch.h", r"\bkBlockK") == arch.operand_box[0]


def test_lookups() -> None:
    assert arch_of((9, 0)) is SM_90A
    assert arch_of((8, 0)) is None
    assert arch_named("sm_90a") is SM_90A
    with pytest.raises(ValueError, match="'sm_80' is not compiled at run time; sm_90a is"):
        arch_named("sm_80")


def test_only_the_branches_name_a_generation() -> None:
    names = re.compile("|".join(rf"MOK_ARCH_\w+|\b{folder_of(arch)}\b" for arch in ARCHES))
    own = {folder_of(arch) for arch in ARCHES}
    found = {
        path.relative_to(CSRC).as_posix()
        for path in CSRC.rglob("*")
        if path.suffix in {".h", ".cu", ".cpp"}
        and path.parent.name not in own
        and names.search(re.sub(r"//.*", "", path.read_text()))
    }
    assert found == set(BRANCHES)
    text = (CSRC / "targets" / "README.md").read_text()
    for file in BRANCHES:
        assert f"`{file.removeprefix('targets/')}`" in text


@pytest.mark.slow
def test_a_new_generation_needs_the_listed_edits_alone(tmp_path: Path) -> None:
    """One more folder, a branch in each of two files, an entry of the table: then a GEMM kernel compiles for it."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="compiling for a GPU needs cuda-bindings and nvidia-cuda-nvrtc")
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    sm99 = csrc / "targets" / "sm99"
    shutil.copytree(csrc / "targets" / "sm90", sm99)
    for path in sm99.iterdir():
        path.write_text(path.read_text().replace("sm90", "sm99"))
    arch_h = sm99 / "arch.h"
    changed = arch_h.read_text().replace("kOperandSlots = 4", "kOperandSlots = 3")
    assert changed != arch_h.read_text()
    arch_h.write_text(changed)
    shutil.rmtree(csrc / "targets" / "sm90")
    for file in BRANCHES:
        text = (csrc / file).read_text()
        (branch,) = re.findall(r"#if defined\(MOK_ARCH_SM90\)\n(.*?)(?=#else|#endif)", text, flags=re.DOTALL)
        new = f"#elif defined(MOK_ARCH_SM99)\n{branch.replace('sm90', 'sm99')}"
        (csrc / file).write_text(text.replace(branch, branch + new, 1))
    defines = tuple("MOK_ARCH_SM99" if each == SM_90A.define else each for each in SM_90A.defines)
    lines = ['#include "stages/grouped_gemm.h"', '#include "targets/gemm_driver.h"']
    (csrc / "product.cu").write_text("\n".join([*lines, "using namespace mok; MOK_GEMM_KERNEL(gate_up, GateUp)"]))
    data, log = nvrtc.compile_source(csrc, "product.cu", nvrtc.compile_options(SM_90A.name, defines))
    assert data
    assert not re.search(r"C75\d\d", log)
    with pytest.raises(nvrtc.CompileError, match="define the GPU generation"):
        nvrtc.compile_source(csrc, "split/publish.cu", nvrtc.compile_options(SM_90A.name, ("MOK_TARGET_CUDA",)))
