"""The persistent kernels: every plan, ablation and number of ranks bit for bit, few SMs, expired waits, CUDA graphs."""

from __future__ import annotations

import time
from typing import Any

import helpers
import pytest
import torch
from held_sms import held_sms, is_over_within, num_sms
from helpers import FULL_RING, SMALL_RING, make_workload, same_bits
from torch import Tensor

from mok_modular import LocalGroup, MoKConfig, MoKTimeoutError, functional
from mok_modular.protocol.plan import all_plans
from mok_modular.testing import Workload

DEVICE = "cuda:0"
SPLIT = MoKConfig(mode="split", **SMALL_RING)
FUSED = MoKConfig(**SMALL_RING)


def run(workload: Workload, config: MoKConfig, *, repeats: int = 2, save_context: bool = True) -> list[Tensor]:
    """Outputs of all ranks' tokens, once a repeat."""
    moved = workload.to(DEVICE)

    def step(member: Any) -> list[Tensor]:
        workspace = helpers.workspace_for(moved, member, config)
        outputs = []
        for _ in range(repeats):
            schedule = helpers.build(moved, workspace, config)
            outputs.append(helpers.forward(moved, workspace, config, schedule, save_context=save_context)[0])
        workspace.check()
        return outputs

    by_rank = LocalGroup(workload.num_ranks, device=DEVICE).run(step)
    return [torch.cat([outputs[i] for outputs in by_rank]).cpu() for i in range(repeats)]


def assert_same(workload: Workload, config: MoKConfig, base: Tensor, **options: Any) -> None:
    for output in run(workload, config, **options):
        assert same_bits(output, base), f"{config}: {int((output != base).any(dim=1).sum())} tokens differ"


@pytest.fixture(scope="module")
def workload_and_base() -> tuple[Workload, Tensor]:
    """Several row blocks an expert, shared expert, missing routes; eight ranks' worth of tokens."""
    workload = make_workload([800], H=256, I=384, S=128, E=16, K=4)
    return workload, run(workload, SPLIT, repeats=1)[0]


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("plan", [str(plan) for plan in all_plans()])
def test_every_plan(workload_and_base: tuple[Workload, Tensor], plan: str, num_ranks: int) -> None:
    workload, base = workload_and_base
    assert_same(helpers.regroup(workload, num_ranks), MoKConfig(mode=plan, **SMALL_RING), base)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "options",
    [
        {},
        FULL_RING,
        {"minibatch_size": 256, "macrobatch_size": 256},  # one window a generation
        {"ring": "serial"},
        {"signal_grain": "minibatch"},
        {"fwd_num_comm_sms": 16},
        {"fwd_num_comm_sms": 1000},  # half of the CTAs, as many as there may be
        {"num_reserved_sms": 130},
        {**FULL_RING, "dispatch": "push"},
        {**FULL_RING, "dispatch": "pull_once"},
        {**FULL_RING, "dispatch": "pull_once", "fwd_num_comm_sms": 4},
        {**FULL_RING, "combine": "pull"},
        {**FULL_RING, "dispatch": "push", "combine": "pull", "fwd_num_comm_sms": 4},
    ],
    ids=str,
)
def test_ablations(workload_and_base: tuple[Workload, Tensor], options: dict[str, Any], num_ranks: int) -> None:
    workload, base = workload_and_base
    config = MoKConfig(**{**SMALL_RING, **options})
    assert_same(helpers.regroup(workload, num_ranks), config, base, save_context="ring" not in options)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize(
    "options",
    [
        {},
        FULL_RING,
        {"ring": "serial"},
        {"fwd_num_comm_sms": 16},
        {"num_reserved_sms": 131},
        {**FULL_RING, "dispatch": "push"},
        {**FULL_RING, "dispatch": "pull_once"},
        {**FULL_RING, "combine": "pull"},
    ],
    ids=str,
)
def test_without_a_shared_expert(options: dict[str, Any], num_ranks: int) -> None:
    """The consumers copy the input and the first rows, since there is nothing to multiply before."""
    workload = make_workload([801], H=256, I=384, S=0, E=16, K=4)
    base = run(workload, SPLIT, repeats=1)[0]
    config = MoKConfig(**{**SMALL_RING, **options})
    assert_same(helpers.regroup(workload, num_ranks), config, base, repeats=3, save_context=False)


