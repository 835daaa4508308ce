"""StreamOrder: work of several streams in turn, with stand-ins for a GPU's streams."""

import pytest
import torch

from bytetx.runtime.on_stream import StreamOrder


class Device:
    """A GPU's stand-in for torch: the current device and stream, and what events were used for."""

    def __init__(self):
        self.index, self.stream, self.calls = 0, 11, []

    def event(self):
        device = self

        class Event:
            def record(self):
                device.calls.append(("record", device.index, device.stream))

            def wait(self):
                device.calls.append(("wait", device.index, device.stream))

        return Event()


@pytest.fixture
def device(monkeypatch):
    found = Device()

    def set_device(index):
        found.index = index

    for name, function in (
        ("_cuda_getDevice", lambda: found.index),
        ("_cuda_setDevice", set_device),
        ("_cuda_getCurrentRawStream", lambda index: found.stream),
    ):
        monkeypatch.setattr(torch._C, name, function, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    return found


def test_a_stream_waits_for_the_work_of_another_one(device):
    order = StreamOrder(torch.device("cuda", 0))
    for stream in (11, 11, 12, 12, 11):
        device.stream = stream
        with order:
            pass
    assert device.calls == [
        ("record", 0, 11),
        ("record", 0, 11),
        ("wait", 0, 12),
        ("record", 0, 12),
        ("record", 0, 12),
        ("wait", 0, 11),
        ("record", 0, 11),
    ]


def test_its_device_is_current_inside_and_the_callers_after_it(device):
    order = StreamOrder(torch.device("cuda", 1))
    with pytest.raises(KeyError), order:
        assert device.index == 1
        raise KeyError
    assert device.index == 0
    assert device.calls == [("record", 1, 11)]
