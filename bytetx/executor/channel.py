"""Channel: frames of bounded size between two ranks, over a unix socket."""

import os
import socket
import struct
import threading
from contextlib import suppress

# kind, bytes of the payload
_HEADER = struct.Struct("<BI")
_CHUNK_BYTES = 1 << 16
# The largest message is a step's sequence lengths: 4 bytes for each of up to 16 million sequences.
MAX_PAYLOAD_BYTES = 1 << 26
_PEER = struct.Struct("iII")  # struct ucred: pid, uid, gid


class Channel:
    """Frames in both directions: each is a kind (one byte) and a payload (bytes).

    Nothing is unpickled. Several threads may send; one thread reads. The socket is one end of a
    socketpair, or a connection whose other end peer_pid has checked.
    """

    def __init__(self, sock: socket.socket, *, max_payload_bytes: int = MAX_PAYLOAD_BYTES):
        self._socket, self._max_payload_bytes = sock, max_payload_bytes
        self._send_lock = threading.Lock()
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: int, payload: bytes = b"") -> None:
        """Waits until the socket takes the frame. Raises OSError where the other end is gone."""
        if len(payload) > self._max_payload_bytes:
            raise ValueError(f"a payload has at most {self._max_payload_bytes} bytes")
        frame = _HEADER.pack(kind, len(payload)) + payload
        with self._send_lock:
            self._socket.sendall(frame)

    def try_send(self, kind: int, payload: bytes = b"") -> bool:
        """Sends a small frame; False where it would have to wait, and OSError as of send."""
        if not self._send_lock.acquire(blocking=False):
            return False
        try:
            frame = _HEADER.pack(kind, len(payload)) + payload
            # A unix socket takes a small frame whole or not at all.
            return self._socket.send(frame, socket.MSG_DONTWAIT) == len(frame)
        except BlockingIOError:
            return False
        finally:
            self._send_lock.release()

    def read(self) -> list[tuple[int, bytes]]:
        """Waits for bytes; returns the frames that are complete, maybe none: (kind, payload) each.

        Raises EOFError at the end, OSError, and ValueError for a frame that is too large.
        """
        chunk = self._socket.recv(_CHUNK_BYTES)
        if not chunk:
            raise EOFError("the other end was closed")
        received, frames, start = self._received, [], 0
        received += chunk
        while len(received) - start >= _HEADER.size:
            kind, num_bytes = _HEADER.unpack_from(received, start)
            if num_bytes > self._max_payload_bytes:
                raise ValueError(f"a frame of {num_bytes} bytes, at most {self._max_payload_bytes}")
            end = start + _HEADER.size + num_bytes
            if len(received) < end:
                break
            frames.append((kind, bytes(received[start + _HEADER.size : end])))
            start = end
        del received[:start]
        return frames

    def shutdown(self) -> None:
        """Ends the connection in both directions; threads that wait on it wake up."""
        with suppress(OSError):  # the other end did so first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._send_lock:
            self._socket.close()


def peer_pid(sock: socket.socket) -> int | None:
    """The process at the other end; None where it belongs to another user.

    The kernel reports it (SO_PEERCRED, Linux): of a connecting process, or of one that listens.
    """
    pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid if uid == os.getuid() else None
