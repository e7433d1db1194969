"""One rank of `bars.py two_gpus`, which starts all of them.

    torchrun --nproc-per-node=2 benchmarks/two_gpus.py REPORT.json PART...

Measures the parts one after the other. Rank 0 adds every figure to REPORT.json as soon as there is one, and a part's
name to its `done` at the end. A part that fails ends the process, so that no rank waits for it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from two_gpus_cases import LAYERS, NUM_RANKS
from two_gpus_copies import measure_copies, measure_signals
from two_gpus_layer import measure_layer, measure_minibatches

PARTS: dict[str, Callable[[Any], None]] = {
    "copies": lambda env: measure_copies(env, ("remote", "uniform", "captured")),
    "copies hot": lambda env: measure_copies(env, ("hot",)),
    **{f"layer {name}": lambda env, name=name: measure_layer(env, name) for name in LAYERS},
    "minibatch": measure_minibatches,
    "signals": measure_signals,
}
HEAD_START_CYCLES = 700_000
"""About 0.4 ms in which the hosts get ahead of their GPUs, as they are when a model comes to a layer."""


class Env:
    """This rank, and what the parts need of it."""

    device_type, backend = "cuda", "nccl"

    def __init__(self, report: Path) -> None:
        self.rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device(self.device_type, self.rank)
        torch.cuda.set_device(self.device)
        distributed.init_process_group("gloo")
        if distributed.get_world_size() != NUM_RANKS:
            raise SystemExit(f"two_gpus needs {NUM_RANKS} ranks, got {distributed.get_world_size()}")
        self.group = distributed.group.WORLD
        self.nccl = distributed.new_group(backend=self.backend)
        self.deep_ep: Any = None
        self._token = torch.zeros(1, device=self.device)
        self._path = report
        self._report: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
        self._start_s = time.monotonic()

    def meet(self) -> None:
        """All hosts are here."""
        self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        values: list[Any] = [None] * NUM_RANKS
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def slowest(self, milliseconds: Mapping[str, float]) -> dict[str, float]:
        """The largest of all ranks, of each."""
        ranks = self.gather(dict(milliseconds))
        return {name: max(rank[name] for rank in ranks) for name in milliseconds}

    def start(self, num_cycles: int = HEAD_START_CYCLES) -> None:
        """What is enqueued next starts on all GPUs at the same time, but for microseconds, and with the host ahead."""
        torch.cuda._sleep(num_cycles)
        distributed.all_reduce(self._token, group=self.nccl)

    def medians(self, runs: Mapping[str, Callable[[], object]], rounds: int, warmup: int) -> dict[str, float]:
        """Milliseconds of each on this rank, interleaved, each started on all ranks at once; all ranks call."""
        events: dict[str, list[Any]] = {name: [] for name in runs}
        for _ in range(warmup + rounds):
            for name, run in runs.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.start()
                begin.record()
                run()
                end.record()
                events[name].append((begin, end))
        torch.cuda.synchronize()
        return {name: statistics.median(b.elapsed_time(e) for b, e in pairs[warmup:]) for name, pairs in events.items()}

    def save(self, part: str, key: str, figures: Any) -> None:
        """Keeps figures that all ranks have alike."""
        self.log(f"{part}: {key}: {_short(figures)}")
        self._report.setdefault(part, {})[key] = figures
        self._write()

    def finish(self, part: str) -> None:
        self._report.setdefault("done", []).append(part)
        self._report.setdefault("seconds", {})[part] = round(time.monotonic() - self._start_s, 1)
        self._write()

    def log(self, text: str) -> None:
        if self.rank == 0:
            print(f"[{time.monotonic() - self._start_s:6.1f} s] {text}", file=sys.stderr, flush=True)

    def _write(self) -> None:
        if self.rank == 0:
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self._report, indent=1))
            new.replace(self._path)


def _short(figures: Any) -> str:
    if isinstance(figures, dict) and isinstance(figures.get("ms"), dict):
        figures = figures["ms"]
    if isinstance(figures, dict):
        return ", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
    return str(figures)


def main() -> None:
    env = Env(Path(sys.argv[1]))
    for part in sys.argv[2:]:
        env.log(f"{part} begins")
        try:
            PARTS[part](env)
            torch.cuda.synchronize()
            env.meet()
        except BaseException:
            print(f"rank {env.rank}, {part}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            os._exit(1)  # whoever waits for this rank is ended by the launcher
        env.finish(part)
    env.log("ends")
    if env.deep_ep is not None:
        env.deep_ep.destroy()
    distributed.destroy_process_group(env.nccl)


if __name__ == "__main__":
    main()
