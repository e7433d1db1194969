"""One layer run by any choice of options (mok_modular.testing.options), and held against the bits of a plain run.

    runs = Differential("cpu")
    print(runs.difference({**plain("host"), "mode": "split", "dispatch": "push", "windows": "all"}))    # "": none

What may change the bits picks the base: precision, limit, shared expert, routing, and for the gradients of weights,
which are sums over the rows of a rank, the number of ranks and of each one's tokens. Everything else must not change a
bit. A base is itself held against float64.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from mok_modular import functional, stages
from mok_modular.config import MoEShape, MoKConfig
from mok_modular.group import LocalGroup
from mok_modular.layer import MoE
from mok_modular.precision import pack_backward, pack_forward
from mok_modular.reference import LayerGradients
from mok_modular.swap import STAGES_OF
from mok_modular.testing.options import ALL, Choice, Target, plain
from mok_modular.testing.runs import check_tensors
from mok_modular.testing.workload import Weights, Workload

SHAPE = MoEShape(
    "covering", hidden_size=128, intermediate_size=256, num_experts=24, topk=3, shared_intermediate_size=128
)
NUM_TOKENS = 200
"""Of all ranks together: several windows of 128 rows on each of them."""
TIMEOUTS = {"timeout_s": 4.0, "start_timeout_s": 20.0}
MORE_ROOM = 13
"""Tokens of a workspace that nobody uses, with room="more"."""
NUM_CALLS = 2
"""Calls of a run: their words and counters stand in two banks, which they use in turn."""

Tensors = dict[str, Tensor]
"""Output, gradients (as Workload.reference_gradients names them) and context (context_x, ...) of a rank."""

_CONTEXT = ("context_", "num_rows")
WEIGHTS = ("shared_gate", "routed_gate", "shared_up", "routed_up", "shared_down", "routed_down")
"""In the order of main_grads."""


class DifferenceError(AssertionError):
    """A base is not right."""


class Differential:
    """Runs of choices on one device. Groups, workspaces and bases are kept from run to run."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.target: Target = "host" if device == "cpu" else "sm_90a"
        self.groups: dict[Any, LocalGroup] = {}
        self.bases: dict[Any, list[Tensors]] = {}
        self.whole: dict[Any, Workload] = {}

    def difference(self, choice: Choice) -> str:
        """What differs from the base, or the error of the run; "" where all bits are the same."""
        try:
            wanted = self.expected(choice)
            for call, given in enumerate(self.run(choice)):
                differing = _differing(given, wanted, choice)
                if differing:
                    return f"call {call + 1} of {NUM_CALLS}: other bits in {', '.join(differing)}"
        except Exception as error:
            self.groups.clear()  # nothing that has seen a failure is used again
            return f"{type(error).__name__}: {error}"
        return ""

    def run(self, choice: Choice) -> list[list[Tensors]]:
        """What every rank has after each of NUM_CALLS calls. Raises what the library raises."""
        workload = self.workload(choice)
        config = make_config(choice, workload)
        group = self._group(choice)
        with torch.set_grad_enabled(choice["api"] == "layer" and choice["passes"] != "forward"):
            by_rank = group.run(lambda member: run_rank(member, workload, config, choice))
        return [[calls[i] for calls in by_rank] for i in range(NUM_CALLS)]

    def workload(self, choice: Choice) -> Workload:
        """The inputs of a choice: the same tokens on any number of ranks."""
        key = choice["routing"], choice["shared"]
        if key not in self.whole:
            self.whole[key] = _whole_workload(*key).to(self.device)
        whole = dataclasses.replace(self.whole[key], swiglu_limit=choice["swiglu_limit"], precision=choice["precision"])
        return spread(whole, num_tokens_of(choice["tokens"], choice["num_ranks"]))

    def expected(self, choice: Choice) -> list[Tensors]:
        """What every rank must have: of the base, with what becomes of the weights' gradients."""
        base = self._base(choice)
        main_grads = choice["main_grads"]
        if choice["passes"] == "forward":
            return [{name: t for name, t in rank.items() if not name.startswith("d_")} for rank in base]
        wanted = []
        for rank, tensors in enumerate(base):
            parts = dict(tensors)
            for i, name in enumerate(WEIGHTS):
                if (sums := parts.get(f"d_{name}")) is None:
                    continue
                if main_grads is not None:
                    sums = sums + _start_of(i, rank, sums.shape, main_grads, self.device).float()
                parts[f"d_{name}"] = sums if main_grads == "fp32" else sums.bfloat16()
            wanted.append(parts)
        return wanted

    def _base(self, choice: Choice) -> list[Tensors]:
        """By rank: output, gradients (those of the weights as float32 sums) and context of a plain split run."""
        names = ("precision", "swiglu_limit", "shared", "routing", "num_ranks", "tokens")
        key = tuple(choice[name] for name in names)
        if key not in self.bases:
            base = plain(self.target) | {name: choice[name] for name in names}
            base |= {"mode": "split", "windows": ALL}
            if self.target == "host":
                base["main_grads"] = "sums"
            tensors = self.run(base)[0]
            self._check_base(base, tensors)
            self.bases[key] = tensors
        return self.bases[key]

    def _check_base(self, base: Choice, tensors: list[Tensors]) -> None:
        """Raises DifferenceError unless a base is right by float64 and, token by token, as on one rank."""
        workload = self.workload(base)
        by_name = {
            name: [rank[name].bfloat16() if name.removeprefix("d_") in WEIGHTS else rank[name] for rank in tensors]
            for name in tensors[0]
            if not name.startswith(_CONTEXT)
        }
        checks = check_tensors(workload, by_name)
        wrong = {name: check for name, check in checks.items() if not check.is_ok}
        if wrong:
            raise DifferenceError(f"the base is too far from float64: {wrong}")
        if base["num_ranks"] == 1:
            return
        (alone,) = self._base({**base, "num_ranks": 1, "tokens": "nobody" if base["tokens"] == "nobody" else "even"})
        for name in by_name:
            if name.removeprefix("d_") not in WEIGHTS and not same_bits(torch.cat(by_name[name]), alone[name]):
                raise DifferenceError(f"the base's {name} on {base['num_ranks']} ranks has other bits than on one")

    def _group(self, choice: Choice) -> LocalGroup:
        names = ("num_ranks", "executor", "order", "num_workers")
        key = tuple(choice[name] for name in names)
        if key not in self.groups:
            size, executor, order, num_workers = key
            self.groups[key] = LocalGroup(
                size, device=self.device, executor=executor, order=order, num_workers=num_workers, seed=len(self.groups)
            )
        return self.groups[key]


