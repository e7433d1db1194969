"""NVSHMEM for the ranks of a process group: start, symmetric memory, addresses of peers.

One process has one NVSHMEM, for one set of ranks. It starts with the first workspace of a group; where the program
started it already, its PEs must be the group's ranks in order. Multicast over NVLink is never used.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mok_modular.ranks.process_group import ProcessRanks

NEEDS = "pip install 'mok-modular[cuda]' brings nvshmem4py-cu13 and nvidia-nvshmem-cu13"
DEFAULTS = {
    "NVSHMEM_DISABLE_NVLS": "1",  # no multicast
    "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": "1",  # a polling thread that serves nothing that is used here
}
"""Environment variables of NVSHMEM that are set before it starts, unless they are set already."""
IS_INITIALIZED = 2  # NVSHMEM_STATUS_IS_INITIALIZED: the statuses above it are initialised as well
LEAVE_PATIENCE_S = 10.0

_runtime: Runtime | None = None


class Runtime:
    """NVSHMEM as it runs in this process. Get it from `start`."""

    def __init__(self, ranks: ProcessRanks, bindings: Any, is_owner: bool) -> None:
        self.global_ranks = ranks.global_ranks()
        self.is_owner = is_owner  # started here, so it is ended here
        self.is_healthy = True  # False: some rank may be gone, so nothing collective is called any more
        self.is_shared_gpu = False
        self.version = host_version(bindings)
        self._bindings = bindings
        self._ranks = ranks
        self._modules: set[int] = set()
        self._num_blocks = 0
        self._dropped: dict[int, int] = {}  # address by number, of blocks that no tensor of this process uses

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """A new symmetric block as a flat uint8 tensor. Collective, with the same size everywhere.

        Nobody gives memory back alone: a block whose tensors are gone waits for `release`. Raises MemoryError.
        """
        address = int(self._bindings.malloc(num_bytes))
        if not address:
            raise MemoryError(
                f"NVSHMEM's symmetric heap has no room for {num_bytes} bytes more (NVSHMEM_SYMMETRIC_SIZE, "
                "NVSHMEM_MAX_MEMORY_PER_GPU)"
            )
        number = self._num_blocks
        self._num_blocks += 1
        memory = _Memory(address, num_bytes)
        weakref.finalize(memory, self._dropped.__setitem__, number, address)
        return torch.as_tensor(memory, device=device)

    def dropped(self) -> set[int]:
        """Numbers of the blocks that this process does not use any more. The device must be idle."""
        return set(self._dropped)

    def release(self, numbers: Iterable[int]) -> None:
        """Gives back blocks that every rank has dropped. Collective, with the same numbers."""
        for number in sorted(numbers):
            self._bindings.free(self._dropped.pop(number))

    def peer_address(self, address: int, rank: int) -> int:
        """Where this process sees `rank`'s copy of a symmetric block; 0 where its memory cannot be reached."""
        return int(self._bindings.ptr(address, rank))

    def init_module(self, module: int) -> None:
        """Gives a loaded module that is linked with the device library what it needs. Before its first launch.

        Raises RuntimeError where host and device library do not fit, with both versions.
        """
        if module in self._modules:
            return
        device = device_version(module)
        if device[0] != self.version[0] or device[1] > self.version[1]:
            raise RuntimeError(
                f"NVSHMEM's host library is {_dotted(self.version)}, the device library that kernels are linked with "
                f"is {_dotted(device)}: they must have the same major version, and the host's must not be the older one"
            )
        status = self._bindings.cumodule_init(module)
        if status:
            raise RuntimeError(f"NVSHMEM could not initialise a module (status {status})")
        self._modules.add(module)

    def leave(self) -> None:
        """Ends NVSHMEM if every rank is about to; else leaves that to the operating system."""
        if not (self.is_owner and self.is_healthy) or self.is_shared_gpu:
            return
        self._ranks.post("leaving", True)
        everybody = range(self._ranks.size())
        is_complete = len(self._ranks.reports("leaving", everybody, LEAVE_PATIENCE_S)) == self._ranks.size()
        # One decision for all: a rank that finalizes waits for the others without end.
        if self._ranks.decide("leave", "finalize" if is_complete else "skip") == "finalize":
            self._bindings.hostlib_finalize()


