"""What CMake says about compilers that are missing or too old: in the project's words, with what is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDS = "needs a C++20 compiler, g++ 11 or clang++ 14 or newer"

pytestmark = pytest.mark.slow


def configure(folder: Path, path: str, compiler: str | None = None) -> str:
    """What CMake says in an environment with this PATH and this CXX; everything on one line."""
    cmake, ninja = shutil.which("cmake"), shutil.which("ninja")
    if cmake is None or ninja is None:
        pytest.skip("needs cmake and ninja")
    env = {key: value for key, value in os.environ.items() if key not in ("CXX", "CXXFLAGS")} | {"PATH": path}
    if compiler is not None:
        env["CXX"] = compiler
    command = [cmake, "-S", ROOT, "-B", folder / "build", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    nanobind = subprocess.run([sys.executable, "-m", "nanobind", "--cmake_dir"], capture_output=True, text=True)
    if nanobind.returncode != 0:
        pytest.skip("needs nanobind")
    command += [f"-Dnanobind_DIR={nanobind.stdout.strip()}", f"-DPython_EXECUTABLE={sys.executable}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    text = " ".join((done.stdout + done.stderr).split())
    return text if done.returncode else f"configured: {text}"


def wrapper(folder: Path, arguments: str) -> str:
    """A compiler that calls the real one with more arguments."""
    real = shutil.which("g++")
    if real is None:
        pytest.skip("needs g++")
    path = folder / "some-g++"
    path.write_text(f'#!/bin/sh\nexec {real} {arguments} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_no_compiler(tmp_path: Path) -> None:
    said = configure(tmp_path, str(tmp_path))
    assert f"{NEEDS}: there is none on PATH" in said


def test_a_compiler_that_is_not_there(tmp_path: Path) -> None:
    assert f'{NEEDS}: the environment variable CXX names "g++"' in configure(tmp_path, str(tmp_path), "g++")


def test_a_compiler_that_is_too_old(tmp_path: Path) -> None:
    old = wrapper(tmp_path, "-w -U__GNUC__ -D__GNUC__=10")
    assert f"{NEEDS}: {old} is GNU 10." in configure(tmp_path, os.environ["PATH"], old)


def test_a_compiler_with_arguments(tmp_path: Path) -> None:
    """As `CXX='ccache g++'` names one."""
    launcher = tmp_path / "launcher"
    launcher.write_text('#!/bin/sh\nexec "$@"\n')
    launcher.chmod(0o755)
    assert configure(tmp_path, os.environ["PATH"], f"{launcher} {wrapper(tmp_path, '')}").startswith("configured: ")
