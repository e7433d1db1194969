"""`mok-modular ab` and `sweep` on a GPU: same bits, tables, JSON, a picture, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mok_modular import cli

DEVICE = ["--device", "cuda:0"]
PLANS = ("fused", "split", "dispatch|gate_up+swiglu|down|combine", "dispatch+gate_up+swiglu|down+combine")
SMALL = ["--routing", "random", "--shape", "256,384,16,4,128", "--tokens", "300", "--iters", "3"]


def report_of(capsys: pytest.CaptureFixture[str], argv: list[str]) -> dict[str, Any]:
    assert cli.main([*argv, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    value = json.loads(line)
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_ab(capsys: pytest.CaptureFixture[str], num_ranks: int) -> None:
    argv = ["ab", *DEVICE, *SMALL, "--ranks", str(num_ranks)]
    report = report_of(capsys, argv)
    assert report["bits_identical"] is True
    assert report["differing"] == []
    assert 0 < report["fused_s"] < 1
    assert 0 < report["split_s"] < 1
    assert report["with_schedule"]["fused_s"] > 0
    assert report["device"]["name"] == torch.cuda.get_device_name(0)
    assert report["device"]["rounds"] == 3
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["fused", "split"]
    assert torch.cuda.get_device_name(0) in out


def test_ab_of_chosen_plans_on_captured_routing(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(capsys, ["ab", *DEVICE, "--plans", ";".join(PLANS), "--iters", "2"])
    assert report["bits_identical"] is True
    assert tuple(report["plans"]) == PLANS
    assert all(plan["bits_identical"] and plan["median_s"] > 0 for plan in report["plans"].values())


def test_sweep_over_plan_and_communication_sms(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["sweep", *DEVICE, *SMALL, "--over", "plan=fused,split", "--over", "comm_sms=0,8,16"]
    has_picture = True
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        has_picture = False
    path = tmp_path / "sweep.png"
    report = report_of(capsys, [*argv, "--png", str(path)] if has_picture else argv)
    assert report["ok"] is True
    assert [(row["plan"], row["comm_sms"]) for row in report["rows"]] == [
        (plan, num_sms) for plan in ("fused", "split") for num_sms in (0, 8, 16)
    ]
    for row in report["rows"]:
        assert row["bits_identical"] is True
        assert row["forward_ms"] > 0
        assert 0 < row["floor_over_time"] < 1
    (run,) = report["runs"]
    assert 1e14 < run["dense_flops"] < 1e15
    if has_picture:
        assert path.read_bytes().startswith(b"\x89PNG")
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split()[:2] == ["plan", "comm_sms"]
    assert "one interleaved run" in out


def test_sweep_over_inputs_and_layouts_frees_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    axes = ["--over", "minibatch=256,512", "--over", "direction=pull,push", "--over", "imbalance=0,0.5"]
    sizes = ["--routing", "random", "--shape", "256,384,16,4", "--tokens", "64,512", "--ranks", "2", "--iters", "2"]
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    report = report_of(capsys, ["sweep", *DEVICE, *axes, *sizes])
    assert len(report["rows"]) == 16
    assert len(report["runs"]) == 4
    assert report["ok"] is True
    assert torch.cuda.memory_allocated() - before < 256 << 20


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["ab", *DEVICE, "--precision", "mxfp8"], ["mxfp8", "no kernels", "bf16"]),
        (["ab", *DEVICE, "--workers", "2"], ["--workers", "CPU ranks"]),
        (["ab", "--device", "cuda:99"], ["cuda:99", "torch sees"]),
        (["ab", "--device", "cuda:x"], ["--device", "cuda:x"]),
        (["ab", *DEVICE, "--ranks", "16"], ["at most 8 ranks", "16"]),
        (["sweep", *DEVICE, "--over", "workers=2"], ["workers", "comm_sms"]),
        (["sweep", *DEVICE, *SMALL, "--over", "macrobatch=256", "--over", "direction=push"], ["holds all rows"]),
    ],
    ids=" ".join,
)
def test_misuse(capsys: pytest.CaptureFixture[str], argv: list[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    for word in words:
        assert word in line