def start(ranks: ProcessRanks, timeout_s: float) -> Runtime:
    """NVSHMEM over `ranks`, started if it does not run yet. Collective.

    Raises ImportError where nvshmem4py is missing, RuntimeError where NVSHMEM runs over other ranks or does not start.
    """
    global _runtime
    if _runtime is not None:
        if _runtime.global_ranks != ranks.global_ranks():
            raise RuntimeError(
                f"NVSHMEM runs over the ranks {_runtime.global_ranks} in this process, and a process has one NVSHMEM: "
                f"a group of the ranks {ranks.global_ranks()} cannot have another"
            )
        return _runtime
    runtime, error = None, None
    try:
        bindings = load()
        is_running = bindings.init_status() >= IS_INITIALIZED
        mine: dict[str, Any] = {"version": host_version(bindings), "is_running": is_running}
        if is_running:
            mine |= {"pe": bindings.my_pe(), "num_pes": bindings.n_pes()}
        elif ranks.rank() == 0:
            mine["unique_id"] = _new_unique_id(bindings)
    except Exception as caught:
        error = caught
    all_ranks = ranks.exchange("NVSHMEM's start", error if error is not None else mine, timeout_s)
    _check_same_world(all_ranks)
    if not all_ranks[0]["is_running"]:
        with torch.cuda.device(torch.device(ranks.device)):
            torch.zeros(1, device=ranks.device)  # the context exists
            _initialize(bindings, ranks, all_ranks[0]["unique_id"])
    runtime = _runtime = Runtime(ranks, bindings, is_owner=not all_ranks[0]["is_running"])
    atexit.register(runtime.leave)
    return runtime


def load() -> Any:
    """nvshmem4py's bindings, with the host library loaded. Raises ImportError with the way to mend it."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        load_nvidia_dynamic_lib("nvshmem_host")
        from nvshmem import bindings
    except (ImportError, RuntimeError) as error:
        raise ImportError(f"a ProcessGroup needs NVSHMEM ({error}); {NEEDS}") from error
    return bindings


def host_version(bindings: Any) -> tuple[int, int, int]:
    """The version of NVSHMEM's host library."""
    numbers = [ctypes.c_int() for _ in range(3)]
    bindings.vendor_get_version_info(*(ctypes.addressof(number) for number in numbers))
    major, minor, patch = (number.value for number in numbers)
    return major, minor, patch


def device_version(module: int) -> tuple[int, int, int]:
    """The version of the device library that a loaded module (a CUmodule) is linked with."""
    from cuda.bindings import driver

    code, address, num_bytes = driver.cuModuleGetGlobal(driver.CUmodule(module), b"nvshmemi_device_lib_version_d")
    numbers = (ctypes.c_int * 3)()
    if int(code) == 0 and num_bytes >= ctypes.sizeof(numbers):
        (code,) = driver.cuMemcpyDtoH(ctypes.addressof(numbers), address, ctypes.sizeof(numbers))
    if int(code) != 0:
        raise RuntimeError(f"a kernel is not linked with NVSHMEM's device library ({code})")
    major, minor, patch = numbers
    return major, minor, patch


def tensor_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """A flat uint8 tensor over memory that somebody else owns."""
    return torch.as_tensor(_Memory(address, num_bytes), device=device)


class _Memory:
    """Device memory for torch.as_tensor; lives as long as a tensor over it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _new_unique_id(bindings: Any) -> bytes:
    unique_id = bindings.uniqueid()
    if bindings.get_uniqueid(unique_id.ptr):
        raise RuntimeError("NVSHMEM has no unique id to start with")
    return ctypes.string_at(unique_id.ptr, unique_id._data.nbytes)


def _initialize(bindings: Any, ranks: ProcessRanks, unique_id: bytes) -> None:
    copy = bindings.uniqueid()
    ctypes.memmove(copy.ptr, unique_id, len(unique_id))
    attributes = bindings.InitAttr()
    ctypes.memset(attributes.ptr, 0, attributes._data.nbytes)
    status = bindings.set_attr_uniqueid_args(ranks.rank(), ranks.size(), copy.ptr, attributes.ptr)
    status = status or bindings.hostlib_init_attr(bindings.Flags.INIT_WITH_UNIQUEID, attributes.ptr)
    if status or bindings.init_status() < IS_INITIALIZED:
        raise RuntimeError(
            f"NVSHMEM did not start on rank {ranks.rank()} (status {status}); NVSHMEM_DEBUG=INFO says more"
        )


def _check_same_world(all_ranks: list[dict[str, Any]]) -> None:
    versions = [each["version"] for each in all_ranks]
    if len(set(versions)) > 1:
        given = ", ".join(f"rank {rank}: {_dotted(version)}" for rank, version in enumerate(versions))
        raise RuntimeError(f"NVSHMEM's host library must be the same on every rank, got {given}")
    if len({each["is_running"] for each in all_ranks}) > 1:
        running = [rank for rank, each in enumerate(all_ranks) if each["is_running"]]
        raise RuntimeError(f"NVSHMEM runs already on rank {', '.join(map(str, running))} and not on the others")
    if all_ranks[0]["is_running"]:
        for rank, each in enumerate(all_ranks):
            if each["pe"] != rank or each["num_pes"] != len(all_ranks):
                raise RuntimeError(
                    f"NVSHMEM runs already, and its PEs are not the group's ranks in order: rank {rank} of "
                    f"{len(all_ranks)} is PE {each['pe']} of {each['num_pes']}"
                )


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
