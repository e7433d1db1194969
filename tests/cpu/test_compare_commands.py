"""`ab` and `sweep`: arguments, JSON, tables and pictures, and what a GPU would be timed for, with the host's clock."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_workload

import mok_modular.testing.timed_forward as timed_forward
import mok_modular.testing.timing as timing
from mok_modular import LocalGroup, MoKConfig, cli
from mok_modular.cli import common as cli_common
from mok_modular.cli import sweep as cli_sweep
from mok_modular.cli import sweep_points as sweep
from mok_modular.protocol.plan import all_plans

ONE_PARTIAL = "dispatch|gate_up+swiglu|down|combine"
SMALL = ["--routing", "random", "--shape", "64,128,8,2,64", "--ranks", "2"]
GPU_ROW = {
    *("forward_ms", "with_schedule_ms", "floor_ms", "floor_over_time", "over_first", "host_ms", "is_host_bound"),
    *("bits_identical", "run"),
}


class HostEvent:
    """What torch.cuda.Event is, on the host's clock."""

    def __init__(self, **_: Any) -> None:
        self.at_s = math.nan

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        return (end.at_s - self.at_s) * 1e3


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`cuda:0` is the CPU. Returns the names of the contenders in the order of their calls."""
    called: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 34, 1 << 34))
    monkeypatch.setattr(timed_forward, "dense_product", lambda device: lambda: called.append("dense"))
    monkeypatch.setattr(timed_forward, "sm_clock_mhz", lambda device: 1500)
    monkeypatch.setattr(timing, "describe_gpu", lambda device: {"name": "a GPU", "driver": "1.2"})
    real_load = cli_common.load_workload

    def load(args: Any, *options: Any) -> Any:
        device, args.device = args.device, "cpu"
        try:
            return real_load(args, *options)
        finally:
            args.device = device

    for module in (cli_common, cli_sweep):
        monkeypatch.setattr(module, "check_device", lambda args: None)
        monkeypatch.setattr(module, "load_workload", load)
        monkeypatch.setattr(module, "make_group", lambda args, num_ranks: LocalGroup(num_ranks))
    return called


def report_of(capsys: pytest.CaptureFixture[str], argv: list[str], exit_code: int = 0) -> dict[str, Any]:
    assert cli.main([*argv, "--json"]) == exit_code
    (line,) = capsys.readouterr().out.splitlines()
    value = json.loads(line)
    assert isinstance(value, dict)
    return value


# ---- wrong arguments ----

GPU = ["--device", "cuda:0"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["ab", "--plans", "fused"], ["--plans", "several different plans", "'fused'"]),
        (["ab", "--plans", "fused;fused"], ["several different plans"]),
        (["ab", "--plans", "fused;turbo"], ["--plans", "joined by ';'", "turbo"]),
        (["ab", "--device", "gpu"], ["--device must be cpu or a GPU", "'gpu'"]),
        (["ab", *GPU, "--workers", "2"], ["--workers 2", "CPU ranks", "cuda:0"]),
        (["ab", *GPU, "--executor", "threads"], ["--executor threads", "CPU ranks"]),
        (["ab", *GPU, "--order", "random"], ["--order random", "CPU ranks"]),
        (["run", *GPU, "--order", "random"], ["--order random", "CPU ranks"]),
        (["ab", *GPU, "--precision", "mxfp8"], ["--precision mxfp8", "cuda:0", "forward in bf16"]),
        (["ab", "--timeline", "/nonexistent/x.png"], ["/nonexistent", "x.png"]),
        (["ab", "--experts", "0"], ["--experts", "0"]),
        (["ab", "--experts", "8"], ["num_experts", "8", "16", "--routing random"]),
        (["ab", "--shape", "kimi-k2.7"], ["topk", "--routing random"]),
        (["ab", "--routing", "random", "--shape", "64,128,8,9"], ["topk must be at most num_experts", "9", "8"]),
        (["ab", "--routing", "random", "--ranks", "3"], ["3 ranks", "16 experts"]),
        (["sweep", "--over", "comm_sms=0,8"], ["comm_sms is for a GPU", "workers"]),
        (["sweep", *GPU, "--over", "workers=2"], ["workers is for CPU ranks", "comm_sms"]),
        (["sweep", *GPU, "--over", "comm_sms=-1"], ["comm_sms must be at least 0", "-1"]),
        (["sweep", *GPU, "--over", "plan=turbo"], ["mode", "turbo"]),
        (["sweep", *GPU, "--over", "minibatch=100"], ["minibatch must", "100"]),
        (["sweep", *GPU, "--iters", "0"], ["--iters", "0"]),
        (["sweep", "--iters", "3"], ["--iters 3", "GPU", "counted"]),
        (["sweep", "--tokens", "8,x"], ["--tokens", "8,x"]),
        (["sweep", "--tokens", "0"], ["tokens must be at least 1"]),
        (["sweep", "--tokens", "8,8"], ["tokens", "each once"]),
        (["sweep", "--tokens", "8", "--over", "tokens=8"], ["--tokens 8", "--over already"]),
        (["sweep", "--over", "plan=fused", "--over", "plan=split"], ["--over plan", "twice"]),
        (["sweep", "--over", "macrobatch=100"], ["macrobatch must be a multiple", "128", "100"]),
        (["sweep", "--over", "macrobatch=0"], ["macrobatch must be a multiple", "128", "0"]),
        (["sweep", "--over", "macrobatch=256", "--over", "minibatch=384"], ["macrobatch", "minibatch (384)", "256"]),
        (["sweep", "--over", "imbalance=2"], ["imbalance must be 0 to 1"]),
        (["sweep", "--png", "/nonexistent/x.png"], ["/nonexistent", "x.png"]),
        (["sweep", "--device", "tpu"], ["--device must be cpu or a GPU", "'tpu'"]),
    ],
    ids=" ".join,
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], argv: list[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert out == ""
    (line,) = err.splitlines()
    for word in words:
        assert word in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["run", "ab", "sweep"])
def test_no_gpu(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, *GPU])
    assert "--device cuda:0: torch sees no NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["sweep", "--png", "x.png"], ["ab", "--timeline", "x.png"]], ids=" ".join)
def test_a_picture_without_matplotlib(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    """Said before anything has run."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(argv) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"mok-modular {argv[0]}: ImportError: a picture needs matplotlib: pip install 'mok-modular[plot]'"
    ]


