"""Ports that several processes of one server share."""

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from bytetx.errors import OptionError
from bytetx.serve.settings import ServeSettings

logger = logging.getLogger("bytetx.serve")


def reserve_port(hostname: str, port: int, *, option: str = "--port") -> socket.socket:
    """A socket that keeps the port for replicas, and does not listen: no connection waits there.

    Raises OptionError where the address cannot be had, or another server listens on it, even one
    that shares it.
    """
    try:
        found = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
        kept = socket.socket(family, kind, protocol)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(place)
    except OSError as error:
        raise OptionError(
            f"cannot listen on {hostname}:{port}: {error.strerror or error}; choose another "
            f"--hostname or {option}"
        ) from error
    return kept


@contextmanager
def reserved_grpc_port(settings: ServeSettings) -> Iterator[ServeSettings]:
    """Settings for processes that share the port of gRPC, which is kept for them meanwhile."""
    if settings.grpc_port is None:
        yield settings
        return
    with reserve_port(settings.hostname, settings.grpc_port, option="--grpc-port") as place:
        port = place.getsockname()[1]
        logger.info("gRPC on port %d", port)
        yield replace(settings, grpc_port=port)
