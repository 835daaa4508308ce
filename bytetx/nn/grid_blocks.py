"""How a rank of a group runs its part of a model, on any grid: its blocks and its transformer."""

import torch

from bytetx.checkpoint.spec import ModelSpec
from bytetx.errors import InputError
from bytetx.nn.blocks import Blocks, LocalBlocks
from bytetx.nn.feature_blocks import FeatureBlocks
from bytetx.nn.pass_graphs import GraphedPlacement, PassGraphs, RankPlacement
from bytetx.nn.sharded_blocks import ShardedBlocks
from bytetx.nn.slots import SlottedPlacement
from bytetx.nn.transformer import Transformer
from bytetx.nn.weight_gather import WeightGather
from bytetx.parallel.grid import Grid
from bytetx.parallel.layout import shard_model
from bytetx.parallel.tp import TpGroup


def check_grid(spec: ModelSpec, grid: Grid) -> None:
    """Raises InputError where a model cannot be divided so."""
    if spec.layer_spec.mixer is not None:
        raise InputError(
            f"ranks divide layers with attention alone, and {spec.family} has others; run it on "
            "one device, or several whole copies of it (bytetx serve --replicas)"
        )
    if grid.x * grid.y * grid.z > 1 and not spec.layer_spec.can_share:
        raise InputError(
            f"x, y and z do not divide layers whose heads differ or that read the embedded tokens, "
            f"which {spec.family} has; use data"
        )
    shard_model(spec, rank=0, size=grid.y)
    has_experts = spec.experts is not None
    if grid.z > 1 and has_experts:
        raise InputError(f"z gathers dense layers, and {spec.family} has experts; use data or y")
    if grid.x == 1:
        return
    if spec.hidden_size % grid.x:
        raise InputError(f"x={grid.x} must divide the hidden size, {spec.hidden_size}")
    if has_experts or not spec.layer_spec.can_divide_hidden:
        raise InputError(
            f"x does not divide experts, disentangled attention or convolutions, which "
            f"{spec.family} has; use data, z or y"
        )


def grid_blocks(spec: ModelSpec, group: TpGroup) -> Blocks:
    """The blocks of this rank: as its y, x and z axes say."""
    axes = group.axes
    if axes is None:
        return ShardedBlocks(spec, group, shard_model(spec, rank=group.rank, size=group.size))
    y = axes.y
    blocks: LocalBlocks | ShardedBlocks
    if axes.x.size > 1:
        blocks = FeatureBlocks(spec, axes)
    elif y.size > 1:
        blocks = ShardedBlocks(spec, y, shard_model(spec, rank=y.rank, size=y.size))
    else:
        blocks = LocalBlocks(spec)
    if axes.z.size > 1:
        blocks.weight_gather = WeightGather(axes.z)
    return blocks


def grid_transformer(local: Transformer, group: TpGroup) -> Transformer:
    """The transformer that runs whole batches on this rank; called as grid_placement is."""
    return local.placed(grid_placement(local, group))


def grid_placement(local: Transformer, group: TpGroup) -> RankPlacement:
    """The placement of whole batches on this rank: with slots, it runs a part of each batch.

    All ranks call this, once all have loaded.
    """
    blocks, axes = local.blocks, group.axes
    blocks.sync_kernel_support(local.layers.weights)
    if blocks.weight_gather is not None:
        blocks.weight_gather.connect()
    graphs = None
    if _all_capture(local, group):
        groups = group.all_collectives()
        graphs = PassGraphs(local, collectives=groups, device=group.device)
    if axes is None or axes.slots.size == 1:
        return GraphedPlacement(local, graphs)
    return SlottedPlacement(local, axes.slots, graphs)


def _all_capture(local: Transformer, group: TpGroup) -> bool:
    """Whether every rank can capture its passes: their shards may differ, and with them kernels."""
    if group.device.type != "cuda":
        return False
    gather = local.blocks.weight_gather
    captures = (
        local.is_capturable
        and all(collectives.is_capturable for collectives in group.all_collectives())
        and (gather is None or gather.is_capturable)
    )
    lacking = torch.tensor([float(not captures)], device=group.device)
    return not group.collectives.all_reduce(lacking).item()
