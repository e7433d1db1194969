"""The command line and the workload behind it: JSON, tables, exit codes, one-line argument errors."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

import mok_modular.cli.doctor
import mok_modular.testing
from mok_modular.cli import ab, commands, look, main, sweep
from mok_modular.cli.common import parse_shape
from mok_modular.cli.explore import PLANTED
from mok_modular.config import PRESETS, MoEShape, MoKConfig
from mok_modular.protocol.errors import MoKDeadlockError
from mok_modular.protocol.plan import Plan
from mok_modular.routing import Routing, load_routing, save_routing
from mok_modular.targets.build import BuildError
from mok_modular.testing import REPLAYED, ForwardResult, PassesResult, TensorCheck, Workload, check_forward

ROOT = Path(__file__).parents[2]
SMALL = ["--shape", "64,128,8,2,64", "--tokens", "24"]
ROUTED_STAGES = ("schedule", "publish", "dispatch", "gate_up", "swiglu", "down", "combine", "reduce")
STAGES = {*ROUTED_STAGES, "shared_gate_up", "shared_down"}
BACKWARD_ROUTED = ("reverse_combine", "down_dgrad", "swiglu_backward", "gate_up_dgrad", "reverse_dispatch", "wgrad")
BACKWARD_STAGES = {
    *("publish", "shared_down_dgrad", "shared_gate_up_dgrad", "shared_wgrad", "reduce"),
    *BACKWARD_ROUTED,
}
TENSORS = {
    *("output", "d_x", "d_router_weights", "d_routed_gate", "d_routed_up", "d_routed_down"),
    *("d_shared_gate", "d_shared_up", "d_shared_down"),
}
STAGE_KEYS = {"name", "pass", "kernel", "num_rows", "num_bytes", "flops", "busy_s", "wait_s"}


@pytest.fixture
def routing_file(tmp_path: Path) -> str:
    """A routing of 2 captures, 2 ranks, 24 tokens, E 8, K 2, with a route missing here and there."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(-1, 8, (2, 2, 24, 2), generator=generator, dtype=torch.int32)
    path = tmp_path / "routing.pt"
    save_routing(path, Routing(ids, torch.rand(2, 2, 24, 2, generator=generator), 8, "made for this test"))
    return str(path)


