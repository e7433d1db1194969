"""Every interleaving of the protocol: models of sequences of calls, searched to the end.

    for result in explore("FFBB"):                 # all plans, R = 2 with one expired wait and R = 3 without
        print(result.setup.name, result.num_states, result.verdict)

A model is what is left of calls without arithmetic. From the sources that were compiled come the waits and signals of
every stage (`needs` and `publishes` of csrc/stages), what counts them, the order of tasks, what a worker does when it
leaves a kernel, and the launches of the host target or of a GPU. Modelled (csrc/explore/) are the cells that a task
reads and writes, and the workers. Sizes are small: a row block has one copy task and two or three tiles of a product.

A violation is a read that finds another version than it must, a deadlock, or an output made of what was written after a
false wait. Words only grow, so most actions commute with whatever the others may do; those are done at once, and the
search branches over the rest (partial-order reduction). `is_reduced=False` branches everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

from mok_modular.protocol.call import Call, has_both_roles, kernel_arguments, launches
from mok_modular.protocol.config import MoKConfig
from mok_modular.protocol.extension import extension
from mok_modular.protocol.plan import Plan, all_plans
from mok_modular.targets.cuda.device import kernel_of
from mok_modular.targets.cuda.grid import MIN_SHARED_SMS
from mok_modular.targets.cuda.order import in_streams

SEQUENCES = ("SSS", "CC", "CF", "SFSF", "FFBB", "FCB", "FRF")
"""Schedule, forward, recompute (C), backward, and R: after an abort, or without one, the workspace is reset."""

KINDS = {"S": "schedule", "F": "forward", "C": "recompute_forward_context", "B": "backward"}
"""Calls of a sequence by their letters."""

GPU_CALLS = {"S", "F"}
"""Those that a GPU has kernels for."""

MAX_STATES = 20_000_000

_MIDDLE = "dispatch|gate_up+swiglu+down+combine"
FIRST_TWO = "dispatch+gate_up|swiglu+down+combine"


@dataclass(frozen=True)
class Layout:
    """Local experts of each rank's row blocks, and the ranks that the rows of a rank come from."""

    name: str
    experts: tuple[tuple[int, ...], ...]
    sources: tuple[int, ...]
    ring_blocks: int = 2

    def source_lists(self) -> list[list[list[int]]]:
        return [[list(self.sources) for _ in blocks] for blocks in self.experts]


LAYOUTS = {
    2: (
        Layout("a partial last macrobatch on one rank, one generation on the other", ((0, 0, 1), (0, 1)), (0, 1)),
        Layout("a rank without rows", ((0, 1), ()), (0, 1)),
        Layout("a rank without tokens, one row block a generation", ((0, 0), (0,)), (0,), ring_blocks=1),
        Layout("three windows a generation, the last of one", ((0, 0, 1, 1), (0,)), (0, 1), ring_blocks=3),
    ),
    3: (
        Layout("three generations, two, and none", ((0, 0, 0, 1, 1), (0, 1, 1), ()), (0, 1, 2)),
        Layout("a rank without tokens or rows", ((0, 0), (0,), ()), (0, 1), ring_blocks=1),
    ),
}
"""By number of ranks."""

_FULL_RING = {
    ranks: tuple(Layout(layout.name, layout.experts, layout.sources, ring_blocks=8) for layout in layouts)
    for ranks, layouts in LAYOUTS.items()
}


