"""Timings on a GPU: contenders interleaved, each once a round, so that clocks and power drift alike for all of them.

    ms = interleaved_ms({"dense": dense_product("cuda:0"), "ours": lambda: layer(x)})

Figures of one call may be compared with each other; with those of another call only roughly.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Contenders = Mapping[str, Callable[[], object]]

DENSE_SIZE = 8192
"""Rows, columns and depth of `dense_product`."""
DENSE_FLOPS = 2 * DENSE_SIZE**3


def run_rounds(contenders: Contenders, rounds: int) -> None:
    """What `interleaved_ms` runs, without a clock: a rank whose peer has the clock makes the same calls."""
    for _ in range(rounds):
        for run in contenders.values():
            run()


def interleaved_ms(
    contenders: Contenders, rounds: int = 30, warmup: int = 3, at_end: Callable[[], object] | None = None
) -> dict[str, float]:
    """The median milliseconds of each contender, by CUDA events on the current stream.

    A call that keeps the host longer than the GPU is timed with the gaps that the host leaves (see `host_ms`).
    at_end: called when everything is enqueued and the GPU, as a rule, still busy with the last rounds.
    """
    run_rounds(contenders, warmup)
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            events[name].append((begin, end))
    if at_end is not None:
        at_end()
    torch.cuda.synchronize()
    return {name: statistics.median(b.elapsed_time(e) for b, e in pairs) for name, pairs in events.items()}


def host_ms(contenders: Contenders, num_calls: int = 5) -> dict[str, float]:
    """The median milliseconds that a call keeps the host, while nothing of the GPU's holds it up."""
    found = {}
    for name, run in contenders.items():
        times = []
        for _ in range(num_calls):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        found[name] = statistics.median(times) * 1e3
    return found


def dense_product(device: torch.device | str = "cuda") -> Callable[[], torch.Tensor]:
    """A dense BF16 product of random matrices, DENSE_FLOPS a call: what a GPU's floor is reckoned from."""
    a, b = (torch.randn(DENSE_SIZE, DENSE_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    return lambda: a @ b


# ---- the machine ----


def describe_gpu(device: torch.device | str) -> dict[str, str | None]:
    """`name`, and the `driver`'s version, None where nobody tells."""
    return {"name": torch.cuda.get_device_name(device), "driver": query_gpu("driver_version", device=device)[0]}


def sm_clock_mhz(device: torch.device | str) -> int | None:
    """The clock of the SMs at this moment, None where neither NVML nor nvidia-smi tells."""
    try:
        return int(torch.cuda.clock_rate(device))
    except Exception:  # without pynvml, or NVML itself: torch raises many things, and none of them is in the way
        text = query_gpu("clocks.sm", device=device)[0] or ""
        number = text.split()[0] if text else ""
        return int(number) if number.isdigit() else None


def query_gpu(*fields: str, device: torch.device | str | None = None) -> list[str | None]:
    """What nvidia-smi says of a GPU (None: the first that it lists), a None for each field where it does not answer."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        if device is not None:  # by UUID: its numbers are not torch's
            uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
            command.append(f"--id=GPU-{uuid}")
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        values = done.stdout.splitlines()[0].split(", ")
    except (OSError, subprocess.SubprocessError, IndexError, AttributeError):
        return [None] * len(fields)
    return [*values] if len(values) == len(fields) else [None] * len(fields)
