"""Plants each one-line fault of mutations.py in a copy of the sources and tells which test caught it.

    python tests/mutations/run.py                 # all; by hand, not in CI: some minutes
    python tests/mutations/run.py --only swap     # those whose file or text contains a word
    python tests/mutations/run.py --python        # those that need no compiler

The copy is compiled once without optimization (cmake and ninja), and again where a fault is in C++. Exit code 1 if one
is not caught.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]


def run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**os.environ, **environment}, timeout=1800
    )


class Copy:
    """A copy of the sources with a build of its own."""

    def __init__(self, folder: Path, is_compiled: bool) -> None:
        self.source, self.build = folder / "source", folder / "build"
        ignored = shutil.ignore_patterns(".git", ".lab", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache")
        shutil.copytree(ROOT, self.source, ignore=ignored, symlinks=True)
        if not is_compiled:
            return
        self.build.mkdir()
        nanobind = run([sys.executable, "-m", "nanobind", "--cmake_dir"], folder).stdout.strip()
        options = [f"-Dnanobind_DIR={nanobind}", f"-DPython_EXECUTABLE={sys.executable}", "-DMOK_OPTIMIZE=-O0"]
        done = run(["cmake", "-G", "Ninja", str(self.source), *options], self.build)
        assert done.returncode == 0, done.stderr
        assert self.compile(), "the copy does not compile as it is"

    def compile(self) -> bool:
        done = run(["ninja", "_host"], self.build)
        if done.returncode != 0:
            print(done.stdout[-2000:])
            return False
        for old in (self.source / "mok_modular").glob("_host*.so"):
            old.unlink()
        for new in self.build.glob("_host*.so"):
            shutil.copy(new, self.source / "mok_modular")
        return True

    def caught_by(self, mutation: Mutation) -> str:
        """The first test that fails; empty: none."""
        path = self.source / mutation.file
        before = path.read_text()
        assert before.count(mutation.old) >= 1, f"{mutation.file} has no {mutation.old!r}"
        path.write_text(before.replace(mutation.old, mutation.new, 1))
        is_native = mutation.file.startswith("csrc/")
        try:
            if is_native and not self.compile():
                return "the compiler"
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                *mutation.tests.split(" ", 2),
            ]
            done = run(command, self.source, PYTHONPATH=str(self.source))
            found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            if found:
                return found.group(1)
            return "" if done.returncode == 0 else "a crash of the tests"
        finally:
            path.write_text(before)

    def restore(self) -> None:
        self.compile()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word of the file or the text")
    parser.add_argument("--python", action="store_true", help="only those that need no compiler")
    args = parser.parse_args()
    chosen = [m for m in MUTATIONS if args.only in m.file or args.only in m.old]
    chosen = [m for m in chosen if not (args.python and m.file.startswith("csrc/"))]
    # Python first: they run on the extension as it is.
    chosen.sort(key=lambda m: m.file.startswith("csrc/"))
    num_missed = 0
    with tempfile.TemporaryDirectory(prefix="mok_mutations_") as folder:
        copy = Copy(Path(folder), any(m.file.startswith("csrc/") for m in chosen))
        for number, mutation in enumerate(chosen, 1):
            start = time.monotonic()
            test = copy.caught_by(mutation)
            num_missed += not test
            line = " ".join(mutation.new.split()) or "(nothing)"
            print(f"{number:3}/{len(chosen)} {mutation.file}: {line[:70]}")
            print(
                f"        {'caught by ' + test if test else 'NOT CAUGHT'} in {time.monotonic() - start:.0f} s",
                flush=True,
            )
    print(f"{len(chosen) - num_missed} of {len(chosen)} caught")
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
