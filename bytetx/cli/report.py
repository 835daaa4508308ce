"""The report of `bytetx info`: versions, the kernels of each op, and a checkpoint's facts."""

import platform
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bytetx import __version__
from bytetx.checkpoint.demo import DEMO_PACKAGE

if TYPE_CHECKING:
    from bytetx.model import Model

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "sentence-transformers")
_MIB = 1 << 20


def machine_report() -> dict[str, Any]:
    """Versions, threads, and the kernels that run each op on this machine."""
    import torch

    from bytetx.ops.backend_report import backend_report

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


def checkpoint_report(model: "Model") -> dict[str, Any]:
    """Report what the loaded model says of itself, and the size of its weight files."""
    from bytetx.checkpoint.weights import weight_files

    paths = weight_files(model.checkpoint.sentence.folder, model.checkpoint.spec)
    return {**model.info(), "weights_bytes": sum(path.stat().st_size for path in paths)}


def print_report(report: dict[str, Any], console: Console) -> None:
    """Prints the report as a table; programs use `--json`."""
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
    is_lm = "language model" in info["heads"]
    rows = {
        "checkpoint": info["path"],
        "family": f"{info['family']} ({architectures})",
        "layers": f"{info['num_layers']} of {info['hidden_size']}, {info['num_heads']} heads, "
        f"feed-forward {info['intermediate_size']}"
        if info["num_layers"]
        else f"none: a table of vectors of {info['hidden_size']}",
        "parameters": f"{info['num_parameters']:,} in {info['weights_bytes'] / _MIB:,.0f} MiB "
        f"({', '.join(info['weights_formats'])}; {info['weights_bits']:g} bits each)",
        "longest text": f"{info['max_tokens']:,} tokens",
        "vocabulary": f"{info['vocab_size']:,} tokens"
        + ("" if info["has_tokenizer"] else "; no tokenizer in the checkpoint"),
        "pooling": "" if is_lm else " + ".join([*info["pooling"], *info["sentence_modules"]]),
        "prompts": "" if is_lm else ", ".join(info["prompts"]) or "none",
        "heads": ", ".join(info["heads"]) or "none",
        "labels": ", ".join(info["labels"]),
        "runs as": f"{info['dtype']} on {info['device']}, {info['token_budget']:,} tokens a step, "
        f"{info['held_bytes'] / _MIB:,.0f} MiB of weights, "
        f"{info['workspace_bytes'] / _MIB:,.0f} MiB of activations",
        "prefix cache": f"{info['prefix_cache_bytes'] / _MIB:,.0f} MiB at most"
        if info["prefix_cache_bytes"]
        else "",
        "unused tensors": ", ".join(info["unused_tensors"]) or "none",
    }
    return [(name, value) for name, value in rows.items() if value]


def _backend_rows(backends: dict[str, Any]) -> list[tuple[str, str]]:
    """One row for each backend with its ops; ops without a backend here have no row."""
    rows = []
    for title, device in (("on the CPU", "cpu"), ("on a GPU", "cuda")):
        ops_of: dict[str, list[str]] = {}
        for row in backends["ops"]:
            ops_of.setdefault(row[device], []).append(row["op"])
        some = {backing: ops for backing, ops in ops_of.items() if not backing.startswith("none")}
        for backing, ops in some.items():
            names = "all ops" if len(ops_of) == 1 else ", ".join(ops)
            rows.append((title, f"{backing}: {names}"))
            title = ""
        if not some:
            rows.append((title, backends["gpu"] if device == "cuda" else backends["cpu"]))
    return rows
