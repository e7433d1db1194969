"""Commands that look inside: `explore`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from mok_modular.errors import format_table
from mok_modular.plan import Plan


def add_commands(commands: Any) -> list[argparse.ArgumentParser]:
    """Adds the parsers of these commands and returns them."""
    explore = commands.add_parser("explore", help="every interleaving of the protocol, and the faults it must find")
    explore.add_argument(
        "--sequence",
        action="append",
        metavar="CALLS",
        help="calls in order, such as FFBB: S schedule, F forward, C recompute, B backward, R abort and reset "
        "(default: seven sequences)",
    )
    explore.add_argument("--plan", metavar="PLAN", help="this plan alone (default: all 16)")
    explore.add_argument("--fault", metavar="NAME", help="plant this fault and tell what happens (see --fault list)")
    explore.add_argument("--threads", type=int, default=2, help="searches at a time (default: 2)")
    explore.set_defaults(command=_explore)
    return [explore]


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _explore(args: argparse.Namespace) -> int:
    from mok_modular import explore

    if args.threads < 1:
        raise ValueError(f"--threads must be at least 1, got {args.threads}")
    if args.fault is not None:
        return _explore_fault(args)
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


def _explore_fault(args: argparse.Namespace) -> int:
    from mok_modular import explore

    if args.fault not in explore.PLANTED:
        raise ValueError(f"--fault must be one of {', '.join(explore.PLANTED)}; got {args.fault!r}")
    result = explore.search(explore.PLANTED[args.fault])
    if args.json:
        report = {"ok": result.is_ok, "fault": args.fault, "verdict": result.verdict, "violation": result.violation}
        print(json.dumps(report | {"num_states": result.num_states, "story": result.story}))
    else:
        print(result.tell() if not result.is_ok else f"{result.setup.name}: nothing found")
    return 1 if not result.is_ok else 0
