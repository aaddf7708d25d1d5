"""Tables of linear layers, training steps, gradients and long rows in Markdown, from their JSON.

No table has an error beside the time of another call: those of `layers_h200.json` are of the first
image or the first 512 rows, and stay in the file.
`python -m elsa_core.bench.training_tables` rewrites them in docs/benchmarks.md.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from elsa_core.errors import ArgumentError
from elsa_core.messages import milliseconds

_TUNING: Final = Path(__file__).parents[1] / "backends" / "triton" / "tuning" / "backward"


def steps_table(document: dict[str, Any]) -> str:
    """The steps of a document of `elsa bench training` in Markdown; MB beyond weights."""
    lines = [
        "| model | px | batch | dtype | original, ms | patched, ms | gain (95%) "
        "| MB original / patched |",
        "|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    for result in document["results"]["cases"]:
        case, gain = result["case"], result["gain"]
        runs = {run["contender"]: run for run in result["measurements"]}
        ways = [runs["eager"], runs["patched"]]
        times = " | ".join(milliseconds(way["seconds"]) for way in ways)
        held = [way["memory_bytes"] for way in ways]
        memory = " / ".join("-" if size is None else f"{size / 1e6:.0f}" for size in held)
        known = f"{gain['low']:.2f} to {gain['high']:.2f}"
        if gain["verdict"] == "unsure":
            known = f"{gain['rounds']} rounds"
        about = " | ".join(str(case[key]) for key in ("label", "image_size", "batch", "dtype"))
        lines.append(f"| {about} | {times} | {gain['value']:.2f} ({known}) | {memory} |")
    return "\n".join(lines) + "\n"


def gradients_table(document: dict[str, Any]) -> str:
    """The calls of `tuning/backward/measured_*.json` in Markdown."""
    lines = [
        "| B,H,N,D | dtype | mask | elsa, ms | fastest peer, ms | ratio |",
        "|---|---|---|---:|---:|---:|",
    ]
    for case in document["cases"]:
        shape = ",".join(str(case[name]) for name in ("batch", "heads", "tokens", "head_dim"))
        name, peer = min(case["peers_forward_backward_ms"].items(), key=lambda item: item[1])
        lines.append(
            f"| {shape} | {case['dtype']} | {case['mask']} | {case['forward_backward_ms']:.3f} | "
            f"{peer:.3f} ({name}) | {case['ratio']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def layers_table(document: dict[str, Any]) -> str:
    """The models of `docs/layers_h200.json` in Markdown: CUDA graphs, in milliseconds."""
    lines = [
        "| model | px | batch | original, ms | attention, ms | whole model, ms | gain "
        "| original with TF32, ms |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in document["models"]:
        about = " | ".join(str(case[key]) for key in ("model", "px", "batch"))
        taken = case["graph_ms"]
        times = " | ".join(f"{taken[way]:.3g}" for way in ("original", "attention", "model"))
        gain = taken["original"] / taken["model"]
        lines.append(f"| {about} | {times} | {gain:.2f} | {case['tf32_graph_ms']:.3g} |")
    return "\n".join(lines) + "\n"


def compiled_table(document: dict[str, Any]) -> str:
    """The models of `docs/layers_compiled_h200.json` in Markdown: CUDA graphs, in milliseconds."""
    ways = ("original", "original, compiled", "patched, frozen", "patched, compiled")
    exact = ("original, TF32", "original, TF32, compiled")
    lines = [
        f"| model | px | batch | {' | '.join(f'{way}, ms' for way in ways)} | gain "
        f"| {' | '.join(f'{way}, ms' for way in exact)} |",
        f"|---|{'---:|' * (3 + len(ways) + len(exact))}",
    ]
    for case in document["models"]:
        about = " | ".join(str(case[key]) for key in ("model", "px", "batch"))
        taken = case["graph_ms"]
        times, others = (
            " | ".join(f"{taken[way]:.3g}" if way in taken else "-" for way in some)
            for some in (ways, exact)
        )
        original, own = (
            min(taken[way] for way in some if way in taken) for some in (ways[:2], ways[2:])
        )
        lines.append(f"| {about} | {times} | {original / own:.2f} | {others} |")
    return "\n".join(lines) + "\n"


def fusions_table(document: dict[str, Any]) -> str:
    """The models of `elsa_core.bench.fusions` in Markdown: CUDA graphs."""
    lines = [
        "| model | batch | variant | ms | original / it | products alone / it "
        "| error, it / original |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for case in document["rows"]:
        for each in case["variants"]:
            about = f"{case['model']} | {case['batch']} | {each['variant']}"
            errors = f"{each['error']:.1e} / {each['original_error']:.1e}"
            times = f"{each['milliseconds']:.3g} | {each['gain']:.2f} | {each['alone']:.2f}"
            lines.append(f"| {about} | {times} | {errors} |")
    return "\n".join(lines) + "\n"


def products_table(document: dict[str, Any]) -> str:
    """The products of `docs/layers_h200.json` in Markdown."""
    lines = [
        "| rows x channels x columns | PyTorch, ms | elsa, ms | gain |",
        "|---|---:|---:|---:|",
    ]
    for case in document["products"]:
        shape = "x".join(str(case[name]) for name in ("rows", "depth", "columns"))
        ours, theirs = case["elsa_ms"], case["pytorch_ms"]
        lines.append(f"| {shape} | {theirs:.3g} | {ours:.3g} | {theirs / ours:.2f} |")
    return "\n".join(lines) + "\n"


def distributed_table(document: dict[str, Any]) -> str:
    """The calls and the model of `elsa_core.bench.distributed` in Markdown."""
    lines = [
        "| what | dtype | one GPU, s | all, s | gain | memory, MB | error, one GPU and all |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for case in document["attention"]:
        about = f"{','.join(map(str, case['shape']))}, {case['direction']}"
        errors = f"{case['relative_error_one']:.1e}, {case['relative_error']:.1e}"
        lines.append(f"| {about} | {case['dtype']} | {_of_ranks(case)} | {errors} |")
    model = document["model"]
    about = f"{model['model']} at {model['image_size']} px, {sum(model['tokens'])} tokens"
    apart = f"apart by {model['difference']:.1e}"
    lines.append(f"| {about} | {model['dtype']} | {_of_ranks(model)} | {apart} |")
    return "\n".join(lines) + "\n"


def _of_ranks(case: dict[str, Any]) -> str:
    """Seconds of one and of all ranks, their ratio, and the memory of one and of each of all."""
    seconds = f"{case['seconds_one']:.3g} | {case['seconds']:.3g} | {case['speedup']:.2f}"
    return f"{seconds} | {case['memory_one'] / 1e6:.0f} / {case['memory'] / 1e6:.0f}"


def long_table(document: dict[str, Any]) -> str:
    """The calls of `elsa_core.bench.long_context` in Markdown; models are left out."""
    lines = [
        "| shape | dtype | by | seconds | error | copies under a fold |",
        "|---|---|---|---:|---:|---:|",
    ]
    for case in document["cases"]:
        shape = ",".join(map(str, case["shape"]))
        if "queries" in case:
            shape += f" of {case['queries']} queries, memory for half of the keys and values"
        report = case.get("report")
        hidden = "-" if report is None else f"{report['hidden']:.0%}"
        what = f"{shape} | {case['dtype']} | {case['contender']} | {case['seconds']:.3g}"
        lines.append(f"| {what} | {case['error']:.1e} | {hidden} |")
    return "\n".join(lines) + "\n"


TABLES: Final[dict[str, tuple[Callable[[dict[str, Any]], str], str | Path]]] = {
    "layers": (layers_table, "layers_h200.json"),
    "layers_compiled": (compiled_table, "layers_compiled_h200.json"),
    "products": (products_table, "layers_h200.json"),
    "fusions": (fusions_table, "fusions_h200.json"),
    "training": (steps_table, "training_steps_h200.json"),
    "training_h100": (steps_table, "training_steps_h100.json"),
    "training_cpu": (steps_table, "training_steps_cpu.json"),
    "training_cpu_avx512": (steps_table, "training_steps_cpu_avx512.json"),
    "distributed": (distributed_table, "distributed_2xh100.json"),
    "long_context": (long_table, "long_context_h100.json"),
    "gradients": (gradients_table, _TUNING / "measured_h200.json"),
}
"""By the name in the page's markers: what renders a table, and its JSON beside the page."""


def rendered(page: Path) -> str:
    """The text of a page with every table of `TABLES` as its JSON gives it.

    Raises:
        ArgumentError: the page has no pair of markers for one of them.
    """
    text = page.read_text(encoding="utf-8")
    for name, (render, file) in TABLES.items():
        markdown = render(json.loads((page.parent / file).read_text(encoding="utf-8")))
        begin, end = f"<!-- begin:{name} -->\n", f"<!-- end:{name} -->"
        block = re.compile(f"{begin}.*?{end}", re.DOTALL)
        if not block.search(text):
            raise ArgumentError(f"{page}: no {begin.strip()} and {end}")
        text = block.sub(lambda _, new=f"{begin}{markdown}{end}": new, text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    for argument in sys.argv[1:] or ["docs/benchmarks.md"]:
        Path(argument).write_text(rendered(Path(argument)), encoding="utf-8")
