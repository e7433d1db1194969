"""What a process says when it ends: nothing of its own, whatever is alive then."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LAYER = """
import torch, mok_modular as mok
def call():
    layer = mok.MoE(64, 64, 4, 2, mok.LocalGroup(1))
    return layer, layer(torch.randn(5, 64).bfloat16(), torch.tensor([[0, 1]] * 5), torch.rand(5, 2))
"""
GRAPH = """
import torch, mok_modular as mok
layer = mok.MoE(64, 64, 4, 2, mok.LocalGroup(1))
out = layer(torch.randn(5, 64).bfloat16(), torch.tensor([[0, 1]] * 5), torch.rand(5, 2))
"""
ERROR = """
def main():
    kept = call()
    raise ValueError("my own mistake")
main()
"""
LET_GO = """
call()[1].sum().backward()
def step(member):
    layer = mok.MoE(64, 64, 4, 2, member, config=mok.MoKConfig(trace=True))
    for _ in range(2):
        layer(torch.randn(5, 64).bfloat16(), torch.tensor([[0, 3]] * 5), torch.rand(5, 2)).sum().backward()
    return layer.workspace.trace()
group = mok.LocalGroup(2)
traces = group.run(step)
gate, up = torch.randn(2, 3, 64).bfloat16()
mok.stages.swiglu.launch(gate, up)
stages = {"swiglu": lambda gate, up, limit=None, *, num_rows=None: mok.stages.swiglu.reference(gate, up, limit)}
layer = mok.MoE(64, 64, 4, 2, mok.LocalGroup(1), config=mok.MoKConfig(mode="split", stages=stages))
with torch.no_grad():
    layer(torch.randn(5, 64).bfloat16(), torch.tensor([[0, 1]] * 5), torch.rand(5, 2))
"""


def run(code: str, **variables: str) -> tuple[int, str]:
    environment = {name: value for name, value in os.environ.items() if name != "MOK_LEAK_WARNINGS"} | variables
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=170, env=environment)
    assert done.stdout == ""
    return done.returncode, done.stderr


def test_a_graph_alive_at_exit() -> None:
    assert run(GRAPH) == (0, "")


def test_an_uncaught_error_is_the_last_word() -> None:
    code, said = run(LAYER + ERROR)
    assert code == 1
    assert said.startswith("Traceback")
    assert said.endswith("ValueError: my own mistake\n")


@pytest.mark.parametrize(
    "code", [LET_GO, ERROR.replace("kept = call()", "with torch.no_grad(): kept = call()")], ids=["calls", "traceback"]
)
def test_nothing_leaks_that_torch_lets_go(code: str) -> None:
    """nanobind's check, on: calls of every kind, and a traceback that holds a layer, but no graph."""
    said = run(LAYER + code, MOK_LEAK_WARNINGS="1")[1]
    assert "nanobind" not in said, said


def test_the_check_can_see_a_leak() -> None:
    """It counts what torch does not free: a graph in a traceback's frames."""
    assert "leaked 1 instances" in run(LAYER + ERROR, MOK_LEAK_WARNINGS="1")[1]