def run_json(capsys: pytest.CaptureFixture[str], argv: list[str], exit_code: int = 0) -> dict[str, Any]:
    """Runs `argv` with --json; stdout must be one line that holds one strict JSON object."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    assert main([*argv, "--json"]) == exit_code
    (line,) = capsys.readouterr().out.splitlines()
    value = json.loads(line, parse_constant=refuse)
    assert isinstance(value, dict)
    return value


def run_process(cwd: Path, argv: list[str], exit_code: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs `argv` in a process of its own, away from the sources and without input."""
    done = subprocess.run(
        [sys.executable, "-m", "mok_modular.cli", *argv],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == exit_code, done.stderr
    return done


# ---- wrong arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["COMMAND"]),
        (["fly"], ["fly", "run", "doctor"]),
        (["run", "--ranks", "0"], ["--ranks", "0", "at least 1"]),
        (["run", "--ranks", "two"], ["--ranks", "two"]),
        (["run", "--ranks", "3", "--tokens", "1"], ["--ranks", "3 ranks", "16 experts"]),
        (["run", "--seed", "-1"], ["--seed", "0 to 18446744073709551615", "-1"]),
        (["run", "--seed", "18446744073709551616"], ["--seed", "18446744073709551616"]),
        (["run", "--routing", "random", "--tokens", "100000000"], ["--tokens 100000000", "GB", "doctor --shape"]),
        (["run", "--routing", "random", "--tokens", "1000000000"], ["num_tokens", "2147483648 rows", "1000000000"]),
        (["doctor", "--tokens", "1000000000"], ["num_tokens", "2147483648 rows", "1000000000"]),
        (["run", "--trace", "/nonexistent/x.json"], ["/nonexistent", "x.json"]),
        (["run", "--trace", "/"], ["folder"]),
        (["run", "--routing", "/"], ["Is a directory", "/"]),
        (["run", "--routing", f"{__file__}/x"], ["Not a directory", "test_cli.py/x"]),
        (["run", "--tokens", "-1"], ["--tokens", "-1"]),
        (["run", "--tokens", "1000000000"], ["1000000000", "holds"]),
        (["run", "--workers", "0"], ["--workers", "0"]),
        (["run", "--mode", "turbo"], ["mode", "turbo", "fused"]),
        (["run", "--mode", "combine|down|swiglu|gate_up|dispatch"], ["mode", "'down'", "'combine'"]),
        (["run", "--shape", "256,384"], ["--shape", "H,I,E,K", "256,384", "tiny"]),
        (["run", "--shape", "a,b,c,d"], ["--shape", "a,b,c,d"]),
        (["run", "--shape", "100,384,16,4"], ["hidden_size", "100", "64"]),
        (["run", "--shape", "64,64,16,33"], ["topk", "33"]),
        (["run", "--order", "sideways"], ["--order", "sideways", "last_first"]),
        (["run", "--executor", "processes"], ["--executor", "processes", "fibers"]),
        (["run", "--routing", "/nonexistent/file.pt"], ["/nonexistent/file.pt"]),
        (["run", "--routing", __file__], ["test_cli.py", "not a routing file"]),
        (["run", "--iters", "3"], ["--iters"]),
        (["run", "--profile", "x.json"], ["--profile"]),
        (["run", "--precision", "fp8"], ["--precision", "fp8", "mxfp8"]),
        (["run", "--precision", "mxfp8", "--shape", "64,128,16,4"], ["hidden_size", "128", "MXFP8", "64"]),
        (["ab", "--iters", "0"], ["--iters", "0"]),
        (["stages", "--only", "combiner"], ["--only", "combiner", "combine"]),
        (["stages", "--dump", "x"], ["--dump needs --only"]),
        (["stages", "--only", "dispatch", "--dump", __file__], ["--dump", "test_cli.py", "is a file"]),
        (["stages", "--only", "swiglu", "--input", __file__], ["test_cli.py", "not a captured stage"]),
        (["stages", "--only", "swiglu", "--input", "/nonexistent/x.pt"], ["/nonexistent/x.pt"]),
        (["explore", "--sequence", ""], ["sequence", "''"]),
        (["explore", "--sequence", "X"], ["sequence", "'X'"]),
        (["explore", "--fault", "none_such"], ["--fault", "none_such", "lost_signal"]),
        (["explore", "--fault", "list", "--sequence", "F"], ["--fault", "--sequence"]),
        (["explore", "--fault", "lost_signal", "--plan", "fused"], ["--fault", "--plan"]),
        (["explain", "--tokens", "0"], ["--tokens", "0"]),
        (["stages", "--only", "reduce", "--tokens", "-1"], ["--tokens", "-1"]),
        (["ab", "--plans", "some"], ["--plans", "some", "all"]),
        (["build", "--target", "sm_100f"], ["sm_100f", "not available in this version", "host"]),
        (["build", "--plan", "down|combine"], ["down|combine", "plan"]),
        (["build", "--target", ""], ["''", "not available"]),
    ],
    ids=" ".join,
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], argv: list[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("mok-modular")
    for word in words:
        assert word in line


def test_shape_must_fit_the_routing(capsys: pytest.CaptureFixture[str], routing_file: str) -> None:
    for shape, words in (("64,128,4,2", ["num_experts", "4", "8"]), ("64,128,8,3", ["topk", "3", "2"])):
        with pytest.raises(SystemExit):
            main(["run", "--routing", routing_file, "--shape", shape])
        err = capsys.readouterr().err
        assert all(word in err for word in words)


def test_parse_shape() -> None:
    assert parse_shape("tiny", num_experts=99, topk=9) is PRESETS["tiny"]
    assert parse_shape("64,128,8,2", num_experts=8, topk=2) == MoEShape("64,128,8,2", 64, 128, 8, 2, 0)
    assert parse_shape("64,128,8,2,64", num_experts=8, topk=2).shared_intermediate_size == 64
    assert parse_shape(None, num_experts=20, topk=5) == MoEShape("default", 256, 384, 20, 5, 128)


# ---- help and version --------------------------------------------------------------------------------------


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of every command."""
    (found,) = [a for a in commands._make_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(found.choices)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"mok-modular {mok_modular.__version__}\n"


@pytest.mark.parametrize("name", parsers())
def test_help_has_sentences_and_examples_that_parse(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = parsers()[name]
    sentence = re.compile(r"[A-Z`].*\.", re.DOTALL)
    assert sentence.fullmatch(parser.description or "")
    for action in parser._actions:
        if "--help" not in action.option_strings:
            assert sentence.fullmatch(action.help or ""), action.option_strings
    title, *lines = (parser.epilog or "").splitlines()
    assert title == "examples:"
    assert len(lines) >= 2
    for line in lines:
        program, *argv = shlex.split(line)
        assert (program, argv[0]) == ("mok-modular", name)
        commands._make_parser().parse_args(argv)
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert capsys.readouterr().out.endswith("\n".join(["examples:", *lines]) + "\n")


# ---- how a command ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError("none is left"), 1, "MemoryError: none is left"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), 1, "RuntimeError: DefaultCPUAllocator"),
        (OSError(28, "No space left on device"), 1, "OSError: [Errno 28] No space left"),
        (NotADirectoryError(20, "Not a directory", "a_file"), 2, "error: [Errno 20] Not a directory: 'a_file'"),
        (FileExistsError(17, "File exists", "a_file"), 2, "error: [Errno 17] File exists: 'a_file'"),
        (ValueError("a value\nin two lines"), 2, "error: a value in two lines"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
@pytest.mark.parametrize("name", ["run", "ab", "explore", "explain", "sweep"])
def test_an_error_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    error: BaseException,
    code: int,
    words: str,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    module = {"run": commands, "ab": ab, "sweep": sweep}.get(name, look)
    monkeypatch.setattr(module, f"_{name}", fail)
    try:
        found: Any = main([name])
    except SystemExit as caught:
        found = caught.code
    assert found == code
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith(f"mok-modular {name}: {words}")


def test_an_error_of_the_program_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(commands, "_run", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["run"])


def start(argv: list[str], folder: Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mok_modular.cli", *argv]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe, text=True, **options)


@pytest.mark.parametrize(
    "argv",
    [
        ["run", "--routing", "random", "--tokens", "20000"],
        ["explain"],
        ["explore", "--sequence", "CC", *["--sequence", "FFBB"] * 50],
    ],
    ids=lambda argv: argv[0],
)
def test_ctrl_c_is_one_line(tmp_path: Path, argv: list[str]) -> None:
    """A minute's work, interrupted at its first line of output or progress."""
    process = start(argv, tmp_path, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    assert process.stdout is not None
    assert process.stderr is not None
    (process.stdout if argv[0] == "explain" else process.stderr).readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == f"mok-modular {argv[0]}: interrupted\n"


@pytest.mark.parametrize("argv", [["explain"], ["stages"], ["run", "--help"]], ids=" ".join)
def test_a_closed_pipe_is_no_error(tmp_path: Path, argv: list[str]) -> None:
    process = start(argv, tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate("next\n" * 1000, timeout=60)
    assert process.returncode in (0, 141)  # --help: argparse itself leaves
    assert err == ""


def test_seeds_of_64_bits(capsys: pytest.CaptureFixture[str], routing_file: str) -> None:
    argv = ["run", "--routing", routing_file, *SMALL, "--order", "random", "--seed"]
    assert run_json(capsys, [*argv, str(2**64 - 1)])["ok"]


@pytest.mark.parametrize(
    "content",
    [{"stage": "swiglu"}, [1], {"stage": "swiglu", "args": (1, 2, 3, 4, 5), "kwargs": {}}],
    ids=["incomplete", "no dict", "other arguments"],
)
def test_a_damaged_capture_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "swiglu.pt")
    with pytest.raises(SystemExit) as caught:
        main(["stages", "--only", "swiglu", "--input", str(tmp_path / "swiglu.pt")])
    assert caught.value.code == 2
    assert str(tmp_path / "swiglu.pt") in capsys.readouterr().err


def test_faults_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", "--fault", "list"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == list(PLANTED)
    assert run_json(capsys, ["explore", "--fault", "list"])["faults"] == list(PLANTED)


def test_a_run_that_never_began_has_no_trace(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mok_modular.testing, "run_passes", interrupted)
    assert main(["run", "--trace", str(tmp_path / "x.json"), "--tokens", "8"]) == 130
    assert not (tmp_path / "x.json").exists()


# ---- run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fused", "split", "dispatch|gate_up+swiglu|down+combine"])
def test_run_json(capsys: pytest.CaptureFixture[str], routing_file: str, mode: str) -> None:
    report = run_json(capsys, ["run", "--routing", routing_file, "--mode", mode, *SMALL])
    assert report["ok"] is True
    assert report["ranks"] == 2
    assert report["config"]["mode"] == mode
    assert report["config"]["minibatch_size"] == MoKConfig().minibatch_size
    assert report["num_tokens"] == [24, 24]
    for stage in report["stages"]:
        assert set(stage) == STAGE_KEYS
        assert stage["busy_s"] >= 0
        assert stage["wait_s"] >= 0
    by_pass = {
        name: {stage["name"]: stage for stage in report["stages"] if stage["pass"] == name}
        for name in ("forward", "backward")
    }
    assert len(report["stages"]) == len(STAGES) + len(BACKWARD_STAGES)
    assert set(by_pass["forward"]) == STAGES
    assert set(by_pass["backward"]) == BACKWARD_STAGES
    num_routes = int((load_routing(routing_file).expert_ids[0] >= 0).sum())
    for name in ("dispatch", "gate_up", "swiglu", "down", "combine"):
        assert by_pass["forward"][name]["num_rows"] == num_routes
    for name in BACKWARD_ROUTED:
        assert by_pass["backward"][name]["num_rows"] == num_routes, name
    flops = {pass_name: {name: stage["flops"] for name, stage in part.items()} for pass_name, part in by_pass.items()}
    one_product = num_routes * 2 * 64 * 128
    assert flops["forward"]["gate_up"] == flops["backward"]["gate_up_dgrad"] == 2 * one_product
    assert flops["forward"]["down"] == flops["backward"]["down_dgrad"] == one_product
    assert flops["backward"]["wgrad"] == 3 * one_product
    assert flops["forward"]["shared_gate_up"] == 48 * 2 * 2 * 64 * 64
    kernels = {name: stage["kernel"] for name, stage in by_pass["forward"].items()}
    for group in Plan.parse(mode).groups:
        assert {kernels[name] for name in group} == {"fused" if mode == "fused" else "+".join(group)}
    kernels = {name: stage["kernel"] for name, stage in by_pass["backward"].items()}
    for group in Plan.parse(mode).backward_groups:
        assert {kernels[name] for name in group} == {"fused" if mode == "fused" else "+".join(group)}
    assert set(report["check"]) == TENSORS
    for check in report["check"].values():
        assert check["ratio"] == pytest.approx(check["error"] / check["torch_error"])
        assert check["ratio"] <= 1.5
        assert 0 < check["error"] < 0.02


@pytest.mark.parametrize("command", ["run", "ab"])
def test_mxfp8(capsys: pytest.CaptureFixture[str], routing_file: str, command: str) -> None:
    options = ["--precision", "mxfp8", "--shape", "128,256,8,2,128", "--routing", routing_file, "--tokens", "24"]
    if command == "ab":
        assert run_json(capsys, ["ab", "--plans", "all", "--iters", "1", *options])["bits_identical"] is True
        return
    report = run_json(capsys, ["run", *options])
    assert (report["ok"], report["precision"]) == (True, "mxfp8")
    assert {stage["name"] for stage in report["stages"]} == STAGES | BACKWARD_STAGES | {"quantize"}
    for name, check in report["check"].items():
        assert check["ratio"] <= 1.5
        assert (0.02 < check["error"] < 0.1) == ("shared" not in name)


def test_run_prints_progress_and_tables(capsys: pytest.CaptureFixture[str], routing_file: str) -> None:
    assert main(["run", "--routing", routing_file, "--ranks", "1", *SMALL]) == 0
    out, err = capsys.readouterr()
    stages, checks = (part.splitlines() for part in out.split("\n\n"))
    assert stages[0].split()[:3] == ["stage", "pass", "kernel"]
    assert {row.split()[0] for row in stages[1:-1] if row.split()[1] == "forward"} == STAGES
    assert {row.split()[0] for row in stages[1:-1] if row.split()[1] == "backward"} == BACKWARD_STAGES
    assert {len(row) for row in stages[:-1]} == {len(stages[0])}  # numbers end in one column
    assert stages[-1].startswith("rows, MB, GFLOP")
    assert {row.split()[0] for row in checks[1:-1]} == TENSORS
    assert {row.split()[-1] for row in checks[1:-1]} == {"ok"}
    assert "1.5" in checks[-1]
    assert "1 rank x 24 tokens" in err
    assert "checked" in err


@pytest.mark.parametrize(
    "options",
    [
        ["--order", "random", "--seed", "3"],
        ["--order", "last_first", "--workers", "3"],
        ["--executor", "threads", "--workers", "2"],
        ["--ranks", "4"],
        ["--tokens", "0"],
        ["--tokens", "1"],
        ["--shape", "64,64,8,2"],
    ],
    ids=" ".join,
)
def test_run_options(capsys: pytest.CaptureFixture[str], routing_file: str, options: list[str]) -> None:
    report = run_json(capsys, ["run", "--routing", routing_file, *SMALL, *options])
    assert report["ok"] is True


def test_run_by_default_replays_the_shipped_capture(tmp_path: Path) -> None:
    done = run_process(tmp_path, ["run", "--json"])
    report = json.loads(done.stdout)
    routing = load_routing()
    assert report["ok"] is True
    assert report["ranks"] == routing.expert_ids.shape[1] >= 4
    assert report["shape"]["hidden_size"] >= 256
    assert report["shape"]["num_experts"] == routing.num_experts >= 16
    assert report["shape"]["topk"] == routing.expert_ids.shape[3] >= 4
    assert min(report["num_tokens"]) >= 256
    assert report["routing"] == routing.source
    assert {stage["name"] for stage in report["stages"]} == STAGES | BACKWARD_STAGES
    assert all(check["ratio"] <= 1.5 for check in report["check"].values())
    assert done.stderr


def test_run_exits_1_when_the_output_is_wrong(
    capsys: pytest.CaptureFixture[str], routing_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mok_modular.testing.run_passes

    def wrong(*args: Any) -> PassesResult:
        result = real(*args)
        result.outputs[1][3] += 1
        return result

    monkeypatch.setattr(mok_modular.testing, "run_passes", wrong)
    report = run_json(capsys, ["run", "--routing", routing_file, *SMALL], exit_code=1)
    assert report["ok"] is False
    assert report["check"]["output"]["ratio"] > 1.5
    assert main(["run", "--routing", routing_file, *SMALL]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("output")]
    assert line.endswith("FAILED")


def test_run_exits_1_on_nan_and_json_stays_strict(
    capsys: pytest.CaptureFixture[str], routing_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nan = TensorCheck(math.nan, 0.001, math.nan)
    monkeypatch.setattr(mok_modular.testing, "check_passes", lambda *_: {"output": nan})
    report = run_json(capsys, ["run", "--routing", routing_file, *SMALL], exit_code=1)
    assert report["check"]["output"] == {"error": None, "torch_error": 0.001, "ratio": None}


def test_a_broken_run_shows_its_waits_and_exits_1(
    capsys: pytest.CaptureFixture[str], routing_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(*_: Any) -> PassesResult:
        raise MoKDeadlockError("nobody will publish x_ready", [{"rank": 1, "edge": "x_ready", "have": 3}])

    monkeypatch.setattr(mok_modular.testing, "run_passes", stuck)
    assert main(["run", "--routing", routing_file, "--json", *SMALL]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"] is False
    assert "MoKDeadlockError: nobody will publish x_ready" in err
    assert "have" in err


# ---- ab --------------------------------------------------------------------------------------------------


def test_ab_json(tmp_path: Path, routing_file: str) -> None:
    done = run_process(tmp_path, ["ab", "--json", "--iters", "3", "--routing", routing_file, *SMALL])
    report = json.loads(done.stdout)
    assert set(report) == {"bits_identical", "differing", "fused_s", "split_s", "ratio"}
    assert report["bits_identical"] is True
    assert report["differing"] == []
    assert report["ratio"] == pytest.approx(report["split_s"] / report["fused_s"])
    assert report["fused_s"] > 0


def test_ab_over_all_plans(capsys: pytest.CaptureFixture[str], routing_file: str) -> None:
    report = run_json(capsys, ["ab", "--plans", "all", "--iters", "1", "--routing", routing_file, *SMALL])
    assert report["bits_identical"] is True
    assert len(report["plans"]) == 16
    assert report["plans"]["split"]["median_s"] == report["split_s"]
    assert all(plan["bits_identical"] for plan in report["plans"].values())


@pytest.mark.parametrize("name", ["output", "d_router_weights", "d_routed_down", "d_shared_up"])
def test_ab_exits_1_when_one_bit_differs(
    capsys: pytest.CaptureFixture[str], routing_file: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = mok_modular.testing.run_passes_plans

    def flipped(*args: Any) -> list[PassesResult]:
        results = real(*args)
        results[-1].tensors[name][0].view(torch.int16)[-1, 1] ^= 1
        return results

    monkeypatch.setattr(mok_modular.testing, "run_passes_plans", flipped)
    argv = ["ab", "--iters", "1", "--routing", routing_file, *SMALL]
    report = run_json(capsys, argv, exit_code=1)
    assert report["bits_identical"] is False
    assert report["differing"] == [name]
    assert main(argv) == 1
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if "DIFFER" in line] == ["split", "split/fused"]


# ---- stages, build, doctor -------------------------------------------------------------------------------


def test_stages(capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, ["stages"])
    names = [row["name"] for row in report["stages"]]
    assert names == [*REPLAYED, "ring"]
    for row in report["stages"]:
        assert len(row["contract"].split()) >= 4
        assert row["implementation"] == "host, compiled"
        assert (ROOT / row["code"]).exists()
        assert (ROOT / "csrc" / "split" / f"{row['name']}.cu").exists()
    assert main(["stages"]) == 0
    table, sources = capsys.readouterr().out.split("\n\n")
    header, *lines = table.splitlines()
    assert header.split() == ["stage", "implementation", "code"]
    assert [line.split()[0] for line in lines[::2]] == names
    assert [line.strip() for line in lines[1::2]] == [row["contract"] for row in report["stages"]]
    assert (Path(sources.split()[1]) / "stages" / "dispatch.h").exists()


@pytest.mark.parametrize("name", REPLAYED)
def test_a_stage_alone_without_tokens(capsys: pytest.CaptureFixture[str], name: str) -> None:
    argv = ["stages", "--only", name, "--routing", "random", "--ranks", "2", "--shape", "128,256,8,2", "--tokens", "0"]
    report = run_json(capsys, argv)
    assert (report["ok"], report["num_rows"], report["num_differing"]) == (True, 0, 0)


@pytest.mark.parametrize("name", REPLAYED)
def test_a_stage_alone_on_captured_routing(
    capsys: pytest.CaptureFixture[str], routing_file: str, tmp_path: Path, name: str
) -> None:
    argv = ["stages", "--only", name, "--routing", routing_file, "--shape", "128,256,8,2", "--dump", str(tmp_path)]
    report = run_json(capsys, argv)
    assert (report["name"], report["ok"], report["routing"]) == (name, True, "made for this test")
    assert report["num_rows"] == int((load_routing(routing_file).expert_ids[0] >= 0).sum())
    assert report["num_values"] > 0
    assert report["seconds"] > 0
    if name in ("grouped_gemm", "swiglu", "reduce", "grouped_dgrad", "swiglu_backward", "wgrad"):
        assert report["check"]["ratio"] <= 1.5
        assert report["num_differing"] < report["num_values"] / 20
    else:
        assert report["check"] is None
        assert report["num_differing"] == 0
    results = torch.load(tmp_path / f"{name}.pt", weights_only=True)["results"]
    assert sum(tensor.numel() for launch in results for tensor in launch) == report["num_values"]
    assert main(argv[:5]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == "ok"


def test_a_stage_that_leaves_its_reference_exits_1(
    capsys: pytest.CaptureFixture[str], routing_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mok_modular.stages.combine.launch
    monkeypatch.setattr(mok_modular.stages.combine, "launch", lambda *args: [y.roll(1, 0) for y in real(*args)])
    report = run_json(capsys, ["stages", "--only", "combine", "--routing", routing_file], exit_code=1)
    assert report["ok"] is False
    assert report["num_differing"] > 0


def test_stages_without_the_extension(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mok_modular._host", None)
    assert {row["implementation"] for row in run_json(capsys, ["stages"])["stages"]} == {"none"}
    assert main(["stages"]) == 0
    assert "no implementation: " in capsys.readouterr().out


def test_build(capsys: pytest.CaptureFixture[str]) -> None:
    whole = run_json(capsys, ["build", "--target", "host"])
    assert whole["ok"] is True
    report = whole["host"]
    assert all(report[key] for key in ("compiler", "flags", "build_hash"))
    assert Path(report["path"]).exists()
    assert main(["build"]) == 0
    out = capsys.readouterr().out
    assert "when the package is installed" in out
    assert report["build_hash"] in out


@pytest.mark.slow
def test_build_for_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="compiling for a GPU needs cuda-bindings and nvidia-cuda-nvrtc")
    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path))
    plan = "dispatch|gate_up+swiglu|down|combine"
    kernels = run_json(capsys, ["build", "--target", "sm_90a", "--plan", plan])["sm_90a"]
    assert {k["kernel"] for k in kernels} == {
        *("schedule", "publish", "shared_gate_up", "shared_down", "dispatch", "gate_up", "down", "combine", "reduce")
    }
    assert not any(k["is_from_cache"] for k in kernels)
    assert all(Path(k["path"]).parent == tmp_path for k in kernels)


@pytest.mark.slow
def test_build_into_a_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="compiling for a GPU needs cuda-bindings and nvidia-cuda-nvrtc")
    monkeypatch.setenv("MOK_CACHE_DIR", __file__)
    with pytest.raises(SystemExit) as caught:
        main(["build", "--target", "sm_90a"])
    assert caught.value.code == 2
    assert "test_cli.py" in capsys.readouterr().err.splitlines()[-1]


def test_build_for_a_gpu_without_nvrtc(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("cuda", "cuda.bindings", "cuda.bindings.nvrtc"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["build", "--target", "sm_90a"]) == 1
    err = capsys.readouterr().err
    assert "NVRTC" in err
    assert "mok-modular[cuda]" in err


def test_build_of_a_broken_installation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mok_modular._host", None)
    assert main(["build"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "compiled extension" in err
    assert "pip install" in err


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    report = run_json(capsys, ["doctor"])
    assert report["ok"] is True
    assert {"python", "torch", "host target", "host flags", "cpu", "cpu features", "gpus"} <= set(report["facts"])
    assert "kernels for sm_90" in report["facts"]["gpus"]
    assert "right output" in report["facts"]["layer"]
    (problem,) = [p for p in report["problems"] if "CUDA_" in p["what"]]
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in problem["what"]
    assert problem["broken"] is False
    assert main(["doctor"]) == 0
    assert "warning: CUDA_DEVICE_MAX_CONNECTIONS=1" in capsys.readouterr().out


def test_doctor_sees_an_edited_source(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mok_modular.cli.doctor, "source_hash", lambda _: "of another one")
    report = run_json(capsys, ["doctor"])
    (problem,) = [p for p in report["problems"] if "compiled from other sources" in p["what"]]
    assert "of another one" in problem["what"]
    assert problem["broken"] is False


def test_doctor_of_a_broken_installation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise BuildError("the host extension does not load (no such file)", "install it again")

    monkeypatch.setattr(mok_modular.cli.doctor, "host_build_info", missing)
    report = run_json(capsys, ["doctor"], exit_code=1)
    assert report["ok"] is False
    assert "layer" not in report["facts"]
    (problem,) = [p for p in report["problems"] if p["broken"]]
    assert problem == {
        "what": "the host extension does not load (no such file)",
        "mend": "install it again",
        "broken": True,
    }


def test_doctor_runs_where_the_extension_is_missing(tmp_path: Path) -> None:
    package = Path(mok_modular.cli.doctor.__file__).parents[1]
    shutil.copytree(package, tmp_path / "mok_modular", ignore=shutil.ignore_patterns("*.so", "__pycache__", "csrc"))
    done = run_process(tmp_path, ["doctor"], exit_code=1)
    assert str(tmp_path / "mok_modular") in done.stdout
    assert f"BROKEN: {tmp_path / 'mok_modular'} has no compiled extension" in done.stdout
    assert "mend: install it with a C++20 compiler on PATH: " in done.stdout
    assert done.stdout.splitlines()[-1] == "something is broken"


def test_doctor_judges_the_layer() -> None:
    def broken() -> bool:
        raise RuntimeError("illegal instruction")

    for forward, words in ((broken, "RuntimeError: illegal instruction"), (lambda: False, "wrong output")):
        report = mok_modular.cli.doctor.Report()
        mok_modular.cli.doctor.check_layer_runs(report, forward)
        assert not report.is_ok
        assert words in report.problems[0].what


def test_versions() -> None:
    assert mok_modular.cli.doctor.parse_version("2.13.0+cpu") == (2, 13)
    assert mok_modular.cli.doctor.parse_version("2.10.0a0+git12") == (2, 10)
    assert mok_modular.cli.doctor.parse_version("2.9.1") < mok_modular.cli.doctor.MIN_TORCH


def test_the_script_is_this_main() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        scripts = tomllib.load(file)["project"]["scripts"]
    assert list(scripts) == ["mok-modular"]
    assert EntryPoint("mok-modular", scripts["mok-modular"], "console_scripts").load() is main


# ---- the workload ----------------------------------------------------------------------------------------


def test_workload_values_do_not_depend_on_the_number_of_ranks(routing_file: str) -> None:
    routing = load_routing(routing_file)
    shape = MoEShape("s", 64, 128, num_experts=8, topk=2, shared_intermediate_size=64)
    one, four = (Workload.from_routing(routing, shape, num_ranks=r, num_tokens=10) for r in (1, 4))
    other_seed = Workload.from_routing(routing, shape, num_ranks=1, num_tokens=10, seed=1)
    assert torch.equal(one.x[0], four.x[0])
    assert not torch.equal(one.x[0], other_seed.x[0])
    for a, b, c in zip(*(vars(w.weights).values() for w in (one, four, other_seed)), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    third = four.weights.of_rank(2, 4)
    assert torch.equal(third.routed_down, one.weights.routed_down[4:6])
    assert third.shared_gate is four.weights.shared_gate


def test_surplus_ranks_go_on_where_the_captured_ones_stopped(routing_file: str) -> None:
    routing = load_routing(routing_file)
    shape = MoEShape("s", 64, 128, num_experts=8, topk=2)
    workload = Workload.from_routing(routing, shape, num_ranks=4, num_tokens=20)
    stream = routing.expert_ids[:, 1].flatten(0, 1)
    assert torch.equal(workload.expert_ids[1], stream[:20])
    assert torch.equal(workload.expert_ids[3], stream[20:40])
    with pytest.raises(ValueError, match="need 50 tokens of each captured rank; the routing holds 48 of rank 0"):
        Workload.from_routing(routing, shape, num_ranks=4, num_tokens=25)


def test_check_forward_sees_a_wrong_output() -> None:
    shape = MoEShape("s", 64, 128, num_experts=4, topk=2)
    workload = Workload.from_ids(shape, [torch.tensor([[0, 3], [1, -1], [-1, -1]], dtype=torch.int32)])
    exact = ForwardResult(workload.reference(torch.float64), [], 0.0, 0.0)
    rounded = dataclasses.replace(exact, outputs=workload.reference(torch.bfloat16))
    shifted = dataclasses.replace(exact, outputs=[torch.roll(exact.outputs[0], 1, 0)])
    poisoned = dataclasses.replace(exact, outputs=[exact.outputs[0].clone()])
    poisoned.outputs[0][2, 5] = math.nan
    assert check_forward(workload, exact)["output"].error == 0
    assert check_forward(workload, rounded)["output"].ratio == 1
    assert 0 < check_forward(workload, rounded)["output"].error < 0.02
    assert not check_forward(workload, shifted)["output"].is_ok
    assert not check_forward(workload, poisoned)["output"].is_ok


def test_check_forward_without_any_value() -> None:
    shape = MoEShape("s", 64, 128, num_experts=4, topk=2)
    workload = Workload.from_ids(shape, [torch.full((3, 2), -1, dtype=torch.int32)])
    zeros, ones = (
        ForwardResult([torch.full((3, 64), value, dtype=torch.bfloat16)], [], 0.0, 0.0) for value in (0.0, 1.0)
    )
    assert check_forward(workload, zeros)["output"].is_ok
    assert not check_forward(workload, ones)["output"].is_ok
