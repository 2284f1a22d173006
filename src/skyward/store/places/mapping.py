"""A file as private memory: mapped copy-on-write, with no descriptor left open.

The `mmap` of the standard library holds a descriptor for as long as the memory lives (up to Python
3.12 always), and a process may have as few as 1024: fewer than a model has tensors.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class _Mapping(ctypes.Array[ctypes.c_char]):
    """Owns the mapped memory: every view of the memory, and every slice of one, keeps it alive.

    One type serves all lengths, because making a type costs more than the mapping itself; `mapped`
    cuts the view to the file's length.
    """

    _type_ = ctypes.c_char
    _length_ = sys.maxsize


def mapped(descriptor: int) -> memoryview:
    """The whole file as memory; it is unmapped when its last view is freed."""
    size = os.fstat(descriptor).st_size
    if size == 0:
        return memoryview(bytearray())
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, size, writable, mmap.MAP_PRIVATE, descriptor, 0)
    if address is None or address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = _Mapping.from_address(address)
    # Not at the interpreter's exit: threads and destructors may still read the memory, and the
    # kernel unmaps it when the process ends.
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return memoryview(memory).cast("B")[:size]
