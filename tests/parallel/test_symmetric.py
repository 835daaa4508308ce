"""The store of the rendezvous for symmetric memory, without a GPU."""

from datetime import timedelta

import pytest
import torch.distributed as dist

symmetric = pytest.importorskip("bytetx.parallel.symmetric")


def test_exchanges_are_numbered_from_0_in_every_group() -> None:
    """torch goes on from where a process has got to; a rank that is new has got nowhere."""
    shared = dist.HashStore()
    leads, follows = (symmetric.NumberedStore(shared) for _ in range(2))
    old, new = (dist.PrefixStore("group", store) for store in (leads, follows))  # as torch has it
    for number in range(3):
        old.set(f"Exchange/{number + 7}/0", f"of 0, {number}")
        new.set(f"Exchange/{number}/1", b"\x00\xff")
        assert old.get(f"Exchange/{number + 7}/1") == b"\x00\xff"
        assert new.get(f"Exchange/{number}/0") == f"of 0, {number}".encode()
    old.set("Other/5/0", "another kind")
    assert new.get("Other/0/0") == b"another kind"
    old.set("name", "as it is")
    new.wait(["name"])
    assert new.get("name") == b"as it is"
    with pytest.raises(dist.DistError):
        new.wait(["Exchange/9/0"], timedelta(milliseconds=20))
