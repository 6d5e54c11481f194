"""Files that are mapped into memory, any number of them."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def mapped(path: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Maps a file of raw values into memory.

    Unlike `numpy.memmap`, whose files stay open, of which a process may have a thousand. The pages
    of the file that nobody needs any more leave memory again. The file stays mapped, as it is, as
    long as an array has a part of it, also if it is removed; it must not be cut off meanwhile.

    Args:
        path: of the file.
        dtype: the type of its values.
        shape: how many there are, from the file's beginning on.

    Returns:
        The values, which can't be written.

    Raises:
        OSError: if it can't be opened or mapped.
        ValueError: if it is shorter.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Of what lies beyond its end, each page would end the process that reads it.
        found = os.fstat(descriptor).st_size
        if found < size:
            raise ValueError(f"{path} has {found} bytes, not {size}: it is cut off or another file")
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    finally:
        os.close(descriptor)
    if address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"can't be mapped into memory: {os.strerror(error)}", path)
    region = (ctypes.c_ubyte * size).from_address(address)
    finalizer = weakref.finalize(region, _libc.munmap, address, size)
    # When the process ends, other threads may read it still.
    finalizer.atexit = False
    values = np.frombuffer(region, np.uint8).view(dtype).reshape(shape)
    values.flags.writeable = False
    return values
