"""The layer on ranks that are processes: one command for any number of GPUs, or for several ranks on one.

    torchrun --nproc-per-node=4 tests/multi/run.py
    torchrun --nproc-per-node=2 tests/multi/run.py --cases bits,late --bodies nvshmem --repeats 10
    torchrun --nproc-per-node=4 tests/multi/run.py --group-size 2     # groups smaller than the world, side by side

Ranks take the GPUs in turn. Each case runs on every rank, which checks its own part and raises; `ok` is printed once a
case. The last case, `killed`, loses a rank for good: the others must say so and end.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

sys.path.insert(0, str(Path(__file__).parents[1]))
from held_sms import held_sms, is_over_within, num_sms

import mok_modular as mok
from mok_modular import functional
from mok_modular.protocol.plan import all_plans

E, K, H, I, S = 8, 3, 256, 384, 128  # noqa: E741
PATIENCE_S = 8.0
"""How long beyond the effective timeout an error may take: hosts report to each other, and GPUs are time-sliced."""


@dataclass
class Data:
    """A whole layer and the tokens of all ranks, on the CPU."""

    x: Tensor
    ids: Tensor
    router_weights: Tensor
    routed: tuple[Tensor, Tensor, Tensor]
    shared: tuple[Tensor, Tensor, Tensor] | None

    @classmethod
    def random(cls, num_tokens: int, seed: int, num_experts: int = E, has_shared: bool = True) -> Data:
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).bfloat16()

        return cls(
            torch.randn(num_tokens, H, generator=generator).bfloat16(),
            torch.randint(-1, num_experts, (num_tokens, K), generator=generator),
            torch.rand(num_tokens, K, generator=generator),
            (weight(num_experts, I, H), weight(num_experts, I, H), weight(num_experts, H, I)),
            (weight(S, H), weight(S, H), weight(H, S)) if has_shared else None,
        )


class Rank:
    """This process, and what the cases need of it."""

    def __init__(self, signals: str, group: Any) -> None:
        self.group = group
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self.device = torch.device(f"cuda:{torch.cuda.current_device()}")
        self.num_sharing = -(-distributed.get_world_size() // torch.cuda.device_count())
        self.signals = signals
        self.repeats = 100

    def config(self, **options: Any) -> mok.MoKConfig:
        defaults = {
            "mode": "split",
            "minibatch_size": 128,
            "macrobatch_size": 256,
            "timeout_s": 5,
            "start_timeout_s": 30,
        }
        return mok.MoKConfig(**{**defaults, "allow_shared_gpu": True, "signals": self.signals, **options})

    def workspace(self, config: mok.MoKConfig, splits: list[int]) -> mok.Workspace:
        return functional.get_workspace(
            config, self.group, num_local_tokens=max(splits), hidden_size=H, topk=K, device=self.device
        )

    def part(self, data: Data, splits: list[int]) -> Part:
        return Part(data, splits, self.rank, self.device)


class Part:
    """One rank's part of Data, on its GPU, and the calls on it."""

    def __init__(self, data: Data, splits: list[int], rank: int, device: torch.device) -> None:
        begin, size = sum(splits[:rank]), len(splits)
        tokens = slice(begin, begin + splits[rank])
        self.num_local_experts = data.routed[0].shape[0] // size
        experts = slice(rank * self.num_local_experts, (rank + 1) * self.num_local_experts)
        self.x, self.ids, self.router_weights = (
            each[tokens].contiguous().to(device) for each in (data.x, data.ids, data.router_weights)
        )
        self.routed = [each[experts].contiguous().to(device) for each in data.routed]
        self.shared = [None if each is None else each.to(device) for each in data.shared or (None,) * 3]

    def schedule(self, config: mok.MoKConfig, workspace: mok.Workspace) -> mok.MoKSchedule:
        return functional.build_schedule(workspace, config, self.ids, num_local_experts=self.num_local_experts)

    def forward(self, config: mok.MoKConfig, workspace: mok.Workspace, schedule: mok.MoKSchedule) -> Tensor:
        inputs = (self.x, self.router_weights, *self.shared, *self.routed)
        return functional.forward(config, workspace, schedule, *inputs, save_context=False)[0]

    def run(self, config: mok.MoKConfig, workspace: mok.Workspace) -> Tensor:
        return self.forward(config, workspace, self.schedule(config, workspace))


