"""The explorer: sequences of calls end with no state left, planted faults are found, and so are faults in the sources
of stages, since its models are recorded from them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers import FULL_RING, SMALL_RING, backward, build, forward, make_workload, recompute, workspace_for
from native import ROOT, build_target

from mok_modular import LocalGroup, MoKConfig, cli
from mok_modular.cli.explore import (
    FIRST_TWO,
    LAYOUTS,
    ONE_GENERATION_EACH,
    PLANTED,
    SEQUENCES,
    SMALL,
    STRADDLING,
    Layout,
    Setup,
    explore,
    search,
    setups,
)
from mok_modular.protocol.extension import extension
from mok_modular.protocol.plan import Plan, all_plans
from mok_modular.protocol.roster import roster

FEW_PLANS = [Plan.parse(text) for text in ("split", "fused", "dispatch|gate_up+swiglu+down+combine")]


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_no_state_is_left(sequence: str) -> None:
    """Three plans here; `mok-modular explore` goes through all 16 in about 80 s on two cores."""
    results = list(explore(sequence, FEW_PLANS))
    assert len(results) == len(list(setups(sequence, FEW_PLANS)))
    for result in results:
        assert result.is_ok, result.tell()
        assert result.is_complete
        assert result.verdict == "ok"


def test_every_plan_once() -> None:
    for plan in all_plans():
        for layout in LAYOUTS[3]:
            assert search(Setup("FFBB", str(plan), layout, "tasks")).verdict == "ok"


def test_every_fault_is_planted() -> None:
    assert set(PLANTED) == set(extension().protocol_faults())


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_found(fault: str) -> None:
    """And nothing is found where it is not planted."""
    setup = PLANTED[fault]
    assert setup.fault == fault
    result = search(setup)
    assert result.verdict == "violation"
    assert result.story
    told = result.tell()
    assert told.splitlines()[-1] == f"  So {result.violation}."
    without = search(dataclasses.replace(setup, fault=""))
    assert without.verdict == "ok", without.tell()


@pytest.mark.parametrize("fault", ["done_before_publish", "push_without_entered"])
def test_what_the_planted_fault_is_not(fault: str) -> None:
    """Both are planted where a recomputation does not wait at its end, which is right by itself."""
    assert search(dataclasses.replace(PLANTED[fault], fault="recompute_returns_early")).verdict == "ok"


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("recompute_without_done", "reads x of rank 0 and finds what call 2 wrote instead of what call 1 wrote"),
        ("ring_counts_generations", "dispatch[1] waits for slot_free[3] of rank 0, call 1, has 0 and wants 1"),
        (
            "carry_without_read_edge",
            "finds what call 2 wrote in macrobatch 1 instead of what call 2 wrote in macrobatch 0",
        ),
        ("writes_after_false_wait", "returns an output made of what was written after a false wait"),
        ("roles_counted_by_call", "gate_up[0,0] waits for x_ready[0] of rank 0, call 1, has 0 and wants 1"),
        ("reset_zeroes_done", "publish waits for done[0] even of rank 0, has 0 and wants 20"),
    ],
)
def test_violations_in_words(fault: str, text: str) -> None:
    assert text in search(PLANTED[fault]).violation


UNREDUCED = [(sequence, "one", is_expired) for sequence in ("SS", "CC", "F", "FRF") for is_expired in (False, True)]
UNREDUCED += [(sequence, "streams", False) for sequence in ("SS", "CC", "F")]
"""With streams the others have millions of states."""


@pytest.mark.parametrize(("sequence", "workers", "is_expiry_allowed"), UNREDUCED)
def test_reduction_changes_no_verdict(sequence: str, workers: str, is_expiry_allowed: bool) -> None:
    setup = Setup(sequence, "fused", SMALL, workers, is_expiry_allowed=is_expiry_allowed)
    reduced, whole = search(setup), search(setup, is_reduced=False)
    assert (reduced.verdict, whole.verdict) == ("ok", "ok")
    assert reduced.num_states <= whole.num_states


@pytest.mark.parametrize("fault", ["", "roles_counted_by_call"])
def test_reduction_changes_no_verdict_where_roles_are_drawn(fault: str) -> None:
    layout = Layout("two generations of one rank", ((0, 0),), (0,), ring_blocks=1)
    setup = Setup("F", FIRST_TWO, layout, "ctas", fault=fault, num_comm_sms=1)
    reduced, whole = search(setup), search(setup, is_reduced=False)
    assert reduced.verdict == whole.verdict == ("violation" if fault else "ok")
    assert 1 < reduced.num_states < whole.num_states


@pytest.mark.parametrize("fault", ["one_id_region", "recompute_without_done", "surplus_sends_no_done", "lost_signal"])
def test_reduction_hides_no_fault(fault: str) -> None:
    setup = dataclasses.replace(PLANTED[fault], workers="streams")
    assert search(setup).verdict == "violation"
    assert search(setup, is_reduced=False).verdict == "violation"


def test_a_search_that_is_cut_short_says_so() -> None:
    result = search(Setup("F", "fused", LAYOUTS[2][0], "streams", is_expiry_allowed=True), max_states=10)
    assert result.is_ok
    assert not result.is_complete
    assert result.verdict == "not finished"


def test_wrong_names() -> None:
    with pytest.raises(ValueError, match="no fault of the protocol has the name 'nothing'"):
        search(Setup("F", "split", SMALL, fault="nothing"))
    with pytest.raises(ValueError, match="a sequence is made of S, F, C, B and R"):
        search(Setup("FX", "split", SMALL))
    with pytest.raises(ValueError, match="a backward without a forward"):
        search(Setup("B", "split", SMALL))


# ---- one edge table: models and real runs ----


def edge_table() -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """By edge: the stages that publish it, and those that wait for it. Tickets are drawn, not published."""
    return {edge.name: (edge.writers, edge.readers) for edge in roster().edges if edge.writers}


def real_uses(config: MoKConfig, precision: str = "bf16") -> set[tuple[str, str, str]]:
    """(stage, edge, wait or publish) of a schedule, a forward, a recomputation and a backward of the stage code."""
    workload = make_workload([150, 140, 0], E=3, K=4, H=128, S=128, precision=precision)

    def step(member: Any) -> set[tuple[str, str, str]]:
        workspace = workspace_for(workload, member, config)
        schedule = build(workload, workspace, config)
        _, context = forward(workload, workspace, config, schedule)
        recompute(workload, workspace, config, schedule)
        backward(workload, workspace, config, schedule, context)
        return workspace.shared.signal_uses

    return LocalGroup(3).run(step)[0]


def test_stage_code_uses_the_same_edges() -> None:
    """Every wait and signal of the stage code, in all plans, is in the table, and every row of the table is in use."""
    table = edge_table()
    seen: set[tuple[str, str, str]] = set()
    for plan in all_plans():
        seen |= real_uses(MoKConfig(mode=str(plan), **SMALL_RING, trace=True))
    seen |= real_uses(MoKConfig(mode="split", **SMALL_RING, trace=True), "mxfp8")
    for mode in ("split", "fused"):
        seen |= real_uses(MoKConfig(mode=mode, **FULL_RING, dispatch="push", combine="pull", trace=True))
        seen |= real_uses(MoKConfig(mode=mode, **FULL_RING, dispatch="pull_once", trace=True))
    waits = {(stage, edge) for stage, edge, what in seen if what == "wait"}
    signals = {(stage, edge) for stage, edge, what in seen if what == "publish"}
    anywhere = {edge for edge, (writers, _) in table.items() if len(writers) > 15}
    assert anywhere == {"done", "exited"}
    for stage, edge in waits:
        assert stage in table[edge][1], f"{stage} waits for {edge}"
    for stage, edge in signals:
        assert stage in table[edge][0], f"{stage} signals {edge}"
    for edge, (writers, readers) in table.items():
        if edge not in anywhere:
            assert {(stage, edge) for stage in writers} <= signals, edge
        if edge != "published":
            assert {(stage, edge) for stage in readers} <= waits, edge


def test_models_use_every_edge_of_the_table() -> None:
    used: set[str] = set()
    for plan in all_plans():
        used |= set(search(Setup("SFCB", str(plan), LAYOUTS[2][0])).edges)
    full = dataclasses.replace(LAYOUTS[2][0], ring_blocks=8)
    used |= set(search(Setup("F", "split", full, is_push_dispatch=True, is_pull_combine=True)).edges)
    used |= set(search(Setup("F", "split", full, is_pull_once=True)).edges)
    used |= set(search(Setup("FB", "split", STRADDLING)).edges)
    assert set(edge_table()) - used == set()


# ---- what is real in a model: launches and stages ----


def test_launches_are_those_of_the_targets() -> None:
    """Of a GPU with SMs for communication: copies on a stream of their own, and reduce after both."""
    setup = Setup("F", "dispatch|gate_up+swiglu+down+combine", LAYOUTS[2][0], "ctas", num_comm_sms=1)
    found = [(row["name"], row["stream"], row["is_join"], row["has_roles"]) for row in setup.launches("F")]
    products = "gate_up+swiglu+down+combine"
    generation = [("dispatch", 0, False, False), (products, 1, False, True)]
    shared = [("shared_gate_up", 1, False, False), ("shared_down", 1, False, False)]
    assert found == [("publish", 0, False, False), *shared, *generation, *generation, ("reduce", 1, True, False)]
    alone = dataclasses.replace(setup, num_comm_sms=None).launches("F")
    assert {row["stream"] for row in alone} == {1}
    assert [row["has_experts_in_turn"] for row in alone if row["name"] == "dispatch"] == [True, True]
    host = dataclasses.replace(setup, workers="streams").launches("F")
    assert [row["stream"] for row in host if row["name"] == "dispatch"] == [0, 0]
    assert [row["is_last_group"] for row in host] == [False] * 6 + [True, False]


EDITS = {
    "combine.h": (
        """    free_slot(args.call, task.block, signals);
  }

  MOK_DEVICE static Cost cost(""",
        """  }

  MOK_DEVICE static Cost cost(""",
        Setup("F", "dispatch|gate_up+swiglu|down|combine", ONE_GENERATION_EACH, "one"),
        "dispatch[0] waits for slot_free[1] of rank 0, call 1, has 0 and wants 1",
    ),
    "reduce.h": (
        "if (!signals.wait_rank_once(Edge::done, src, signals.seen_dones())) return false;",
        "if (src < 0) return false;",
        Setup("F", "fused", SMALL, "tasks"),
        "and finds nothing instead of what call 1 wrote for row block 0",
    ),
    "grouped_gemm.h": (
        "signals.add(is_hidden ? Edge::hidden_ready : Edge::gate_up_ready, task.block);",
        "signals.add(Edge::hidden_ready, task.block);",
        Setup("F", "split", SMALL, "one"),
        "swiglu[0] waits for gate_up_ready[0] of rank 0, call 1, has 0 and wants 3",
    ),
}
"""Faults in csrc/stages, built together: the lines, what they become, and a setup in which each must be found, and how
it is told. A setup shows one of them only."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fault_in_a_stage_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    shutil.copytree(ROOT / "tests" / "threads", tmp_path / "tests" / "threads")
    shutil.copy(ROOT / "CMakeLists.txt", tmp_path)
    for file, (old, new, _, _) in EDITS.items():
        path = tmp_path / "csrc" / "stages" / file
        assert path.read_text().count(old) == 1
        path.write_text(path.read_text().replace(old, new))
    built = build_target("_explore", tmp_path)
    spec = importlib.util.spec_from_file_location("_explore", next((built / "explore").glob("_explore*")))
    assert spec is not None and spec.loader is not None
    edited = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(edited)
    for _, _, setup, _ in EDITS.values():
        assert search(setup).verdict == "ok"
    monkeypatch.setattr("mok_modular.cli.explore.extension", lambda: edited)
    for file, (_, _, setup, text) in EDITS.items():
        assert text in search(setup).violation, file


# ---- the command ----


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explore", "--sequence", "CC", "--plan", "split", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["sequences"][0]["sequence"] == "CC"
    assert report["sequences"][0]["num_states"] > 0
    assert cli.main(["explore", "--sequence", "SSS"]) == 0
    assert "SSS" in capsys.readouterr().out


def test_command_tells_a_story(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explore", "--fault", "recompute_without_done"]) == 1
    out = capsys.readouterr().out
    assert "rank 0, call 2, publish: " in out
    assert "So rank 1, call 1, dispatch[0] reads x of rank 0" in out
    with pytest.raises(SystemExit, match="2"):
        cli.main(["explore", "--fault", "nothing"])
    assert "--fault must be list or one of one_id_region" in capsys.readouterr().err
