"""References: the memory of a device's process, opened by another process of the same node."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import struct
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MEMORY = struct.Struct("<II32sQ")
"""Process, descriptor and name of its file, bytes; made by device/csrc/worker/exports.cpp."""
_ON_GPU = struct.Struct("<16s64sQ")
"""If more follows: which GPU, the handle of an allocation, where in it."""


class CannotOpenError(Exception):
    """This process cannot open the memory; the bytes have to be sent."""


def storage(description: bytes) -> torch.UntypedStorage:
    """A storage over the described memory, shared with the process that owns the memory."""
    import torch

    pid, descriptor, name, size = _MEMORY.unpack_from(description)
    where = description[_MEMORY.size :]
    if where:
        uuid, handle, offset = _ON_GPU.unpack(where)
        ordinal = _ordinal(uuid)
        if not size:
            return torch.empty(0, dtype=torch.uint8, device=f"cuda:{ordinal}").untyped_storage()
        file = _open(pid, descriptor, name)
        return _Borrowed(file, ordinal, handle, offset, size).tensor().untyped_storage()
    if not size:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    file = _open(pid, descriptor, name)
    try:
        block = mmap.mmap(file, size)
    except (OSError, ValueError) as problem:  # the latter if the file is shorter
        raise CannotOpenError(f"shared memory cannot be mapped: {problem}") from problem
    finally:
        os.close(file)
    return torch.frombuffer(block, dtype=torch.uint8).untyped_storage()


def flat(description: bytes) -> torch.Tensor:
    """The bytes of the described memory."""
    import torch

    opened = storage(description)
    return torch.empty(0, dtype=torch.uint8, device=opened.device).set_(opened)


def device(description: bytes) -> torch.device:
    """The device of the described memory, by this process's name for the device."""
    import torch

    where = description[_MEMORY.size :]
    if not where:
        return torch.device("cpu")
    return torch.device("cuda", _ordinal(_ON_GPU.unpack(where)[0]))


def _open(pid: int, descriptor: int, name: bytes) -> int:
    path = f"/proc/{pid}/fd/{descriptor}"
    wanted = f"/memfd:{name.decode('ascii', 'replace')} (deleted)"
    try:
        # By now the number may be that of another file, or of a pipe without another end.
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        if os.readlink(f"/proc/self/fd/{file}") == wanted:
            return file
        os.close(file)
    except OSError as problem:
        raise CannotOpenError(f"{path} cannot be opened: {problem}") from problem
    raise CannotOpenError(f"{path} is another file by now")


def settle() -> None:
    """Wait until every operation on borrowed GPU memory is done."""
    if not _has_borrowed or not _borrowed:
        return
    for ordinal in {borrowed.ordinal for borrowed in _borrowed.copy()}:
        import torch

        torch.cuda.synchronize(ordinal)


class _Borrowed:
    """A storage of another process on a GPU; that process keeps it as long as this object lives."""

    def __init__(self, file: int, ordinal: int, handle: bytes, offset: int, size: int) -> None:
        try:
            # The owner does not reuse the memory while a process has this lock; the kernel releases
            # the lock however this process ends.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            allocation = _allocation(ordinal, handle)
        except (OSError, RuntimeError) as problem:
            os.close(file)
            raise CannotOpenError(f"memory of a GPU cannot be opened: {problem}") from problem
        except BaseException:
            os.close(file)
            raise
        global _has_borrowed
        _has_borrowed = True
        self.ordinal = ordinal
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (allocation.pointer + offset, False),
            "version": 3,
        }
        _borrowed.add(self)
        weakref.finalize(self, _give_back, ordinal, file, [allocation]).atexit = False

    def tensor(self) -> torch.Tensor:
        """The bytes as a tensor, which keeps this alive."""
        import torch

        try:
            return torch.as_tensor(self, device=f"cuda:{self.ordinal}")
        except RuntimeError as problem:
            # PyTorch reads the description of an array with numpy, which may not be installed.
            raise CannotOpenError(str(problem)) from problem


_borrowed: weakref.WeakSet[_Borrowed] = weakref.WeakSet()
_has_borrowed = False
"""Whether this process has ever borrowed memory: every task asks."""


def _give_back(ordinal: int, file: int, held: list[_Allocation]) -> None:
    import torch

    try:
        torch.cuda.synchronize(ordinal)
    finally:
        held.clear()
        os.close(file)


class _Allocation:
    """An allocation of another process on a GPU, mapped here."""

    def __init__(self, ordinal: int, handle: bytes) -> None:
        import torch

        pointer = ctypes.c_uint64()
        with torch.cuda.device(ordinal):
            torch.cuda.synchronize()  # makes the context, which the driver's calls need
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), _Handle(handle), 1)
        self.pointer = pointer.value
        weakref.finalize(self, _close, ordinal, self.pointer).atexit = False


class _Handle(ctypes.Structure):
    _fields_ = (("opaque", ctypes.c_ubyte * 64),)

    def __init__(self, handle: bytes) -> None:
        super().__init__((ctypes.c_ubyte * 64)(*handle))


_allocations: weakref.WeakValueDictionary[tuple[int, bytes], _Allocation] = (
    weakref.WeakValueDictionary()
)
"""A process may open a handle once only."""
_opening = threading.Lock()


def _allocation(ordinal: int, handle: bytes) -> _Allocation:
    with _opening:
        known = _allocations.get((ordinal, handle))
        if known is None:
            known = _allocations[ordinal, handle] = _Allocation(ordinal, handle)
        return known


def _close(ordinal: int, pointer: int) -> None:
    import torch

    with torch.cuda.device(ordinal):
        _driver().cuIpcCloseMemHandle(ctypes.c_uint64(pointer))


@functools.cache
def _ordinal(uuid: bytes) -> int:
    """The GPU's number in this process, where CUDA_VISIBLE_DEVICES may number it differently."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
        device, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        for ordinal in range(torch.cuda.device_count()):
            _call("cuDeviceGet", ctypes.byref(device), ordinal)
            _call("cuDeviceGetUuid_v2", found, device)
            if bytes(found) == uuid:
                return ordinal
    raise CannotOpenError("this process does not see that GPU")


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        raise CannotOpenError(f"{name} failed with CUDA error {code}")


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as problem:
        raise CannotOpenError(str(problem)) from problem