def on_one_rank(rank: Rank, data: Data, **options: Any) -> Tensor:
    """The same layer on LocalGroup(1): the bits that every number of ranks must give."""
    group = mok.LocalGroup(1, device=str(rank.device))
    config = replace(rank.config(**options), signals="direct", allow_shared_gpu=False)
    splits = [data.x.shape[0]]
    workspace = functional.get_workspace(config, group, num_local_tokens=splits[0], hidden_size=H, topk=K)
    output = Part(data, splits, 0, rank.device).run(config, workspace)
    workspace.check()
    return output.cpu()


def expect_bits(rank: Rank, output: Tensor, whole: Tensor, splits: list[int]) -> None:
    begin = sum(splits[: rank.rank])
    want = whole[begin : begin + splits[rank.rank]]
    if not torch.equal(output.cpu().view(torch.int16), want.view(torch.int16)):
        num = int((output.cpu().view(torch.int16) != want.view(torch.int16)).any(dim=1).sum())
        raise AssertionError(f"{num} of {len(want)} tokens differ; NaN: {int(output.isnan().any())}")


@contextmanager
def expect_error(rank: Rank, kind: type[Exception], *words: str, within_s: float) -> Iterator[None]:
    """The block raises `kind`, whose text holds `words`, in within_s (on one GPU: times the ranks) and PATIENCE_S."""
    begin = time.monotonic()
    try:
        yield
    except kind as error:
        seconds = time.monotonic() - begin
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in: {error}"
        limit = within_s * rank.num_sharing + PATIENCE_S
        assert seconds < limit, f"{kind.__name__} came after {seconds:.1f} s, {limit:.1f} s are allowed"
    else:
        raise AssertionError(f"no {kind.__name__}")


