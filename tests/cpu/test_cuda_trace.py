"""What the host makes of a GPU's records. (That the records are right: tests/gpu/test_trace_gpu.py.)"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from mok_modular.protocol import trace, trace_plot
from mok_modular.protocol.extension import extension
from mok_modular.protocol.roster import roster
from mok_modular.targets.cuda import trace as cuda_trace

LAUNCHES = [("schedule", "comm")], [("fused", "compute"), ("reduce", "compute")]
START_NS = 1_700_000_000_000_000_000
CTA, SCHEDULER, PRODUCER, CONSUMERS, PUBLISHER, COMMUNICATOR = range(6)


def roles() -> tuple[str, ...]:
    return tuple(extension().trace_role_names())


def record(
    begin: int,
    end: int,
    launch: int,
    cta: int,
    role: int,
    kind: str,
    stage: str,
    edge: str = "",
    is_closed: bool = True,
) -> bytes:
    """A TraceRecord of csrc/trace.h."""
    edges = [*roster().edge_names, *extension().inner_wait_names()]
    edge_number = edges.index(edge) if edge else -1
    worker, stage_number = cta * len(roles()) + role, roster().stage_names.index(stage)
    kind_number = trace.KINDS.index(kind)
    times = START_NS + begin, START_NS + end, 7
    return struct.pack(
        "<3q10i", *times, 0, worker, launch, kind_number, stage_number, 3, 1, edge_number, -1, int(is_closed)
    )


def read(records: list[bytes], num_dropped: int = 0) -> trace.Trace:
    found = trace.Trace("ns", roles=roles())
    calls = [cuda_trace.TracedCall("schedule", 0, LAUNCHES[0]), cuda_trace.TracedCall("forward", 1, LAUNCHES[1])]
    taken = torch.tensor(list(b"".join(records)), dtype=torch.uint8)
    cuda_trace.split_calls(found, taken, calls, num_dropped)
    return found


def test_sizes_and_names() -> None:
    assert cuda_trace.RECORD_BYTES == len(record(0, 1, 0, 0, 0, "work", "schedule")) == 64
    assert roles()[:6] == ("CTA", "scheduler", "producer", "consumers", "publisher", "communicator 0")
    assert len(roles()) == 9
    assert extension().inner_wait_names() == ["operands", "message_slot", "stored_tile"]


def test_records_come_to_their_calls_and_gaps_are_left_out() -> None:
    gap = bytes(cuda_trace.RECORD_BYTES)
    found = read(
        [
            record(900, 950, 2, 4, CTA, "work", "reduce"),
            gap,
            record(0, 10, 0, 0, CTA, "work", "schedule"),
            record(100, 130, 1, 17, CONSUMERS, "wait", "gate_up", "operands"),
            record(130, 700, 1, 17, CONSUMERS, "work", "gate_up"),
            gap,
            record(50, 120, 1, 17, SCHEDULER, "wait", "gate_up", "x_ready", is_closed=False),
        ],
        num_dropped=5,
    )
    assert found.calls == ["schedule", "forward"]
    assert found.num_dropped == 5
    assert [(each.call, each.kernel, each.launch, each.stream, each.stage) for each in found.intervals] == [
        (0, "schedule", 0, "comm", "schedule"),
        (1, "reduce", 1, "compute", "reduce"),
        (1, "fused", 0, "compute", "gate_up"),
        (1, "fused", 0, "compute", "gate_up"),
        (1, "fused", 0, "compute", "gate_up"),
    ]
    names = [(found.worker_name(each.worker), each.name) for each in found.intervals]
    assert names[1:] == [
        ("CTA 4", "reduce 3.1"),
        ("CTA 17 / consumers", "wait operands[7]"),
        ("CTA 17 / consumers", "gate_up 3.1"),
        ("CTA 17 / scheduler", "wait x_ready[7]"),
    ]
    assert [each.is_closed for each in found.intervals] == [True] * 4 + [False]
    assert found.overlaps() == []
    assert set(found.coverage().values()) == {1.0}
    assert set(found.coverage()) == {(0, -1, 0, 0), (1, -1, 1, 36), (1, -1, 0, 156), (1, -1, 0, 154)}
    assert found.totals()["gate_up"] == {"wait": 100, "work": 570, "publish": 0, "load": 0, "store": 0, "idle": 0}


def test_calls_without_records() -> None:
    found = read([])
    assert (found.calls, found.intervals, found.num_dropped) == (["schedule", "forward"], [], 0)


def many_ctas(num_ctas: int, *extra: bytes) -> trace.Trace:
    """A tile a CTA, and copy CTAs of an earlier kernel of which there are three times as many."""
    records = [record(0, 40 + cta % 5, 0, cta, CTA, "work", "schedule") for cta in range(3 * num_ctas)]
    for cta in range(num_ctas):
        for role, kind, edge in (
            (SCHEDULER, "wait", "x_ready"),
            (PRODUCER, "load", ""),
            (CONSUMERS, "work", ""),
            (CONSUMERS, "store", ""),
            (PUBLISHER, "publish", ""),
        ):
            begin = 100 if kind != "store" else 300
            records.append(record(begin, begin + 200, 1, cta, role, kind, "gate_up", edge))
    return read([*records, *extra])


def test_names_in_a_viewer() -> None:
    data = many_ctas(20).to_chrome()
    named = {(each["pid"], each.get("tid")): each["args"]["name"] for each in data["traceEvents"] if each["ph"] == "M"}
    assert named[0, None] == "rank 0"
    assert {"comm CTA 59", "compute CTA 17 / consumers", "compute CTA 0 / scheduler"} <= set(named.values())
    kinds = {named[each["pid"], each["tid"]]: each["cat"] for each in data["traceEvents"] if each["ph"] == "X"}
    assert kinds["compute CTA 3 / producer"] == "load"


def test_some_ctas_are_drawn_with_all_their_roles(tmp_path: Path) -> None:
    found = many_ctas(132)
    call = [each for each in found.intervals if found.calls[each.call] == "forward"]
    drawn = trace_plot._drawn(found, call)
    ctas = sorted({each.worker // len(roles()) for each in drawn})
    assert len({each.track for each in drawn}) == trace_plot.MAX_DRAWN_TRACKS
    assert len(ctas) == trace_plot.MAX_DRAWN_TRACKS // 4
    assert ctas[0] == 0
    assert ctas[-1] > 120
    assert len(drawn) == 5 * len(ctas)
    few = many_ctas(10)
    assert trace_plot._drawn(few, few.intervals[30:]) == few.intervals[30:]


@pytest.mark.slow
def test_picture_of_many_ctas(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    few, found = many_ctas(10), many_ctas(132)
    trace_plot.plot({"split": few, "fused": found}, tmp_path / "both.png")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
