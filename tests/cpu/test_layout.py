"""The layout is one truth for all targets: Python asks the host's build for the sizes of a GPU's memory."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mok_modular.targets.cuda.arch import ARCHES

ROOT = Path(__file__).resolve().parents[2]

# What a C++ compiler needs to read the headers of the CUDA targets. No function of theirs is called.
CUDA = """
#define __device__
#define __forceinline__ inline
float __uint_as_float(unsigned);
unsigned __float_as_uint(float);
float __fmaf_rn(float, float, float);
"""
DEFINES = {"host": ("MOK_TARGET_HOST",), **{arch.name: arch.defines for arch in ARCHES}}

SIZES = ((64, 64), (192, 64), (128, 2880), (2880, 640), (2880, 2880), (4096, 1536), (7168, 2048))
"""Hidden size and intermediate size: tiles of 128 and of 256 columns end at other places."""

PROGRAM = """
#include "stages/wgrad.h"
#include <cstdio>
#include <set>

using namespace mok;

int main() {
  constexpr int kSizes[][2] = {@SIZES@};
  for (const auto& size : kSizes) {
    Call call;
    Shape& s = call.shape;
    s.num_ranks = 3, s.max_tokens = 200, s.topk = 2, s.num_local_experts = 5;
    s.hidden_size = size[0], s.intermediate_size = size[1], s.shared_size = 320;
    s.minibatch = 256, s.ring_rows = 512, s.capacity_rows = 1280;
    s.has_backward = true;
    std::printf("%d %d", size[0], size[1]);
    for (int i = 0; i < kNumRegions; ++i) std::printf(" %s=%lld", region_name(Region(i)), region_bytes(Region(i), s));
    std::printf("\\n");
    // Every tile's units of the carry are its own, and inside the region; together they are all of it.
    int expert[16] = {};
    call.schedule.row_block_expert = expert;
    std::set<int> units;
    for (int part = 0; part < num_wgrad_tiles(s.hidden_size, s.intermediate_size); ++part) {
      Task task;
      task.stage = Stage::wgrad;
      task.part = part;
      const GemmTile tile = Wgrad::decode(call, task);
      const int first = Wgrad::carry_unit(call, task), end = first + Wgrad::start_pitch(tile) / kCarryCols;
      for (int unit = first; unit < end; ++unit)
        if (unit >= num_carry_units(s) || !units.insert(unit).second) return 1;
    }
    if (int(units.size()) != num_carry_units(s)) return 2;
  }
}
"""


def report(target: str, folder: Path) -> str:
    """Bytes of every region for all SIZES, as the target's layout has them."""
    sizes = ", ".join(f"{{{hidden}, {width}}}" for hidden, width in SIZES)
    source = folder / f"{target}.cpp"
    source.write_text(("" if target == "host" else CUDA) + PROGRAM.replace("@SIZES@", sizes))
    defines = [f"-D{define}" for define in DEFINES[target]]
    command = ["c++", "-std=c++20", f"-I{ROOT / 'csrc'}", *defines, str(source), "-o", str(folder / target)]
    subprocess.run(command, check=True)
    return subprocess.run([folder / target], check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_regions_are_the_same_on_every_target(tmp_path: Path) -> None:
    host, *gpus = (report(target, tmp_path).splitlines() for target in DEFINES)
    assert len(host) == len(SIZES)
    assert gpus
    for gpu in gpus:
        assert gpu == host
