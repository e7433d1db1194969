"""What a rank that is a process has for itself, for ranks that are threads.

`ProcessState` is what torch keeps once per process: it is saved and installed where members take turns. `CallerState`
is what torch keeps per thread: a member's thread starts from that of the caller of `LocalGroup.run`.
"""

from __future__ import annotations

import ctypes
import random
import sys
import warnings
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    ),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)
"""Settings of the process that code changes around a forward, which may hold collective calls: how each is read and
set."""

_MT19937_BYTES = 625 * 4  # 624 words and a position


@dataclass(frozen=True, eq=False)
class ProcessState:
    """The generators of torch (CPU, and CUDA once it is initialised), of `random` and of NumPy if it is loaded, and the
    values of SETTINGS."""

    torch_generator: torch.Tensor
    cuda_generators: tuple[torch.Tensor, ...]
    python_generator: Any
    numpy_generator: Any
    settings: tuple[Any, ...]

    @classmethod
    def save(cls) -> ProcessState:
        """The state as it is now."""
        return cls(
            torch.default_generator.get_state(),
            tuple(generator.get_state() for generator in _cuda_generators()),
            _python.save(),
            _numpy.save(),
            tuple(read() for read, _ in SETTINGS),
        )

    def install(self) -> None:
        """Makes this the state of the process."""
        torch.default_generator.set_state(self.torch_generator)
        # Fewer are saved where CUDA has been initialised since.
        for generator, state in zip(_cuda_generators(), self.cuda_generators, strict=False):
            generator.set_state(state)
        _python.install(self.python_generator)
        _numpy.install(self.numpy_generator)
        for (read, write), value in zip(SETTINGS, self.settings, strict=True):
            if read() != value:
                write(value)


def _cuda_generators() -> tuple[torch.Generator, ...]:
    """None while a CUDA graph is captured: their states must not be read or set then."""
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return ()
    return torch.cuda.default_generators


class _Generator(ABC):
    """A generator of the process whose state takes long to read: it is read only if its memory has changed."""

    def __init__(self) -> None:
        self._state: Any = None  # what was saved or installed last, and the generator's memory then
        self._memory: Any = None  # None: not known

    def save(self) -> Any:
        """The state; None where there is no such generator."""
        if not self._exists():
            return None
        memory = self._read_memory()
        if memory is None or memory != self._memory:
            self._state = self._read()
            self._memory = memory if self._is_all_in_memory(self._state) else None
        return self._state

    def install(self, state: Any) -> None:
        """Makes a saved state the generator's."""
        if state is None:
            return
        memory = self._read_memory()
        if memory is None or memory != self._memory or state is not self._state:
            self._write(state)
            self._state = state
            self._memory = self._read_memory() if self._is_all_in_memory(state) else None

    def _exists(self) -> bool:
        return True

    def _is_all_in_memory(self, state: Any) -> bool:
        return True

    @abstractmethod
    def _read_memory(self) -> Any: ...
    @abstractmethod
    def _read(self) -> Any: ...
    @abstractmethod
    def _write(self, state: Any) -> None: ...


class _PythonGenerator(_Generator):
    """That of `random`: 12 microseconds to read."""

    def __init__(self) -> None:
        super().__init__()
        self._generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
        # CPython's RandomObject: the object's head, a position, 624 words.
        self._address = id(self._generator) + object.__basicsize__
        *words, position = random.getstate()[1]
        self._is_known = ctypes.string_at(self._address, _MT19937_BYTES) == array("I", [position, *words]).tobytes()

    def _read_memory(self) -> Any:
        if not self._is_known:
            return None
        return ctypes.string_at(self._address, _MT19937_BYTES), self._generator.gauss_next

    def _read(self) -> Any:
        return random.getstate()

    def _write(self, state: Any) -> None:
        random.setstate(state)


class _NumpyGenerator(_Generator):
    """NumPy's global one, once it is loaded: 60 microseconds to read."""

    def _exists(self) -> bool:
        return "numpy.random" in sys.modules

    def _is_all_in_memory(self, state: Any) -> bool:
        return not state[1]["has_gauss"]  # the next normal number is kept elsewhere

    def _read_memory(self) -> Any:
        numpy_random = sys.modules["numpy.random"]
        bit_generator = numpy_random.get_bit_generator()
        if type(bit_generator) is not numpy_random.MT19937:
            return None
        address = bit_generator.ctypes.state_address
        return address, ctypes.string_at(address, _MT19937_BYTES)

    def _read(self) -> Any:
        numpy_random = sys.modules["numpy.random"]
        return numpy_random.get_bit_generator(), numpy_random.get_state(legacy=False)

    def _write(self, state: Any) -> None:
        numpy_random, (bit_generator, values) = sys.modules["numpy.random"], state
        if numpy_random.get_bit_generator() is not bit_generator:
            numpy_random.set_bit_generator(bit_generator)
        numpy_random.set_state(values)


_python = _PythonGenerator()
_numpy = _NumpyGenerator()


class CallerState:
    """What torch keeps for the thread that makes this: grad and inference mode, autocast, function and dispatch modes
    (a default device, FlopCounterMode), the profiler, and the CUDA device and stream once CUDA is initialised."""

    def __init__(self) -> None:
        self._is_grad, self._is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), True, torch.is_autocast_cache_enabled())
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ]
        modes = _get_current_function_mode_stack()
        self._modes = [mode for mode in modes if not isinstance(mode, DeviceContext)]
        self._devices = [mode.device for mode in modes if isinstance(mode, DeviceContext)]
        self._modes += _get_current_dispatch_mode_stack()
        self._is_profiled = torch._C._autograd._profiler_enabled()
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The same for the thread that runs the block, a new one."""
        with ExitStack() as stack:
            if self._stream is not None:
                torch.cuda.set_device(self._stream.device)
                torch.cuda.set_stream(self._stream)
            if self._is_profiled:
                stack.enter_context(_profiled())
            stack.enter_context(torch.inference_mode(self._is_inference))
            stack.enter_context(torch.set_grad_enabled(self._is_grad))
            for options in self._autocast:
                stack.enter_context(torch.autocast(*options))
            for device in self._devices:
                stack.enter_context(device)
            for mode in self._modes:
                stack.enter_context(mode)
            yield


_PROFILER = "_ZN5torch8autograd8profiler"  # torch::autograd::profiler::


@contextmanager
def _profiled() -> Iterator[None]:
    """This thread's operators go to the profile that another thread has begun.

    torch has the functions for that in C++ (torch/csrc/autograd/profiler_kineto.h) and not in Python.
    """
    library = ctypes.CDLL(torch._C.__file__)  # symbols of what it is linked to are found too
    try:
        is_enabled = library[f"{_PROFILER}29isProfilerEnabledInMainThreadEv"]
        enable = library[f"{_PROFILER}27enableProfilerInChildThreadEv"]
        disable = library[f"{_PROFILER}28disableProfilerInChildThreadEv"]
    except AttributeError:
        warnings.warn(
            f"the members of a LocalGroup are not in this profile: torch {torch.__version__} has no "
            "enableProfilerInChildThread; pass experimental_config=torch.profiler._ExperimentalConfig("
            "profile_all_threads=True) to torch.profiler.profile",
            RuntimeWarning,
            stacklevel=2,
        )
        yield
        return
    is_enabled.restype = ctypes.c_bool
    if not is_enabled():  # a profile of another kind, which has no child threads
        yield
        return
    enable()
    try:
        yield
    finally:
        disable()
