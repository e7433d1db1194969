"""Builds what is compiled for tests alone: instrumented variants of the host target."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def build_target(target: str, root: Path = ROOT, *options: str) -> Path:
    """The folder that cmake built `target` of the sources in `root` in; skips the test where cmake, nanobind or a
    compiler is missing.

    MOK_NATIVE_BUILD names a folder to build in again, which is faster; it is for the sources here.
    """
    cmake = shutil.which("cmake")
    if cmake is None or shutil.which("c++") is None:
        pytest.skip("needs cmake and a C++ compiler")
    nanobind = subprocess.run([sys.executable, "-m", "nanobind", "--cmake_dir"], capture_output=True, text=True)
    if nanobind.returncode != 0:
        pytest.skip("needs nanobind")
    kept = os.environ.get("MOK_NATIVE_BUILD") if root == ROOT else None
    folder = Path(kept or tempfile.mkdtemp(prefix="mok_native_"))
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    for command in (
        [
            cmake,
            *generator,
            str(root),
            *options,
            f"-Dnanobind_DIR={nanobind.stdout.strip()}",
            f"-DPython_EXECUTABLE={sys.executable}",
        ],
        [cmake, "--build", ".", "--target", target, "--parallel", str(os.cpu_count() or 1)],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder
