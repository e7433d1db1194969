"""The references of the stages and of the whole layer, against naive loops, formulas and autograd."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from mok_modular import reference
from mok_modular.stages import combine, dispatch, grouped_gemm, reduce, schedule, swiglu

NUM_EXPERTS, TOPK, HIDDEN, WIDTH, SHARED = 8, 3, 10, 6, 7
NAN = float("nan")


def random_ids(num_tokens: int, seed: int, num_experts: int = NUM_EXPERTS, topk: int = TOPK) -> Tensor:
    """Ids with missing routes and repeated experts."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, num_experts, (num_tokens, topk), generator=generator, dtype=torch.int32)


def layer_arguments(
    dtype: torch.dtype, num_tokens: Sequence[int], seed: int = 0, has_shared: bool = True
) -> tuple[list[Tensor], list[Tensor], list[Tensor], Any]:
    """Random xs, expert ids and router weights by rank, and the layer's weights, all asking for gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    router_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    xs = [normal(n, HIDDEN) for n in num_tokens]
    ids = [random_ids(n, seed + rank) for rank, n in enumerate(num_tokens)]
    router_weights = [normal(n, TOPK, dtype=router_dtype) for n in num_tokens]
    weights = [normal(NUM_EXPERTS, WIDTH, HIDDEN), normal(NUM_EXPERTS, WIDTH, HIDDEN)]
    weights += [normal(NUM_EXPERTS, HIDDEN, WIDTH)]
    if has_shared:
        weights += [normal(SHARED, HIDDEN), normal(SHARED, HIDDEN), normal(HIDDEN, SHARED)]
    return xs, ids, router_weights, weights


def naive_moe(x: Tensor, ids: Tensor, router_weights: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The definition of the layer, token by token, without any rounding points (for float64)."""

    def expert(token: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return down @ (torch.nn.functional.silu(gate @ token) * (up @ token))

    out = []
    for t, token in enumerate(x):
        acc = expert(token, *weights[3:]) if len(weights) > 3 else torch.zeros_like(token)
        for k, e in enumerate(ids[t].tolist()):
            if e >= 0:
                acc = acc + router_weights[t, k] * expert(token, *(w[e] for w in weights[:3]))
        out.append(acc)
    return torch.stack(out) if out else torch.zeros_like(x)


# --- schedule


def naive_schedule(
    top_experts: Sequence[Sequence[int]], num_experts: int, row_block: int
) -> tuple[list[list[tuple[int, int]]], list[list[int]], list[list[int]]]:
    """Every owner's rows as (peer rank, route) pairs, segment starts and numbers of rows, by nested loops."""
    num_ranks = len(top_experts)
    rows: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    starts: list[list[int]] = [[] for _ in range(num_ranks)]
    counts: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert in range(num_experts):
        owner = expert // (num_experts // num_ranks)
        starts[owner].append(len(rows[owner]))
        routes = [[i for i, e in enumerate(ids) if e == expert] for ids in top_experts]
        for turn in range(max(map(len, routes))):
            rows[owner] += [(rank, routes[rank][turn]) for rank in range(num_ranks) if turn < len(routes[rank])]
        counts[owner].append(len(rows[owner]) - starts[owner][-1])
        while len(rows[owner]) % row_block:
            rows[owner].append((-1, -1))
    for owner in range(num_ranks):
        starts[owner].append(len(rows[owner]))
    return rows, starts, counts


def check_schedule(top_experts: Sequence[Tensor], num_experts: int, row_block: int) -> None:
    flat = [ids.flatten().tolist() for ids in top_experts]
    rows, starts, counts = naive_schedule(flat, num_experts, row_block)
    for rank, tables in enumerate(schedule.reference(top_experts, num_experts=num_experts, row_block=row_block)):
        assert all(table.dtype == torch.int32 for table in vars(tables).values())
        assert list(zip(tables.peer_rank.tolist(), tables.peer_token_idx.tolist(), strict=True)) == rows[rank]
        assert tables.segment_start.tolist() == starts[rank]
        assert tables.segment_num_rows.tolist() == counts[rank]
        row_block_expert = [
            e
            for e, (a, b) in enumerate(zip(starts[rank], starts[rank][1:], strict=False))
            for _ in range(a, b, row_block)
        ]
        assert tables.row_block_expert.tolist() == row_block_expert
        for route, expert in enumerate(flat[rank]):
            owner, row = int(tables.route_rank[route]), int(tables.route_row[route])
            if expert < 0:
                assert (owner, row) == (-1, -1)
            else:
                assert owner == expert // (num_experts // len(top_experts))
                assert rows[owner][row] == (rank, route)


@hypothesis.given(
    num_ranks=st.integers(1, 4),
    num_local_experts=st.integers(1, 3),
    topk=st.integers(1, 4),
    row_block=st.sampled_from([1, 2, 4, 128]),
    data=st.data(),
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_schedule_is_the_naive_one(
    num_ranks: int, num_local_experts: int, topk: int, row_block: int, data: st.DataObject
) -> None:
    num_experts = num_ranks * num_local_experts
    top_experts = []
    for _ in range(num_ranks):
        num_tokens = data.draw(st.integers(0, 6))
        ids = data.draw(
            st.lists(st.integers(-1, num_experts - 1), min_size=num_tokens * topk, max_size=num_tokens * topk)
        )
        dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
        top_experts.append(torch.tensor(ids, dtype=dtype).view(num_tokens, topk))
    check_schedule(top_experts, num_experts, row_block)


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([[[5] * 3] * 40, [[5] * 3] * 7], id="all-to-one-expert"),
        pytest.param([[], []], id="no-tokens"),
        pytest.param([[], [[0, 1, 7]]], id="a-rank-without-tokens"),
        pytest.param([[[-1, -1, -1]], [[-1, 3, -1]]], id="missing-routes"),
    ],
)
def test_schedule_of_extremes(ids: list[list[list[int]]]) -> None:
    top_experts = [torch.tensor(rank_ids, dtype=torch.int32).view(-1, 3) for rank_ids in ids]
    check_schedule(top_experts, NUM_EXPERTS, 16)


def test_schedule_names_what_is_wrong() -> None:
    ids = random_ids(4, 0)
    with pytest.raises(ValueError, match=r"num_experts=8 .* 3"):
        schedule.reference([ids] * 3, num_experts=8)
    with pytest.raises(ValueError, match="2 ids out of range"):
        schedule.reference([torch.tensor([[0, 8], [-2, -1]])], num_experts=8)
    with pytest.raises(TypeError, match="int16"):
        schedule.reference([ids.to(torch.int16)], num_experts=8)
    with pytest.raises(ValueError, match="row_block=0"):
        schedule.reference([ids], num_experts=8, row_block=0)
    with pytest.raises(ValueError, match="one K"):
        schedule.reference([ids, ids[:, :2]], num_experts=8)
    with pytest.raises(ValueError, match="empty"):
        schedule.reference([], num_experts=8)


# --- dispatch and combine


def identity_tokens(rank: int, num_tokens: int) -> Tensor:
    """Tokens that say who they are: column c of token t of a rank is rank*1000 + t + c/16."""
    return rank * 1000 + torch.arange(num_tokens)[:, None] + torch.arange(HIDDEN) / 16


@pytest.mark.parametrize("num_tokens", [[5], [3, 0], [4, 1, 0, 9], [0, 0]])
def test_dispatch_and_combine_bring_every_token_back(num_tokens: list[int]) -> None:
    xs = [identity_tokens(rank, n).requires_grad_() for rank, n in enumerate(num_tokens)]
    ids = [random_ids(n, seed=7 + rank) for rank, n in enumerate(num_tokens)]
    tables = schedule.reference(ids, num_experts=NUM_EXPERTS, row_block=4)
    ys = dispatch.reference(xs, tables, topk=TOPK)
    for table, y in zip(tables, ys, strict=True):
        assert not y[table.peer_rank < 0].any()
    combined = combine.reference(ys, tables)
    for x, rank_ids, cells in zip(xs, ids, combined, strict=True):
        expected = x.repeat_interleave(TOPK, 0) * (rank_ids.flatten() >= 0)[:, None]
        assert torch.equal(cells, expected)

    torch.cat(combined).sum().backward()
    for x, rank_ids in zip(xs, ids, strict=True):
        assert x.grad is not None
        assert torch.equal(x.grad, (rank_ids >= 0).sum(1, dtype=torch.float32)[:, None].expand_as(x))


def test_dispatch_and_combine_name_what_is_wrong() -> None:
    xs = [torch.zeros(2, HIDDEN), torch.zeros(3, HIDDEN)]
    tables = schedule.reference([random_ids(len(x), 0) for x in xs], num_experts=NUM_EXPERTS, row_block=4)
    ys = dispatch.reference(xs, tables, topk=TOPK)
    with pytest.raises(ValueError, match="one H"):
        dispatch.reference([xs[0], torch.zeros(3, 4)], tables, topk=TOPK)
    with pytest.raises(ValueError, match="topk=0"):
        dispatch.reference(xs, tables, topk=0)
    with pytest.raises(ValueError, match="direction must be 'pull' or 'push', got 'up'"):
        dispatch.reference(xs, tables, topk=TOPK, direction="up")
    with pytest.raises(ValueError, match="one H"):
        combine.reference([ys[0], ys[1][:, :4]], tables)
    with pytest.raises(ValueError, match="direction must be 'push' or 'pull', got 'up'"):
        combine.reference(ys, tables, direction="up")
    with pytest.raises(ValueError, match=rf"ys\[1\] has {len(ys[1]) - 1} rows, its schedule has {len(ys[1])}"):
        combine.reference([ys[0], ys[1][:-1]], tables)


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        pytest.param(
            "peer_token_idx", lambda t: t.clamp(min=9), "name routes beyond those of the ranks, .6, 9.", id="idx"
        ),
        pytest.param("peer_rank", lambda t: t * 2, "name routes beyond", id="rank"),
        pytest.param("peer_rank", lambda t: t.clamp(min=0), "peer_rank must be -1 in padding", id="padding"),
        pytest.param("peer_rank", lambda t: t[:-1], "peer_rank and peer_token_idx must both have at least", id="short"),
        pytest.param("route_rank", lambda t: t[1:], "route_rank and route_row must be", id="routes"),
        pytest.param("route_row", lambda t: t + 1000, "name rows beyond those of the ranks", id="row"),
        pytest.param("route_row", lambda t: -2 - t, "name rows beyond those of the ranks", id="negative-row"),
    ],
)
def test_dispatch_and_combine_refuse_tables_that_do_not_fit(field: str, change: Any, message: str) -> None:
    ids = [torch.tensor([[0, 5, -1], [6, 2, 2]]), torch.tensor([[1, 7, 3], [4, -1, 4], [5, 5, 5]])]
    good = schedule.reference(ids, num_experts=NUM_EXPERTS, row_block=4)
    xs = [torch.zeros(2, HIDDEN), torch.zeros(3, HIDDEN)]
    ys = dispatch.reference(xs, good, topk=TOPK)
    bad = [good[0], dataclasses.replace(good[1], **{field: change(getattr(good[1], field))})]
    with pytest.raises(ValueError, match=rf"schedules\[1\].*{message}"):
        dispatch.reference(xs, bad, topk=TOPK)
    with pytest.raises(ValueError, match=rf"schedules\[1\].*{message}"):
        combine.reference(ys, bad)
    with pytest.raises(ValueError, match="one entry per rank, 2, got 1"):
        dispatch.reference(xs, good[:1], topk=TOPK)


# --- grouped GEMM


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_grouped_gemm_multiplies_segments_and_skips_padding(dtype: torch.dtype) -> None:
    segment_start = torch.tensor([0, 8, 8, 12], dtype=torch.int32)
    segment_num_rows = torch.tensor([5, 0, 4], dtype=torch.int32)
    rows = torch.randn(14, HIDDEN).to(dtype)  # two rows lie past the last segment
    is_padding = torch.ones(14, dtype=torch.bool)
    is_padding[:5] = is_padding[8:12] = False
    rows[is_padding] = NAN
    rows.requires_grad_()
    weight = torch.randn(3, WIDTH, HIDDEN).to(dtype).requires_grad_()

    out = grouped_gemm.reference(rows, weight, segment_start, segment_num_rows)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    assert out.dtype == dtype
    assert torch.equal(out[:5], (rows[:5].to(wide) @ weight[0].to(wide).T).to(dtype))
    assert torch.equal(out[8:12], (rows[8:12].to(wide) @ weight[2].to(wide).T).to(dtype))
    assert torch.equal(out[is_padding], torch.zeros(5, WIDTH, dtype=dtype))

    out.backward(torch.ones_like(out).masked_fill(is_padding[:, None], NAN))
    assert rows.grad is not None and weight.grad is not None
    assert not rows.grad[is_padding].any()
    assert not weight.grad[1].any()
    torch.testing.assert_close(rows.grad[:5], weight[0].to(wide).sum(0).to(dtype).expand(5, -1))
    torch.testing.assert_close(weight.grad[2], rows[8:12].to(wide).sum(0).to(dtype).expand(WIDTH, -1))


def test_grouped_gemm_accumulates_bfloat16_in_float32() -> None:
    # In a bfloat16 accumulator 256 + 1 is 256 again.
    rows = torch.tensor([[256.0] + [1.0] * 8]).bfloat16()
    starts, num_rows = torch.tensor([0, 1]), torch.tensor([1])
    assert grouped_gemm.reference(rows, torch.ones(1, 1, 9).bfloat16(), starts, num_rows).item() == 264.0


def test_grouped_gemm_takes_a_pair_of_weights() -> None:
    rows, gate, up = torch.randn(8, HIDDEN), torch.randn(2, WIDTH, HIDDEN), torch.randn(2, WIDTH, HIDDEN)
    segments = torch.tensor([0, 4, 8]), torch.tensor([3, 4])
    pair = grouped_gemm.reference(rows, (gate, up), *segments)
    assert torch.equal(pair[0], grouped_gemm.reference(rows, gate, *segments))
    assert torch.equal(pair[1], grouped_gemm.reference(rows, up, *segments))


def test_grouped_gemm_names_what_is_wrong() -> None:
    rows, weight = torch.zeros(8, HIDDEN), torch.zeros(2, WIDTH, HIDDEN)
    starts, num_rows = torch.tensor([0, 4, 8]), torch.tensor([4, 4])
    with pytest.raises(ValueError, match="pair"):
        grouped_gemm.reference(rows, (weight, weight[:1]), starts, num_rows)
    with pytest.raises(TypeError, match="float64"):
        grouped_gemm.reference(rows, weight.double(), starts, num_rows)
    with pytest.raises(ValueError, match="same Kdim"):
        grouped_gemm.reference(rows, weight.mT, starts, num_rows)
    with pytest.raises(ValueError, match="2 experts"):
        grouped_gemm.reference(rows, weight, starts[:2], num_rows)
    for wrong_starts, wrong_rows in [
        ([0, 4, 12], [4, 4]),
        ([0, 4, 8], [5, 3]),
        ([0, 4, 8], [-1, 4]),
        ([1, 4, 8], [3, 4]),
    ]:
        with pytest.raises(ValueError, match="segments must"):
            grouped_gemm.reference(rows, weight, torch.tensor(wrong_starts), torch.tensor(wrong_rows))


# --- swiglu


def test_swiglu_rounds_once() -> None:
    gate, up = torch.randn(2, 500).mul(4).bfloat16()
    silu = gate.float() * torch.sigmoid(gate.float())
    assert torch.equal(swiglu.reference(gate, up), (silu * up.float()).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("limit", [0.0, 1.5, 7.0])
def test_swiglu_limit(limit: float, dtype: torch.dtype) -> None:
    edges = torch.tensor([-limit - 1, -limit, -limit / 2, 0.0, limit / 2, limit, limit + 1, 100.0, -100.0])
    gate, up = (t.flatten().to(dtype) for t in torch.meshgrid(edges, edges, indexing="ij"))
    gate.requires_grad_()
    up.requires_grad_()
    out = swiglu.reference(gate, up, limit)
    clamped = swiglu.reference(gate.detach().clamp(max=limit), up.detach().clamp(-limit, limit))
    assert torch.equal(out, clamped)

    # The gradient passes at the limit and stops beyond it.
    out.sum().backward()
    assert gate.grad is not None and up.grad is not None
    silu = torch.nn.functional.silu
    inside_gate = gate.detach().double().requires_grad_()
    slope = torch.autograd.grad(silu(inside_gate).sum(), inside_gate)[0]
    expected_gate = slope * up.double().clamp(-limit, limit) * (gate <= limit)
    expected_up = silu(gate.double().clamp(max=limit)) * (up.abs() <= limit)
    torch.testing.assert_close(gate.grad, expected_gate.to(dtype))
    torch.testing.assert_close(up.grad, expected_up.to(dtype))


def test_swiglu_names_what_is_wrong() -> None:
    gate = torch.zeros(2, 3)
    for limit in (-1.0, NAN):
        with pytest.raises(ValueError, match="limit="):
            swiglu.reference(gate, gate, limit)
    with pytest.raises(TypeError, match="bfloat16"):
        swiglu.reference(gate, gate.bfloat16())
    with pytest.raises(ValueError, match="same shape"):
        swiglu.reference(gate, gate.T)


# --- reduce


def test_reduce_is_a_chain_of_fused_multiply_adds() -> None:
    # 1 + 2^-30 needs the exact product: a rounded one would be 1, and the difference 0.
    weight = torch.tensor([[1.0, 1.0 + 2**-15]])
    rows = torch.tensor([[-1.0], [1.0 - 2**-15]])
    out = reduce.reference(rows, weight, torch.ones(1, 2, dtype=torch.bool), None)
    assert out.item() == -(2.0**-30)


def test_reduce_adds_in_order_and_rounds_once() -> None:
    num_tokens = 20
    combined = torch.randn(num_tokens * TOPK, HIDDEN).bfloat16()
    weights, shared = torch.randn(num_tokens, TOPK), torch.randn(num_tokens, HIDDEN).bfloat16()
    acc = shared.float()
    for k in range(TOPK):
        acc = (weights[:, k, None].double() * combined[k::TOPK].double() + acc.double()).float()
    out = reduce.reference(combined, weights, torch.ones(num_tokens, TOPK, dtype=torch.bool), shared)
    assert torch.equal(out, acc.bfloat16())


@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_reduce_does_not_read_missing_routes(dtype: torch.dtype, has_shared: bool) -> None:
    mask = torch.tensor([[True, False, True], [False, False, False]])
    combined = torch.ones(6, HIDDEN, dtype=dtype).masked_fill(~mask.view(-1, 1), NAN).requires_grad_()
    weights = torch.tensor([[2.0, NAN, 3.0], [NAN, NAN, NAN]], requires_grad=True)
    shared = torch.full((2, HIDDEN), -0.0, dtype=dtype) if has_shared else None
    out = reduce.reference(combined, weights, mask, shared)
    assert torch.equal(out, torch.tensor([[5.0], [0.0]], dtype=dtype).expand(2, HIDDEN))
    assert torch.signbit(out[1]).all() == has_shared  # a token without routes keeps the very bits of shared

    out.sum().backward()
    assert combined.grad is not None and weights.grad is not None
    assert torch.equal(weights.grad, mask * float(HIDDEN))
    assert torch.equal(combined.grad[:, 0], torch.tensor([2, 0, 3, 0, 0, 0], dtype=dtype))


def test_reduce_names_what_is_wrong() -> None:
    combined, weights, mask = torch.zeros(6, HIDDEN), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(TypeError, match=r"router_weights have dtype torch\.bfloat16"):
        reduce.reference(combined, weights.bfloat16(), mask, None)
    with pytest.raises(TypeError, match=r"route_mask has dtype torch\.int64"):
        reduce.reference(combined, weights, mask.long(), None)
    with pytest.raises(TypeError, match=r"shared has dtype torch\.bfloat16"):
        reduce.reference(combined, weights, mask, torch.zeros(2, HIDDEN).bfloat16())
    with pytest.raises(ValueError, match=r"T\*K = 6"):
        reduce.reference(combined[:5], weights, mask, None)
    with pytest.raises(ValueError, match=r"\[2, 10\]"):
        reduce.reference(combined, weights, mask, torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"\[T, K\]"):
        reduce.reference(combined, weights, mask.T, None)


# --- the whole layer


@pytest.mark.parametrize("has_shared", [False, True])
def test_moe_is_its_definition(has_shared: bool) -> None:
    (x,), (ids,), (router_weights,), weights = layer_arguments(torch.float64, [9], has_shared=has_shared)
    ids[3], ids[4], ids[5] = -1, 2, torch.tensor([6, -1, 6])
    inputs = [x, router_weights, *weights]
    out, expected = (
        reference.moe(x, ids, router_weights, *weights),
        naive_moe(x, ids, router_weights, weights),
    )
    torch.testing.assert_close(out, expected)
    d_out = torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, d_out)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, inputs, d_out))


