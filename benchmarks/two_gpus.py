"""One rank of `bars.py two_gpus` (torchrun starts it): dispatch and combine over NVLink, beside a plain peer copy.

Every token's experts are on the other rank, so that every row crosses the link, both directions at once.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from mok_modular import MoKConfig, functional, nvrtc
from mok_modular.targets.cuda_device import check, driver

HIDDEN, INTER, TOPK, LOCAL_EXPERTS, NUM_TOKENS = 7168, 64, 8, 8, 2048
ROW_BYTES, NUM_ROWS = 2 * HIDDEN, NUM_TOKENS * TOPK
NUM_SMS = (4, 8, 16, 32, 64, 132)
WAYS: dict[str, dict[str, str]] = {
    "pull dispatch, push combine": {},
    "push dispatch, pull combine": {"dispatch": "push", "combine": "pull"},
}
ROUNDS = 9


class PeerCopy:
    """The kernel of peer_copy.cu."""

    def __init__(self) -> None:
        options = ["--gpu-architecture=sm_90a", "--std=c++20", "--device-as-default-execution-space"]
        cubin, _ = nvrtc.compile_source(Path(__file__).parent, "peer_copy.cu", options)
        self.function = check(driver().cuModuleGetFunction(check(driver().cuModuleLoadData(cubin)), b"peer_copy"))

    def __call__(self, dst: int, src: int, num_bytes: int, num_sms: int) -> None:
        values = [ctypes.c_void_p(dst), ctypes.c_void_p(src), ctypes.c_longlong(num_bytes // 16)]
        pointers = (ctypes.c_void_p * 3)(*[ctypes.addressof(value) for value in values])
        stream = torch.cuda.current_stream().cuda_stream
        check(
            driver().cuLaunchKernel(
                self.function, 2 * num_sms, 1, 1, 512, 1, 1, 0, stream, ctypes.addressof(pointers), 0
            )
        )


def slowest(milliseconds: dict[str, float]) -> dict[str, float]:
    """The same of all ranks: the largest of each."""
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, milliseconds)
    return {name: max(rank[name] for rank in ranks) for name in milliseconds}


def time_stages(group: Any, rank: int, options: dict[str, str], report: dict[str, float], way: str) -> Any:
    """Kernel times of a forward by number of SMs, into `report`. Returns the workspace."""
    base = MoKConfig(mode="split", minibatch_size=4096, macrobatch_size=131072, **options)
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(rank)

    def random(*dims: int) -> torch.Tensor:
        return torch.randn(*dims, device=device, generator=generator).bfloat16() / dims[-1] ** 0.5

    workspace = functional.create_workspace(
        base, group, device=device, num_local_tokens=NUM_TOKENS, hidden_size=HIDDEN, topk=TOPK
    )
    ids = torch.rand(NUM_TOKENS, LOCAL_EXPERTS, device=device, generator=generator).argsort(dim=1)[:, :TOPK]
    ids = (ids + (1 - rank) * LOCAL_EXPERTS).int()
    x, router_weights = random(NUM_TOKENS, HIDDEN), torch.rand(NUM_TOKENS, TOPK, device=device, generator=generator)
    routed = [random(LOCAL_EXPERTS, INTER, HIDDEN), random(LOCAL_EXPERTS, INTER, HIDDEN),
              random(LOCAL_EXPERTS, HIDDEN, INTER)]  # fmt: skip
    shared: Any = workspace.shared
    for num_sms in NUM_SMS:
        config = MoKConfig(
            mode="split", minibatch_size=4096, macrobatch_size=131072, num_reserved_sms=132 - num_sms, **options
        )
        times: dict[str, list[float]] = {"dispatch": [], "combine": []}
        for _ in range(ROUNDS):
            workspace.check()
            distributed.barrier()
            shared.is_timing = True
            # The ranks' kernels meet in the schedule, so that no rank's dispatch waits for a host that is late.
            torch.cuda._sleep(1_000_000)
            schedule = functional.build_schedule(workspace, config, ids, num_local_experts=LOCAL_EXPERTS)
            functional.forward(
                config, workspace, schedule, x, router_weights, None, None, None, *routed, save_context=False
            )
            for kernel, seconds in shared.kernel_times_s():
                if kernel in times:
                    times[kernel].append(seconds * 1e3)
        for kernel, values in times.items():
            direction = way.split(", ")[kernel == "combine"]
            report[f"{direction} {num_sms}"] = statistics.median(values[2:])
    return workspace


def time_plain(workspace: Any, rank: int, report: dict[str, float]) -> None:
    """The plain copy of as many bytes, loads from the peer and stores to it."""
    copy, memory = PeerCopy(), workspace.shared.native
    num_bytes = NUM_ROWS * ROW_BYTES
    own, peer = memory.address(rank, "ring_x"), memory.address(1 - rank, "combine")
    for name, dst, src in (("plain loads", own, peer), ("plain stores", peer, own)):
        for num_sms in NUM_SMS:
            values = []
            for _ in range(ROUNDS):
                torch.cuda.synchronize()
                distributed.barrier()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                copy(dst, src, num_bytes, num_sms)
                end.record()
                torch.cuda.synchronize()
                values.append(begin.elapsed_time(end))
            report[f"{name} {num_sms}"] = statistics.median(values[2:])


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    distributed.init_process_group("gloo")
    group = distributed.group.WORLD
    milliseconds: dict[str, float] = {}
    for way, options in WAYS.items():
        workspace = time_stages(group, rank, options, milliseconds, way)
        if not options:
            time_plain(workspace, rank, milliseconds)
            workspace.reset()  # its regions hold anything now
    milliseconds = slowest(milliseconds)
    if rank == 0:
        rates = {name: NUM_ROWS * ROW_BYTES / ms * 1e-6 for name, ms in milliseconds.items()}
        Path(sys.argv[1]).write_text(json.dumps(rates))


if __name__ == "__main__":
    main()
