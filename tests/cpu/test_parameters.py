"""How a layer's parameters start, on meta devices and as DTensors too; which experts a state dict holds."""

from __future__ import annotations

import copy
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch._subclasses import FakeTensorMode

import mok_modular as mok

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_experts": 8, "topk": 2}
NAMES = ("w_routed_gate", "w_routed_up", "w_routed_down", "w_shared_gate", "w_shared_up", "w_shared_down")


def make(member: Any = None, **options: Any) -> mok.MoE:
    group = member or mok.LocalGroup(1)
    return mok.MoE(**{**SIZES, "group": group, "shared_intermediate_size": 192, **options})


def layers_of(num_ranks: int, seed: int = 3) -> list[mok.MoE]:
    """By rank, as processes that seed alike would make them."""
    layers = []
    for member in mok.LocalGroup(num_ranks).members:
        torch.manual_seed(seed)
        layers.append(make(member))
    return layers


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, given), (other, wanted) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(given, wanted), name


# ---- how they start ----


def test_the_layers_of_a_model_start_different() -> None:
    group = mok.LocalGroup(1)
    model = nn.ModuleList(mok.MoE(64, 64, 4, 2, group) for _ in range(12))
    experts = torch.cat([layer.w_routed_gate for layer in model]).flatten(1)
    assert torch.unique(experts, dim=0).shape[0] == 12 * 4


def test_a_seed_gives_the_same_values_and_another_reset_others() -> None:
    torch.manual_seed(5)
    first = make()
    again = copy.deepcopy(first)
    again.reset_parameters()
    for name in NAMES:
        assert not torch.equal(getattr(first, name), getattr(again, name)), name
    torch.manual_seed(5)
    assert_same(make(), first)
    torch.manual_seed(6)
    again.reset_parameters()
    assert not torch.equal(again.w_routed_up, first.w_routed_up)
    torch.manual_seed(5)
    again.reset_parameters()
    assert_same(again, first)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_experts_do_not_depend_on_the_number_of_ranks(num_ranks: int) -> None:
    (whole,), parts = layers_of(1), layers_of(num_ranks)
    for name in NAMES[:3]:
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name)), name
    for part in parts:
        for name in NAMES[3:]:
            assert torch.equal(getattr(part, name), getattr(whole, name)), name


def test_members_of_a_run_draw_as_processes_do() -> None:
    """One seed before the run: every member starts from it, however many there are."""
    for num_ranks in (1, 4):
        torch.manual_seed(3)
        for given, wanted in zip(mok.LocalGroup(num_ranks).run(make), layers_of(num_ranks), strict=True):
            assert_same(given, wanted)


def test_every_rank_draws_the_same_from_torch() -> None:
    """What comes after the layer starts the same everywhere."""
    after = []
    for num_ranks, options in ((1, {}), (4, {}), (4, {"shared_intermediate_size": 0})):
        for member in mok.LocalGroup(num_ranks).members:
            torch.manual_seed(7)
            make(member, **options)
            after.append(torch.rand(1).item())
    assert len(set(after)) == 1


def test_the_deviation_is_one_over_the_root_of_the_fan_in() -> None:
    torch.manual_seed(0)
    for name, weight in make().named_parameters():
        values = weight.float() * weight.shape[-1] ** 0.5
        assert abs(values.mean()) < 0.03, name
        assert abs(values.std() - 1) < 0.03, name


@pytest.mark.parametrize("limit", [-1.0, "7", float("nan"), True])
def test_a_wrong_limit_is_named_by_the_constructor_as_by_a_call(limit: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="swiglu_limit") as by_constructor:
        make(swiglu_limit=limit)
    layer = make()
    layer._state.swiglu_limit = limit
    with pytest.raises((TypeError, ValueError)) as by_call, torch.no_grad():
        layer(torch.zeros(1, 64).bfloat16(), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2))
    assert (type(by_call.value), str(by_call.value)) == (type(by_constructor.value), str(by_constructor.value))


# ---- without data ----


def test_built_on_meta() -> None:
    state = torch.get_rng_state()
    with torch.device("meta"):
        layer = make()
    assert {weight.device.type for weight in layer.parameters()} == {"meta"}
    layer.reset_parameters()
    assert torch.equal(torch.get_rng_state(), state)
    layer.to_empty(device="cpu")
    torch.manual_seed(3)
    layer.reset_parameters()
    assert_same(layer, layers_of(1)[0])
    assert make().w_routed_up.device.type == "cpu"


