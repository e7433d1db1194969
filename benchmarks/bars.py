"""The bars of this library: figures that must hold, measured here and now.

    python benchmarks/bars.py forward_cpu            all bars of a group, as a table
    python benchmarks/bars.py forward_cpu --quick    fewer runs of the same kinds, and no times on a CPU: what CI runs
    python benchmarks/bars.py forward_cpu --json     one JSON object, nothing else on stdout
    python benchmarks/bars.py --records              which files in benchmarks/results/ were measured on these sources

A group is a module bars_GROUP.py beside this file with

    bars(quick)       a generator of Bar (bar.py). quick is False for the whole group, which the published tables show,
                      and True for a part of it that takes about a minute. Where there is a second argument, seconds, it
                      is what --seconds gives, or None: how long random runs may take.

and, if it wants them,

    figures           a dict. Where there is one, the bars and it are written to benchmarks/results/ (machine.py).
    RECORD            what that file is called, in place of the group.
    finish(path)      returns a text to print after that.
    COVERS            a tuple of string literals: files that the group runs without importing them, relative to the
                      repository, such as "examples/train_tiny_moe.py".

A record holds a hash of the sources that it covers: csrc/, mok_modular/, the group's module, the modules beside it that
it imports, and COVERS. It is stale as soon as one of them changes.

Exit code 0 when every bar of the group holds, 1 when one is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import math
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from bar import Bar
from machine import RESULTS, covered_files, state_of_record, write_results

from mok_modular.protocol.errors import format_table

HERE = Path(__file__).parent
GROUPS = sorted(path.stem.removeprefix("bars_") for path in HERE.glob("bars_*.py"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("group", choices=GROUPS, nargs="?")
    what.add_argument("--records", action="store_true", help="tell which records are fresh and which are stale")
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="a part of the group that takes about a minute")
    extent.add_argument("--full", action="store_true", help="the whole group, which is the default")
    parser.add_argument("--seconds", type=float, help="how long the random runs of a group may take, where it has any")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    if args.records:
        return _tell_records(args.json)
    module = importlib.import_module(f"bars_{args.group}")
    options = {"quick": args.quick}
    if args.seconds is not None:
        if "seconds" not in inspect.signature(module.bars).parameters:
            parser.error(f"--seconds: {args.group} has no random runs")
        options["seconds"] = args.seconds
    return _measure(args.group, module, options, args.json)


def _measure(group: str, module: ModuleType, options: dict[str, Any], is_json: bool) -> int:
    quick = options["quick"]
    start_s = time.perf_counter()
    bars: list[Bar] = []
    for bar in module.bars(**options):
        bars.append(bar)
        took_s = time.perf_counter() - start_s
        print(f"[{took_s:6.2f} s] {_verdict(bar)}: {bar.name}", file=sys.stderr, flush=True)
    is_ok = all(bar.is_ok for bar in bars)
    figures = getattr(module, "figures", None)
    if figures is not None:  # a group that needs a machine of its own keeps what it saw
        rows = [bar.to_json() for bar in bars]
        report = {"ok": is_ok, "quick": quick, "bars": rows, "figures": figures}
        path = write_results(getattr(module, "RECORD", group), report, covers=covered_files(Path(str(module.__file__))))
        print(f"wrote {path}", file=sys.stderr)
        if hasattr(module, "finish"):  # tables of its own, a picture beside the results
            text = module.finish(path)
            print(text, end="\n\n", file=sys.stderr if is_json else sys.stdout, flush=True)
    if is_json:
        rows = [
            {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in row.items()
            }
            for row in (bar.to_json() for bar in bars)
        ]
        report = {"group": group, "ok": is_ok, "quick": quick, "seconds": time.perf_counter() - start_s, "bars": rows}
        print(json.dumps(report))
    else:
        cells = [
            (bar.name, _number(bar.value), f"{bar.rule} {bar.bar:g} {bar.unit}".rstrip(), _verdict(bar)) for bar in bars
        ]
        print(format_table(("name", "value", "bar", "verdict"), cells))
    return 0 if is_ok else 1


def _tell_records(is_json: bool) -> int:
    found = [state_of_record(path) for path in sorted(RESULTS.glob("*.json"))]
    if is_json:
        print(json.dumps({"ok": True, "records": [dataclasses.asdict(record) for record in found]}))
    else:
        print(format_table(("record", "measured", "bars", "state"), [dataclasses.astuple(record) for record in found]))
    return 0


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _verdict(bar: Bar) -> str:
    return "ok" if bar.is_ok else "MISSED"


if __name__ == "__main__":
    sys.exit(main())