@pytest.mark.parametrize("plan", ["dispatch+gate_up|swiglu+down+combine", "dispatch|gate_up|swiglu|down+combine"])
@pytest.mark.parametrize("options", [{"dispatch": "push"}, {"dispatch": "pull_once"}, {"combine": "pull"}], ids=str)
def test_ablations_of_partial_plans(
    workload_and_base: tuple[Workload, Tensor], plan: str, options: dict[str, str]
) -> None:
    workload, base = workload_and_base
    assert_same(helpers.regroup(workload, 4), MoKConfig(mode=plan, **{**FULL_RING, **options}), base)


@pytest.mark.parametrize("num_tokens", [[1], [0, 40], [0, 0, 0, 0], [5, 1000], [3, 14, 159, 26]], ids=str)
def test_counts(num_tokens: list[int]) -> None:
    workload = make_workload(num_tokens)
    outputs = run(workload, FUSED)
    assert outputs[0].shape == (sum(num_tokens), workload.shape.hidden_size)
    if sum(num_tokens):
        helpers.assert_right(workload, outputs[0])
        assert_same(workload, FUSED, run(workload, SPLIT, repeats=1)[0])


@pytest.mark.parametrize("choices", [(3, 3), (0, 4), (6, 7), (-1, -1)], ids=str)
def test_hot_and_idle_experts(choices: tuple[int, ...]) -> None:
    workload = make_workload(
        [150, 301], routing=lambda rank, count, g: torch.tensor(choices).expand(count, 2).contiguous()
    )
    assert_same(workload, FUSED, run(workload, SPLIT, repeats=1)[0])


@pytest.mark.parametrize(
    "sizes", [{"S": 0}, {"E": 64, "K": 6}, {"E": 2, "K": 1}, {"H": 2880, "I": 640, "S": 0}, {"I": 64}], ids=str
)
def test_sizes(sizes: dict[str, int]) -> None:
    workload = make_workload([90, 33], **sizes)
    base = run(workload, SPLIT, repeats=1)[0]
    helpers.assert_right(workload, base)
    assert_same(workload, FUSED, base)


def test_experts_in_groups_of_rows() -> None:
    """An expert whose rows are more than the L2 keeps is done group by group."""
    workload = make_workload([2 * 4000], H=7168, I=128, S=0, E=2, K=1)
    config = MoKConfig(minibatch_size=131072)
    assert_same(workload, config, run(workload, MoKConfig(mode="split"), repeats=1)[0], save_context=False)


# ---- calls ----


class Single:
    """One rank with a workspace, and calls on it."""

    def __init__(self, workload: Workload, config: MoKConfig = FUSED) -> None:
        self.workload, self.config = workload.to(DEVICE), config
        self.member = LocalGroup(1, device=DEVICE).members[0]
        self.workspace = helpers.workspace_for(self.workload, self.member, config)

    def call(self, **options: Any) -> Tensor:
        return helpers.call(self.workload, self.workspace, self.config, **options)


def test_a_wait_that_expires() -> None:
    """A `done` was lost: the next call ends within its limit with NaN, and after a reset the next is right."""
    single = Single(make_workload([300]), MoKConfig(timeout_s=1, start_timeout_s=1, **SMALL_RING))
    good = single.call()
    single.workspace.check()
    schedule = helpers.build(single.workload, single.workspace, single.config)
    shared: Any = single.workspace.shared
    shared.region(0, "words", torch.int64)[4:6] = 0  # done[2][R] of csrc/layout.h: the last call's is lost
    begin = time.monotonic()
    output, _ = helpers.forward(single.workload, single.workspace, single.config, schedule)
    with pytest.raises(MoKTimeoutError, match="done"):
        single.workspace.check()
    assert time.monotonic() - begin < 5
    assert output.isnan().all()
    with pytest.raises(MoKTimeoutError):
        single.call()
    single.workspace.reset()
    assert same_bits(single.call(), good)
    single.workspace.check()


@pytest.mark.parametrize("save_context", [False, True])
def test_capture_and_replay(save_context: bool) -> None:
    """Schedule and forward in one graph, which runs what a call runs, with other values too."""
    single = Single(make_workload([300]))
    first = single.call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        single.call(save_context=save_context)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = single.call(save_context=save_context)
    x = single.workload.x[0]
    kept = x.clone()
    for step in range(6):
        output.fill_(float("nan"))
        if step == 3:
            x.copy_(kept.flip(0))
            other = single.call()
        graph.replay()
        assert same_bits(output, first if step < 3 else other)
    single.workspace.check()


