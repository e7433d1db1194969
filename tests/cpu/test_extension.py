"""Which compiled extension a package takes: its own, or for a source tree the installed one of the same sources."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mok_modular.protocol.extension import extension, hash_files, source_dir, source_hash

ROOT = Path(__file__).parents[2]
PROBE = "from mok_modular.protocol.extension import *; print(extension().__file__)"


@pytest.fixture(scope="module")
def compiled() -> Path:
    """The extension's file, if it was compiled from the sources of this checkout."""
    assert extension().build_info()["hash"] == source_hash(ROOT / "csrc"), "csrc was edited: compile it again"
    return Path(extension().__file__)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree without its extension."""
    return make_tree(tmp_path / "a clone")


@pytest.fixture
def site(tmp_path: Path, compiled: Path) -> Path:
    """A folder of installed packages that holds the extension."""
    folder = tmp_path / "site-packages"
    (folder / "mok_modular").mkdir(parents=True)
    shutil.copy(compiled, folder / "mok_modular")
    return folder


def make_tree(folder: Path) -> Path:
    package = folder / "mok_modular"
    (package / "protocol").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "protocol" / "__init__.py").touch()
    (folder / "CMakeLists.txt").touch()
    shutil.copy(ROOT / "mok_modular" / "protocol" / "extension.py", package / "protocol")
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    return folder


def probe(*search_path: Path, before: str = "") -> str:
    """The extension's path, or the error, in a process that has no other packages than those of `search_path`."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", before + PROBE],
        cwd=search_path[0],
        env={"PYTHONPATH": ":".join(map(str, search_path))},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def test_the_hash_is_that_of_cmake(compiled: Path) -> None:
    """`compiled` has compared them; an installed package holds the same sources."""
    assert source_hash(source_dir()) == source_hash(ROOT / "csrc")


def test_the_hash_covers_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text("1")
    (tmp_path / "b.h").write_text("2")

    def found() -> str:
        return hash_files(tmp_path, tmp_path.glob("*.h"))

    first = found()
    assert found() == first
    (tmp_path / "b.h").write_text("3")
    assert found() != first
    (tmp_path / "b.h").write_text("2")
    (tmp_path / "b.h").rename(tmp_path / "c.h")
    assert found() != first


def test_a_tree_takes_the_installed_extension(tree: Path, site: Path) -> None:
    assert probe(tree, site).startswith(str(site / "mok_modular"))
    (tree / "csrc" / "README.md").write_text("not compiled")
    assert probe(tree, site).startswith(str(site / "mok_modular"))


def test_a_tree_takes_its_own_extension_first(tree: Path, site: Path, compiled: Path) -> None:
    shutil.copy(compiled, tree / "mok_modular")
    assert probe(tree, site).startswith(str(tree / "mok_modular"))


@pytest.mark.parametrize("edit", ["change", "add", "remove"])
def test_an_installed_extension_of_other_sources_is_refused(tree: Path, site: Path, edit: str) -> None:
    header = tree / "csrc" / "stages" / "swiglu.h"
    if edit == "change":
        header.write_text(header.read_text() + "\n")
    elif edit == "add":
        header.with_name("new.h").touch()
    else:
        header.unlink()
    error = probe(tree, site)
    assert str(tree / "mok_modular") in error
    assert str(site / "mok_modular") in error
    assert "compiled from other sources" in error
    assert error.endswith(f"-m pip install --force-reinstall --no-deps '{tree}'")


def test_a_tree_without_any_extension_says_so(tree: Path) -> None:
    error = probe(tree)
    assert f"{tree / 'mok_modular'} is a source tree without a compiled extension" in error
    assert "no other mok_modular is installed" in error
    assert error.endswith(f"-m pip install --force-reinstall --no-deps '{tree}'")


def test_an_installed_package_takes_no_extension_but_its_own(tree: Path, site: Path) -> None:
    (tree / "CMakeLists.txt").unlink()
    assert f"{tree / 'mok_modular'} has no compiled extension for this Python" in probe(tree, site)


@pytest.mark.parametrize("where", ["tree", "site"])
def test_an_extension_that_does_not_load_is_named(tree: Path, site: Path, compiled: Path, where: str) -> None:
    path = (tree if where == "tree" else site) / "mok_modular" / compiled.name
    path.write_bytes(b"not a library")
    error = probe(tree, site)
    assert f"{path} does not load" in error
    assert ("delete it" in error) == (where == "tree")


EDITABLE = """
import sys
from importlib.machinery import PathFinder

class Finder:  # as an editable install leaves one: Python files in the tree, the extension among the installed packages
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [{site!r}]) if name == "mok_modular._host" else None

sys.meta_path.insert(0, Finder)
"""


def test_an_editable_install(tree: Path, site: Path) -> None:
    finder = EDITABLE.format(site=str(site / "mok_modular"))
    assert probe(tree, before=finder).startswith(str(site / "mok_modular"))
    (tree / "csrc" / "new.h").touch()
    error = probe(tree, before=finder)
    assert "compiled from other sources" in error
    assert error.endswith(f"-m pip install --force-reinstall --no-deps -e '{tree}'")
