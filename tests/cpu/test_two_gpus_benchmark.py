"""benchmarks/bars_two_gpus.py and what belongs to it, as far as that goes without a GPU: routings, floors, the
baselines' outputs, the flow of the measurements, bars, tables, picture, and processes that fail."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mok_modular import LocalGroup, MoEShape, MoKConfig, functional
from mok_modular.reference import moe

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = MoEShape("tiny", 128, 64, num_experts=8, topk=3)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a module of benchmarks/."""
    import importlib

    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module


# ---- routings and floors ----


def test_layers_are_what_two_ranks_of_ep64_see(load: Callable[[str], Any]) -> None:
    layers = load("two_gpus_cases").LAYERS
    assert {name: layer.num_experts // 2 for name, layer in layers.items()} == {
        "kimi-k2.7": 8,
        "glm-5.2": 8,
        "qwen3.5-397b": 10,
        "deepseek-v4-pro": 6,
    }
    assert all(layer.num_experts >= 2 * layer.topk for layer in layers.values())


@pytest.mark.parametrize("routing", ["uniform", "captured", "remote", "hot"])
def test_routings(load: Callable[[str], Any], routing: str) -> None:
    cases = load("two_gpus_cases")
    for layer in (*cases.LAYERS.values(), TINY):
        ids = [cases.expert_ids(layer, 300, routing, rank) for rank in range(2)]
        assert all(torch.equal(ids[rank], cases.expert_ids(layer, 300, routing, rank)) for rank in range(2))
        for rank, each in enumerate(ids):
            assert each.shape == (300, layer.topk)
            assert each.dtype == torch.int64
            assert all(len(set(row)) == layer.topk for row in each.tolist())
            owner = each // (layer.num_experts // 2)
            if routing == "remote":
                assert (owner == 1 - rank).all()
            if routing == "hot":
                assert (owner == 0).all()
        if routing in ("uniform", "captured"):
            assert not torch.equal(ids[0], ids[1])


def test_captured_loads_follow_the_capture(load: Callable[[str], Any]) -> None:
    cases = load("two_gpus_cases")
    layer = MoEShape("wide", 128, 64, num_experts=16, topk=2)
    popularity = cases.captured_popularity(16)
    counts = torch.bincount(cases.expert_ids(layer, 20_000, "captured", 0).flatten(), minlength=16).double()
    assert torch.corrcoef(torch.stack([counts, popularity]))[0, 1] > 0.98
    assert cases.captured_popularity(20).shape == (20,)
    assert float(cases.captured_popularity(12).mean()) == pytest.approx(1)


def test_load_and_floors_by_hand(load: Callable[[str], Any]) -> None:
    cases = load("two_gpus_cases")
    layer = MoEShape("by hand", 1024, 256, num_experts=4, topk=2)
    ids = [torch.tensor([[0, 1], [0, 2], [3, 2]]), torch.tensor([[0, 1], [2, 3], [3, 2]])]
    load_ = cases.Load.of(ids, 4)
    assert load_.rows == ((3, 3), (2, 4))
    assert load_.unique == ((2, 2), (1, 2))
    assert load_.max_received() == 7
    assert cases.crossing(load_.rows) == 3
    assert cases.crossing_there_and_back(load_.rows) == 5
    assert cases.crossing_there_and_back(load_.unique) == 3
    floors = cases.floors_ms(layer, load_, dense_flops=1e9, link_bytes_per_s=1e6)
    assert floors["flop"] == pytest.approx(6 * 7 * 1024 * 256 / 1e9 * 1e3)
    assert floors["link"] == pytest.approx(5 * 2048 / 1e6 * 1e3)
    assert floors["link_unique"] == pytest.approx(3 * 2048 / 1e6 * 1e3)