@pytest.mark.parametrize("limit", [None, 0.4])
def test_moe_gradcheck(limit: float | None) -> None:
    (x,), (ids,), (router_weights,), weights = layer_arguments(torch.float64, [3], seed=1)
    ids[0], ids[1, 0] = 1, -1
    inputs = (x, router_weights, *weights)
    assert torch.autograd.gradcheck(
        lambda x, w, *rest: reference.moe(x, ids, w, *rest, swiglu_limit=limit), inputs, fast_mode=True
    )


@pytest.mark.parametrize("row_block", [1, 16, 256])
@pytest.mark.parametrize("num_tokens", [[11], [7, 0], [5, 1, 0, 12], [0, 0]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_moe_does_not_depend_on_the_number_of_ranks(dtype: torch.dtype, num_tokens: list[int], row_block: int) -> None:
    xs, ids, router_weights, weights = layer_arguments(dtype, num_tokens, has_shared=len(num_tokens) > 1)
    outs = reference.moe_ranks(xs, ids, router_weights, *weights, row_block=row_block)
    assert [out.shape for out in outs] == [x.shape for x in xs]
    expected = reference.moe(torch.cat(xs), torch.cat(ids), torch.cat(router_weights), *weights)
    assert expected.dtype == dtype
    inputs = [*xs, *router_weights, *weights]
    d_out = torch.randn_like(expected)
    torch.testing.assert_close(torch.cat(outs), expected)
    gradients = torch.autograd.grad(torch.cat(outs), inputs, d_out)
    for gradient, other in zip(gradients, torch.autograd.grad(expected, inputs, d_out), strict=True):
        # Autograd adds a tensor's bfloat16 gradients up in bfloat16, in an order of its own.
        tolerance = 2**-6 if gradient.dtype == torch.bfloat16 else 1e-5
        scale = float(other.abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(gradient, other, rtol=0, atol=tolerance * scale)


def test_moe_rounds_bfloat16_where_the_library_does() -> None:
    (x,), _, _, weights = layer_arguments(torch.bfloat16, [6])
    ids, router_weights = torch.full((6, 1), 5), torch.full((6, 1), 0.75)

    def linear(rows: Tensor, weight: Tensor) -> Tensor:
        return (rows.float() @ weight.float().T).bfloat16()

    def expert(gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        g, u = linear(x, gate).float(), linear(x, up).float()
        return linear((g * torch.sigmoid(g) * u).bfloat16(), down)

    y, shared = expert(*(w[5] for w in weights[:3])), expert(*weights[3:])
    expected = (0.75 * y.double() + shared.double()).float().bfloat16()
    torch.testing.assert_close(reference.moe(x, ids, router_weights, *weights), expected, rtol=0, atol=0)


@pytest.mark.parametrize("limit", [0.0, 0.25])
def test_moe_limit_holds_for_the_shared_expert_too(limit: float) -> None:
    (x,), (ids,), (router_weights,), weights = layer_arguments(torch.float64, [5])
    out = reference.moe(x, ids, router_weights, *weights, swiglu_limit=limit)
    if limit == 0:
        assert not out.any()
    ids.fill_(-1)
    shared_only = reference.moe(x, ids, router_weights, *weights, swiglu_limit=limit)
    h = swiglu.reference(x @ weights[3].T, x @ weights[4].T, limit)
    torch.testing.assert_close(shared_only, h @ weights[5].T)


def test_moe_ignores_the_weights_of_missing_routes() -> None:
    (x,), (ids,), (router_weights,), weights = layer_arguments(torch.bfloat16, [8])
    ids[2], ids[5, 1] = -1, -1
    poisoned = router_weights.detach().masked_fill(ids < 0, NAN).requires_grad_()
    out = reference.moe(x, ids, poisoned, *weights)
    assert torch.equal(out, reference.moe(x, ids, router_weights, *weights))
    gradients = torch.autograd.grad(out.float().sum(), [poisoned, x, *weights])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][ids < 0].any()


def test_moe_gives_unused_experts_zero_gradients() -> None:
    (x,), (ids,), (router_weights,), weights = layer_arguments(torch.bfloat16, [8])
    ids[ids == 3] = 4
    out = reference.moe(x, ids, router_weights, *weights)
    for gradient in torch.autograd.grad(out.float().sum(), weights[:3]):
        assert not gradient[3].any()
        assert gradient[4].any()


def test_moe_takes_views_and_both_id_types() -> None:
    (x,), (ids,), (router_weights,), weights = layer_arguments(torch.bfloat16, [8])
    expected = reference.moe(x, ids, router_weights, *weights)
    assert torch.equal(reference.moe(x, ids.long(), router_weights, *weights), expected)
    views = [t.mT.contiguous().mT for t in (x, ids, router_weights, *weights)]
    assert torch.equal(reference.moe(*views), expected)


def test_moe_names_what_is_wrong() -> None:
    (x,), (ids,), (router_weights,), weights = layer_arguments(torch.bfloat16, [4])
    with pytest.raises(TypeError, match=r"x of rank 0 has dtype torch\.float16"):
        reference.moe(x.half(), ids, router_weights, *weights)
    with pytest.raises(TypeError, match=r"w_routed_up has dtype torch\.float32"):
        reference.moe(x, ids, router_weights, weights[0], weights[1].float(), weights[2])
    with pytest.raises(TypeError, match="router_weights have dtype"):
        reference.moe(x, ids, router_weights.double(), *weights)
    with pytest.raises(TypeError, match="int16"):
        reference.moe(x, ids.to(torch.int16), router_weights, *weights)
    with pytest.raises(ValueError, match=r"w_routed_down must be \[8, 10, 6\], not \[8, 6, 10\]"):
        reference.moe(x, ids, router_weights, weights[0], weights[1], weights[0])
    with pytest.raises(ValueError, match=r"w_shared_gate must be"):
        reference.moe(x, ids, router_weights, *weights[:3], *(w.mT for w in weights[3:]))
    with pytest.raises(ValueError, match="all three or none, not 1"):
        reference.moe(x, ids, router_weights, *weights[:4])
    with pytest.raises(ValueError, match="same T"):
        reference.moe(x[:3], ids, router_weights, *weights)
    with pytest.raises(ValueError, match="K >= 1"):
        reference.moe(x, ids[:, :0], router_weights[:, :0], *weights)
    with pytest.raises(ValueError, match="three dimensions"):
        reference.moe(x, ids, router_weights, weights[0][0], *weights[1:3])
    with pytest.raises(ValueError, match="12 ids out of range"):
        reference.moe(x, torch.full_like(ids, NUM_EXPERTS), router_weights, *weights)
    with pytest.raises(ValueError, match="one entry per rank, not 2, 1 and 1"):
        reference.moe_ranks([x, x], [ids], [router_weights], *weights)
    with pytest.raises(ValueError, match="one dtype and H"):
        reference.moe_ranks([x, x.float()], [ids] * 2, [router_weights] * 2, *weights)
    with pytest.raises(ValueError, match=r"num_experts=8 .* 3"):
        reference.moe_ranks([x] * 3, [ids] * 3, [router_weights] * 3, *weights)
