"""`inspect --all`: every architecture of every library, its sites, and whether patching it changes
what it computes.

Sites are found on the meta device. The check runs on the same architecture with two blocks (per
stage) and a small image where the library allows that, in float32, on random weights: what differs
between architectures is in one block.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elsa_core.base.inputs import generated_inputs, text_shape
from elsa_core.base.messages import Progress, first_line
from elsa_core.base.reading import RESULT_BYTES, parse_json, read_text
from elsa_core.errors import ModelError, UnavailableError
from elsa_core.loading import meta_model, small_model
from elsa_core.measuring.documents import Plain
from elsa_core.measuring.memory_limit import available_bytes
from elsa_core.patching import computes_otherwise, find_sites, original, patch, patched_sites
from elsa_core.proof.checking import check
from elsa_core.proof.compare import Judgement
from elsa_core.proof.run import depends
from elsa_core.proof.samples import random_weight
from elsa_core.proof.sides import Given, of_model

# transformers lists configurations, not architectures that MODEL can name: its attention interface
# (`patching.adapters.hf_transformers`) takes them all.
CATALOGUES: dict[str, Callable[[Any], Iterable[str]]] = {
    "timm": lambda timm: timm.list_models(),
    "open_clip": lambda open_clip: open_clip.list_models(),
    "torchvision": lambda vision: vision.models.list_models(module=vision.models),
}
# Memory that a check takes for each weight: its own 4, 8 of the float64 copy, 4 for activations.
BYTES_PER_WEIGHT = 16
# A relative error of the original above which random weights prove nothing: some bring logits to
# 1e6, where a rounding decides between two keys. Smaller weights are tried then.
SENSITIVE = 64 * torch.finfo(torch.float32).eps
_SPREADS = (1.0, 0.5, 0.25)
AGREES, DIFFERS, FAILED = "agrees", "differs", "failed"
NOT_CHECKED, UNAVAILABLE = "not checked", "unavailable"


@dataclass(frozen=True)
class Kept:
    """Sites of one class that stay as they are, and why.

    `softmax`: whether the class computes softmax(Q K^T s + b) V at all.
    """

    module_class: str
    reason: str
    sites: int
    softmax: bool


@dataclass(frozen=True)
class Coverage(Plain):
    """One architecture: of its `sites`, `patchable` ones and those `kept`, by class and reason;
    `reason` says why for every verdict but "agrees"; `error` is that of the patched output against
    float64, of the worst case."""

    name: str
    family: str
    parameters: int
    sites: int
    patchable: int
    kept: tuple[Kept, ...]
    verdict: str
    reason: str
    error: float | None = None
    original_error: float | None = None

    @property
    def softmax_sites(self) -> int:
        """Sites that compute softmax attention, patchable or not."""
        return self.patchable + sum(kept.sites for kept in self.kept if kept.softmax)


def architectures(match: str = "*") -> list[str]:
    """Names ("timm:...", "torchvision:...") that a glob selects; one of each family comes first.

    A library that is not installed has none.
    """
    turns: Counter[str] = Counter()
    order = []
    for library, names in CATALOGUES.items():
        try:
            found = names(import_module(library))
        except ImportError:
            continue
        for name in (f"{library}:{bare}" for bare in found):
            if fnmatchcase(name, match):
                of = family(name)
                order.append((turns[of], name))
                turns[of] += 1
    return [name for _, name in sorted(order, key=lambda pair: pair[0])]


def family(name: str) -> str:
    """The family of an architecture "library:name": of timm the module that defines it."""
    library, _, bare = name.partition(":")
    if library != "timm":
        return library
    from timm.models import model_entrypoint

    return str(model_entrypoint(bare).__module__.rpartition(".")[2])


def examine(name: str, *, checked: bool = True) -> Coverage:
    """Find the sites of one architecture and, if `checked`, prove a small version. Never raises
    because of a model: what goes wrong is the verdict."""
    empty = Coverage(name, family(name), 0, 0, 0, (), UNAVAILABLE, "")
    try:
        whole = meta_model(name)
    except UnavailableError as error:
        return replace(empty, reason=first_line(error))
    except Exception as error:
        return replace(empty, verdict=FAILED, reason=f"cannot be built: {first_line(error)}")
    sites = find_sites(whole)
    groups = Counter((s.module_class, s.reason) for s in sites if not s.patchable)
    kept = [Kept(*one, count, not computes_otherwise(one[0])) for one, count in groups.items()]
    found = replace(
        empty, parameters=sum(parameter.numel() for parameter in whole.parameters()),
        sites=len(sites), patchable=sum(site.patchable for site in sites), kept=tuple(kept),
        verdict=NOT_CHECKED, reason="" if sites else "no attention",
    )  # fmt: skip
    if not found.patchable:
        return replace(found, reason=found.reason or "nothing to patch")
    if not checked:
        return found
    try:
        return _checked(found)
    except Exception as error:  # a model may raise anything; the next one is examined still
        return replace(found, verdict=FAILED, reason=first_line(error))


def examine_all(
    names: Sequence[str],
    *,
    checked: bool = True,
    state: Path | None = None,
    progress: Progress | None = None,
) -> Iterator[Coverage]:
    """Examine architectures one after another; with `state`, a file of JSON lines that is appended
    to as they come, continue where a run stopped. `progress` is called with (name, architectures
    done, in all) before each.

    Raises:
        ModelError: `state` is not such a file.
    """
    known = {} if state is None else read_state(state)
    for index, name in enumerate(names):
        if progress is not None:
            progress(name, index, len(names))
        done = known.get(name)
        if done is None or (checked and done.verdict == NOT_CHECKED and done.patchable):
            done = examine(name, checked=checked)
            if state is not None:
                with state.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(done.to_dict()) + "\n")
        yield done


def read_state(path: Path) -> dict[str, Coverage]:
    """What an earlier run wrote, by name; a later line of one name counts."""
    if not path.exists():
        return {}
    records = {}
    try:
        for line in read_text(path, RESULT_BYTES).splitlines():
            values = parse_json(line, str(path))
            kept = tuple(Kept(**kept) for kept in values["kept"])
            records[values["name"]] = Coverage(**(values | {"kept": kept}))
    except (TypeError, KeyError) as error:
        raise ModelError(f"{path} is not a coverage file: {first_line(error)}") from error
    return records


def _checked(found: Coverage) -> Coverage:
    for spread in _SPREADS:
        with torch.random.fork_rng(devices=[]):
            model, size = small_model(found.name)
            weights = sum(parameter.numel() for parameter in model.parameters())
            if weights * BYTES_PER_WEIGHT > available_bytes("cpu"):
                reason = f"{weights / 1e6:.0f} M weights do not fit in memory to be checked"
                return replace(found, reason=reason)
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for name, tensor in model.named_parameters():
                    tensor.copy_(random_weight(name, tensor, generator, spread))
            patch(model, scope="attention")
        noise = generated_inputs(
            size, 1, seed=0, dtype=torch.float32, device="cpu", text=text_shape(model)
        )["noise"]
        case = noise if isinstance(noise, tuple) else (noise,)
        given: Given = (case, {})
        sites, ran, judgement = patched_sites(model), set[nn.Module](), Judgement(2.0)
        with torch.no_grad(), ExitStack() as hooks:
            if not depends(model, sites, given):
                return replace(found, verdict=FAILED, reason="its output depends on no site")
            with original(model):
                sides = of_model(model, copy.deepcopy(model).double())
            one, exact = sides.original(given), sides.exact(given)
            for site in sites.values():
                handle = site.register_forward_pre_hook(lambda module, _, ran=ran: ran.add(module))
                hooks.callback(handle.remove)
            judgement.add(exact, one, sides.run_patched(given))
        idle = [path for path, site in sites.items() if site not in ran]
        worst = max(judgement.comparisons.values(), key=lambda one: one.excess)
        reason = f"never ran: {', '.join(idle)}" if idle else ""
        verdict = AGREES
        if worst.excess <= 1.0:
            break
        # One run says little about a sensitive model: the full check decides.
        report = check(model, {"noise": case}, stress=False, progress=False)
        if not report.ok:
            verdict, reason = DIFFERS, "; ".join(report.failures[:2])
        if report.ok or report.cases[0].original_error < SENSITIVE:
            break
    return replace(
        found, verdict=verdict, reason=reason, error=worst.patched_error,
        original_error=worst.original_error,
    )  # fmt: skip


def summarise(records: Sequence[Coverage]) -> dict[str, Any]:
    """Numbers over many architectures.

    `attentive` have at least one softmax attention; `complete` are patched whole, a `share` of
    these.
    """
    attentive = [record for record in records if record.softmax_sites > 0]
    complete = sum(record.softmax_sites == record.patchable for record in attentive)
    return {
        "architectures": len(records),
        "attentive": len(attentive),
        "complete": complete,
        "share": complete / len(attentive) if attentive else 1.0,
        "sites": sum(record.sites for record in records),
        "patchable": sum(record.patchable for record in records),
        "verdicts": dict(Counter(record.verdict for record in records if record.sites)),
    }


def by_family(records: Iterable[Coverage]) -> dict[str, list[Coverage]]:
    """Records with attention, by family, in alphabetical order."""
    families: dict[str, list[Coverage]] = {}
    for record in sorted(records, key=lambda record: (record.family, record.name)):
        if record.sites or record.verdict in (FAILED, UNAVAILABLE):
            families.setdefault(record.family, []).append(record)
    return families