def test_all_remote_loads_the_link_as_ep64_does(load: Callable[[str], Any]) -> None:
    cases = load("two_gpus_cases")
    kimi = cases.LAYERS["kimi-k2.7"]
    load_ = cases.Load.of([cases.expert_ids(kimi, 2048, "remote", rank) for rank in range(2)], kimi.num_experts)
    assert load_.rows == ((0, 2048 * 8), (2048 * 8, 0))
    assert cases.floors_ms(kimi, load_, 790e12, 330e9)["link"] == pytest.approx(2 * 0.7117, rel=1e-3)
    hot = cases.Load.of([cases.expert_ids(kimi, 64, "hot", rank) for rank in range(2)], kimi.num_experts)
    assert hot.rows == ((512, 0), (512, 0))
    assert hot.max_received() == 1024


# ---- contenders ----

RANK_SCRIPT = """
import sys
sys.path.insert(0, {benchmarks!r})
import torch
from torch import distributed
from two_gpus_cases import expert_ids
from two_gpus_contenders import DeepEp, Inputs, LocalParts, Nccl
from mok_modular import MoEShape

class Buffer:
    "What DeepEP does, over gloo."
    def __init__(self, size, rank):
        self.size, self.rank = size, rank
    def get_dispatch_layout(self, ids, num_experts):
        self.num_local = num_experts // self.size
        owner = ids // self.num_local
        in_rank = torch.stack([(owner == rank).any(1) for rank in range(self.size)], dim=1)
        return in_rank.sum(0).int(), None, torch.bincount(ids.view(-1), minlength=num_experts).int(), in_rank, None
    def exchange(self, parts):
        everything = [None] * self.size
        distributed.all_gather_object(everything, parts)
        return [each[self.rank] for each in everything]
    def dispatch(self, x, topk_idx, topk_weights, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert):
        ids, weights = topk_idx, topk_weights
        parts = self.exchange([(x[m], ids[m], weights[m]) for m in is_token_in_rank.t()])
        x, ids, weights = (torch.cat(each) for each in zip(*parts))
        ids = ids - self.rank * self.num_local
        ids = torch.where((ids < 0) | (ids >= self.num_local), -1, ids)
        counts = [int((ids == e).sum()) for e in range(self.num_local)]
        handle = ([len(part[0]) for part in parts], is_token_in_rank)
        return x, ids, weights.masked_fill(ids < 0, 0), counts, handle, None
    def combine(self, x, handle):
        lengths, in_rank = handle
        out = torch.zeros(len(in_rank), x.shape[1])
        for rank, part in enumerate(self.exchange(list(x.split(lengths)))):
            out[in_rank[:, rank]] += part.float()
        return out.bfloat16(), None, None

distributed.init_process_group("gloo")
rank = distributed.get_rank()
layer = MoEShape("tiny", 128, 64, num_experts=8, topk=3)
outputs = {{}}
for routing in {routings!r}:
    ids = expert_ids(layer, {num_tokens}, routing, rank)
    inputs = Inputs.random(layer, ids, 2, rank, "cpu", None)
    kinds = {{"eager": LocalParts()}}
    if {is_compiled}:
        kinds["compiled"] = LocalParts.compiled()
    for kind, parts in kinds.items():
        outputs[routing, "nccl", kind] = Nccl(distributed.group.WORLD, parts)(inputs)
        outputs[routing, "deep_ep", kind] = DeepEp(Buffer(2, rank), parts)(inputs)
    names = ("x", "ids", "router_weights", "w_gate", "w_up", "w_down")
    outputs[routing, "inputs"] = tuple(getattr(inputs, name) for name in names)
torch.save(outputs, sys.argv[1] + f"/{{rank}}.pt")
distributed.destroy_process_group()
"""