@dataclass(frozen=True)
class Setup:
    """What is searched. `workers`: `one` for all kernels of a rank, `streams` one for each stream (and in a kernel with
    both kinds of tasks for each role), `tasks` one for each task, `ctas` a GPU's: two CTAs for each stream, of which
    with `num_comm_sms` one only communicates, by arrival."""

    sequence: str
    plan: str
    layout: Layout
    workers: str = "one"
    is_push_dispatch: bool = False
    is_pull_combine: bool = False
    is_pull_once: bool = False
    is_mxfp8: bool = False
    is_zero_copy: bool = False
    fault: str = ""
    is_expiry_allowed: bool = False
    num_comm_sms: int | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.layout.experts)

    @property
    def name(self) -> str:
        """What tells it from others, in words."""
        words = [" ".join(self.sequence), self.plan, f"R = {self.num_ranks}", f"workers: {self.workers}"]
        words += [word for word, is_so in self._options() if is_so]
        return ", ".join([*words, self.layout.name])

    def _options(self) -> list[tuple[str, bool]]:
        return [
            ("push dispatch", self.is_push_dispatch),
            ("pull combine", self.is_pull_combine),
            ("pull once", self.is_pull_once),
            ("MXFP8", self.is_mxfp8),
            ("zero-copy input", self.is_zero_copy),
            (f"planted: {self.fault}", bool(self.fault)),
            ("one wait may expire", self.is_expiry_allowed),
            (f"SMs for communication: {self.num_comm_sms}", self.num_comm_sms is not None),
        ]

    @property
    def config(self) -> MoKConfig:
        """That of its calls, with rows by number of row blocks."""
        return MoKConfig(
            mode=self.plan,
            dispatch="push" if self.is_push_dispatch else "pull_once" if self.is_pull_once else "pull",
            combine="pull" if self.is_pull_combine else "push",
            fwd_num_comm_sms=self.num_comm_sms,
        )

    def launches(self, kind: str) -> list[dict[str, Any]]:
        """The launches of a call (`kind`: S, F, C or B) as the target makes them: LaunchRow of csrc/explore/model.h."""
        max_blocks = max(1, *(len(blocks) for blocks in self.layout.experts))
        shape = SimpleNamespace(max_generations=-(-max_blocks // self.layout.ring_blocks))
        config = self.config
        call = Call(KINDS[kind], config.plan, 0, 1, 1, {}, {}, {}, shared_size=1, is_mxfp8=self.is_mxfp8, config=config)
        in_order = launches(call, shape)
        rows = []
        on_gpu = in_streams(config, call.kind, in_order, num_sms=MIN_SHARED_SMS)
        for each, arguments in zip(on_gpu, kernel_arguments(in_order), strict=True):
            row = asdict(arguments) | {"has_experts_in_turn": False, "num_comm_ctas": 0}
            stages = each.launch.stages
            row["has_roles"] = has_both_roles(each.launch, is_pull_combine=self.is_pull_combine)
            if self.workers == "ctas":
                kernel = kernel_of(stages, self.is_pull_combine)
                row |= {
                    "stream": 0 if each.is_on_side else 1,
                    "is_join": each.is_last,
                    "num_comm_ctas": each.num_comm_ctas,
                    "has_experts_in_turn": each.has_experts_in_turn,
                    "has_roles": isinstance(kernel, int) and not {"dispatch", "combine"}.isdisjoint(stages),
                }
            rows.append(row)
        return rows


@dataclass(frozen=True)
class Result:
    """What a search found. `num_states`: where it had to branch; `num_steps`: actions that were done. `is_complete`: no
    state was left. `story`: who did what, up to the violation, as (rank, call, task, what)."""

    setup: Setup
    is_ok: bool
    is_complete: bool
    num_states: int
    num_steps: int
    violation: str
    story: list[tuple[int, int, str, str]] = field(repr=False)
    edges: list[str] = field(repr=False)

    @property
    def verdict(self) -> str:
        """In a word."""
        return "violation" if not self.is_ok else "ok" if self.is_complete else "not finished"

    def tell(self) -> str:
        """The violation as a story: what led to it, a line a task, and what went wrong in the end."""
        lines, last = [f"{self.setup.name}:"], None
        for rank, call, task, text in self.story:
            if (rank, call, task) == last:
                lines[-1] += f"; {text}"
            else:
                lines.append(f"  {len(lines):3}. rank {rank}, call {call}, {task}: {text}")
            last = rank, call, task
        return "\n".join([*lines, f"  So {self.violation}."])


def search(setup: Setup, *, is_reduced: bool = True, max_states: int = MAX_STATES) -> Result:
    """Searches all interleavings of one setup. Raises ValueError for a sequence or fault that there is not."""
    if not setup.sequence:
        raise ValueError("a sequence is one or more of S, F, C, B and R, got ''")
    found: dict[str, Any] = extension().explore(
        setup.sequence,
        {kind: setup.launches(kind) for kind in set(setup.sequence) & set(KINDS)},
        setup.layout.ring_blocks,
        [list(blocks) for blocks in setup.layout.experts],
        setup.layout.source_lists(),
        setup.workers,
        setup.is_push_dispatch,
        setup.is_pull_combine,
        setup.is_pull_once,
        setup.is_mxfp8,
        setup.is_zero_copy,
        setup.fault,
        setup.is_expiry_allowed,
        is_reduced,
        max_states,
    )
    return Result(
        setup,
        found["is_ok"],
        found["is_complete"],
        found["num_states"],
        found["num_steps"],
        found["violation"],
        found["story"],
        found["edges"],
    )


def setups(sequence: str, plans: Sequence[Plan] | None = None) -> Iterator[Setup]:
    """All setups of a sequence: R = 2 with at most one expired wait, R = 3 without, in every plan; forwards also with
    push dispatch, pull combine and pull once, recomputations also with zero-copy input. Sequences of schedules and
    forwards also in the launches of a GPU, with and without SMs for communication."""
    for plan in plans if plans is not None else all_plans():
        for num_ranks, layouts in LAYOUTS.items():
            all_workers = ("one", "streams") if num_ranks == 2 else ("one", "streams", "tasks")
            for layout in layouts:
                for workers in all_workers:
                    yield Setup(sequence, str(plan), layout, workers, is_expiry_allowed=num_ranks == 2)
                if set(sequence) <= GPU_CALLS:
                    yield Setup(sequence, str(plan), layout, "ctas", num_comm_sms=1)
            if set(sequence) <= GPU_CALLS:
                yield Setup(sequence, str(plan), layouts[0], "ctas")
            if "B" in sequence:
                yield Setup(sequence, str(plan), layouts[0], "tasks", is_mxfp8=True)
                yield Setup(sequence, str(plan), layouts[0], "one", is_mxfp8=True)
            if num_ranks == 2 and "C" in sequence:
                yield Setup(sequence, str(plan), layouts[0], "tasks", is_zero_copy=True)
            if num_ranks == 2 and "F" in sequence and "B" not in sequence and "R" not in sequence:
                for push, pull in ((True, False), (False, True), (True, True)):
                    layout = _FULL_RING[num_ranks][1]
                    yield Setup(sequence, str(plan), layout, "streams", push, pull)
            if "F" in sequence and "B" not in sequence and "R" not in sequence:
                for workers in ("one", "streams", "tasks") if num_ranks == 2 else ("one",):
                    yield Setup(sequence, str(plan), _FULL_RING[num_ranks][0], workers, is_pull_once=True)


def explore(
    sequence: str, plans: Sequence[Plan] | None = None, *, num_threads: int = 2, max_states: int = MAX_STATES
) -> Iterator[Result]:
    """Searches every setup of a sequence, on some threads; results in the order of `setups`."""
    return run_all(setups(sequence, plans), num_threads=num_threads, max_states=max_states)


def run_all(given: Iterable[Setup], *, num_threads: int = 2, max_states: int = MAX_STATES) -> Iterator[Result]:
    """The same for any setups. A search holds no lock of the interpreter."""
    with ThreadPoolExecutor(num_threads) as pool:
        yield from pool.map(lambda setup: search(setup, max_states=max_states), given)


ONE_GENERATION_EACH = Layout("one row block a generation", ((0, 0), (0, 0)), (0, 1), ring_blocks=1)
THREE_GENERATIONS = Layout("three generations of one row block", ((0, 0, 0), (0,)), (0, 1), ring_blocks=1)
STRADDLING = Layout("an expert that enters a macrobatch and one that leaves it", ((0, 0, 0, 1, 1), ()), (0, 1))
SMALL = Layout("a row block on each rank", ((0,), (0,)), (0, 1), ring_blocks=1)

PLANTED: dict[str, Setup] = {
    "one_id_region": Setup("SSS", "split", SMALL, "tasks", fault="one_id_region"),
    "tokens_in_topk_word": Setup("SSS", "split", SMALL, "tasks", fault="tokens_in_topk_word"),
    "recompute_without_done": Setup("CC", "split", SMALL, "tasks", fault="recompute_without_done"),
    "recompute_returns_early": Setup("CF", "split", SMALL, "tasks", is_zero_copy=True, fault="recompute_returns_early"),
    "done_without_parity": Setup("FFF", _MIDDLE, LAYOUTS[2][1], "tasks", fault="done_without_parity"),
    "done_before_publish": Setup("CCC", FIRST_TWO, LAYOUTS[2][1], "tasks", fault="done_before_publish"),
    "ring_counts_generations": Setup("F", "split", LAYOUTS[2][0], "one", fault="ring_counts_generations"),
    "macrobatch_0_does_not_wait": Setup("F", "fused", ONE_GENERATION_EACH, "tasks", fault="macrobatch_0_does_not_wait"),
    "replay_does_not_wait": Setup("FB", "fused", THREE_GENERATIONS, "tasks", fault="replay_does_not_wait"),
    "reverse_combine_does_not_wait": Setup(
        "FB", "fused", ONE_GENERATION_EACH, "tasks", fault="reverse_combine_does_not_wait"
    ),
    "order_across_generations": Setup("F", "fused", ONE_GENERATION_EACH, "one", fault="order_across_generations"),
    "carry_without_read_edge": Setup("FB", "split", STRADDLING, "tasks", fault="carry_without_read_edge"),
    "wgrad_beside_down_dgrad": Setup("FB", "split", SMALL, "one", fault="wgrad_beside_down_dgrad"),
    "surplus_sends_no_done": Setup("F", "split", LAYOUTS[2][1], "one", fault="surplus_sends_no_done"),
    "reset_zeroes_done": Setup("FRF", "split", SMALL, "one", fault="reset_zeroes_done"),
    "writes_after_false_wait": Setup(
        "F", "split", SMALL, "one", fault="writes_after_false_wait", is_expiry_allowed=True
    ),
    "lost_signal": Setup("F", "split", SMALL, "one", fault="lost_signal"),
    "push_without_entered": Setup("CF", "fused", SMALL, "tasks", is_push_dispatch=True, fault="push_without_entered"),
    "counts_of_another_plan": Setup("F", "fused", SMALL, "tasks", fault="counts_of_another_plan"),
    "copies_without_x_ready": Setup(
        "F", "fused", _FULL_RING[2][1], "tasks", is_pull_once=True, fault="copies_without_x_ready"
    ),
    "roles_counted_by_call": Setup(
        "F", FIRST_TWO, ONE_GENERATION_EACH, "ctas", fault="roles_counted_by_call", num_comm_sms=1
    ),
}
"""For each hole that a protocol like this can have, a setup in which it must be found."""
