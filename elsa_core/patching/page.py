"""The page of `elsa inspect --html`: every site of a model, and what can be patched."""

from __future__ import annotations

from pathlib import Path

from elsa_core.base import pages
from elsa_core.patching.adapters import table
from elsa_core.patching.sites import Inspection, sites_of


def write_page(name: str, about: str, found: Inspection, path: Path) -> Path:
    """Write the page of `found`, whole or not at all; `about` is a line below the model's name."""
    good = [site for site in found.sites if site.patchable]
    share = sum(site.flops_share or 0.0 for site in good)
    work = f", with {share:.1%} of the model's FLOPs" if share else ""
    layers = any(site.kind in table.LAYERS for site in found.sites)
    which = sites_of("model" if layers else "attention")
    said = f"{len(good)} of {len(found.sites)} {which} can be patched{work}."
    parts = [
        f"<h1>{pages.text(name)}: its attention</h1>",
        f'<p class="dim">{pages.text(about)}</p>',
        f'<p class="gain"><b>{pages.text(said)}</b></p>',
    ]
    shown = found.summary()
    parts += [f'<p class="warning">{pages.text(line)}</p>' for line in shown.lines]
    if found.sites:
        columns = [title.lstrip(">") if title[0] == ">" else f".{title}" for title in shown.columns]
        parts += ["<h2>Sites</h2>", pages.table(columns, shown.rows)]
        more = " Of linear layers, MLPs and patch embeddings: of all their products." * layers
        parts.append(
            '<p class="dim">FLOPs: of the two products of attention, q k<sup>T</sup> and that with '
            "v, as a share of the whole model's; projections do not count among them."
            f"{more} tokens: queries:keys of a call, one number where they are equal. count: sites "
            "that are alike.</p>"
        )
    if found.total_flops:
        size = " x ".join(map(str, found.input_size))
        parts.append(
            f'<p class="dim">One image of {size}: {found.total_flops / 1e9:.2f} GFLOPs.</p>'
        )
    return pages.write(pages.document(f"elsa inspect: {name}", parts), path)