def run_ranks(folder: Path, num_tokens: int, routings: tuple[str, ...], is_compiled: bool) -> list[dict[Any, Any]]:
    """What both ranks of RANK_SCRIPT, as processes over gloo, wrote."""
    script = folder / "rank.py"
    text = RANK_SCRIPT.format(
        benchmarks=str(BENCHMARKS), routings=routings, num_tokens=num_tokens, is_compiled=is_compiled
    )
    script.write_text(textwrap.dedent(text))
    port = str(20_000 + os.getpid() % 20_000)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env={**os.environ, **world, "RANK": str(rank), "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(2)
    ]
    assert [rank.wait(150) for rank in ranks] == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def check_outputs(found: list[dict[Any, Any]], routing: str, error: Callable[[Tensor, Tensor], float]) -> None:
    """Every contender against the reference in float64, and this library's two."""
    inputs = [each[routing, "inputs"] for each in found]
    weights = [torch.cat([rank[3 + i] for rank in inputs]) for i in range(3)]

    def step(member: Any, mode: str) -> Tensor:
        x, ids, router_weights, *routed = inputs[member.rank()]
        config = MoKConfig(mode=mode)
        workspace = functional.create_workspace(
            config, member, num_local_tokens=len(x), hidden_size=x.shape[1], topk=ids.shape[1]
        )
        schedule = functional.build_schedule(workspace, config, ids, num_local_experts=len(routed[0]))
        return functional.forward(
            config, workspace, schedule, x, router_weights, None, None, None, *routed, save_context=False
        )[0]

    ours = {mode: LocalGroup(2).run(lambda member, mode=mode: step(member, mode)) for mode in ("fused", "split")}
    for rank in range(2):
        x, ids, router_weights, *_ = inputs[rank]
        exact = moe(x.double(), ids, router_weights, *(weight.double() for weight in weights))
        for mode, outputs in ours.items():
            assert error(outputs[rank], exact) < 0.01, mode
        for key, output in found[rank].items():
            if key[0] == routing and key[1] != "inputs":
                assert output.dtype == torch.bfloat16
                assert error(output, exact) < 0.01, (rank, key)


def test_baselines_compute_the_layer(tmp_path: Path, load: Callable[[str], Any]) -> None:
    routings = ("uniform", "captured", "remote")
    found = run_ranks(tmp_path, 65, routings, is_compiled=False)
    for routing in routings:
        check_outputs(found, routing, load("two_gpus_contenders").relative_error)


@pytest.mark.slow
def test_compiled_baselines_compute_the_layer(tmp_path: Path, load: Callable[[str], Any]) -> None:
    found = run_ranks(tmp_path, 40, ("uniform",), is_compiled=True)
    assert ("uniform", "deep_ep", "compiled") in found[0]
    check_outputs(found, "uniform", load("two_gpus_contenders").relative_error)


# ---- the flow of a rank, on CPU ranks ----


class FakeEnv:
    """What parts need of an Env, for a LocalMember; times are made up, calls are made."""

    nccl = deep_ep = None
    device = torch.device("cpu")

    def __init__(self, member: Any) -> None:
        self.group, self.rank, self.report = member, member.rank(), {}

    def gather(self, value: Any) -> list[Any]:
        return self.group.group.meet(self.rank, "gather", value, lambda values: [values] * len(values), 60)

    def slowest(self, milliseconds: dict[str, float]) -> dict[str, float]:
        ranks = self.gather(milliseconds)
        return {name: max(rank[name] for rank in ranks) for name in milliseconds}

    def start(self, num_cycles: int = 0) -> None:
        pass

    def medians(self, runs: dict[str, Callable[[], object]], rounds: int, warmup: int) -> dict[str, float]:
        for run in runs.values():
            run()
        return {name: float(1 + self.rank + i) for i, name in enumerate(runs)}

    def save(self, part: str, key: str, figures: Any) -> None:
        self.report.setdefault(part, {})[key] = json.loads(json.dumps(figures, allow_nan=False))

    def log(self, text: str) -> None:
        pass


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, load: Callable[[str], Any]) -> Callable[[Callable[[Any], None]], Any]:
    """Runs a part on two CPU ranks with layers as small as TINY; gives rank 0's report."""
    layer, copies = load("two_gpus_layer"), load("two_gpus_copies")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(layer.gpu_timing, "matmul_rate_flops", lambda: 1e12)
    monkeypatch.setattr(layer, "dense_product", lambda: lambda: None)
    monkeypatch.setattr(layer, "LAYERS", {"kimi-k2.7": TINY})
    monkeypatch.setattr(layer, "TOKENS", (33, 64))
    monkeypatch.setattr(copies, "LAYER", TINY)
    monkeypatch.setattr(copies, "NUM_TOKENS", 48)
    monkeypatch.setattr(copies, "_measure_plain", lambda *_: None)
    monkeypatch.setattr(copies, "_measure_rounds", lambda *_: None)
    shared = load("mok_modular.targets.host").HostWorkspace
    times = [("schedule", 1e-5), ("dispatch", 1e-3), ("gate_up", 1e-3), ("combine", 2e-3)]
    monkeypatch.setattr(shared, "kernel_times_s", lambda self: times, raising=False)

    def run(part: Callable[[Any], None]) -> Any:
        def step(member: Any) -> Any:
            env = FakeEnv(member)
            part(env)
            return env.report

        return LocalGroup(2).run(step)[0]

    return run


