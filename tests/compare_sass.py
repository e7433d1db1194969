"""Compiles every kernel of the sm_90a target from two versions of csrc/ and compares the machine code.

    python tests/compare_sass.py origin/main        # a commit against the working tree; exit 1 if they differ
    python tests/compare_sass.py HEAD --masks 31 30 # of the persistent kernels only these groups
    python tests/compare_sass.py HEAD --traced      # the working tree with the timeline compiled in: how they differ

Needs no GPU; the wheels of tests/cpu/test_sass.py. Python, with options and names of kernels, is the working tree's.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

from cpu.test_sass import disassemble, persistent_masks

from mok_modular.targets.cuda import device as cuda_device
from mok_modular.targets.cuda import nvrtc
from mok_modular.targets.cuda.arch import SM_90A

ROOT = Path(__file__).resolve().parents[1]


def machine_code(root: Path, kernel: nvrtc.Kernel) -> tuple[dict[str, str], str]:
    """Instructions by entry, encodings included, and what ptxas says of registers and spills."""
    defines = SM_90A.defines
    if "MOK_TARGET_CUDA" not in (root / "targets/target.h").read_text():
        defines = ("MOK_TARGET_SM90", *defines)  # one macro was both target and generation
    options = nvrtc.compile_options(SM_90A.name, (*defines, *kernel.defines))
    data, log = nvrtc.compile_source(root, kernel.source, options)
    with tempfile.TemporaryDirectory() as folder:
        code = disassemble(nvrtc.Cubin(data, log, Path(), is_from_cache=False), Path(folder))
    remarks = re.findall(r"\d+ bytes stack frame.*|Used \d+ registers", log)
    return code, "; ".join(" ".join(remark.split()) for remark in remarks)


def extract(commit: str, folder: Path) -> Path:
    """csrc/ of a commit."""
    archive = subprocess.run(["git", "archive", commit, "csrc"], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder / "csrc"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="what the working tree is compared with")
    parser.add_argument("--masks", type=int, nargs="*", help="persistent kernels by group mask (default: all)")
    parser.add_argument("--traced", action="store_true", help="compile the working tree's kernels with their timeline")
    args = parser.parse_args()
    masks = sorted(persistent_masks()) if args.masks is None else args.masks
    kernels = [*cuda_device.copy_kernels().values(), *cuda_device.link_kernels().values(), cuda_device.gemm_kernel()]
    kernels += [cuda_device.persistent_kernel(mask) for mask in masks]
    num_different = 0
    with tempfile.TemporaryDirectory() as folder:
        before = extract(args.commit, Path(folder))
        for kernel in kernels:
            own = cuda_device.traced(kernel) if args.traced else kernel
            (old, old_remarks), (new, new_remarks) = machine_code(before, kernel), machine_code(ROOT / "csrc", own)
            label = kernel.source + "".join(f" {each}" for each in kernel.defines if "GROUP_MASK" in each)
            for entry in sorted(old.keys() | new.keys()):
                is_same = old.get(entry) == new.get(entry)
                num_different += not is_same
                counts = " -> ".join(str(code.get(entry, "").count(";")) for code in (old, new))
                print(f"{'same     ' if is_same else 'DIFFERENT'} {label} {entry}: {counts} instructions", flush=True)
            if old_remarks != new_remarks:
                print(f"  ptxas before: {old_remarks}\n  ptxas now:    {new_remarks}", flush=True)
    print(f"{num_different} kernels differ")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