def test_moved_to_meta_and_back() -> None:
    torch.manual_seed(1)
    layer = make().to("meta").to_empty(device="cpu")
    torch.manual_seed(3)
    layer.reset_parameters()
    assert_same(layer, layers_of(1)[0])


def test_one_tensor_on_meta_changes_no_other() -> None:
    layer = make()
    layer.w_routed_up = nn.Parameter(layer.w_routed_up.to("meta"))
    torch.manual_seed(3)
    layer.reset_parameters()
    wanted = layers_of(1)[0]
    for name in NAMES[:1] + NAMES[2:]:
        assert torch.equal(getattr(layer, name), getattr(wanted, name)), name


def test_fake_tensors() -> None:
    with FakeTensorMode():
        layer = make()
    layer.reset_parameters()
    assert layer.w_routed_up.shape == (8, 128, 64)


# ---- DTensors, in processes ----


def test_dtensors_and_checkpoints_of_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_body, args=(rank, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0]


def _body(rank: int, folder: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        _check_dtensors(rank, folder)
        _check_checkpoints(rank, folder)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    finally:
        distributed.destroy_process_group()


def _check_dtensors(rank: int, folder: Path) -> None:
    """A layer of one rank, sharded over two processes for data parallelism."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layer = make(num_experts=5).to("meta")
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    layer.to_empty(device="cpu")
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    plain = make(num_experts=5)
    for name in NAMES:
        assert getattr(layer, name).to_local().shape[0] < getattr(plain, name).shape[0]
        assert torch.equal(getattr(layer, name).full_tensor(), getattr(plain, name)), name

    x = torch.randn(30, 64, generator=torch.Generator().manual_seed(rank)).bfloat16()
    ids, weights = torch.tensor([[0, 4]] * 30), torch.ones(30, 2)
    for model in (layer, plain):
        model(x, ids, weights).float().square().sum().backward()
    for name in NAMES:
        wanted = getattr(plain, name).grad.float()
        distributed.all_reduce(wanted)
        torch.testing.assert_close(getattr(layer, name).grad.full_tensor().float(), wanted / 2, rtol=2e-2, atol=2e-2)
    by_fsdp = mok.clip_grad_norm_(layer, 1.0)
    joined = torch.linalg.vector_norm(torch.cat([w.grad.full_tensor().flatten().float() for w in layer.parameters()]))
    assert by_fsdp > 1
    torch.testing.assert_close(joined, torch.tensor(1.0), rtol=1e-2, atol=0)

    assert layer.load_state_dict(layer.state_dict()).missing_keys == []
    whole = get_model_state_dict(layer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:  # by torch's convention the others get nothing
        plain.load_state_dict(whole)
        torch.save(whole, folder / "whole.pt")


def _check_checkpoints(rank: int, folder: Path) -> None:
    """torch.distributed.checkpoint keeps one tensor of a name: rank 1 gets rank 0's experts, and refuses them."""
    import torch.distributed.checkpoint as dcp

    layer = layers_of(2)[rank]
    dcp.save({"layer": layer.state_dict()}, checkpoint_id=folder / "checkpoint")
    read = {"layer": {name: tensor.clone() for name, tensor in layer.state_dict().items()}}
    dcp.load(read, checkpoint_id=folder / "checkpoint")
    if rank == 0:
        layer.load_state_dict(read["layer"])
    else:
        with pytest.raises(RuntimeError, match="holds experts 0 to 3 of 8, this rank holds experts 4 to 7 of 8"):
            layer.load_state_dict(read["layer"])


# ---- state dicts ----


def test_a_state_dict_says_which_experts_it_holds(tmp_path: Path) -> None:
    layers = layers_of(4)
    entries = [layer.state_dict()["_extra_state"] for layer in layers]
    assert [entry.tolist() for entry in entries] == [[0, 2, 8], [2, 2, 8], [4, 2, 8], [6, 2, 8]]
    with torch.device("meta"):
        assert make().state_dict()["_extra_state"].tolist() == [0, 8, 8]
    torch.save(layers[2].state_dict(), tmp_path / "rank2.pt")
    other = make(layers[2].member)
    assert str(other.load_state_dict(torch.load(tmp_path / "rank2.pt", weights_only=True))).startswith("<All keys")
    assert_same(other, layers[2])


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"assign": True}])
def test_another_ranks_file_is_refused(options: dict[str, bool]) -> None:
    model, wanted = (nn.Sequential(nn.Linear(2, 2), layers_of(4)[2]) for _ in range(2))
    wanted.load_state_dict(model.state_dict())
    given = layers_of(4, seed=8)[1].state_dict(prefix="1.")
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict({**model.state_dict(), **given}, **options)
    text = "1: the state dict holds experts 2 to 3 of 8, this rank holds experts 4 to 5 of 8. Every rank loads the"
    assert text in str(caught.value)
    assert "size mismatch" not in str(caught.value)
    assert_same(model, wanted)  # nothing was copied


