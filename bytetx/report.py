"""What `bytetx info` tells: versions, what backs each op on this machine, what a checkpoint is."""

import platform
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bytetx import __version__
from bytetx.demo import DEMO_PACKAGE

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "sentence-transformers")
_MIB = 1 << 20


def machine_report() -> dict[str, Any]:
    """Versions, threads, and for each op what runs it here and why it is not a kernel."""
    import torch

    from bytetx.ops.native import backend_report

    return {
        "versions": {"bytetx": __version__, "python": platform.python_version(), **_versions()},
        "threads": torch.get_num_threads(),
        "backends": asdict(backend_report()),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in (*_PACKAGES, DEMO_PACKAGE.replace("_", "-")):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def checkpoint_report(model: Any, folder: Path) -> dict[str, Any]:
    """What the loaded model says of itself, and the sizes of its weights files."""
    from safetensors import safe_open

    num_parameters, dtypes = 0, set()
    paths = sorted(folder.glob("*.safetensors"))
    for path in paths:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118  (a safetensors handle is no mapping)
                tensor = file.get_slice(name)
                size = 1
                for length in tensor.get_shape():
                    size *= length
                num_parameters += size
                dtypes.add(tensor.get_dtype())
    return {
        **model.info(),
        "num_parameters": num_parameters,
        "weights_bytes": sum(path.stat().st_size for path in paths),
        "weights_dtypes": sorted(dtypes),
    }


def print_report(report: dict[str, Any], console: Console) -> None:
    """The report as tables for a person; `--json` is for programs."""
    if "checkpoint" in report:
        console.print(_checkpoint_table(report["checkpoint"]))
    console.print(_backend_table(report["backends"]))
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    console.print(Text(f"{versions}; {report['threads']} CPU threads"), soft_wrap=True)


def _checkpoint_table(info: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    unused = info["unused_tensors"]
    architectures = ", ".join(info["architectures"]) or "no architecture named"
    rows = {
        "checkpoint": info["path"],
        "family": f"{info['family']} ({architectures})",
        "layers": f"{info['num_layers']} of {info['hidden_size']}, {info['num_heads']} heads, "
        f"feed-forward {info['intermediate_size']}",
        "parameters": f"{info['num_parameters']:,} in {info['weights_bytes'] / _MIB:,.0f} MiB "
        f"({', '.join(info['weights_dtypes'])})",
        "longest text": f"{info['max_tokens']:,} tokens",
        "vocabulary": f"{info['vocab_size']:,} tokens"
        + ("" if info["has_tokenizer"] else "; no tokenizer in the checkpoint"),
        "pooling": " + ".join([*info["pooling"], *info["sentence_modules"]]),
        "prompts": ", ".join(info["prompts"]) or "none",
        "heads": ", ".join(info["heads"]) or "none",
        "labels": ", ".join(info["labels"]) if info["heads"] else "",
        "runs as": f"{info['dtype']} on {info['device']}, {info['token_budget']:,} tokens a step, "
        f"{info['workspace_bytes'] / _MIB:,.0f} MiB of activations",
        "unused tensors": ", ".join(unused) or "none",
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, Text(value))
    return table


def _backend_table(backends: dict[str, Any]) -> Table:
    table = Table(title_justify="left", pad_edge=False, box=None)
    for name in ("op", "CPU", "GPU"):
        table.add_column(name)
    for row in backends["ops"]:
        table.add_row(row["op"], Text(row["cpu"]), Text(row["cuda"]))
    table.add_section()
    table.add_row("native core", Text(backends["cpu"]), Text(backends["cuda"]))
    table.add_row("GPU", "", Text(backends["gpu"]))
    return table
