"""Which compiled extension a package takes: its own, or for a source tree the installed one of the same sources."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

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
    copy_extension(compiled, folder / "mok_modular")
    return folder


def copy_extension(compiled: Path, folder: Path) -> None:
    """With what is asked before it is loaded."""
    for path in compiled.parent.glob("_host*.so"):
        shutil.copy(path, folder)


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
    copy_extension(compiled, tree / "mok_modular")
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
    copy_extension(compiled, path.parent)
    path.write_bytes(b"not a library")
    error = probe(tree, site)
    assert f"{path} does not load" in error
    assert ("delete it" in error) == (where == "tree")


EDITABLE = """
import sys
import sysconfig
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


THREADS = """
import sys
sys.setswitchinterval(1e-6)
from concurrent.futures import ThreadPoolExecutor
from mok_modular.protocol import extension as module
with ThreadPoolExecutor(8) as pool:
    found = list(pool.map(lambda _: module.extension(), range(64)))
assert all(each is found[0] for each in found)
print("one")
"""


def test_threads_load_it_once(tree: Path, compiled: Path) -> None:
    copy_extension(compiled, tree / "mok_modular")
    done = subprocess.run(
        [sys.executable, "-S", "-c", THREADS], cwd=tree, env={"PYTHONPATH": str(tree)}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr, done.returncode) == ("one\n", "", 0)


# ---- compiled for another processor ----

OTHER = """
import mok_modular.protocol.extension as e
e._missing_instructions = lambda _: (["xop", "fma4"], "-march=x", "x86-64-v3")
"""


def test_an_extension_for_another_processor_is_not_loaded(tree: Path, site: Path) -> None:
    """Whatever it holds: here nothing that could be loaded."""
    for path in (site / "mok_modular").glob("_host.*"):
        path.write_bytes(b"not a library")
    error = probe(tree, site, before=OTHER)
    assert f"{site / 'mok_modular'}/_host." in error
    assert "may use xop, fma4, which this one does not have (flags: -march=x); compile it on this machine: " in error
    assert error.endswith(f"--no-deps '{tree}' -Ccmake.define.MOK_HOST_ARCH=x86-64-v3")


def test_doctor_says_that_the_processor_lacks_instructions() -> None:
    program = OTHER + "from mok_modular.cli import main; raise SystemExit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (broken,) = [line for line in done.stdout.splitlines() if line.startswith("BROKEN")]
    assert "was compiled for another processor: it may use xop, fma4" in broken
    assert "MOK_HOST_ARCH=x86-64-v3" in done.stdout
    assert "something is broken" in done.stdout


def test_an_extension_without_its_processors_module_is_refused(tree: Path, site: Path) -> None:
    for path in (site / "mok_modular").glob("_host_processor.*"):
        path.unlink()
    error = probe(tree, site)
    assert "_host_processor." in error
    assert "does not load" in error


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other architectures are not compared")
@pytest.mark.parametrize(
    ("flags", "has", "lacks"),
    [
        (["-march=x86-64"], set(), {"avx", "avx2", "sse3"}),
        (["-march=x86-64-v3"], {"avx2", "fma", "bmi", "bmi2", "f16c", "lzcnt", "movbe"}, {"avx512f", "xop"}),
        (["-march=x86-64-v4"], {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}, {"avx512bf16"}),
        (["-march=bdver4"], {"xop", "fma4", "tbm", "sse4a"}, {"avx512f"}),
    ],
)
def test_what_flags_allow(flags: list[str], has: set[str], lacks: set[str], tmp_path: Path) -> None:
    """The module as CMake compiles it: the flags decide constants, the code is for any processor."""
    folder = build_processor(flags, tmp_path)
    module = load_processor(folder)
    built_for = set(module.built_for())
    assert has <= built_for
    assert not lacks & built_for
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        words = {"lzcnt": "abm", "avx512vbmi2": "avx512_vbmi2", "avx512bitalg": "avx512_bitalg", "bmi": "bmi1"}
        words |= {name: name.replace("avx512", "avx512_") for name in ("avx512vnni", "avx512bf16", "avx512fp16")}
        words |= {"avxvnni": "avx_vnni", "avx512vpopcntdq": "avx512_vpopcntdq", "sse3": "pni"}
        flags_here = cpuinfo.read_text().partition("\nflags")[2].partition("\n")[0].split()
        here = set(module.here())
        for name in (
            "sse3",
            "ssse3",
            "sse4_1",
            "popcnt",
            "avx",
            "avx2",
            "fma",
            "f16c",
            "bmi",
            "bmi2",
            "lzcnt",
            "movbe",
        ):
            assert (name in here) == (words.get(name, name) in flags_here), name
        for name in (
            "avx512f",
            "avx512bw",
            "avx512vnni",
            "avx512bf16",
            "avxvnni",
            "gfni",
            "xop",
            "fma4",
            "tbm",
            "sse4a",
        ):
            assert (name in here) == (words.get(name, name) in flags_here), name


def build_processor(flags: list[str], folder: Path) -> Path:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    options = ["-std=c++20", "-O2", "-fPIC", f"-I{ROOT / 'csrc'}", f"-I{sysconfig.get_path('include')}"]
    objects = []
    for name, own in (("processor", ["-march=x86-64", '-DMOK_FLAGS="some"']), ("built_for", flags)):
        objects.append(str(folder / f"{name}.o"))
        source = ROOT / "csrc" / "targets" / "host" / f"{name}.cpp"
        subprocess.run([compiler, *options, *own, "-c", str(source), "-o", objects[-1]], check=True)
    subprocess.run([compiler, "-shared", *objects, "-o", str(folder / "_host_processor.so")], check=True)
    return folder


def load_processor(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("_host_processor", folder / "_host_processor.so")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
