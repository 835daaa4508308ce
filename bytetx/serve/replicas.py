"""Several server processes behind one port: starts them, starts dead ones again, drains them.

Each replica is a whole server on GPUs of its own (replica_process.py). The kernel shares new
connections among the sockets that listen on the port (SO_REUSEPORT).
"""

import asyncio
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import replace

from bytetx.errors import BytetxError, OptionError
from bytetx.serve.child_process import ChildProcess, drain_on_signals, run_until_told
from bytetx.serve.logs import set_up_logs
from bytetx.serve.ports import reserve_port, reserved_grpc_port
from bytetx.serve.settings import ServeSettings

logger = logging.getLogger("bytetx.serve")


def serve_replicas(
    settings: ServeSettings, num_replicas: int, *, visible_devices: str | None = None
) -> None:
    """Serves until SIGTERM or SIGINT, and returns once what runs is answered.

    visible_devices: CUDA_VISIBLE_DEVICES of this process.
    Raises OptionError for settings that replicas cannot share, BytetxError where a replica does not
    get ready.
    """
    set_up_logs(settings)
    if settings.uds_path is not None:
        raise OptionError("--replicas share a port, not a --uds-path; drop one of them")
    if settings.frontends > 1:
        raise OptionError("--replicas and --frontends exclude each other")
    devices = replica_devices(settings, num_replicas, visible_devices)
    asyncio.run(_supervise(settings, devices))


def share_gpus(gpus: Sequence[str], num_replicas: int, *, tp: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each replica: tp GPUs of their own.

    Raises OptionError where there are too few.
    """
    if num_replicas * tp > len(gpus):
        each = f" of {tp} GPUs each" if tp > 1 else ""
        raise OptionError(
            f"--replicas {num_replicas}{each} need {num_replicas * tp} GPUs, there are {len(gpus)}"
        )
    return [",".join(gpus[i * tp : (i + 1) * tp]) for i in range(num_replicas)]


def replica_devices(
    settings: ServeSettings, num_replicas: int, visible_devices: str | None
) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each replica; None where they run on the CPU."""
    if settings.device.startswith("cuda:"):
        return [_shared_gpu(settings, visible_devices)] * num_replicas
    if settings.device == "cpu":
        return [None] * num_replicas
    import torch  # takes a second, which a server on the CPU need not wait for

    num_gpus = torch.cuda.device_count()
    if num_gpus == 0 and settings.device == "auto":
        return [None] * num_replicas
    gpus = visible_devices.split(",") if visible_devices else [str(i) for i in range(num_gpus)]
    return list(share_gpus(gpus[:num_gpus], num_replicas, tp=settings.tp))


def _shared_gpu(settings: ServeSettings, visible_devices: str | None) -> str:
    """CUDA_VISIBLE_DEVICES of all replicas, where they share the one GPU that --device names."""
    number = settings.device.removeprefix("cuda:")
    gpus = None if not visible_devices else visible_devices.split(",")
    if not number.isdecimal() or (gpus is not None and int(number) >= len(gpus)):
        raise OptionError(f"--device {settings.device}: there is no such GPU")
    if settings.tp > 1:
        raise OptionError(
            f"--device {settings.device} is one GPU, which --replicas would share, and --tp "
            f"{settings.tp} needs several: give --device cuda"
        )
    return number if gpus is None else gpus[int(number)]


async def _supervise(settings: ServeSettings, devices: Sequence[str | None]) -> None:
    """Runs a replica on each of the devices, until a signal.

    Raises BytetxError where one ends before it was ready for the first time.
    """
    told = asyncio.Event()
    with (
        tempfile.TemporaryDirectory(prefix="bytetx-") as folder,
        reserve_port(settings.hostname, settings.port) as place,
        reserved_grpc_port(settings) as settings,
    ):
        settings = replace(settings, port=place.getsockname()[1])
        replicas = [_replica(settings, i, gpus, folder) for i, gpus in enumerate(devices)]
        ready: set[ChildProcess] = set()

        def note_ready(replica: ChildProcess) -> None:
            ready.add(replica)
            logger.info("%s is ready (%d of %d)", replica.title, len(ready), len(replicas))

        drain_on_signals(replicas, told)
        for replica in replicas:
            replica.start(note_ready)
        failed = await run_until_told(replicas, told)
        await asyncio.gather(*(replica.stop() for replica in replicas))
    if failed is not None:
        child, code = failed
        raise BytetxError(f"{child.title} ended with {code} before it was ready")
    logger.info("ended")


def _replica(settings: ServeSettings, index: int, gpus: str | None, folder: str) -> ChildProcess:
    """gpus: CUDA_VISIBLE_DEVICES; None: it runs on the CPU."""
    if gpus is None and settings.device == "auto":
        settings = replace(settings, device="cpu")
    if gpus is not None and settings.device.startswith("cuda:"):
        settings = replace(settings, device="cuda")  # the only one that it sees
    return ChildProcess(
        settings,
        ["bytetx.serve.replica_process", str(index), folder],
        f"replica {index}",
        environment=[] if gpus is None else [f"CUDA_VISIBLE_DEVICES={gpus}"],
    )