def test_no_host_synchronisation_and_three_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from mok_modular.targets.cuda import launch as cuda_launch

    single = Single(make_workload([300]))
    first = single.call()
    single.call()
    enqueued: list[Any] = []
    enqueue = cuda_launch.PackedLaunch.enqueue
    monkeypatch.setattr(
        cuda_launch.PackedLaunch, "enqueue", lambda self, stream: (enqueued.append(self), enqueue(self, stream))[1]
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = [single.call(save_context=is_kept) for is_kept in (True, False, False)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    single.workspace.check()
    assert all(same_bits(first, output) for output in outputs)
    assert len(enqueued) == 3 * 3  # schedule, the fused kernel, reduce


def test_what_is_remembered_is_checked_again_where_it_changes() -> None:
    single = Single(make_workload([64]))
    workload, workspace = single.workload, single.workspace
    schedule = helpers.build(workload, workspace, FUSED)
    weights = helpers.weights_of(workload, single.member)

    def forward(x: Tensor, router_weights: Tensor, schedule: Any = schedule, limit: Any = None) -> Tensor:
        return functional.forward(FUSED, workspace, schedule, x, router_weights, *weights, limit)[0]

    x, router_weights = workload.x[0], workload.router_weights[0]
    first = [forward(x, router_weights, limit=1.0) for _ in range(2)]
    assert same_bits(*first)
    with pytest.raises(TypeError, match="swiglu_limit must be a float"):
        forward(x, router_weights, limit=True)
    with pytest.raises(ValueError, match="x must be contiguous"):
        forward(x.t(), router_weights)
    with pytest.raises(TypeError, match=r"x must be torch\.bfloat16"):
        forward(x.view(torch.float16), router_weights)
    with pytest.raises(TypeError, match="schedule must be a MoKSchedule"):
        forward(x, router_weights, schedule=x)
    with pytest.raises(ValueError, match="x has 32 tokens"):
        forward(x[:32], router_weights[:32])
    workspace.grow(500)  # regions move: packed launches are void
    assert same_bits(forward(x, router_weights, helpers.build(workload, workspace, FUSED), 1.0), first[0])
    workspace.check()


def test_many_calls() -> None:
    workload = make_workload([256, 100, 0, 130]).to(DEVICE)

    def step(member: Any) -> int:
        workspace = helpers.workspace_for(workload, member, FUSED)
        first = helpers.call(workload, workspace, FUSED)
        differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for _ in range(300):
            output = helpers.call(workload, workspace, FUSED, save_context=False)
            differing += (output.view(torch.int16) != first.view(torch.int16)).any()
        workspace.check()
        return int(differing)

    assert LocalGroup(4, device=DEVICE).run(step) == [0] * 4


# ---- other kernels hold SMs ----


@pytest.mark.parametrize("num_left", [32, 3, 2])
@pytest.mark.parametrize("options", [{}, {"fwd_num_comm_sms": 8}, {"num_used_sms": 16}], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_progress_beside_a_kernel_that_holds_sms(num_ranks: int, options: dict[str, int], num_left: int) -> None:
    """Two SMs are enough, whatever the grid: CTAs that are not resident are not waited for."""
    workload = make_workload([200] * num_ranks)
    base = run(workload, SPLIT, repeats=1)[0]
    moved = workload.to(DEVICE)
    options = dict(options)
    if "num_used_sms" in options:
        options["num_reserved_sms"] = num_sms() - options.pop("num_used_sms")
    config = MoKConfig(timeout_s=20, **{**SMALL_RING, **options})
    group = LocalGroup(num_ranks, device=DEVICE)
    workspaces: list[Any] = [None] * num_ranks

    def warm(member: Any) -> None:
        workspaces[member.rank()] = helpers.workspace_for(moved, member, config)
        for _ in range(2):
            helpers.call(moved, workspaces[member.rank()], config)

    def enqueue(member: Any) -> Tensor:
        return helpers.call(moved, workspaces[member.rank()], config)

    group.run(warm)
    with held_sms(num_sms() - num_left):
        outputs = group.run(enqueue)
        is_over = is_over_within(10)
    assert is_over, f"no progress on {num_left} SMs"
    workspaces[0].check()
    assert same_bits(torch.cat(outputs).cpu(), base)
