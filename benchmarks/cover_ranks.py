"""Ranks that are threads against ranks that are processes: the same random numbers, run after run.

python benchmarks/cover_ranks.py        how many of 200 runs differ
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from mok_modular import LocalGroup, MoE

NUM_RANKS = 4
DELAY_S = 0.01
_ALONE = (
    "import sys, torch; torch.manual_seed(int(sys.argv[1])); print(torch.randn(1).tolist() + torch.randn(2).tolist())"
)


def num_unlike_processes(num_runs: int = 200) -> int:
    """The number of runs in which a rank does not compute what it computes as a process. Every run draws numbers under
    seeds of the ranks, repeats noisy routing under activation checkpointing, and multiplies under the caller's
    autocast; in each, other ranks are late."""
    expected = _draws_of_processes()
    num_unlike = 0
    for run_idx in range(num_runs):
        delays_s = [DELAY_S * ((rank + run_idx) % NUM_RANKS) for rank in range(NUM_RANKS)]
        drawn = LocalGroup(NUM_RANKS).run(lambda member, delays_s=delays_s: _draw(member, delays_s))
        repeated = LocalGroup(NUM_RANKS).run(lambda member, delays_s=delays_s: _noisy_routing(member, delays_s))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            dtypes = LocalGroup(NUM_RANKS).run(_product_dtype)
        is_like = drawn == expected and repeated == [(True, 0.0)] * NUM_RANKS and set(dtypes) == {torch.bfloat16}
        num_unlike += not is_like
    return num_unlike


def _draws_of_processes() -> list[list[float]]:
    processes = [
        subprocess.Popen([sys.executable, "-c", _ALONE, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(NUM_RANKS)
    ]
    outputs = [process.communicate()[0] for process in processes]
    return [[float(value) for value in output.strip("[]\n").split(",")] for output in outputs]


def _draw(member: Any, delays_s: list[float]) -> list[float]:
    torch.manual_seed(member.rank())
    time.sleep(delays_s[member.rank()])
    first = torch.randn(1).tolist()
    member.all_reduce([])  # others draw here
    return first + torch.randn(2).tolist()


def _product_dtype(member: Any) -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def _noisy_routing(member: Any, delays_s: list[float]) -> tuple[bool, float]:
    """Whether a checkpoint's second forward routes as the first one, and how far d_x is from that without a checkpoint
    (relative norm)."""
    torch.manual_seed(0)
    layer = MoE(128, 192, 8, 2, member)
    x = torch.randn(200, 128, generator=torch.Generator().manual_seed(member.rank())).bfloat16().requires_grad_()
    used = []

    def block(x: torch.Tensor) -> torch.Tensor:
        time.sleep(delays_s[member.rank()])
        weights, ids = torch.rand(len(x), 8).softmax(-1).topk(2)
        used.append((ids, weights))
        return layer(x, ids, weights)

    checkpoint(block, x, use_reentrant=False).float().square().sum().backward()
    plain = x.detach().clone().requires_grad_()
    layer(plain, *used[0]).float().square().sum().backward()
    assert x.grad is not None and plain.grad is not None
    error = (x.grad - plain.grad).float().norm() / plain.grad.float().norm()
    return torch.equal(used[0][0], used[1][0]), float(error)


if __name__ == "__main__":
    start = time.monotonic()
    print(f"{num_unlike_processes()} of 200 runs differ, {time.monotonic() - start:.0f} s")