# ---- inputs ----


def num_tokens_of(tokens: str, num_ranks: int, total: int = NUM_TOKENS) -> list[int]:
    """Tokens by rank, `total` or none in all."""
    shares = {
        "even": [1] * num_ranks,
        "uneven": ([2, 7] if num_ranks == 2 else [6, 0, 8, 1, 3, 0, 5, 2])[:num_ranks],
        "one": [0] * (num_ranks - 1) + [1],
        "nobody": [0] * num_ranks,
    }[tokens]
    if not any(shares):
        return shares
    counts = [total * share // sum(shares) for share in shares]
    counts[shares.index(max(shares))] += total - sum(counts)
    return counts


def spread(workload: Workload, num_tokens: Sequence[int]) -> Workload:
    """The first tokens of a workload of one rank on len(num_tokens) ranks, in the same order."""

    def split(parts: Sequence[Tensor]) -> list[Tensor]:
        return [part.contiguous() for part in parts[0][: sum(num_tokens)].split(list(num_tokens))]

    return dataclasses.replace(
        workload,
        x=split(workload.x),
        expert_ids=split(workload.expert_ids),
        router_weights=split(workload.router_weights),
        d_output=split(workload.d_outputs()),
    )


def _whole_workload(routing: str, has_shared: bool) -> Workload:
    """All tokens on one rank."""
    generator = torch.Generator().manual_seed(17)
    size = (NUM_TOKENS, SHAPE.topk)
    ids = torch.randint(0, SHAPE.num_experts, size, generator=generator)
    if routing == "missing":
        ids[torch.rand(size, generator=generator) < 0.2] = -1
    elif routing == "hot":
        ids[torch.rand(size, generator=generator) < 0.7] = 5
    elif routing == "nobody":
        ids.fill_(-1)
    weights = torch.randn(size, generator=generator)
    weights[torch.rand(size, generator=generator) < 0.05] = 0.0
    shape = SHAPE if has_shared else dataclasses.replace(SHAPE, shared_intermediate_size=0)
    return Workload.from_ids(shape, [ids], [weights], seed=5)


def make_config(choice: Choice, workload: Workload, **options: Any) -> MoKConfig:
    """The config of a choice for the inputs that it will be given."""
    multiplier = None
    if choice["capacity"] == "enough":
        multiplier = enough_capacity(workload)
    minibatch = choice["minibatch_size"]
    config = MoKConfig(
        mode=choice["mode"],
        dispatch=choice["dispatch"],
        combine=choice["combine"],
        signal_grain=choice["signal_grain"],
        ring=choice["ring"],
        minibatch_size=minibatch,
        macrobatch_size=131072 if choice["windows"] == ALL else minibatch * choice["windows"],
        row_block=choice["row_block"],
        fwd_num_comm_sms=choice["fwd_num_comm_sms"],
        bwd_num_comm_sms=choice["bwd_num_comm_sms"],
        num_reserved_sms=choice["num_reserved_sms"],
        schedule_capacity_multiplier=multiplier,
        wire=choice["wire"],
        trace=choice["trace"],
        **{**TIMEOUTS, **options},
    )
    return config if choice["stages"] == "own" else dataclasses.replace(config, stages=_swappable(config))


def enough_capacity(workload: Workload) -> float:
    """A schedule_capacity_multiplier that leaves room for just the routes of the rank that gets the most."""
    num_local = workload.shape.num_experts // workload.num_ranks
    ids = torch.cat([ids.flatten() for ids in workload.expert_ids])
    owners = torch.bincount(ids[ids >= 0].long() // num_local, minlength=workload.num_ranks)
    share = max(len(x) for x in workload.x) * workload.shape.topk
    return max(0.5, float(owners.max()) - 0.5) / max(1, share)


def _swappable(config: MoKConfig) -> dict[str, Any]:
    """The library's own kernels as functions, for all stages that this config lets one swap."""
    found = {}
    for name in STAGES_OF:
        launch = getattr(stages, name).launch
        try:
            dataclasses.replace(config, stages={name: launch})
        except ValueError:
            continue
        found[name] = launch
    return found


# ---- one rank ----


@dataclass(frozen=True, eq=False)
class _Inputs:
    """What a rank gives to its calls."""

    x: Tensor
    ids: Tensor
    router_weights: Tensor
    d_output: Tensor
    weights: Weights

    @classmethod
    def of(cls, workload: Workload, rank: int, choice: Choice) -> _Inputs:
        ids = workload.expert_ids[rank].to(getattr(torch, choice["ids_dtype"]))
        x, router_weights = workload.x[rank], workload.router_weights[rank]
        if choice["input"] == "strided":
            x, ids, router_weights = (_strided(t) for t in (x, ids, router_weights))
        return cls(
            x, ids, router_weights, workload.d_outputs()[rank], workload.weights.of_rank(rank, workload.num_ranks)
        )

    @property
    def shared(self) -> tuple[Tensor | None, ...]:
        weights = self.weights
        return weights.shared_gate, weights.shared_up, weights.shared_down

    @property
    def routed(self) -> tuple[Tensor, Tensor, Tensor]:
        weights = self.weights
        return weights.routed_gate, weights.routed_up, weights.routed_down


def run_rank(member: Any, workload: Workload, config: MoKConfig, choice: Choice) -> list[Tensors]:
    """NUM_CALLS calls of one rank; every one's output, gradients and context."""
    inputs = _Inputs.of(workload, member.rank(), choice)
    most = max(len(x) for x in workload.x)
    sizes = most, workload.shape
    if choice["api"] == "layer":
        return _run_layer(member, inputs, config, choice, *sizes, workload.swiglu_limit)
    workspace = _workspace(member, config, choice, *sizes)
    x = inputs.x
    if choice["input"] == "workspace":
        x = workspace.x[: len(x)]
        x.copy_(inputs.x)
    inputs = dataclasses.replace(inputs, x=x)
    if choice["launch"] == "graph":
        return _run_graph(workspace, inputs, config, choice, workload)
    results = []
    for _ in range(NUM_CALLS):
        results.append(_call(workspace, inputs, config, choice, workload))
        if workspace.device.type == "cuda":
            workspace.check()
    return results


def _workspace(member: Any, config: MoKConfig, choice: Choice, most: int, shape: MoEShape) -> functional.Workspace:
    sizes = {"hidden_size": shape.hidden_size, "topk": shape.topk}
    if choice["room"] == "cached":
        return functional.get_workspace(config, member, num_local_tokens=most, **sizes)
    if choice["room"] == "grown":
        workspace = functional.create_workspace(config, member, num_local_tokens=most // 2, **sizes)
        workspace.grow(most)
        return workspace
    room = most + (MORE_ROOM if choice["room"] == "more" else 0)
    return functional.create_workspace(config, member, num_local_tokens=room, **sizes)


def _call(
    workspace: functional.Workspace, inputs: _Inputs, config: MoKConfig, choice: Choice, workload: Workload
) -> Tensors:
    """build_schedule, forward and what belongs to it."""
    num_local_experts = len(inputs.weights.routed_gate)
    schedule = functional.build_schedule(workspace, config, inputs.ids, num_local_experts=num_local_experts)
    packed = pack_forward(*inputs.routed, choice["precision"])
    limit = workload.swiglu_limit
    output, context = functional.forward(
        config,
        workspace,
        schedule,
        inputs.x,
        inputs.router_weights,
        *inputs.shared,
        *packed,
        limit,
        save_context=choice["context"] == "kept",
    )
    if choice["context"] == "recomputed":
        context = functional.recompute_forward_context(
            config, workspace, schedule, inputs.x, *inputs.shared[:2], *packed[:2], limit
        )
    found = {"output": output}
    if choice["passes"] != "forward":
        found |= _gradients(workspace, inputs, config, choice, schedule, context, limit)
    if choice["context"] != "none":
        found |= {f"context_{name}": tensor for name, tensor in vars(context).items()}
        found["num_rows"] = schedule.counts[0]
    return found


def _gradients(
    workspace: functional.Workspace,
    inputs: _Inputs,
    config: MoKConfig,
    choice: Choice,
    schedule: functional.MoKSchedule,
    context: functional.MoKForwardContext,
    limit: float | None,
) -> Tensors:
    weights = *inputs.shared, *pack_backward(*inputs.routed, choice["precision"])
    tensors = inputs.x, inputs.router_weights, *weights
    main_grads = _main_grads(inputs.weights, choice["main_grads"], workspace.member.rank())
    if choice["passes"] == "halves":
        d_x, d_router_weights, kept = functional.backward_dgrad(
            config, workspace, schedule, context, inputs.d_output, *tensors, limit
        )
        rest = functional.backward_wgrad(
            config, workspace, schedule, context, kept, inputs.d_output, inputs.x, *weights, main_grads=main_grads
        )
        found = (d_x, d_router_weights, *rest)
    else:
        found = functional.backward(
            config, workspace, schedule, context, inputs.d_output, *tensors, limit, main_grads=main_grads
        )
    named = {f"d_{name}": tensor for name, tensor in zip(LayerGradients._fields, found, strict=True)}
    named |= {f"d_{name}": tensor for name, tensor in zip(WEIGHTS, main_grads or (), strict=bool(main_grads))}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _main_grads(weights: Weights, kind: str | None, rank: int) -> list[Tensor | None] | None:
    """Tensors to which the weights' gradients are added; "sums": zeros, so that the sums themselves are left."""
    if kind is None:
        return None
    found = [getattr(weights, name) for name in WEIGHTS]
    if kind == "sums":
        return [None if w is None else torch.zeros_like(w, dtype=torch.float32) for w in found]
    return [None if w is None else _start_of(i, rank, w.shape, kind, w.device) for i, w in enumerate(found)]


def _start_of(index: int, rank: int, shape: Sequence[int], kind: str, device: torch.device | str) -> Tensor:
    """What a tensor of main_grads holds before the first addition."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    values = torch.randn(shape, generator=generator).to(device)
    return values.bfloat16() if kind == "bf16" else values


def _run_layer(
    member: Any, inputs: _Inputs, config: MoKConfig, choice: Choice, most: int, shape: MoEShape, limit: float | None
) -> list[Tensors]:
    """The same by the module and autograd."""
    room = {"exact": most, "more": most + MORE_ROOM, "grown": most // 2, "cached": None}[choice["room"]]
    layer = MoE(
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_experts,
        shape.topk,
        member,
        config,
        shape.shared_intermediate_size,
        choice["precision"],
        limit,
        num_local_tokens=room,
    )
    with torch.no_grad():
        for name in WEIGHTS:
            if (weight := getattr(inputs.weights, name)) is not None:
                getattr(layer, f"w_{name}").copy_(weight)
    if choice["room"] == "grown":
        layer.workspace.grow(most)
    results = []
    for _ in range(NUM_CALLS):
        if choice["passes"] == "forward":
            results.append({"output": layer(inputs.x, inputs.ids, inputs.router_weights)})
        else:
            results.append(_train(layer, inputs, choice, member.rank()))
        if layer.workspace.device.type == "cuda":
            layer.workspace.check()
    return results


def _train(layer: MoE, inputs: _Inputs, choice: Choice, rank: int) -> Tensors:
    layer.main_grads = main_grads = _main_grads(inputs.weights, choice["main_grads"], rank)
    layer.zero_grad()
    x, router_weights = (t.detach().requires_grad_() for t in (inputs.x, inputs.router_weights))
    if choice["context"] == "recomputed":
        output = torch.utils.checkpoint.checkpoint(
            layer, x, inputs.ids, router_weights, use_reentrant=False, preserve_rng_state=False
        )
    else:
        output = layer(x, inputs.ids, router_weights)
    output.backward(inputs.d_output)
    found = {"output": output.detach(), "d_x": x.grad, "d_router_weights": router_weights.grad}
    for i, name in enumerate(WEIGHTS):
        weight = getattr(layer, f"w_{name}")
        if weight is not None:
            found[f"d_{name}"] = weight.grad if main_grads is None else main_grads[i]
    return found


def _run_graph(
    workspace: functional.Workspace, inputs: _Inputs, config: MoKConfig, choice: Choice, workload: Workload
) -> list[Tensors]:
    """A graph of the calls, replayed NUM_CALLS times."""

    def call() -> Tensors:
        return _call(workspace, inputs, config, choice, workload)

    stream = torch.cuda.Stream(workspace.device)
    stream.wait_stream(torch.cuda.current_stream(workspace.device))
    with torch.cuda.stream(stream):
        call()  # the first call allocates, which a capture may not
    torch.cuda.current_stream(workspace.device).wait_stream(stream)
    workspace.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    results = []
    for _ in range(NUM_CALLS):
        captured["output"].fill_(math.nan)
        graph.replay()
        workspace.check()
        results.append({name: tensor.clone() for name, tensor in captured.items()})
    return results


# ---- comparisons ----


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN and the sign of zero count."""
    kind = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return (
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
    )


def _differing(given: Sequence[Tensors], wanted: Sequence[Tensors], choice: Choice) -> list[str]:
    """Names and ranks of the tensors that are not as wanted. A context is a part of the base's, which has all rows."""
    found = []
    for rank, (mine, base) in enumerate(zip(given, wanted, strict=True)):
        names = [name for name in base if not name.startswith(_CONTEXT)]
        if set(names) != {name for name in mine if not name.startswith(_CONTEXT)}:
            return [f"the list of tensors, which is {', '.join(mine)}, not {', '.join(names)}"]
        pairs = {name: (mine[name], base[name]) for name in names}
        if "context_x" in mine and choice["row_block"] != 256:  # rows stand elsewhere with other padding
            for name in ("x", "gate", "up"):
                part = mine[f"context_{name}"][: int(mine["num_rows"])]
                pairs[f"context_{name}"] = part, base[f"context_{name}"][: len(part)]
            for name in ("shared_gate", "shared_up"):
                pairs[f"context_{name}"] = mine[f"context_{name}"], base[f"context_{name}"]
        found += [f"{name} of rank {rank}" for name, (a, b) in pairs.items() if not same_bits(a, b)]
    return found


def _strided(tensor: Tensor) -> Tensor:
    """The same values, every other column of a larger tensor."""
    wide = tensor.new_zeros(len(tensor), 2 * tensor.shape[1])
    wide[:, ::2] = tensor
    return wide[:, ::2]
