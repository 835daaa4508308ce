"""One rank of a group whose ranks are processes that share GPUs: `comm_rank.py RANK SIZE PORT`.

Processes on one GPU take turns on it, so calls take milliseconds; what they compute is what they
would on a GPU each. Every process draws the same numbers, and checks its own results.
"""

import os
import random
import sys
import time
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from comm_layers import Group, Layer, check_layer, gather_layer, random_layer, sum_layer

from bytetx.ops.comm_plan import CommPlan, Transport
from bytetx.parallel.tp import gpu_of, join_group

BUFFER_BYTES = 256 << 20
NUM_LAYERS = 16
ROWS, ALL_REDUCE_ROWS = 700, 300
NUM_CALLS, LATE_CYCLES = 200, 300_000


def main(rank: int, size: int, port: int) -> None:
    """Ends with 0 where everything is right."""
    began, device = time.monotonic(), gpu_of(rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    options = {"rank": rank, "size": size, "device": device}
    joined = join_group(store, **options, workspace_bytes=BUFFER_BYTES)
    assert joined.workspace is not None and joined.workspace.memory is not None
    met = time.monotonic()
    peers = replace(joined.peers, is_even=False)
    group = Group({rank: peers}, [], [device] * size)
    random.seed(size)
    torch.manual_seed(size)
    for number in range(NUM_LAYERS):
        dtype = (torch.float16, torch.bfloat16)[number % 2]
        check_layer(group, random_layer(group, dtype, max_rows=(ROWS, 6)[number % 3 == 0]), dtype)
    transports: tuple[Transport, ...] = ("one_shot", "two_shot")
    for transport in transports:
        plan = CommPlan("cublas", transport)
        options = {"is_sharded": False, "max_rows": ALL_REDUCE_ROWS, "plan": plan}
        check_layer(group, sum_layer(group, torch.bfloat16, **options), torch.bfloat16)
    copied, layers = {"max_rows": ROWS, "plan": CommPlan("cublas", "copy_engine")}, []
    for dtype, tile in ((torch.bfloat16, "128x192"), (torch.float16, "128x128")):
        layers.append(gather_layer(group, dtype, **copied))
        layers.append(sum_layer(group, dtype, is_sharded=True, **copied))
        plan = CommPlan("fused", "peer_store", tile, fuse_reduce=True)
        layers.append(sum_layer(group, dtype, is_sharded=True, max_rows=size * ROWS, plan=plan))
        for layer in layers[-3:]:
            check_layer(group, layer, dtype)
    call_again(layers, rank, size)
    torch.cuda.synchronize()
    spent = f"{met - began:.1f} s to meet, {time.monotonic() - met:.1f} s of calls"
    print(f"rank {rank} of {size} is right; {spent}", flush=True)
    joined.collectives.barrier()


def call_again(layers: list[Layer], rank: int, size: int) -> None:
    """Many calls, of which some come late, eager and captured, give the bits of the first ones."""
    first = [layer.call(rank) for layer in layers]
    wrong = torch.zeros((), dtype=torch.int64, device=first[0][0].device)

    def call(index: int) -> None:
        for found, same in zip(layers[index].call(rank), first[index], strict=True):
            wrong.add_((found != same).sum())

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(len(layers)):
            call(index)
    for number in range(NUM_CALLS):
        if random.randrange(8 * size) == rank:
            torch.cuda._sleep(LATE_CYCLES)
        if number % 10 == 9:
            graph.replay()
        call(random.randrange(len(layers)))
    assert int(wrong) == 0


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    sys.stdout.flush()
    os._exit(0)  # destructors of shared memory may wait for ranks that have gone
