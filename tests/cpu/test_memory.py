"""Memory: the formulas of docs/memory.md, the estimate, and what is allocated are the same numbers."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import FULL_RING, SMALL_RING, all_ranks, build, call_both, forward, make_workload

from mok_modular import PRESETS, LocalGroup, MoEShape, MoKConfig, functional
from mok_modular.cli import main
from mok_modular.memory import Memory, estimate
from mok_modular.protocol.sizes import Sizes

PAGE = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
FORMULAS = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (?:yes|no|with|one)", PAGE, flags=re.M))

CONFIGS: list[dict[str, Any]] = [
    SMALL_RING,
    FULL_RING,
    {},
    {"minibatch_size": 512, "macrobatch_size": 1536, "row_block": 256},
    {**FULL_RING, "dispatch": "push"},
    {**FULL_RING, "dispatch": "pull_once"},
    {**FULL_RING, "combine": "pull"},
    {**SMALL_RING, "schedule_capacity_multiplier": 1.3, "signal_grain": "minibatch"},
    {**SMALL_RING, "wire": "mxfp8"},
]

LAYERS = [
    (MoEShape("a", 128, 256, 8, 2, 384), 2, 150),
    (MoEShape("b", 192, 320, 12, 3), 4, 77),
    (MoEShape("c", 2880, 640, 6, 1, 64), 1, 1),
    (MoEShape("d", 64, 64, 512, 10, 64), 8, 1000),
    (MoEShape("e", 64, 64, 4, 2), 2, 0),
]


def words(shape: MoEShape, config: MoKConfig, num_ranks: int, num_tokens: int, has_backward: bool) -> dict[str, Any]:
    """The words of the page, computed from its own table."""
    values: dict[str, Any] = {
        "T": num_tokens,
        "H": shape.hidden_size,
        "I": shape.intermediate_size,
        "S": shape.shared_intermediate_size,
        "E": shape.num_experts,
        "K": shape.topk,
        "R": num_ranks,
        "b": config.row_block or 128,
        "N": config.minibatch_size,
        "macrobatch_size": config.macrobatch_size,
        "m": config.schedule_capacity_multiplier,
        "ceil": math.ceil,
        "min": min,
        "max": max,
        "is_backward": int(has_backward),
        "is_direct": int(config.dispatch == "push" or config.combine == "pull"),
        "is_push": int(config.dispatch == "push"),
        "is_once": int(config.dispatch == "pull_once"),
        "is_wire": int(config.wire == "mxfp8"),
    }

    def meaning(word: str, *, last: bool = False) -> Any:
        """The formula behind a word: the first in its row of the table, or the last."""
        (row,) = re.findall(rf"^\| `{word}` \| (.*) \|$", PAGE, flags=re.M)
        return eval(re.findall(r"`([^`]+)`", row)[-1 if last else 0], values)

    values["P"] = meaning("P")
    if values["m"] is not None:
        values["P"] = min(values["P"], meaning("P", last=True))
    for word in ("C", "M", "G"):
        values[word] = meaning(word)
    values["is_partial"] = int(values["M"] < values["C"])
    for word, pattern in (("W", r"`W`, .*?`([^`]+)`\."), ("L", r"`L`, .*?`([^`]+)`\."), ("Z", r"`Z`, .*?`([^`]+)`\.")):
        values[word] = eval(re.search(pattern, PAGE, flags=re.S)[1], values)  # type: ignore[index]
    return values


@pytest.mark.parametrize("options", CONFIGS, ids=str)
@pytest.mark.parametrize(("shape", "num_ranks", "num_tokens"), LAYERS, ids=str)
@pytest.mark.parametrize("has_backward", [False, True])
def test_formulas(
    shape: MoEShape, num_ranks: int, num_tokens: int, options: dict[str, Any], has_backward: bool
) -> None:
    config = MoKConfig(**options)
    memory = estimate(shape, config, num_ranks=num_ranks, num_tokens=num_tokens, has_backward=has_backward)
    values = words(shape, config, num_ranks, num_tokens, has_backward)
    sizes = {**memory.regions, "schedule": memory.schedule, "context": memory.context}
    assert set(FORMULAS) == set(sizes)
    for name, size in sizes.items():
        assert eval(FORMULAS[name], values) == size, name
    whole, forward_only = re.findall(r"`(M\*\([^`]+\))`", PAGE[PAGE.index("**Ring**") :])[:2]
    assert eval(whole if has_backward else forward_only, values) == memory.ring
    assert memory.workspace == sum(memory.regions.values())


@pytest.mark.parametrize("options", [c for c in CONFIGS if "wire" not in c], ids=str)
@pytest.mark.parametrize("num_tokens", [[150, 90], [0, 0], [1, 40, 0, 300]], ids=str)
def test_what_is_allocated(options: dict[str, Any], num_tokens: list[int]) -> None:
    """A workspace before its first call is a small one; afterwards it is what was estimated, region by region."""
    workload = make_workload(num_tokens)
    config = MoKConfig(**options)

    def estimated(has_backward: bool) -> Memory:
        return estimate(
            workload.shape,
            config,
            num_ranks=len(num_tokens),
            num_tokens=max(num_tokens),
            has_backward=has_backward,
        )

    def allocated(workspace: functional.Workspace) -> dict[str, int]:
        native, rank = workspace.shared.native, workspace.member.rank()
        return {name: native.region_bytes(rank, name) for name in estimated(True).regions}

    def step(workspace: functional.Workspace) -> None:
        schedule = build(workload, workspace, config)
        _, none = forward(workload, workspace, config, schedule, save_context=False)
        assert allocated(workspace) == estimated(False).regions
        output, context = forward(workload, workspace, config, schedule)
        want = estimated(True)
        if len(output) == max(num_tokens):  # a context has this rank's tokens, the estimate the most of any
            assert num_bytes(context) == want.context
            assert sum(tensor.nbytes for tensor in schedule.tensors().values()) == want.schedule
        assert num_bytes(none) == estimated(False).context == 0
        call_both(workload, workspace, config)
        assert allocated(workspace) == want.regions
        assert workspace.num_bytes() == len(num_tokens) * want.workspace

    all_ranks(workload, config, step)


def num_bytes(context: functional.MoKForwardContext) -> int:
    return sum(getattr(context, item.name).nbytes for item in dataclasses.fields(context))


def test_the_ring_bounds_what_routing_may_bring() -> None:
    shape = PRESETS["kimi-k2.7"]
    memory = estimate(shape, MoKConfig(), num_ranks=64, num_tokens=4096)
    sizes = Sizes(MoKConfig(), 64, 4096, shape.hidden_size, shape.topk)
    assert sizes.capacity_rows(6) > 2_000_000
    assert memory.ring == 131072 * (6 * 7168 + 12 * 2048 + 2048 // 8 + 4)
    halved = estimate(shape, MoKConfig(macrobatch_size=65536), num_ranks=64, num_tokens=4096)
    assert halved.ring * 2 == memory.ring
    assert halved.context < 0.51 * memory.context
    shown = re.findall(r"\| ([\d.]+) \|$", PAGE[PAGE.index("## Example") :], flags=re.M)
    sizes_in_order = (memory.workspace, memory.ring, memory.carry, memory.schedule, memory.context)
    assert shown == [f"{size / 1e9:.2f}" for size in sizes_in_order]


def test_wrong_ranks_are_named() -> None:
    with pytest.raises(ValueError, match="384 experts on 7 ranks"):
        estimate(PRESETS["kimi-k2.7"], MoKConfig(), num_ranks=7, num_tokens=1)


def test_doctor_tells_the_sums(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    assert main(["doctor", "--json", "--shape", "64,128,8,2,192", "--ranks", "2", "--tokens", "150"]) == 0
    report = json.loads(capsys.readouterr().out)
    shape = MoEShape("64,128,8,2,192", 64, 128, 8, 2, 192)
    memory = estimate(shape, MoKConfig(), num_ranks=2, num_tokens=150)
    assert report["memory"] == memory.to_json()
    assert "2 ranks x 150 tokens" in report["facts"]["memory of"]

    workload = make_workload([150, 150])

    def step(member: Any) -> int:
        workspace = functional.create_workspace(MoKConfig(), member, num_local_tokens=150, hidden_size=64, topk=2)
        call_both(workload, workspace, MoKConfig())
        return workspace.num_bytes()

    assert LocalGroup(2).run(step) == [2 * report["memory"]["workspace"]] * 2
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for name in ("workspace", "ring", "carry", "schedule", "context"):
        assert re.search(rf"memory: {name} +\d", text)
    for wrong in (["--ranks", "0"], ["--tokens", "-1"], ["--shape", "1,2"], ["--ranks", "3"]):
        with pytest.raises(SystemExit):
            main(["doctor", *wrong])
