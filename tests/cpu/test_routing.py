"""The file of captured routing, and the capture that ships with the package."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from mok_modular.config import MoEShape
from mok_modular.routing import Routing, load_routing, save_routing


def small_routing() -> Routing:
    ids = torch.arange(2 * 2 * 3 * 2, dtype=torch.int32).view(2, 2, 3, 2) % 5 - 1
    return Routing(ids, torch.rand(2, 2, 3, 2), num_experts=4, source="a test")


def test_a_saved_routing_loads_as_it_was(tmp_path: Path) -> None:
    routing = small_routing()
    save_routing(tmp_path / "routing.pt", routing)
    loaded = load_routing(tmp_path / "routing.pt")
    assert loaded.expert_ids.dtype == torch.int32
    assert torch.equal(loaded.expert_ids, routing.expert_ids)
    assert torch.equal(loaded.router_weights, routing.router_weights)
    assert (loaded.num_experts, loaded.source) == (4, "a test")


def test_a_view_is_saved_without_what_it_is_a_view_of(tmp_path: Path) -> None:
    ids, weights = torch.zeros(1, 2, 5000, 2, dtype=torch.int32), torch.zeros(1, 2, 5000, 2)
    save_routing(tmp_path / "routing.pt", Routing(ids[:, :, :3], weights[:, :, :3], 4, "a view"))
    assert (tmp_path / "routing.pt").stat().st_size < 5000
    weights = torch.zeros(100000, 1, 3, 2)
    save_routing(tmp_path / "routing.pt", Routing(ids[:, :1, :3], weights[:1], 4, "a contiguous view"))
    assert (tmp_path / "routing.pt").stat().st_size < 5000


def test_numbers_of_tokens_and_the_shape_are_kept(tmp_path: Path) -> None:
    routing = small_routing()
    shape = MoEShape("layer", 64, 128, num_experts=4, topk=2)
    counts = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    ids = routing.expert_ids.masked_fill((torch.arange(3) >= counts[..., None])[..., None], -1)
    uneven = replace(routing, expert_ids=ids, num_tokens=counts, shape=shape)
    save_routing(tmp_path / "routing.pt", uneven)
    loaded = load_routing(tmp_path / "routing.pt")
    assert torch.equal(loaded.num_tokens, counts)
    assert loaded.shape == shape
    assert torch.equal(routing.num_tokens, torch.full((2, 2), 3, dtype=torch.int32))
    first_ids, first_weights = loaded.of_rank(0)
    assert torch.equal(first_ids, routing.expert_ids[0, 0])
    assert torch.equal(first_weights, routing.router_weights[0, 0])
    assert torch.equal(loaded.of_rank(1)[0], torch.cat([routing.expert_ids[0, 1, :1], routing.expert_ids[1, 1, :2]]))

    with pytest.raises(ValueError, match="-1 behind the last token"):
        replace(routing, num_tokens=counts)
    for wrong in (counts[:1], counts.long(), counts + 1, counts - 1):
        with pytest.raises(ValueError, match="num_tokens must be"):
            replace(uneven, num_tokens=wrong)
    with pytest.raises(ValueError, match="E and K, 4 and 2"):
        replace(uneven, shape=replace(shape, topk=3))


def test_load_and_imbalance_count_routes() -> None:
    ids = torch.tensor([[0, 0, 0, 1, 2, -1], [0, 1, 2, 3, 0, 1], [-1] * 6], dtype=torch.int32).view(3, 1, 3, 2)
    routing = Routing(ids, torch.ones(3, 1, 3, 2), num_experts=4, source="a test")
    assert routing.expert_load().tolist() == [[3, 1, 1, 0], [2, 2, 1, 1], [0, 0, 0, 0]]
    imbalance = routing.imbalance()
    torch.testing.assert_close(imbalance[:2], torch.tensor([3 / 1.25, 2 / 1.5], dtype=torch.float64))
    assert imbalance[2].isnan()


def test_routing_names_what_is_wrong() -> None:
    routing = small_routing()
    with pytest.raises(TypeError, match="int64"):
        replace(routing, expert_ids=routing.expert_ids.long())
    with pytest.raises(TypeError, match="float16"):
        replace(routing, router_weights=routing.router_weights.half())
    with pytest.raises(ValueError, match=r"\[C, R, T, K\]"):
        replace(routing, router_weights=routing.router_weights[:1])
    with pytest.raises(ValueError, match=r"\[C, R, T, K\]"):
        Routing(routing.expert_ids[0], routing.router_weights[0], 4, "three dimensions")
    with pytest.raises(ValueError, match="4 ids out of range"):
        replace(routing, num_experts=3)
    with pytest.raises(ValueError, match="num_experts=40000"):
        replace(routing, num_experts=40000)
    with pytest.raises(ValueError, match="24 values that are not finite"):
        replace(routing, router_weights=torch.full((2, 2, 3, 2), float("inf")))


def test_load_names_a_wrong_file(tmp_path: Path) -> None:
    path = tmp_path / "routing.pt"
    with pytest.raises(FileNotFoundError):
        load_routing(path)
    for content in (b"", b"not a routing file at all", bytes(range(256)), b"PK\x03\x04 cut off"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"routing\.pt is not a routing file"):
            load_routing(path)
    for other in (torch.zeros(3), {"format": "another"}, {"weight": torch.zeros(3)}):
        torch.save(other, path)
        with pytest.raises(ValueError, match=r"routing\.pt is not a routing file"):
            load_routing(path)


def test_load_names_a_wrong_version_and_damage(tmp_path: Path) -> None:
    path = tmp_path / "routing.pt"
    save_routing(path, small_routing())
    data = torch.load(path, weights_only=True)

    def load_with(**changes: object) -> Routing:
        torch.save({key: value for key, value in {**data, **changes}.items() if value is not None}, path)
        return load_routing(path)

    assert load_with().num_experts == 4
    with pytest.raises(ValueError, match="version 3; this library reads versions 1 and 2"):
        load_with(version=3)
    with pytest.raises(ValueError, match=r"damaged routing file.*expert_ids"):
        load_with(expert_ids=None)
    with pytest.raises(ValueError, match=r"damaged routing file.*out of range"):
        load_with(num_experts=2)
    with pytest.raises(ValueError, match="damaged routing file"):
        load_with(router_weights=3)
    with pytest.raises(ValueError, match="damaged routing file"):
        load_with(num_experts="four")


def test_the_shipped_capture_is_real_and_uneven() -> None:
    routing = load_routing()
    num_captures, num_ranks, num_tokens, topk = routing.expert_ids.shape
    assert num_captures >= 2 and num_ranks == 4 and num_tokens >= 256
    assert routing.num_experts >= 16 and topk >= 4
    assert (routing.imbalance() >= 1.5).all()
    assert "train_tiny_moe" in routing.source
    assert len((files("mok_modular") / "data" / "routing_tiny.pt").read_bytes()) < 200_000

    # What a softmax top-k router gives: distinct experts, weights that sum to one, greatest first.
    assert (routing.expert_ids.sort(-1).values.diff() > 0).all()
    assert (routing.router_weights.diff() <= 0).all()
    torch.testing.assert_close(routing.router_weights.sum(-1), torch.ones(num_captures, num_ranks, num_tokens))


def test_the_shipped_capture_holds_different_captures() -> None:
    ids = load_routing().expert_ids
    for first in range(len(ids)):
        for second in range(first):
            assert not torch.equal(ids[first], ids[second])