def even(rank: Rank, num_tokens: int) -> list[int]:
    return [num_tokens // rank.size] * rank.size


# ---- cases ----


def case_bits(rank: Rank) -> None:
    """Split forward, many runs without a look from the host: the bits of one rank."""
    splits = even(rank, 240)
    data = Data.random(sum(splits), seed=1)
    whole = on_one_rank(rank, data)
    config = rank.config()
    workspace, part = rank.workspace(config, splits), rank.part(data, splits)
    part.run(config, workspace)
    workspace.check()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = [part.run(config, workspace) for _ in range(rank.repeats)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    workspace.check()
    for output in outputs:
        expect_bits(rank, output, whole, splits)


def case_plans(rank: Rank) -> None:
    """Plans with matrix products that signal, push dispatch, pull combine, several generations."""
    splits = even(rank, 160)
    data = Data.random(sum(splits), seed=2)
    whole = on_one_rank(rank, data)
    rows = 131072
    for options in (
        {"mode": "dispatch|gate_up+swiglu|down+combine"},
        {"macrobatch_size": 128},
        {"macrobatch_size": rows, "dispatch": "push"},
        {"macrobatch_size": rows, "dispatch": "pull_once"},
        {"macrobatch_size": rows, "dispatch": "pull_once", "mode": "fused"},
        {"macrobatch_size": rows, "combine": "pull"},
        {"signal_grain": "minibatch"},
    ):
        config = rank.config(**options)
        workspace, part = rank.workspace(config, splits), rank.part(data, splits)
        for _ in range(2):
            expect_bits(rank, part.run(config, workspace), whole, splits)
        workspace.check()


def case_fused(rank: Rank) -> None:
    """Every plan, communication on SMs of its own, unequal numbers of tokens: the bits of split on one rank."""
    splits = even(rank, 240)
    data = Data.random(sum(splits), seed=9)
    whole = on_one_rank(rank, data)
    num_runs = max(1, min(20, rank.repeats))
    for options in (*({"mode": str(plan)} for plan in all_plans()), {"mode": "fused", "fwd_num_comm_sms": 16}):
        config = rank.config(**options)
        workspace, part = rank.workspace(config, splits), rank.part(data, splits)
        for output in [part.run(config, workspace) for _ in range(num_runs)]:
            expect_bits(rank, output, whole, splits)
        workspace.check()
    data = Data.random(240 // rank.size * rank.size, seed=12, has_shared=False)  # the consumers copy the first rows
    splits, whole = even(rank, 240), on_one_rank(rank, data)
    for options in ({"mode": "fused"}, {"mode": "fused", "dispatch": "pull_once"}):
        config = rank.config(**options, macrobatch_size=131072)
        workspace, part = rank.workspace(config, splits), rank.part(data, splits)
        for output in [part.run(config, workspace) for _ in range(num_runs)]:
            expect_bits(rank, output, whole, splits)
        workspace.check()
    splits = [(37 * r) % 96 for r in range(rank.size)]
    data = Data.random(sum(splits), seed=10)
    if sum(splits):
        config = rank.config(mode="fused")
        workspace = rank.workspace(config, [240 // rank.size, *splits])
        expect_bits(rank, rank.part(data, splits).run(config, workspace), on_one_rank(rank, data), splits)
        workspace.check()


def case_sizes(rank: Rank) -> None:
    """Unequal numbers of tokens, none on some ranks, none at all; a layer; growth."""
    config = rank.config()
    for splits in ([(37 * r) % 96 for r in range(rank.size)], [0] * (rank.size - 1) + [65], [0] * rank.size):
        data = Data.random(sum(splits), seed=3)
        whole = on_one_rank(rank, data) if sum(splits) else data.x
        workspace = rank.workspace(config, [96])
        expect_bits(rank, rank.part(data, splits).run(config, workspace), whole, splits)
        workspace.check()
    workspace = functional.create_workspace(config, rank.group, num_local_tokens=8, hidden_size=H, topk=K)
    for num_tokens in (8, 24):
        workspace.grow(num_tokens)
        splits = [num_tokens] * rank.size
        data = Data.random(sum(splits), seed=4)
        expect_bits(rank, rank.part(data, splits).run(config, workspace), on_one_rank(rank, data), splits)
        workspace.check()
    torch.manual_seed(7)
    layer = mok.MoE(H, I, E, K, rank.group, config, shared_intermediate_size=S)
    part = rank.part(data, splits)
    with torch.no_grad():
        outputs = [layer(part.x, part.ids, part.router_weights) for _ in range(2)]
    assert torch.equal(*outputs)
    assert not outputs[0].isnan().any()


def case_copies(rank: Rank) -> None:
    """Scripts that seed by rank: the first call names the copies that differ; broadcast and clipping over the group."""
    splits = even(rank, 240)
    part = rank.part(Data.random(sum(splits), seed=13), splits)
    torch.manual_seed(1234 + rank.rank)
    layer = mok.MoE(H, I, E, K, rank.group, rank.config(), shared_intermediate_size=S, num_local_tokens=max(splits))
    kept = {name: weight.detach().clone() for name, weight in layer.named_parameters()}
    with torch.no_grad():
        if rank.size > 1:
            with expect_error(rank, ValueError, "w_shared_up on rank 1", within_s=120):
                layer(part.x, part.ids, part.router_weights)
        mok.broadcast_copies(layer)
        layer(part.x, part.ids, part.router_weights)
        torch.cuda.set_sync_debug_mode("error")
        try:
            output = layer(part.x, part.ids, part.router_weights)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    layer.workspace.check()
    assert not output.isnan().any()
    for name, weight in layer.named_parameters():
        assert torch.equal(weight, kept[name]) is (rank.rank == 0 or "routed" in name), name
        weight.grad = torch.full_like(weight, 1 + rank.rank if "routed" in name else 2)
    num_own = sum(weight.numel() for name, weight in kept.items() if "routed" in name)
    num_shared = sum(weight.numel() for name, weight in kept.items() if "shared" in name)
    norm = (sum((1 + r) ** 2 for r in range(rank.size)) * num_own + 4 * num_shared) ** 0.5
    assert abs(mok.clip_grad_norm_(layer, 1.0).item() / norm - 1) < 1e-5
    assert abs(layer.w_shared_up.grad[0, 0].item() * norm / 2 - 1) < 2**-7


def case_held(rank: Rank) -> None:
    """Another kernel holds all SMs but two of every GPU, as a collective might: the fused forward gets on beside it.

    Ranks that share a GPU each have a holding kernel, which spins in its own rank's slices of time and takes nothing
    from the others' but time, so limits are multiplied by their number, as timeouts are.
    """
    splits = even(rank, 240)
    data = Data.random(sum(splits), seed=11)
    whole = on_one_rank(rank, data)
    for options in ({}, {"fwd_num_comm_sms": 8}):
        config = rank.config(mode="fused", timeout_s=20, **options)
        workspace, part = rank.workspace(config, splits), rank.part(data, splits)
        for _ in range(2):  # nothing is loaded or allocated beside the holding kernel
            expect_bits(rank, part.run(config, workspace), whole, splits)
        workspace.check()
        with held_sms(num_sms() - 2, within_s=10 * rank.num_sharing):
            distributed.barrier()  # on the CPU: from here on every GPU is held
            output = part.run(config, workspace)
            is_over = is_over_within(10 * rank.num_sharing)
            distributed.barrier()  # and is until the last rank is done, or has given up
        assert is_over, f"no progress on 2 SMs with {options}"
        workspace.check()
        expect_bits(rank, output, whole, splits)


def case_late(rank: Rank) -> None:
    """A late rank is waited for, however short the inner timeout is."""
    splits = even(rank, 160)
    data = Data.random(sum(splits), seed=5)
    config = rank.config(timeout_s=0.25)
    workspace, part = rank.workspace(config, splits), rank.part(data, splits)
    whole = on_one_rank(rank, data)
    for late, is_late_for_schedule in ((0, True), (rank.size - 1, False)):
        if rank.rank == late and is_late_for_schedule:
            time.sleep(2 * config.timeout_s * rank.num_sharing)
        schedule = part.schedule(config, workspace)
        if rank.rank == late and not is_late_for_schedule:
            torch.cuda.synchronize()
            time.sleep(2 * config.timeout_s * rank.num_sharing)
        output = part.forward(config, workspace, schedule)
        workspace.check()
        expect_bits(rank, output, whole, splits)


def case_missing(rank: Rank) -> None:
    """A rank that does not call: the others name it and the edge, their output is NaN, and a reset mends it."""
    if rank.size == 1:
        return
    splits = even(rank, 160)
    data = Data.random(sum(splits), seed=6)
    config, short = rank.config(), rank.config(start_timeout_s=1)
    workspace, part = rank.workspace(config, splits), rank.part(data, splits)
    schedule = part.schedule(config, workspace)
    workspace.check()
    missing = rank.size - 1
    if rank.rank != missing:
        with expect_error(rank, mok.MoKTimeoutError, f"rank {missing}", "input_ready", within_s=1):
            output = part.forward(short, workspace, schedule)
            workspace.check()
        assert output.isnan().all()
    workspace.reset()
    expect_bits(rank, part.run(config, workspace), on_one_rank(rank, data), splits)
    workspace.check()


def case_mismatch(rank: Rank) -> None:
    """Different calls, different arguments, wrong arguments on one rank: everybody learns of it."""
    if rank.size == 1:
        return
    splits = even(rank, 160)
    data = Data.random(sum(splits), seed=7)
    config = rank.config()
    workspace, part = rank.workspace(config, splits), rank.part(data, splits)
    schedule = part.schedule(config, workspace)
    workspace.check()
    with expect_error(rank, mok.MoKPeerError, "build_schedule", "forward", within_s=5):
        if rank.rank == 0:
            part.forward(config, workspace, schedule)
        else:
            part.schedule(config, workspace)
        workspace.check()
    workspace.reset()
    with expect_error(rank, mok.MoKPeerError, "num_local_experts", within_s=5):
        other = part.num_local_experts + (rank.rank == 0)
        functional.build_schedule(workspace, config, part.ids, num_local_experts=other)
        workspace.check()
    workspace.reset()
    kind, words = (TypeError, ()) if rank.rank == 0 else (mok.MoKPeerError, ("rank 0", "TypeError"))
    with expect_error(rank, kind, "top_experts", *words, within_s=5):
        functional.build_schedule(
            workspace,
            config,
            part.ids.float() if rank.rank == 0 else part.ids,
            num_local_experts=part.num_local_experts,
        )
        workspace.check()
    workspace.reset()
    expect_bits(rank, part.run(config, workspace), on_one_rank(rank, data), splits)
    workspace.check()


def case_killed(rank: Rank) -> None:
    """A process dies between two calls: the others raise in bounded time and end."""
    if rank.size == 1:
        return
    splits = even(rank, 160)
    data = Data.random(sum(splits), seed=8)
    config = rank.config()
    workspace, part = rank.workspace(config, splits), rank.part(data, splits)
    expect_bits(rank, part.run(config, workspace), on_one_rank(rank, data), splits)
    workspace.check()
    victim = rank.size - 1
    if rank.rank == victim:
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun ends all when one fails
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    with expect_error(rank, mok.MoKTimeoutError, f"rank {victim}", "topk_ready", within_s=1):
        part.run(rank.config(start_timeout_s=1, timeout_s=1), workspace)
        workspace.check()
    with expect_error(rank, mok.MoKTimeoutError, f"rank {victim}", within_s=0):
        part.run(config, workspace)


CASES: dict[str, Callable[[Rank], None]] = {
    name.removeprefix("case_"): value for name, value in list(globals().items()) if name.startswith("case_")
}


def my_group(size: int) -> Any:
    """This process's group of `size` ranks that follow one another; every process makes all of them."""
    world = distributed.get_world_size()
    if size < 1 or world % size:
        raise SystemExit(f"--group-size must divide the world of {world} ranks, got {size}")
    if size == world:
        return distributed.group.WORLD
    groups = [distributed.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    return groups[distributed.get_rank() // size]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated, of " + ", ".join(CASES))
    parser.add_argument("--bodies", default="direct,nvshmem", help="bodies, comma-separated")
    parser.add_argument("--repeats", type=int, default=100, help="runs of the case bits")
    parser.add_argument("--group-size", type=int, help="ranks of an expert-parallel group (the world); a divisor of it")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    distributed.init_process_group("gloo")
    group = my_group(options.group_size or distributed.get_world_size())
    names, bodies = options.cases.split(","), options.bodies.split(",")
    for signals in bodies:
        rank = Rank(signals, group)
        rank.repeats = options.repeats
        for name in names:
            if name == "killed" and signals != bodies[-1]:
                continue
            begin = time.monotonic()
            try:
                CASES[name](rank)
            except BaseException:
                print(f"FAILED {name} ({signals}) on rank {rank.rank} of {rank.size}", file=sys.stderr, flush=True)
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            if distributed.get_rank() == 0:
                print(f"ok {name} ({signals}) on {rank.size} ranks: {time.monotonic() - begin:.2f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
