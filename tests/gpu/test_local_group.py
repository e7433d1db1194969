"""Ranks of one GPU: the split forward and its partial plans against float64, bit for bit among themselves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mok_modular import LocalGroup, MoKConfig, MoKTimeoutError, functional
from mok_modular.reference import moe

PLANS = ("split", "dispatch|gate_up+swiglu|down|combine", "dispatch|gate_up+swiglu|down+combine")
SMALL_RING = {"minibatch_size": 256, "macrobatch_size": 512}
SIZES = ((16, 4, 256, 384, 128, 800), (8, 2, 512, 192, 0, 400), (16, 6, 192, 640, 64, 1000))  # E, K, H, I, S, tokens


class Layer:
    """One layer's inputs and weights on the CPU, cut by rank when it runs."""

    def __init__(self, num_experts: int, topk: int, hidden: int, inter: int, shared: int, num_tokens: int) -> None:
        generator = torch.Generator().manual_seed(3)

        def random(*dims: int) -> Tensor:
            return (torch.randn(*dims, generator=generator) / dims[-1] ** 0.5).bfloat16()

        self.num_experts, self.topk, self.hidden = num_experts, topk, hidden
        self.x = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
        self.ids = torch.randint(-1, num_experts, (num_tokens, topk), generator=generator)
        self.router_weights = torch.rand(num_tokens, topk, generator=generator)
        self.routed = (
            random(num_experts, inter, hidden),
            random(num_experts, inter, hidden),
            random(num_experts, hidden, inter),
        )
        self.shared: tuple[Tensor | None, ...] = (None,) * 3
        if shared:
            self.shared = (random(shared, hidden), random(shared, hidden), random(hidden, shared))

    def run(self, num_ranks: int, config: MoKConfig, *, repeats: int = 3, save_context: bool = True) -> list[Tensor]:
        """All tokens' outputs, once a repeat."""
        num_tokens, local = len(self.x) // num_ranks, self.num_experts // num_ranks

        def step(member: Any) -> list[Tensor]:
            part = slice(member.rank() * num_tokens, (member.rank() + 1) * num_tokens)
            x, ids, router_weights = (t[part].cuda() for t in (self.x, self.ids, self.router_weights))
            routed = [w[member.rank() * local : (member.rank() + 1) * local].cuda() for w in self.routed]
            shared = [None if w is None else w.cuda() for w in self.shared]
            workspace = functional.get_workspace(
                config, member, num_local_tokens=num_tokens, hidden_size=self.hidden, topk=self.topk
            )
            outputs = []
            for _ in range(repeats):
                schedule = functional.build_schedule(workspace, config, ids, num_local_experts=local)
                output, _ = functional.forward(
                    config, workspace, schedule, x, router_weights, *shared, *routed, save_context=save_context
                )
                outputs.append(output)
            workspace.check()
            return outputs

        by_rank = LocalGroup(num_ranks, device="cuda:0").run(step)
        return [torch.cat([outputs[i] for outputs in by_rank]).cpu() for i in range(repeats)]


def bits(output: Tensor) -> Tensor:
    return output.view(torch.int16)


@pytest.fixture(scope="module", params=SIZES, ids=str)
def layer_and_base(request: pytest.FixtureRequest) -> Iterator[tuple[Layer, Tensor]]:
    layer = Layer(*request.param)
    yield layer, layer.run(1, MoKConfig(mode="split", **SMALL_RING), repeats=1)[0]


def test_error_is_that_of_bf16(layer_and_base: tuple[Layer, Tensor]) -> None:
    layer, base = layer_and_base
    exact = moe(
        layer.x.double(),
        layer.ids,
        layer.router_weights,
        *(w.double() for w in layer.routed),
        *(None if w is None else w.double() for w in layer.shared),
    )
    rounded = moe(layer.x, layer.ids, layer.router_weights, *layer.routed, *layer.shared)
    assert (base.double() - exact).norm() <= 1.5 * (rounded.double() - exact).norm()


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "options",
    [{}, {"macrobatch_size": 131072}, {"signal_grain": "minibatch"}, {"ring": "serial"}, {"fwd_num_comm_sms": 16}],
    ids=str,
)
def test_same_bits(layer_and_base: tuple[Layer, Tensor], num_ranks: int, plan: str, options: dict[str, Any]) -> None:
    layer, base = layer_and_base
    config = MoKConfig(mode=plan, **{**SMALL_RING, **options})
    for output in layer.run(num_ranks, config, save_context="ring" not in options):
        assert torch.equal(bits(output), bits(base))


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize(
    "options",
    [{"dispatch": "push"}, {"dispatch": "pull_once"}, {"combine": "pull"}, {"dispatch": "push", "combine": "pull"}],
)
def test_ablations(layer_and_base: tuple[Layer, Tensor], num_ranks: int, options: dict[str, str]) -> None:
    layer, base = layer_and_base
    for output in layer.run(num_ranks, MoKConfig(mode="split", minibatch_size=256, **options)):
        assert torch.equal(bits(output), bits(base))


def test_ids_out_of_range_are_told_with_their_count() -> None:
    layer = Layer(*SIZES[0])
    layer.ids[5, 1], layer.ids[7, 0] = 16, -2
    with pytest.raises(ValueError, match="held 2 ids out of range"):
        layer.run(1, MoKConfig(mode="split", **SMALL_RING))


def test_a_wait_that_expires() -> None:
    layer = Layer(*SIZES[0])
    config = MoKConfig(mode="split", timeout_s=1, start_timeout_s=1, **SMALL_RING)
    member = LocalGroup(1, device="cuda:0").members[0]
    workspace = functional.create_workspace(
        config, member, num_local_tokens=len(layer.x), hidden_size=layer.hidden, topk=layer.topk
    )
    routed, shared = [w.cuda() for w in layer.routed], [None if w is None else w.cuda() for w in layer.shared]

    def forward() -> Tensor:
        schedule = functional.build_schedule(workspace, config, layer.ids.cuda(), num_local_experts=layer.num_experts)
        output, _ = functional.forward(
            config, workspace, schedule, layer.x.cuda(), layer.router_weights.cuda(), *shared, *routed
        )
        return output

    good = forward()
    workspace.check()
    shared_workspace: Any = workspace.shared
    schedule = functional.build_schedule(workspace, config, layer.ids.cuda(), num_local_experts=layer.num_experts)
    shared_workspace.region(0, "words", torch.int64)[4:6] = 0  # done[2][R] of csrc/layout.h: the last call's is lost
    begin = time.monotonic()
    output, _ = functional.forward(
        config, workspace, schedule, layer.x.cuda(), layer.router_weights.cuda(), *shared, *routed
    )
    with pytest.raises(MoKTimeoutError, match="done") as caught:
        workspace.check()
    assert time.monotonic() - begin < 5
    assert caught.value.waits[0]["stage"] == "publish"
    assert output.isnan().all()
    with pytest.raises(MoKTimeoutError):
        forward()
    workspace.reset()
    assert torch.equal(bits(forward().cpu()), bits(good.cpu()))
    workspace.check()