def test_layer_part(on_cpu: Any, load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = load("two_gpus_layer")

    def raises(inputs: Any) -> Tensor:
        raise RuntimeError("no such kernel")

    def wrong(inputs: Any) -> Tensor:
        return torch.ones_like(inputs.x)

    monkeypatch.setattr(layer, "baselines", lambda *_: {"raises": raises, "NCCL + torch": wrong})
    report = on_cpu(lambda env: layer.measure_layer(env, "kimi-k2.7"))["layer kimi-k2.7"]
    cases = [f"T={num_tokens} {routing}" for num_tokens in (33, 64) for routing in ("uniform", "captured", "remote")]
    assert [key for key in report if key.startswith("T=")] == cases
    assert report["without DeepEP"] == "not installed"
    for case in cases:
        assert report[case]["ms"] == {"fused": 2.0, "fused, pull once": 3.0, "split": 4.0}
        assert report[case]["errors"]["fused, pull once"] == 0
        assert report[case]["errors"]["split"] == 0  # the same bits
        assert report[case]["errors"]["raises"] == "RuntimeError: no such kernel"
        assert report[case]["errors"]["NCCL + torch"] > 0.5
        assert report[case]["dense_flops"] == pytest.approx(2 * 8192**3 / 4e-3)


def test_minibatch_part(on_cpu: Any, load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = load("two_gpus_layer")
    monkeypatch.setattr(layer, "MINIBATCHES", (128, 256))
    monkeypatch.setattr(layer, "inputs_of", small_inputs(layer.inputs_of))
    report = on_cpu(layer.measure_minibatches)["minibatch"]
    assert list(report) == ["T=2048", "T=8192"]
    assert list(report["T=2048"]["ms"]) == ["row_block 128", "row_block 256", "minibatch 128", "minibatch 256"]
    assert set(report["T=2048"]["errors"].values()) == {0}


def small_inputs(inputs_of: Callable[..., Any]) -> Callable[..., Any]:
    return lambda env, layer, num_tokens, routing, like: inputs_of(env, layer, num_tokens // 128, routing, like)


def test_copy_and_signal_parts(on_cpu: Any, load: Callable[[str], Any]) -> None:
    copies = load("two_gpus_copies")
    report = on_cpu(lambda env: copies.measure_copies(env, ("remote", "hot")))["copies"]
    assert len(report) == (2 * 2 + 1) * (6 + 3)
    figures = report["remote: pull dispatch, 16 SMs"]
    assert figures["link_gb_per_s"] == pytest.approx(48 * 3 * copies.ROW_BYTES / 1e-3 * 1e-9)
    hot = report["hot: push dispatch, 132 SMs"]
    assert hot["logical_gb_per_s"] == pytest.approx(2 * hot["link_gb_per_s"])
    signals = on_cpu(copies.measure_signals)["signals"]
    assert signals["kernels, 1 tokens a rank: pull dispatch, push combine"]["combine"] == pytest.approx(2000)


# ---- bars, tables, picture ----


def made_up(load: Callable[[str], Any], factor: float = 1.0, deep_ep: bool = True) -> dict[str, Any]:
    """Figures as a run leaves them; a larger factor makes this library slower."""
    cases = load("two_gpus_cases")
    found: dict[str, Any] = {"done": [], "failed": {}, "copies": {}, "signals": {}, "minibatch": {}}
    for routing in ("remote", "hot"):
        for name, rate in (("plain loads", 320), ("plain stores", 330), ("pull dispatch", 319), ("push combine", 350),
                           ("push dispatch", 300)):  # fmt: skip
            for num_sms in (8, 16, 132):
                figures = {"ms": 0.7, "link_gb_per_s": rate + num_sms / 132, "logical_gb_per_s": 2.0 * rate}
                found["copies"][f"{routing}: {name}, {num_sms} SMs"] = figures
    for name, layer in cases.LAYERS.items():
        found[f"layer {name}"] = {"dense_flops_alone": 700e12}
        for num_tokens in (512, 2048, 8192):
            for routing in ("uniform", "captured", "remote"):
                ids = [cases.expert_ids(layer, num_tokens, routing, rank) for rank in range(2)]
                load_ = cases.Load.of(ids, layer.num_experts)
                fused = max(list(cases.floors_ms(layer, load_, 700e12, 331e9).values())[:2]) / 0.8 * factor
                ms = {
                    "fused": fused,
                    "split": 1.2 * fused,
                    "NCCL + torch": 9 * fused,
                    "NCCL + torch, compiled": 4.0 * fused,
                }
                if deep_ep:
                    ms |= {"DeepEP + torch": 3 * fused, "DeepEP + torch, compiled": 2.5 * fused}
                found[f"layer {name}"][f"T={num_tokens} {routing}"] = {
                    "ms": ms,
                    "errors": dict.fromkeys(ms, 0.004),
                    "dense_flops": 700e12,
                    "rows": load_.rows,
                    "unique": load_.unique,
                }
    found["minibatch"]["T=2048"] = {"ms": {"row_block 512": 3.0, "row_block 1024": 2.0, "minibatch 512": 4.0}}
    found["signals"] = {
        "hand-over, pull": {"us": 2.5},
        "hand-over, push": {"us": 1.5},
        "kernels, 1 token": {"dispatch": 9.0},
    }
    return json.loads(json.dumps(found))


def test_bars_hold_and_are_missed(load: Callable[[str], Any]) -> None:
    bars = load("bars_two_gpus")
    found = list(bars.bars_of(made_up(load), bars.PARTS))
    assert len(found) == 2 + 4 * 9 + 1
    assert [bar.name for bar in found if not bar.is_ok] == []
    assert [bar.value for bar in found if "NCCL" in bar.name] == [pytest.approx(9), pytest.approx(4)] * 4
    slow = [bar for bar in bars.bars_of(made_up(load, factor=1.3), bars.PARTS) if not bar.is_ok]
    assert len(slow) == 4 * 2  # the floors
    assert len(list(bars.bars_of(made_up(load, deep_ep=False), bars.PARTS))) == 2 + 4 * 5 + 1


def test_missing_figures_are_misses(load: Callable[[str], Any]) -> None:
    bars = load("bars_two_gpus")
    found = list(bars.bars_of({"failed": {"copies": "exit codes [1, 0]"}}, bars.PARTS))
    assert found
    assert all(math.isnan(bar.value) and not bar.is_ok for bar in found)
    assert "copies: exit codes [1, 0]" in load("two_gpus_report").tables({"failed": {"copies": "exit codes [1, 0]"}})
    assert list(bars.bars_of({}, ["signals"])) == []


def test_parts_by_name(load: Callable[[str], Any]) -> None:
    bars = load("bars_two_gpus")
    assert bars.chosen_parts("") == list(bars.PARTS)
    assert bars.chosen_parts("signals, layer kimi") == ["layer kimi-k2.7", "signals"]
    assert set(bars.PARTS) == set(load("two_gpus").PARTS)
    with pytest.raises(SystemExit, match="'typo'"):
        bars.chosen_parts("copies,typo")


def test_tables(load: Callable[[str], Any]) -> None:
    report = load("two_gpus_report")
    found = made_up(load)
    found["layer glm-5.2"]["T=512 remote"]["errors"]["DeepEP + torch"] = "RuntimeError: no"
    text = report.tables(found)
    (line,) = [line.split() for line in text.splitlines() if line.split()[:3] == ["kimi-k2.7", "2048", "remote"]]
    case = report.layer_case(found, "kimi-k2.7", 2048, "remote")
    assert line[4] == "-"  # pull once: no figure
    times = [line[3], *line[5:8]]
    assert times == [f"{case[each]:.2f}" for each in ("fused", "split", "NCCL + torch", "DeepEP + torch")]
    assert line[-4:] == ["0.80", "1.20", "4.00", "2.50"]
    assert "DeepEP + torch was left out: RuntimeError: no" in text
    assert "hand-over, push" in text
    assert report.tables({}) == ""


@pytest.mark.slow
def test_picture(tmp_path: Path, load: Callable[[str], Any]) -> None:
    pytest.importorskip("matplotlib")
    report = load("two_gpus_report")
    for name, found in (("full", made_up(load)), ("empty", {})):
        report.draw(found, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


# ---- processes ----

RANK_WITHOUT_GPU = """
import os, sys, time
sys.path.insert(0, {benchmarks!r})
import torch, two_gpus

class Event:
    def __init__(self, enable_timing):
        self.seconds = None
    def record(self):
        self.seconds = time.perf_counter()
    def elapsed_time(self, other):
        return 1e3 * (other.seconds - self.seconds)

torch.cuda.Event = Event
torch.cuda.set_device = torch.cuda._sleep = torch.cuda.synchronize = lambda *_: None
two_gpus.Env.device_type, two_gpus.Env.backend = "cpu", "gloo"

def measures(env):
    runs = {{"short": lambda: time.sleep(0.01), "long": lambda: time.sleep(0.02 + 0.02 * env.rank)}}
    env.save("times", "ms", env.slowest(env.medians(runs, 3, 1)))

def fails(env):
    env.save("kept", "figure", 1.5)
    if env.rank == 1:
        raise RuntimeError("a part that fails")
    env.meet()

two_gpus.PARTS.update(a=measures, fails=fails, b=lambda env: None, hangs=lambda env: time.sleep(60), c=lambda env: None)
two_gpus.main()
"""


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_loses_nothing(
    tmp_path: Path, load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bars = load("bars_two_gpus")
    (tmp_path / "two_gpus.py").write_text(RANK_WITHOUT_GPU.format(benchmarks=str(BENCHMARKS)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(bars, "__file__", str(tmp_path / "bars_two_gpus.py"))
    path = tmp_path / "report.json"
    found = bars.measure(path, ["a", "fails", "b", "hangs", "c"], limit_s=100, stall_s=12)
    assert found["done"] == ["a", "b", "c"]
    assert set(found["failed"]) == {"fails", "hangs"}
    assert found["failed"]["fails"].startswith("exit codes [")
    assert found["kept"] == {"figure": 1.5}
    assert found["times"]["ms"]["short"] >= 10
    assert found["times"]["ms"]["long"] >= 40  # the slower rank's
    assert set(found["seconds"]) == {"a", "b", "c"}
    assert "nothing came" in found["failed"]["hangs"]
    late = bars.measure(tmp_path / "late.json", ["hangs", "c"], limit_s=8, stall_s=30)
    assert late["failed"] == {"hangs": "stopped: no time was left", "c": "no time was left"}


def test_finish_prints_and_draws(tmp_path: Path, load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bars = load("bars_two_gpus")
    monkeypatch.setattr(bars, "figures", made_up(load))
    text = bars.finish(tmp_path / "two_gpus-20200101-0000.json")
    assert "qwen3.5-397b" in text
    assert (tmp_path / "two_gpus-20200101-0000.png").exists() or "no picture" in text
