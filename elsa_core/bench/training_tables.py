"""Tables of training steps and gradients in Markdown, rendered from their JSON files."""

from __future__ import annotations

from typing import Any


def table(document: dict[str, Any]) -> str:
    """The steps of a document that was written before `elsa bench training` in Markdown."""
    lines = [
        "| model | px | batch | dtype | original, ms | patched, ms | ratio (10 to 90%) | MiB |",
        "|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    for result in document["results"]:
        case, ways = result["case"], [result[way] for way in ("original", "patched")]
        times = " | ".join(f"{way['seconds'] * 1e3:.1f}" for way in ways)
        ratio = f"{result['ratio']:.2f} ({result['ratio_p10']:.2f} to {result['ratio_p90']:.2f})"
        held = [way["memory_bytes"] for way in ways]
        memory = "-" if None in held else " / ".join(f"{size / 2**20:.0f}" for size in held)
        about = " | ".join(str(case[key]) for key in ("model", "image_size", "batch", "dtype"))
        lines.append(f"| {about} | {times} | {ratio} | {memory} |")
    return "\n".join(lines) + "\n"


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
        times = " | ".join(f"{1e3 * way['seconds']:.3g}" for way in ways)
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
