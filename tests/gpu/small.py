"""A few small forwards of every kind of kernel, without pytest: something for compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no python tests/gpu/small.py
    compute-sanitizer --tool synccheck python tests/gpu/small.py
    compute-sanitizer --tool racecheck python tests/gpu/small.py

Waits have no limit, since a sanitizer slows kernels down by orders of magnitude.
"""

from __future__ import annotations

import torch
from test_local_group import Layer, bits

from mok_modular import MoKConfig

RUNS = (
    (1, {"mode": "split"}),
    (2, {"mode": "dispatch|gate_up+swiglu|down+combine"}),
    (2, {"mode": "split", "dispatch": "pull_once", "macrobatch_size": 131072}),
    (2, {"mode": "split", "dispatch": "push", "combine": "pull", "macrobatch_size": 131072}),
    (2, {"mode": "split", "fwd_num_comm_sms": 16}),
)


def main() -> None:
    layer = Layer(8, 2, 192, 128, 64, 200)
    base = None
    for num_ranks, options in RUNS:
        config = MoKConfig(
            **{"minibatch_size": 128, "macrobatch_size": 256, "timeout_s": 0, "start_timeout_s": 0, **options}
        )
        output = layer.run(num_ranks, config, repeats=1)[0]
        base = output if base is None else base
        assert torch.equal(bits(output), bits(base)), options
        print("ok", num_ranks, options, flush=True)


if __name__ == "__main__":
    main()
