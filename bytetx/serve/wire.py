"""Messages between front-ends and the engine process, over a Unix socket.

A frame is: u32 bytes of all that follows, u32 bytes of a JSON header, the header, then the bytes
of arrays, whose dtypes and shapes the header's "arrays" gives. Numbers are little-endian. Nothing
is unpickled: a process that could write to the socket cannot run code here.
"""

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import orjson

_PREFIX = struct.Struct("<II")
_DTYPES = {"float32", "float64", "float16", "int32", "int64", "uint8", "int8"}
_OPTIONS = orjson.OPT_NON_STR_KEYS


def encode_frame(header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> bytes:
    """One frame; arrays: of any shape, of the dtypes above."""
    if arrays:
        kept = [np.ascontiguousarray(array) for array in arrays]
        header = header | {"arrays": [[array.dtype.name, array.shape] for array in kept]}
        blobs = [array.tobytes() for array in kept]
    else:
        blobs = []
    text = orjson.dumps(header, option=_OPTIONS)
    size = 4 + len(text) + sum(map(len, blobs))
    return b"".join((_PREFIX.pack(size, len(text)), text, *blobs))


def decode_frame(body: memoryview) -> tuple[dict[str, Any], tuple[np.ndarray, ...]]:
    """body: all after the first u32. The arrays are copies."""
    (size,) = struct.unpack_from("<I", body)
    header: dict[str, Any] = orjson.loads(body[4 : 4 + size])
    arrays, start = [], 4 + size
    for name, shape in header.get("arrays", ()):
        if name not in _DTYPES:
            raise ValueError(f"a frame holds an array of {name}")
        dtype = np.dtype(name)
        count = int(np.prod(shape, dtype=np.int64))
        flat = np.frombuffer(body, dtype=dtype, count=count, offset=start)
        arrays.append(flat.reshape(shape).copy())
        start += count * dtype.itemsize
    return header, tuple(arrays)


class FrameProtocol(asyncio.Protocol):
    """Cuts a stream into frames; on_frame and on_close are called in the event loop."""

    def __init__(
        self,
        on_frame: Callable[["FrameProtocol", dict[str, Any], tuple[np.ndarray, ...]], None],
        on_close: Callable[["FrameProtocol"], None],
    ):
        self._on_frame, self._on_close = on_frame, on_close
        self._buffer = bytearray()
        self._unsent: list[bytes] = []
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._on_close(self)

    def send(self, header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Frames of one turn of the event loop are written together.

        Does nothing where the connection is closed: its other end has forgotten the request.
        """
        if self.transport is None:
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._write)
        self._unsent.append(encode_frame(header, arrays))

    def close(self) -> None:
        """Closes the connection once all frames are written."""
        self._write()
        transport, self.transport = self.transport, None
        if transport is not None:
            transport.close()

    def _write(self) -> None:
        frames, self._unsent = self._unsent, []
        if frames and self.transport is not None:
            self.transport.write(b"".join(frames))

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= 4:
            (size,) = struct.unpack_from("<I", buffer, start)
            end = start + 4 + size
            if len(buffer) < end:
                break
            header, arrays = decode_frame(memoryview(bytes(buffer[start + 4 : end])))
            self._on_frame(self, header, arrays)
            start = end
        if start:
            del buffer[:start]
