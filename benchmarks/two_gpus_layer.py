"""The layer over NVLink: this library against NCCL and torch, DeepEP and torch; and minibatches. One rank's side."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gpu_timing
import torch
from torch import Tensor
from two_gpus_cases import LAYERS, NUM_RANKS, Load, expert_ids, minibatch_size
from two_gpus_contenders import MAX_ERROR, OURS, Inputs, Ours, baselines, open_deep_ep, relative_error

from mok_modular import MoEShape, MoKConfig, Workspace, functional
from mok_modular.calls.workspace import layout_key

TOKENS = (512, 2048, 8192)
ROUTINGS = ("uniform", "captured", "remote")
ROUNDS, WARMUP = 14, 3
DENSE_SIZE = 8192
MINIBATCHES = (512, 1024, 2048, 4096, 8192)


def dense_product() -> Callable[[], Tensor]:
    a, b = (torch.randn(DENSE_SIZE, DENSE_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: a @ b


def inputs_of(env: Any, layer: MoEShape, num_tokens: int, routing: str, like: Inputs | None) -> tuple[Inputs, Load]:
    all_ids = [expert_ids(layer, num_tokens, routing, rank) for rank in range(NUM_RANKS)]
    inputs = Inputs.random(layer, all_ids[env.rank], NUM_RANKS, env.rank, env.device, like)
    return inputs, Load.of(all_ids, layer.num_experts)


def our_contenders(env: Any, layer: MoEShape, num_tokens: int) -> dict[str, Ours]:
    """Those of OURS; what can share a workspace does. Persistent kernels are loaded with a workspace, so the first
    config of a layout decides which are."""
    workspaces: dict[Any, Workspace] = {}
    found = {}
    for name, options in OURS.items():
        config = MoKConfig(**{"minibatch_size": minibatch_size(layer), **options})
        key = layout_key(config)
        if key not in workspaces:
            workspaces[key] = functional.create_workspace(
                config, env.group, device=env.device, num_local_tokens=num_tokens,
                hidden_size=layer.hidden_size, topk=layer.topk,
            )  # fmt: skip
        found[name] = Ours(workspaces[key], config)
    return found


def checked(env: Any, contenders: dict[str, Any], inputs: Inputs) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contenders whose output on all ranks is that of the first one, and every one's error (a number, or what it
    raised)."""
    expected: Tensor | None = None
    good, errors = {}, {}
    for name, run in contenders.items():
        error: float | str
        try:
            output = run(inputs)
            torch.cuda.synchronize()
            expected = output if expected is None else expected
            error = relative_error(output, expected)
            error = error if math.isfinite(error) else f"the output holds {error}"
        except Exception as caught:
            if expected is None:  # this library's own
                raise
            error = f"{type(caught).__name__}: {caught}"[:500]
        by_rank = env.gather(error)
        texts = [each for each in by_rank if isinstance(each, str)]
        errors[name] = texts[0] if texts else max(by_rank)
        if not texts and errors[name] <= MAX_ERROR:
            good[name] = run
        else:
            env.log(f"{name} is left out: {errors[name]}")
    return good, errors


def open_others(env: Any, part: str) -> None:
    """DeepEP, where it is installed and starts."""
    if env.deep_ep is not None:
        return
    reason = "not installed"
    try:
        env.deep_ep = open_deep_ep(env.group, max(each.hidden_size for each in LAYERS.values()))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:500]
    if not all(env.gather(env.deep_ep is not None)):
        env.deep_ep = None
        env.save(part, "without DeepEP", reason)


def measure_layer(env: Any, name: str) -> None:
    """`layer`: milliseconds of schedule + forward, the slowest rank's median, by number of tokens and routing."""
    layer, dense = LAYERS[name], dense_product()
    part = f"layer {name}"
    env.save(part, "dense_flops_alone", gpu_timing.matmul_rate_flops())
    env.save(part, "minibatch_size", minibatch_size(layer))
    open_others(env, part)
    others = baselines(env.nccl, env.deep_ep)
    weights: Inputs | None = None
    for num_tokens in TOKENS:
        ours = our_contenders(env, layer, num_tokens)
        for routing in ROUTINGS:
            inputs, load = inputs_of(env, layer, num_tokens, routing, weights)
            weights = inputs
            good, errors = checked(env, {**ours, **others}, inputs)
            runs = {each: lambda run=run, inputs=inputs: run(inputs) for each, run in good.items()}
            by_rank = env.gather(env.medians({**runs, "dense": dense}, ROUNDS, WARMUP))
            for each in ours.values():
                each.workspace.check()
            ms = {each: max(rank[each] for rank in by_rank) for each in runs}
            dense_ms = min(rank["dense"] for rank in by_rank)
            figures = {
                "ms": ms,
                "errors": errors,
                "dense_flops": 2 * DENSE_SIZE**3 / (dense_ms * 1e-3),
                "rows": load.rows,
                "unique": load.unique,
            }
            env.save(part, f"T={num_tokens} {routing}", figures)
        del ours
        torch.cuda.empty_cache()


def measure_minibatches(env: Any) -> None:
    """`minibatch`: schedule + fused forward by minibatch size and signal grain, interleaved; Kimi, uniform."""
    layer = LAYERS["kimi-k2.7"]
    weights: Inputs | None = None
    for num_tokens in (2048, 8192):
        inputs, _ = inputs_of(env, layer, num_tokens, "uniform", weights)
        weights = inputs
        runs: dict[str, Any] = {}
        for grain in ("row_block", "minibatch"):
            for minibatch in MINIBATCHES:
                config = MoKConfig(minibatch_size=minibatch, signal_grain=grain)
                workspace = functional.create_workspace(
                    config, env.group, device=env.device, num_local_tokens=num_tokens,
                    hidden_size=layer.hidden_size, topk=layer.topk,
                )  # fmt: skip
                runs[f"{grain} {minibatch}"] = Ours(workspace, config)
        good, errors = checked(env, runs, inputs)
        calls = {each: lambda run=run, inputs=inputs: run(inputs) for each, run in good.items()}
        ms = env.slowest(env.medians(calls, ROUNDS, WARMUP))
        for run in runs.values():
            run.workspace.check()
        env.save("minibatch", f"T={num_tokens}", {"ms": ms, "errors": errors})
        del runs, good, calls
        torch.cuda.empty_cache()