# ---- on the CPU ----


def test_ab_of_chosen_plans(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["ab", "--plans", f"split;{ONE_PARTIAL}", "--iters", "1", "--tokens", "24", *SMALL]
    report = report_of(capsys, argv)
    assert set(report) == {"bits_identical", "differing", "split_s", "ratio", "plans"}
    assert list(report["plans"]) == ["split", ONE_PARTIAL]
    assert report["ratio"] == pytest.approx(report["plans"][ONE_PARTIAL]["median_s"] / report["split_s"])
    assert cli.main(argv) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["plan", "median", "s", "over", "split", "bits"]
    assert out[-1].startswith(f"{ONE_PARTIAL}/split ")


def test_random_routing(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tokens", "30", "--seed", "3"]
    report = report_of(capsys, ["run", *SMALL, *options, "--experts", "4"])
    assert (report["ok"], report["routing"], report["num_tokens"]) == (True, "random", [30, 30])
    assert report["shape"]["num_experts"] == 4


@pytest.mark.slow
def test_sweep_over_tokens_and_its_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    argv = ["sweep", "--over", "plan=fused,split", "--tokens", "8,24", "--png", str(tmp_path / "sweep.png"), *SMALL]
    rows = report_of(capsys, argv)["rows"]
    assert [(row["plan"], row["tokens"]) for row in rows] == [(p, t) for p in ("fused", "split") for t in (8, 24)]
    assert rows[1]["num_bytes"] > rows[0]["num_bytes"]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 0.75, 1.0])
def test_imbalance_is_the_share_of_routes(share: float) -> None:
    workload = make_workload([400], routing=lambda rank, count, g: torch.full((count, 2), 3), E=4)
    moved = sweep.skewed(workload, share).expert_ids[0].eq(0).sum()
    assert int(moved) == pytest.approx(share * 800, abs=1)
    missing = make_workload([40], routing=lambda rank, count, g: torch.full((count, 2), -1), E=4)
    assert sweep.skewed(missing, share).expert_ids[0].eq(-1).all()


