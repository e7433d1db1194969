"""Commands that look inside: `explore`, `explain`, and `stages --only`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from mok_modular.cli.common import add_parser
from mok_modular.protocol.errors import format_table
from mok_modular.protocol.plan import Plan


def add_commands(commands: Any) -> list[argparse.ArgumentParser]:
    """Adds the parsers of these commands and returns them."""
    explore = add_parser(
        commands,
        "explore",
        "Searches every interleaving of models of calls, and for planted faults that it must find. Waits, signals, "
        "their counts, the order of tasks and the launches come from the sources that were compiled, so an edited "
        "stage is searched after a rebuild. Modelled are what a task reads and writes, the workers, and small sizes.",
        "mok-modular explore --sequence FFBB --plan fused",
        "mok-modular explore --fault list",
        "mok-modular explore --fault lost_signal",
    )
    explore.add_argument(
        "--sequence",
        action="append",
        metavar="CALLS",
        help="The calls in order, such as FFBB: S schedule, F forward, C recompute, B backward, R abort and reset "
        "(default: seven sequences). May be given several times.",
    )
    explore.add_argument("--plan", metavar="PLAN", help="Searches this plan alone (default: all 16).")
    explore.add_argument(
        "--fault",
        metavar="NAME",
        help="Plants this fault and tells what happens; exit code 1 means that it was found. list: prints the names.",
    )
    explore.add_argument("--threads", type=int, default=2, help="The number of searches at a time (default: 2).")
    explore.set_defaults(command=_explore)

    explain = add_parser(
        commands,
        "explain",
        "Walks through a small forward step by step, by commands on stdin.",
        "mok-modular explain --mode fused",
        "mok-modular explain --json",
    )
    explain.add_argument(
        "--mode",
        default="split",
        help="Which stages share a kernel: fused, split or a plan string (default: split).",
    )
    explain.add_argument("--tokens", type=int, default=16, help="The tokens of each rank (default: 16).")
    explain.set_defaults(command=_explain)
    return [explore, explain]


def add_stage_options(stages: argparse.ArgumentParser) -> None:
    """`stages --only NAME --input FILE`."""
    stages.add_argument(
        "--input",
        type=Path,
        metavar="FILE",
        help="Runs the stage of --only on arguments that mok_modular.testing.capture wrote, not on captured routing.",
    )


def run_stage(args: argparse.Namespace) -> int:
    """One captured stage alone: the compiled one against its reference."""
    from mok_modular.protocol.swap_rules import SIGNATURES
    from mok_modular.testing.capture import replay

    if args.only not in SIGNATURES:
        raise ValueError(f"with --input, --only must be one of {', '.join(SIGNATURES)}; got {args.only!r}")
    found = replay(args.only, args.input, args.dump)
    if args.json:
        print(json.dumps({"ok": True, "stage": args.only, **found}))
        return 0
    rows = [("results", ", ".join(map(str, found["shapes"]))), ("same bits as the reference", found["is_same"])]
    rows += [("largest difference", f"{found['max_error']:.3g}")]
    print(format_table((args.only, "alone"), rows))
    if args.dump is not None:
        print(f"written to {args.dump}")
    return 0


def _workload(num_tokens: int, num_ranks: int) -> Any:
    from mok_modular.protocol.shapes import MoEShape
    from mok_modular.routing import load_routing
    from mok_modular.testing import Workload

    if num_tokens < 1:
        raise ValueError(f"--tokens must be at least 1, got {num_tokens}")
    routing = load_routing(None)
    shape = MoEShape("small", 128, 192, routing.num_experts, routing.expert_ids.shape[3], 64)
    return Workload.from_routing(routing, shape, num_ranks=num_ranks, num_tokens=num_tokens)


def _explain(args: argparse.Namespace) -> int:
    from mok_modular.cli.explain import HELP, Walk, converse, describe
    from mok_modular.protocol.config import MoKConfig
    from mok_modular.ranks.group import LocalGroup
    from mok_modular.testing import run_forward

    config = MoKConfig(mode=args.mode, minibatch_size=128, macrobatch_size=256, trace=True)
    group = LocalGroup(2, num_workers=2)
    run_forward(group, _workload(args.tokens, 2), config)
    walk = Walk(next(iter(group.workspaces.values())).trace())
    if args.json:
        print(json.dumps({"ok": True, "steps": [describe(step) for step in walk.steps]}))
        return 0
    print(f"{len(walk.steps)} steps of a forward of 2 ranks, mode {args.mode}; logical time in brackets\n{HELP}")
    for line in converse(walk, sys.stdin):
        print(line, flush=True)
    return 0


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _explore(args: argparse.Namespace) -> int:
    from mok_modular.cli import explore

    if args.threads < 1:
        raise ValueError(f"--threads must be at least 1, got {args.threads}")
    if args.fault is not None:
        given = [f"--{name}" for name in ("sequence", "plan") if getattr(args, name) is not None]
        if given:
            raise ValueError(f"--fault has a sequence and a plan of its own, and does not go with {given[0]}")
        return _list_faults(args) if args.fault == "list" else _explore_fault(args)
    plans = [Plan.parse(args.plan)] if args.plan else None
    start_s = time.perf_counter()
    rows, violations = [], []
    for sequence in args.sequence or explore.SEQUENCES:
        sequence_start_s = time.perf_counter()
        results = list(explore.explore(sequence, plans, num_threads=args.threads))
        bad = [result for result in results if not (result.is_ok and result.is_complete)]
        violations += bad
        rows.append(
            {
                "sequence": sequence,
                "num_setups": len(results),
                "num_states": sum(result.num_states for result in results),
                "num_steps": sum(result.num_steps for result in results),
                "seconds": time.perf_counter() - sequence_start_s,
                "verdict": bad[0].verdict if bad else "ok",
            }
        )
        _tell(f"[{time.perf_counter() - start_s:6.2f} s] {sequence}: {rows[-1]['verdict']}")
    planted = [] if args.sequence or args.plan else list(explore.run_all(explore.PLANTED.values()))
    missed = [result.setup.fault for result in planted if result.is_ok]
    is_ok = not violations and not missed
    if args.json:
        print(
            json.dumps(
                {
                    "ok": is_ok,
                    "sequences": rows,
                    "planted": {result.setup.fault: result.verdict for result in planted},
                    "seconds": time.perf_counter() - start_s,
                    "violations": [result.tell() for result in violations[:3]],
                }
            )
        )
        return 0 if is_ok else 1
    columns = ("sequence", "setups", "states", "steps", "seconds", "verdict")
    print(format_table(columns, [[*list(row.values())[:4], f"{row['seconds']:.1f}", row["verdict"]] for row in rows]))
    print(
        "R = 2 with at most one expired wait, R = 3 without; states: where the search had to branch; ok: none is left"
    )
    if planted:
        print()
        found = [(result.setup.fault, result.verdict, result.violation.split(";")[0]) for result in planted]
        print(format_table(("planted fault", "found", "as"), found))
    for result in violations[:1]:
        print(f"\n{result.tell()}")
    return 0 if is_ok else 1


def _list_faults(args: argparse.Namespace) -> int:
    from mok_modular.cli.explore import PLANTED

    if args.json:
        print(json.dumps({"ok": True, "faults": list(PLANTED)}))
        return 0
    rows = [(name, setup.sequence, setup.plan, setup.layout.name) for name, setup in PLANTED.items()]
    print(format_table(("fault", "sequence", "plan", "layout"), rows))
    return 0


def _explore_fault(args: argparse.Namespace) -> int:
    from mok_modular.cli import explore

    if args.fault not in explore.PLANTED:
        raise ValueError(f"--fault must be list or one of {', '.join(explore.PLANTED)}; got {args.fault!r}")
    result = explore.search(explore.PLANTED[args.fault])
    if args.json:
        report = {"ok": result.is_ok, "fault": args.fault, "verdict": result.verdict, "violation": result.violation}
        print(json.dumps(report | {"num_states": result.num_states, "story": result.story}))
    else:
        print(result.tell() if not result.is_ok else f"{result.setup.name}: nothing found")
    return 1 if not result.is_ok else 0
