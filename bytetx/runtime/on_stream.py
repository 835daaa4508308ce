"""OnStream: torch.cuda.stream without its checks."""

import torch


class OnStream:
    """torch.cuda.stream without its checks, which cost 7 us a step."""

    __slots__ = ("_device_index", "_previous", "_stream")

    def __init__(self, stream: torch.cuda.Stream):
        self._stream = (stream.stream_id, stream.device_index, stream.device_type)

    def __enter__(self) -> None:
        self._device_index = torch._C._cuda_getDevice()
        self._previous = torch._C._cuda_getCurrentStream(self._stream[1])
        _set_stream(*self._stream)

    def __exit__(self, *error: object) -> None:
        _set_stream(*self._previous)
        if self._device_index != self._stream[1]:
            torch._C._cuda_setDevice(self._device_index)


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    """Makes the stream current on its device, and that device current, too."""
    torch._C._cuda_setStream(
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )
