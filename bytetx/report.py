"""What `bytetx info` tells: versions, what backs each op on this machine, what a checkpoint is."""

import platform
from dataclasses import asdict
from importlib import metadata
from math import prod
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
                if not tensor.get_dtype().startswith("I"):  # position ids, saved by old versions
                    num_parameters += prod(tensor.get_shape())
                    dtypes.add(tensor.get_dtype())
    return {
        **model.info(),
        "num_parameters": num_parameters,
        "weights_bytes": sum(path.stat().st_size for path in paths),
        "weights_dtypes": sorted(dtypes),
    }


def print_report(report: dict[str, Any], console: Console) -> None:
    """The report as a table for a person; `--json` is for programs."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    rows = _checkpoint_rows(report["checkpoint"]) if "checkpoint" in report else []
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    rows += [*_backend_rows(report["backends"]), ("versions", versions)]
    rows.append(("threads", f"{report['threads']} on the CPU"))
    for name, value in rows:
        table.add_row(name, Text(value))
    console.print(table)


def _checkpoint_rows(info: dict[str, Any]) -> list[tuple[str, str]]:
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
        "unused tensors": ", ".join(info["unused_tensors"]) or "none",
    }
    return [(name, value) for name, value in rows.items() if value]


def _backend_rows(backends: dict[str, Any]) -> list[tuple[str, str]]:
    """Ops that one thing backs, or that lack a kernel for one reason, share a row."""
    rows = []
    for title, device in (("on a CPU", "cpu"), ("on a GPU", "cuda")):
        ops_of: dict[str, list[str]] = {}
        for row in backends["ops"]:
            ops_of.setdefault(row[device], []).append(row["op"])
        for backing, ops in ops_of.items():
            names = "all ops" if len(ops_of) == 1 else ", ".join(ops)
            rows.append((title, f"{names}: {backing}"))
            title = ""
    return [*rows, ("native core", f"CPU: {backends['cpu']}"), ("", f"GPU: {backends['cuda']}")]
