"""Every option of a layer in one table: its values, which of them each target takes, and which go together.

    plain("host")                            # a choice: a value for every option
    broken_rule({**plain("host"), "dispatch": "push"})       # the rule that it breaks: the ring must hold all rows

The covering arrays (mok_modular.testing.covering) and the random runs (mok_modular.testing.fuzz) draw from it. A field
of MoKConfig or an argument of MoE or LocalGroup that no option sets is in EXCLUDED, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mok_modular.protocol.plan import all_plans

Target = Literal["host", "sm_90a"]
Choice = dict[str, Any]
"""A value for every option of a target, by name."""

ALL = "all"
"""A ring that holds all rows."""
MANY = 1000
"""More processors than there are."""


@dataclass(frozen=True)
class Option:
    """One option. `values` are the host's, the plain one first; `gpu` those of sm_90a where they differ.

    `sets`: the fields of MoKConfig and the arguments of MoE and LocalGroup that follow from it. `of`: what it says.
    """

    name: str
    values: tuple[Any, ...]
    of: str
    gpu: tuple[Any, ...] | None = None
    sets: tuple[str, ...] = ()

    def of_target(self, target: Target) -> tuple[Any, ...]:
        """The values that a target takes; one alone where it has no choice."""
        return self.gpu if target == "sm_90a" and self.gpu is not None else self.values


@dataclass(frozen=True)
class Rule:
    """What some options must keep to together."""

    names: tuple[str, ...]
    reason: str
    holds: Callable[..., bool] = field(repr=False)


OPTIONS = (
    # ---- MoKConfig ----
    Option("mode", tuple(map(str, all_plans())), "plan", sets=("MoKConfig.mode",)),
    Option("dispatch", ("pull", "pull_once", "push"), "who moves tokens", sets=("MoKConfig.dispatch",)),
    Option("combine", ("push", "pull"), "who moves results", sets=("MoKConfig.combine",)),
    Option("signal_grain", ("row_block", "minibatch"), "rows of a signal", sets=("MoKConfig.signal_grain",)),
    Option("ring", ("interleaved", "serial"), "order inside a generation", sets=("MoKConfig.ring",)),
    Option("minibatch_size", (128, 256, 512), "rows of a window", sets=("MoKConfig.minibatch_size",)),
    Option("windows", (2, 1, 3, ALL), "windows of the ring", sets=("MoKConfig.macrobatch_size",)),
    Option("row_block", (None, 128, 256), "unit of padding", (None, 128), sets=("MoKConfig.row_block",)),
    Option(
        "fwd_num_comm_sms",
        (None, 1, 5, MANY),
        "processors of a forward that only communicate",
        (None, 1, 5, 33, MANY),
        sets=("MoKConfig.fwd_num_comm_sms",),
    ),
    Option(
        "bwd_num_comm_sms",
        (None, 1, 5, MANY),
        "the same of a backward",
        (None,),
        sets=("MoKConfig.bwd_num_comm_sms",),
    ),
    Option("num_reserved_sms", (0, 40, 131), "processors left alone", sets=("MoKConfig.num_reserved_sms",)),
    Option(
        "capacity",
        (None, "enough"),
        "rows that there is room for: the worst case, or just enough",
        sets=("MoKConfig.schedule_capacity_multiplier",),
    ),
    Option("wire", ("bf16", "mxfp8"), "how tokens travel", ("bf16",), sets=("MoKConfig.wire",)),
    Option("trace", (False, True), "timeline", sets=("MoKConfig.trace",)),
    Option(
        "stages",
        ("own", "swapped"),
        "stages alone in their kernel: the library's, or functions that launch the same ones",
        ("own",),
        sets=("MoKConfig.stages",),
    ),
    # ---- MoE and the functions ----
    Option("precision", ("bf16", "mxfp8"), "operands of the experts", ("bf16",), sets=("MoE.precision",)),
    Option("shared", (True, False), "shared expert", sets=("MoE.shared_intermediate_size",)),
    Option("swiglu_limit", (None, 0.5), "clamp", sets=("MoE.swiglu_limit",)),
    Option(
        "api",
        ("functional", "layer"),
        "mok_modular.functional, or MoE and autograd",
        sets=("MoE.config",),
    ),
    Option("passes", ("both", "forward", "halves"), "backward: none, whole, dgrad and wgrad", ("forward",)),
    Option("context", ("kept", "recomputed", "none"), "what a forward keeps", ("kept", "none")),
    Option("main_grads", (None, "bf16", "fp32"), "where weight gradients are added", (None,)),
    Option("ids_dtype", ("int64", "int32"), "expert ids"),
    Option("input", ("plain", "workspace", "strided"), "where x is: a tensor, workspace.x, a strided view"),
    Option(
        "room",
        ("exact", "more", "grown", "cached"),
        "tokens that a new workspace has room for; cached: one that earlier calls have used",
        sets=("MoE.num_local_tokens",),
    ),
    # ---- the data ----
    Option("routing", ("missing", "full", "hot", "nobody"), "-1 routes, none, skewed, nothing else than -1"),
    Option("tokens", ("uneven", "even", "one", "nobody"), "tokens by rank: one rank has all, no rank has any"),
    # ---- LocalGroup ----
    Option("num_ranks", (2, 1, 3, 4), "R", (2, 1, 4, 6), sets=("LocalGroup.size", "MoE.group")),
    Option("executor", ("fibers", "threads"), "how CPU ranks run", ("fibers",), sets=("LocalGroup.executor",)),
    Option(
        "order",
        ("round_robin", "random", "last_first"),
        "which fiber goes on",
        ("round_robin",),
        sets=("LocalGroup.order",),
    ),
    Option("num_workers", (None, 1, 2, 7), "workers of a kernel", (None,), sets=("LocalGroup.num_workers",)),
    Option("launch", ("call",), "calls, or a CUDA graph of them", ("call", "graph")),
)

EXCLUDED = {
    "MoKConfig.all_gather_top_experts_chunk_bytes": "accepted and not used",
    "MoKConfig.allow_shared_gpu": "of ranks that are processes; a LocalGroup always shares its GPU",
    "MoKConfig.signals": "nvshmem needs ranks that are processes, a LocalGroup refuses it",
    "MoKConfig.start_timeout_s": "only says when a wait is given up: short here, so that a hang ends",
    "MoKConfig.timeout_s": "only says when a wait is given up: short here, so that a hang ends",
    "MoE.hidden_size": "a size: random in mok_modular.testing.fuzz",
    "MoE.intermediate_size": "a size: random in mok_modular.testing.fuzz",
    "MoE.num_experts": "a size: random in mok_modular.testing.fuzz",
    "MoE.topk": "a size: random in mok_modular.testing.fuzz",
    "LocalGroup.device": "the target",
    "LocalGroup.seed": "of order='random': the number of the run",
}
"""Fields and arguments that are no options, and why."""


def _implies(is_so: bool, then: bool) -> bool:
    return then if is_so else True


RULES = (
    Rule(
        ("dispatch", "windows"),
        "push and pull_once dispatch need a ring that holds all rows",
        lambda dispatch, windows: _implies(dispatch != "pull", windows == ALL),
    ),
    Rule(
        ("combine", "windows"),
        "pull combine needs a ring that holds all rows",
        lambda combine, windows: _implies(combine == "pull", windows == ALL),
    ),
    Rule(
        ("minibatch_size", "row_block"),
        "minibatch_size is a multiple of the row block",
        lambda minibatch_size, row_block: minibatch_size % (row_block or 128) == 0,
    ),
    Rule(
        ("precision", "wire"),
        "an mxfp8 wire is for MXFP8 layers",
        lambda precision, wire: _implies(wire == "mxfp8", precision == "mxfp8"),
    ),
    Rule(
        ("dispatch", "wire"),
        "an mxfp8 wire is pulled",
        lambda dispatch, wire: _implies(wire == "mxfp8", dispatch == "pull"),
    ),
    Rule(
        ("dispatch", "precision"),
        "pull_once is for BF16 layers",
        lambda dispatch, precision: _implies(dispatch == "pull_once", precision == "bf16"),
    ),
    Rule(
        ("passes", "windows"),
        "dgrad and wgrad apart need a ring that holds all rows",
        lambda passes, windows: _implies(passes == "halves", windows == ALL),
    ),
    Rule(
        ("passes", "api"),
        "autograd has one backward",
        lambda passes, api: _implies(passes == "halves", api == "functional"),
    ),
    Rule(
        ("passes", "context"),
        "a backward needs a context, and only a backward needs it again",
        lambda passes, context: context in (("kept", "none") if passes == "forward" else ("kept", "recomputed")),
    ),
    Rule(
        ("passes", "context", "api"),
        "a layer keeps a context for its backward only",
        lambda passes, context, api: _implies(api == "layer" and passes == "forward", context == "none"),
    ),
    Rule(
        ("passes", "main_grads"),
        "only a backward has gradients",
        lambda passes, main_grads: _implies(main_grads is not None, passes != "forward"),
    ),
    Rule(
        ("passes", "bwd_num_comm_sms"),
        "only a backward takes it",
        lambda passes, bwd_num_comm_sms: _implies(bwd_num_comm_sms is not None, passes != "forward"),
    ),
    Rule(
        ("input", "api"),
        "functions want contiguous tensors, and workspace.x is theirs",
        lambda input, api: input in (("plain", "workspace") if api == "functional" else ("plain", "strided")),
    ),
    Rule(
        ("tokens", "num_ranks"),
        "one rank has an even share",
        lambda tokens, num_ranks: _implies(num_ranks == 1, tokens in ("even", "nobody")),
    ),
    Rule(
        ("executor", "order"),
        "threads have no order",
        lambda executor, order: _implies(executor == "threads", order == "round_robin"),
    ),
    Rule(
        ("launch", "trace"),
        "a traced call cannot be captured",
        lambda launch, trace: _implies(launch == "graph", not trace),
    ),
    Rule(
        ("launch", "num_ranks"),
        "a graph is captured by one thread",
        lambda launch, num_ranks: _implies(launch == "graph", num_ranks == 1),
    ),
)
"""What must hold of a choice."""


def values_of(target: Target) -> dict[str, tuple[Any, ...]]:
    """The values of every option on a target, the plain one first."""
    return {option.name: option.of_target(target) for option in OPTIONS}


def plain(target: Target) -> Choice:
    """The first value of every option."""
    return {name: values[0] for name, values in values_of(target).items()}


def broken_rule(choice: Mapping[str, Any]) -> Rule | None:
    """The first rule that a choice breaks; options that it leaves out break none."""
    for rule in RULES:
        if all(name in choice for name in rule.names) and not rule.holds(*(choice[name] for name in rule.names)):
            return rule
    return None