def test_shortened() -> None:
    workload = make_workload([40, 30])
    part = sweep.shortened(workload, 30)
    assert [len(x) for x in part.x] == [30, 30]
    assert part.x[0].data_ptr() == workload.x[0].data_ptr()
    assert part.weights is workload.weights
    with pytest.raises(ValueError, match="tokens is 31, but the ranks have"):
        sweep.shortened(workload, 31)


# ---- as on a GPU ----


def test_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    called: list[str] = []

    def slow() -> None:
        called.append("slow")
        time.sleep(0.02)

    contenders = {"slow": slow, "fast": lambda: called.append("fast")}
    ms = timing.interleaved_ms(contenders, rounds=3, warmup=1, at_end=lambda: called.append("end"))
    assert called == ["slow", "fast"] * 4 + ["end"]
    assert ms["slow"] >= 19 > ms["fast"]
    host = timing.host_ms(contenders, num_calls=3)
    assert host["slow"] >= 19 > host["fast"]


def test_clock_and_driver_of_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert timing.query_gpu("driver_version", "clocks.sm") == [None, None]


def test_time_forwards(pretended_gpu: list[str]) -> None:
    workload = make_workload([40, 30])
    configs = {"fused": MoKConfig(), "split": MoKConfig(mode="split"), "small": MoKConfig(minibatch_size=128)}
    found = timed_forward.time_forwards(LocalGroup(2), workload, configs, rounds=2, has_dense=True)
    assert list(found.by_name) == list(configs)
    assert pretended_gpu == ["dense"] * 3  # one rank's, and a round to warm up
    assert found.sm_clock_mhz == 1500
    assert found.dense_flops is not None
    for each in found.by_name.values():
        assert each.is_same
        assert each.with_schedule_ms > 0 < each.forward_ms
        assert each.host_ms > 0
    with pytest.raises(ValueError, match="the group has 1 ranks but the workload is for 2"):
        timed_forward.time_forwards(LocalGroup(1), workload, configs)


