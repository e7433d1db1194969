"""How kernels of the CUDA target are launched: packed arguments, tensor maps, the grid."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mok_modular.protocol.extension import extension
from mok_modular.targets.cuda.device import Device, Function, check, driver, encode_map

MAX_LOCAL_RANKS = 8
MAP_BYTES = 128
"""Of a CUtensorMap."""


class PackedLaunch:
    """A kernel with its arguments in host memory, to be enqueued any number of times (each copies them)."""

    def __init__(self, function: Function, arguments: Sequence[bytes], num_ctas: int) -> None:
        self._buffers = [ctypes.create_string_buffer(argument, len(argument)) for argument in arguments]
        self._pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(buffer) for buffer in self._buffers])
        self._grid = (function.handle, num_ctas, 1, 1, function.num_threads, 1, 1)
        self._num_smem_bytes = function.num_smem_bytes
        self._address = ctypes.addressof(self._pointers)
        self._enqueue = driver().cuLaunchKernel

    def replace_last_argument(self, argument: bytes) -> None:
        """For launches from now on."""
        ctypes.memmove(self._buffers[-1], argument, len(argument))

    def enqueue(self, stream: int) -> None:
        """Behind what is on the stream (a CUstream as an integer)."""
        check(self._enqueue(*self._grid, self._num_smem_bytes, stream, self._address, 0))


class Launcher:
    """Launches kernels for the ranks of this process. Needs `native` (their CudaMemory), `ranks` and `device`."""

    native: Any
    ranks: Sequence[int]
    device: Device
    timeout_factor = 1

    def __init__(self) -> None:
        self._maps: dict[tuple[Any, ...], bytes] = {}

    def _pack_calls(self, programs: Sequence[Any], timeout_s: float, start_timeout_s: float) -> bytes:
        names = extension().region_names()
        failures = self.native.failures
        packed: bytes = extension().pack_calls(
            programs,
            [table.data_ptr() for table in self.native.tables],
            [[self.native.address(rank, name) for name in names] for rank in self.ranks],
            [failures.data_ptr() + i * failures.stride(0) for i in range(len(self.ranks))],
            timeout_s * self.timeout_factor,
            start_timeout_s * self.timeout_factor,
        )
        return packed

    def _launch(self, function: Function, arguments: Sequence[bytes], stream: int, num_sms: int) -> None:
        PackedLaunch(function, arguments, num_sms * function.ctas_per_sm).enqueue(stream)

    # ---- tensor maps ----

    def _all_maps(self, tensors: Sequence[Mapping[str, Tensor]], num_tokens: Sequence[int], shape: Any) -> bytes:
        """Those of the ranks of this process, by each one's tensors and number of tokens."""
        maps = bytearray(extension().struct_sizes()["Maps"])
        size = len(maps) // MAX_LOCAL_RANKS  # of a rank
        for index, rank in enumerate(self.ranks):
            for i, (address, dims) in enumerate(self._matrices(rank, tensors[index], num_tokens[index], shape)):
                if address:
                    at = size * index + MAP_BYTES * i
                    maps[at : at + MAP_BYTES] = self._map(address, dims)
        return bytes(maps)

    def _matrices(
        self, rank: int, tensors: Mapping[str, Tensor], num_tokens: int, shape: Any
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Address and dimensions, innermost first, of every matrix: [rows, k] for A, [experts, cols, k] for B."""
        hidden, inter, shared = shape.hidden_size, shape.intermediate_size, shape.shared_size
        rows, experts = shape.ring_rows, shape.num_local_experts
        at = self.native.address
        dims: Mapping[str, tuple[int, tuple[int, ...]]] = {
            "x": (_address(tensors, "x"), (hidden, max(1, num_tokens))),
            "ring_x": (at(rank, "ring_x"), (hidden, rows)),
            "context_x": (_address(tensors, "context_x"), (hidden, rows)),
            "ring_hidden": (at(rank, "ring_hidden"), (inter, rows)),
            "shared_hidden": (at(rank, "shared_hidden"), (shared, shape.max_tokens)),
            "w_routed_gate": (_address(tensors, "w_routed_gate"), (hidden, inter, experts)),
            "w_routed_up": (_address(tensors, "w_routed_up"), (hidden, inter, experts)),
            "w_routed_down": (_address(tensors, "w_routed_down"), (inter, hidden, experts)),
            "w_shared_gate": (_address(tensors, "w_shared_gate"), (hidden, shared, 1)),
            "w_shared_up": (_address(tensors, "w_shared_up"), (hidden, shared, 1)),
            "w_shared_down": (_address(tensors, "w_shared_down"), (shared, hidden, 1)),
        }
        return [dims[name] if 0 not in dims[name][1] else (0, ()) for name in extension().forward_matrices()]

    def _map(self, address: int, dims: tuple[int, ...]) -> bytes:
        """A tensor map of a K-contiguous BF16 matrix, cached."""
        found = self._maps.get((address, dims))
        if found is None:
            if len(self._maps) > 4096:  # outputs and contexts move from call to call
                self._maps.clear()
            found = self._maps[address, dims] = encode_map(address, dims, self.device.arch.operand_box)
        return found


def _address(tensors: Mapping[str, Tensor], name: str) -> int:
    tensor = tensors.get(name)
    return tensor.data_ptr() if tensor is not None and tensor.numel() else 0
