"""docs/adding-a-stage.md, applied to a copy of the sources: it builds, and the stage runs in every plan."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from native import ROOT, build_target

RECIPE = ROOT / "docs" / "adding-a-stage.md"
MAX_FILES = 6

OUTPUTS = """
import hashlib
from helpers import SMALL_RING, build, forward, make_workload, workspace_for
from mok_modular import LocalGroup, MoKConfig
workload = make_workload([300, 250, 0], E=3, K=4, S=128)
for mode in ("split", "fused"):
    config = MoKConfig(mode=mode, **SMALL_RING)
    def step(member):
        workspace = workspace_for(workload, member, config)
        output, _ = forward(workload, workspace, config, build(workload, workspace, config))
        return output
    bits = b"".join(output.view(__import__("torch").int16).numpy().tobytes() for output in LocalGroup(3).run(step))
    print(hashlib.sha256(bits).hexdigest())
"""
"""Prints a digest of the outputs of a layer, for split and for fused."""


@dataclass(frozen=True)
class Step:
    """A block of the recipe: a new file, or an edit of one that is there."""

    file: str
    is_edit: bool
    text: str


def read_recipe(text: str) -> list[Step]:
    """Blocks belong to the file that is named, alone on a line, before them."""
    steps, file = [], ""
    for match in re.finditer(r"^`([\w./]+)`\n|^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        name, language, block = match.groups()
        if name:
            file = name
        else:
            steps.append(Step(file, language == "diff", block))
    return steps


def apply(step: Step, folder: Path) -> None:
    """Raises ValueError where a new file exists, or the lines of an edit are not there exactly once."""
    path = folder / step.file
    if not step.is_edit:
        if path.exists():
            raise ValueError(f"{step.file} exists")
        path.write_text(step.text)
        return
    lines = step.text.splitlines(keepends=True)
    before, after = ("".join(line[1:] for line in lines if line[0] in signs) for signs in (" -", " +"))
    text = path.read_text()
    if text.count(before) != 1:
        raise ValueError(f"{step.file} has the lines of an edit {text.count(before)} times:\n{before}")
    path.write_text(text.replace(before, after))


def run(command: list[str], folder: Path) -> str:
    paths = (folder, folder / "tests", folder / "tests" / "cpu")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_an_edit_wants_its_lines_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    recipe = "`a.txt`\n\n```diff\n one\n-two\n+2\n```\ntext\n`b.txt`\n```cpp\nnew\n```\n"
    edit, new = read_recipe(recipe)
    apply(edit, tmp_path)
    apply(new, tmp_path)
    assert (tmp_path / "a.txt").read_text() == "one\n2\nthree\n"
    assert (tmp_path / "b.txt").read_text() == "new\n"
    for step in (edit, new):
        with pytest.raises(ValueError, match=f"{step.file} (exists|has the lines)"):
            apply(step, tmp_path)


def test_the_recipe_fits_the_sources(tmp_path: Path) -> None:
    steps = read_recipe(RECIPE.read_text())
    files = {step.file for step in steps}
    assert len(files) <= MAX_FILES
    edited = {step.file for step in steps if step.is_edit}
    assert {"csrc/protocol/roster.h", "csrc/fused/stages.h"} == edited
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        if file in edited:
            shutil.copy(ROOT / file, tmp_path / file)
        else:
            assert not (ROOT / file).exists()
    for step in steps:
        apply(step, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_stage_runs_in_every_plan(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "results")
    for name in ("csrc", "mok_modular", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for step in read_recipe(RECIPE.read_text()):
        apply(step, tmp_path)
    built = build_target("_host", tmp_path, "-DMOK_OPTIMIZE=-O1")
    for library in built.glob("_host*.so"):
        shutil.copy(library, tmp_path / "mok_modular")
    said = run([sys.executable, "-m", "pytest", "-q", "tests/cpu/test_stage_scrub.py"], tmp_path)
    assert re.search(r"^3 passed", said, re.MULTILINE), said
    found = run([sys.executable, "-c", OUTPUTS], tmp_path).split()
    assert found == run([sys.executable, "-c", OUTPUTS], ROOT).split()
    assert len(found) == 2
    assert len(set(found)) == 1
