"""The bars of this library: figures that must hold, measured here and now.

    python benchmarks/bars.py forward_cpu            a table
    python benchmarks/bars.py forward_cpu --json     one JSON object, nothing else on stdout

A group is a module bars_GROUP.py beside this file with `bars()`, a generator of Bar, and perhaps `figures` that are
kept in a file and `finish(path)`, which gives a text to print once they are. Exit code 0 when every bar of the group
holds, 1 when one is missed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import time
from pathlib import Path

from bar import Bar
from machine import write_results

from mok_modular.protocol.errors import format_table

GROUPS = sorted(path.stem.removeprefix("bars_") for path in Path(__file__).parent.glob("bars_*.py"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()

    start_s = time.perf_counter()
    bars: list[Bar] = []
    module = importlib.import_module(f"bars_{args.group}")
    for bar in module.bars():
        bars.append(bar)
        took_s = time.perf_counter() - start_s
        print(f"[{took_s:6.2f} s] {_verdict(bar)}: {bar.name}", file=sys.stderr, flush=True)
    is_ok = all(bar.is_ok for bar in bars)
    figures = getattr(module, "figures", None)
    if figures is not None:  # a group that needs a machine of its own keeps what it saw
        rows = [bar.to_json() for bar in bars]
        path = write_results(args.group, {"ok": is_ok, "bars": rows, "figures": figures})
        print(f"wrote {path}", file=sys.stderr)
        if hasattr(module, "finish"):  # tables of its own, a picture beside the results
            text = module.finish(path)
            print(text, end="\n\n", file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.json:
        rows = [
            {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in row.items()
            }
            for row in (bar.to_json() for bar in bars)
        ]
        print(json.dumps({"group": args.group, "ok": is_ok, "seconds": time.perf_counter() - start_s, "bars": rows}))
    else:
        cells = [
            (bar.name, _number(bar.value), f"{bar.rule} {bar.bar:g} {bar.unit}".rstrip(), _verdict(bar)) for bar in bars
        ]
        print(format_table(("name", "value", "bar", "verdict"), cells))
    return 0 if is_ok else 1


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _verdict(bar: Bar) -> str:
    return "ok" if bar.is_ok else "MISSED"


if __name__ == "__main__":
    sys.exit(main())