@pytest.mark.parametrize("has_entry", [True, False])
def test_a_file_of_another_number_of_ranks_is_refused_in_words(has_entry: bool) -> None:
    given = layers_of(4)[3].state_dict()
    if not has_entry:
        del given["_extra_state"]
    with pytest.raises(RuntimeError) as caught:
        layers_of(2)[1].load_state_dict(given)
    held = "experts 6 to 7 of 8" if has_entry else "2 experts"
    assert f"MoE: the state dict holds {held}, this rank holds experts 4 to 7 of 8. For another number" in str(
        caught.value
    )
    assert "size mismatch" not in str(caught.value)


def test_the_way_to_another_number_of_ranks() -> None:
    """What the error says, done."""
    files, targets = [layer.state_dict() for layer in layers_of(4)], layers_of(2, seed=9)
    for rank, target in enumerate(targets):
        part = {name: files[0][name] for name in NAMES}
        for name in NAMES[:3]:
            part[name] = torch.cat([file[name] for file in files])[
                target.local_experts.start : target.local_experts.stop
            ]
        target.load_state_dict(part)
        assert_same(target, layers_of(2)[rank])


def test_a_file_of_another_layer_is_refused() -> None:
    given = make(num_experts=16, group=mok.LocalGroup(2).members[0]).state_dict()
    with pytest.raises(RuntimeError, match=r"experts 0 to 7 of 16, this rank holds experts 0 to 7 of 8\. It belongs"):
        make().load_state_dict(given)
    with pytest.raises(RuntimeError, match="size mismatch for w_routed_gate"):
        make().load_state_dict({**make(hidden_size=128).state_dict()})
    with pytest.raises(RuntimeError, match="_extra_state must be a tensor of 3 numbers"):
        make().load_state_dict({**make().state_dict(), "_extra_state": {"step": 1}})
    with pytest.raises(RuntimeError, match=r"Missing key.*w_shared_up"):
        make().load_state_dict({name: t for name, t in make().state_dict().items() if name != "w_shared_up"})


def test_files_from_before_the_entry_load() -> None:
    """Strictly too, as do those whose tensors were all cast."""
    given = layers_of(1)[0].state_dict()
    without = {name: given[name] for name in NAMES}
    for state in (without, {name: tensor.to(torch.bfloat16) for name, tensor in given.items()}):
        layer = make()
        assert str(layer.load_state_dict(state)) == "<All keys matched successfully>"
        assert_same(layer, layers_of(1)[0])
    assert set(without) == set(NAMES)


def test_pickling_says_what_can_be_saved(tmp_path: Path) -> None:
    layer = layers_of(2)[1]
    for save in (pickle.dumps, lambda model: torch.save(model, tmp_path / "model.pt")):
        with pytest.raises(TypeError) as caught:
            save(nn.Sequential(layer))
        for words in ("MoE layer", "experts 4 to 7", "rank 1 of 2", "state_dict()"):
            assert words in str(caught.value)
    assert_same(copy.deepcopy(layer), layer)
    assert copy.copy(layer).w_routed_up is layer.w_routed_up


# ---- main_grads by name ----


def test_main_grads_take_names() -> None:
    layer = make()
    grads: dict[str, Tensor] = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in layer.named_parameters()}
    layer.main_grads = grads
    assert layer.main_grads == grads
    with pytest.raises(TypeError, match="main_grads must map names of parameters to tensors, got list"):
        layer.main_grads = list(grads.values())  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"main_grads must have the names .*w_shared_up.* got .*w_routed_up"):
        layer.main_grads = {name: grads[name] for name in NAMES[:5]}
    layer.main_grads = None
    assert layer.main_grads is None
    without_shared = make(shared_intermediate_size=0)
    with pytest.raises(ValueError, match="main_grads must have the names"):
        without_shared.main_grads = grads
    without_shared.main_grads = {name: grads[name] for name in NAMES[:3]}
    x = torch.randn(4, 64).bfloat16()
    without_shared(x, torch.tensor([[0, 1]] * 4), torch.ones(4, 2)).sum().backward()
    assert all(grads[name].abs().sum() > 0 for name in NAMES[:3])