def test_time_forwards_sees_other_bits(pretended_gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = timed_forward._Calls.forward

    def wrong(self: Any, name: str, schedule: Any) -> torch.Tensor:
        output = real(self, name, schedule)
        if name == "split" and self.rank == 1:
            output.view(torch.int16)[-1, -1] ^= 1
        return output

    monkeypatch.setattr(timed_forward._Calls, "forward", wrong)
    configs = {"fused": MoKConfig(), "split": MoKConfig(mode="split")}
    found = timed_forward.time_forwards(LocalGroup(2), make_workload([40, 30]), configs, rounds=1)
    assert {name: each.is_same for name, each in found.by_name.items()} == {"fused": True, "split": False}
    assert found.dense_flops is None


def test_ab_on_a_gpu(pretended_gpu: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["ab", *GPU, "--iters", "2", "--tokens", "24", *SMALL]
    report = report_of(capsys, argv)
    assert set(report) == {
        *("bits_identical", "differing", "fused_s", "split_s", "ratio"),
        *("device", "with_schedule", "host_s"),
    }
    assert report["bits_identical"] is True
    assert report["ratio"] == pytest.approx(report["split_s"] / report["fused_s"])
    assert set(report["with_schedule"]) == {"fused_s", "split_s", "ratio"}
    assert report["device"] == {"name": "a GPU", "driver": "1.2", "sm_clock_mhz": 1500, "rounds": 2}
    assert set(report["host_s"]) == {"fused", "split"}
    assert pretended_gpu == []
    assert cli.main([*argv, "--plans", "all"]) == 0
    out, err = capsys.readouterr()
    assert len([line for line in out.splitlines() if line.endswith("identical")]) == len(all_plans())
    assert "one interleaved run" in out
    assert "backward and mxfp8 run on CPU ranks only" in out
    assert "a GPU, driver 1.2, SMs at 1500 MHz" in out
    assert "16 plans" in err


def test_ab_on_a_gpu_with_other_bits(
    pretended_gpu: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = timed_forward._Calls.forward

    def wrong(self: Any, name: str, schedule: Any) -> torch.Tensor:
        return real(self, name, schedule) * (1 if name == "fused" else 2)

    monkeypatch.setattr(timed_forward._Calls, "forward", wrong)
    report = report_of(capsys, ["ab", *GPU, "--iters", "1", "--tokens", "24", *SMALL], exit_code=1)
    assert (report["bits_identical"], report["differing"]) == (False, ["output"])


def test_sweep_on_a_gpu(pretended_gpu: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    axes = ["--over", "plan=fused,split", "--over", "comm_sms=0,8", "--tokens", "16,24"]
    argv = ["sweep", *GPU, *axes, "--iters", "1", *SMALL]
    report = report_of(capsys, argv)
    assert set(report) == {"ok", "device", "ranks", "shape", "routing", "rounds", "runs", "rows"}
    assert (report["ok"], report["ranks"], report["routing"], report["rounds"]) == (True, 2, "random", 1)
    assert report["shape"] == {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_experts": 8,
        "topk": 2,
        "shared_intermediate_size": 64,
    }
    assert len(report["rows"]) == 8
    for row in report["rows"]:
        assert set(row) == {"plan", "comm_sms", "tokens", *GPU_ROW}
        assert row["bits_identical"]
        assert row["floor_over_time"] == pytest.approx(row["floor_ms"] / row["forward_ms"])
    assert {(row["tokens"], row["run"]) for row in report["rows"]} == {(16, 0), (24, 1)}
    assert [row["over_first"] for row in report["rows"][:2]] == [1, 1]  # the first of each run
    for run, tokens in zip(report["runs"], (16, 24), strict=True):
        assert set(run) == {"run", "tokens", "dense_flops", "sm_clock_mhz"}
        assert run["tokens"] == tokens
        flops = 6 * 64 * 2 * tokens * (2 * 128 + 64)
        assert flops / run["dense_flops"] * 1e3 == pytest.approx(report["rows"][run["run"]]["floor_ms"])
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split()[:3] == ["plan", "comm_sms", "tokens"]
    assert "medians of 1 rounds of 2 interleaved runs" in out
    assert cli.main(["sweep", *GPU, "--tokens", "16", "--iters", "1", *SMALL]) == 0
    assert "medians of 1 rounds of one interleaved run" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("tokens", ["16", "16,24"])
def test_picture_of_a_sweep_on_a_gpu(
    pretended_gpu: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, tokens: str
) -> None:
    pytest.importorskip("matplotlib")
    argv = ["sweep", *GPU, "--tokens", tokens, "--iters", "1", "--png", str(tmp_path / "sweep.png"), *SMALL]
    assert report_of(capsys, argv)["ok"]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_sweep_that_does_not_fit(
    pretended_gpu: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before anything is timed, of any point."""
    small_ring = ["--over", "direction=pull,push", "--over", "macrobatch=256", "--over", "minibatch=128"]
    with pytest.raises(SystemExit):
        cli.main(["sweep", *GPU, *small_ring, "--tokens", "16,300", *SMALL])
    assert "needs a ring that holds all rows" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 34))
    with pytest.raises(SystemExit):
        cli.main(["sweep", *GPU, "--over", "minibatch=128,256", "--tokens", "64", *SMALL])
    assert "GB are free on" in capsys.readouterr().err
    assert pretended_gpu == []


def test_a_sweep_on_a_gpu_has_a_layer_of_its_own(
    pretended_gpu: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def load(args: Any, num_tokens: int) -> Any:
        asked.append((args.shape, args.experts, str(args.routing), args.ranks, num_tokens))
        raise ValueError("enough")

    monkeypatch.setattr(cli_sweep, "load_workload", load)
    for argv in ([], ["--shape", "glm-5.2", "--tokens", "128,256"]):
        with pytest.raises(SystemExit):
            cli.main(["sweep", *GPU, *argv])
    assert asked == [("kimi-k2.7", 16, "random", 1, 2048), ("glm-5.2", None, "random", 1, 256)]
