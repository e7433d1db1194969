"""Plans: what parses, what does not, masks, and the launches that follow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mok_modular.protocol.plan import STAGES, Launch, Plan, all_plans

MIXED = "dispatch|gate_up+swiglu|down+combine"


def test_all_plans() -> None:
    plans = all_plans()
    assert len(plans) == len(set(plans)) == 16
    assert plans[0].is_fused
    assert plans[-1].is_split
    for plan in plans:
        assert tuple(stage for group in plan.groups for stage in group) == STAGES
        assert Plan.parse(str(plan)) == plan
        assert Plan.parse("|".join("+".join(group) for group in plan.groups)) == plan


def test_names() -> None:
    assert str(Plan.parse("dispatch+gate_up+swiglu+down+combine")) == "fused"
    assert str(Plan.parse("dispatch|gate_up|swiglu|down|combine")) == "split"
    assert str(Plan.parse(" dispatch | gate_up + swiglu | down+combine ")) == MIXED
    assert not Plan.parse(MIXED).is_fused
    assert not Plan.parse(MIXED).is_split


def test_group_masks() -> None:
    assert Plan.parse("fused").group_masks == (0b11111,)
    assert Plan.parse("split").group_masks == (1, 2, 4, 8, 16)
    assert Plan.parse(MIXED).group_masks == (0b00001, 0b00110, 0b11000)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "empty stage name"),
        ("turbo", "'turbo' is not a stage"),
        ("Fused", "'Fused' is not a stage"),
        ("fused|combine", "'fused' is not a stage"),
        ("dispatch|gate_up+swiglu|down|combine|", "empty stage name"),
        ("dispatch||gate_up|swiglu|down|combine", "empty stage name"),
        ("dispatch|gate_up+|swiglu|down|combine", "empty stage name"),
        ("dispatch|gate_up|swiglu|down", "combine missing"),
        ("dispatch|gate_up", "swiglu, down, combine missing"),
        ("dispatch|gate_up+gate_up|swiglu|down|combine", "'gate_up' stands there twice"),
        ("dispatch|swiglu|gate_up|down|combine", "'gate_up' stands after 'swiglu'"),
        # Not contiguous: dispatch and combine share a kernel around the others.
        ("dispatch+combine|gate_up+swiglu+down", "'gate_up' stands after 'combine'"),
        ("schedule|dispatch|gate_up|swiglu|down|combine", "'schedule' is not a stage"),
    ],
)
def test_refused(text: str, part: str) -> None:
    with pytest.raises(ValueError) as caught:
        Plan.parse(text)
    assert part in str(caught.value)
    assert "in this order, each once" in str(caught.value)


@given(st.lists(st.lists(st.sampled_from(STAGES), max_size=3), max_size=6))
def test_parses_exactly_the_sixteen(groups: list[list[str]]) -> None:
    text = "|".join("+".join(group) for group in groups)
    known = {"|".join("+".join(group) for group in plan.groups) for plan in all_plans()}
    if text in known:
        assert Plan.parse(text).groups == tuple(tuple(group) for group in groups)
    else:
        with pytest.raises(ValueError):
            Plan.parse(text)


def test_groups_are_checked_too() -> None:
    with pytest.raises(ValueError, match="missing"):
        Plan((("dispatch",), ("gate_up",)))
    with pytest.raises(ValueError, match="empty group"):
        Plan((STAGES, ()))
    with pytest.raises(TypeError, match="int"):
        Plan.parse(3)  # type: ignore[arg-type]
    assert Plan([list(STAGES)]) == Plan.parse("fused")  # type: ignore[arg-type]


def test_launches_of_fused() -> None:
    assert Plan.parse("fused").launches(3, has_shared=True) == [
        Launch("fused", ("publish", "shared_gate_up", "shared_down", *STAGES), None, "compute"),
        Launch("reduce", ("reduce",), None, "compute"),
    ]
    assert Plan.parse("fused").launches(1, has_shared=False)[0].stages == ("publish", *STAGES)


def test_launches_of_a_mixed_plan() -> None:
    assert Plan.parse(MIXED).launches(2, has_shared=True) == [
        Launch("publish", ("publish",), None, "comm"),
        Launch("shared_gate_up", ("shared_gate_up",), None, "compute"),
        Launch("shared_down", ("shared_down",), None, "compute"),
        Launch("dispatch", ("dispatch",), 0, "comm"),
        Launch("gate_up+swiglu", ("gate_up", "swiglu"), 0, "compute"),
        Launch("down+combine", ("down", "combine"), 0, "compute"),
        Launch("dispatch", ("dispatch",), 1, "comm"),
        Launch("gate_up+swiglu", ("gate_up", "swiglu"), 1, "compute"),
        Launch("down+combine", ("down", "combine"), 1, "compute"),
        Launch("reduce", ("reduce",), None, "compute"),
    ]


@pytest.mark.parametrize("plan", all_plans(), ids=str)
@pytest.mark.parametrize("num_generations", [1, 2, 5])
def test_every_stage_is_launched_once_a_generation_in_data_flow_order(plan: Plan, num_generations: int) -> None:
    launches = plan.launches(num_generations, has_shared=False)
    stages = [stage for launch in launches for stage in launch.stages]
    num_passes = 1 if plan.is_fused else num_generations
    assert stages == ["publish", *(STAGES * num_passes), "reduce"]
    assert {launch.stream for launch in launches if launch.kernel in ("dispatch", "combine")} <= {"comm"}


@pytest.mark.parametrize("num_generations", [0, -1])
def test_launches_need_a_generation(num_generations: int) -> None:
    with pytest.raises(ValueError, match=f"num_generations .* got {num_generations}"):
        Plan.parse("split").launches(num_generations, has_shared=False)
