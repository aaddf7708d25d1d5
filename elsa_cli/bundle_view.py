"""What `elsa export` says of the bundle that it wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elsa_cli.console import Session

if TYPE_CHECKING:
    from elsa_core.exporting.artefact_runs import ArtefactReport
    from elsa_core.exporting.bundle import Bundle


def show(session: Session, bundle: Bundle) -> None:
    """The bundle's artefacts, its kernels, and what rounding costs."""
    rows, manifest = [], bundle.manifest
    for each in bundle.artefacts:
        entry = manifest["artefacts"][each.format]
        size = manifest["files"][entry["file"]]["size"]
        rows.append([*artefact_row(each, entry["file"]), f"{size / 1e6:.1f}"])
    session.table(["  artefact", "fresh process", ">error", ">allowed", ">MB"], rows, wrap=1)
    session.line()
    _say_plans(session, manifest)
    _say_cost(session, manifest)
    for each in bundle.artefacts:
        if each.openvino not in ("", "ok"):
            session.warn(f"OpenVINO does not reproduce the model: {each.openvino}")
    if "torchscript" in manifest["artefacts"]:
        session.warn(manifest["artefacts"]["torchscript"]["note"])
    exact = [each for each in bundle.artefacts if each.format != "onnx-int8"]
    count = len(exact)
    also = " and in OpenVINO" if any(each.openvino == "ok" for each in exact) else ""
    rounded = "; model.int8.onnx approximates it" if count < len(bundle.artefacts) else ""
    dtype = manifest["model"]["dtype"]
    of = "the model" if dtype == "float32" else f"the {dtype} model"
    session.line(f"{bundle.path}: {count} of {count} artefacts reproduce {of} "
                 f"in a fresh process{also}{rounded}", "bold", even_quiet=True)  # fmt: skip
    zipped = bundle.path.suffix == ".zip"
    page = "README.md in it" if zipped else str(bundle.path / "README.md")
    session.line(f"Next: elsa verify {bundle.path}, or see {page}", "dim")


def _say_plans(session: Session, manifest: dict[str, Any]) -> None:
    """Which GPUs the kernels of the bundle are for."""
    for name in manifest["artefacts_libraries"]["cuda"][1:]:
        entry, size = manifest["libraries"][name], manifest["files"][name]["size"]
        ran = entry["gpu_archs_verified"]
        rest = [arch for arch in entry["gpu_archs"] if arch not in ran]
        also = f"; compiled and not run: {', '.join(rest)}" if rest else ""
        session.line(f"{name}: {size / 1e6:.1f} MB, run on {', '.join(ran)}{also}")
        session.line()


def _say_cost(session: Session, manifest: dict[str, Any]) -> None:
    """What fp16, bf16 or INT8 cost."""
    given = manifest.get("accuracy")
    if given is None:
        return
    from elsa_core.exporting import accuracy

    heads = [f"  against {given['against']}", ">mean error", ">largest", ">class changed"]
    rows = [[f"  {name}", *cells] for name, *cells in accuracy.rows(given)]
    session.table(heads, rows, wrap=1)
    session.line(f"{given['rows']} inputs: {given['inputs']}; the exact "
                 f"{manifest['outputs'][0]['name']} spread by {given['output_std']:.2g} (standard "
                 "deviation); --images DIR measures it on yours", "dim")  # fmt: skip
    session.line()


def artefact_row(report: ArtefactReport, file: str) -> list[str]:
    """One artefact for a table: its mark, verdict, largest error and what is allowed."""
    if report.status == "ok":
        sizes = ", ".join(map(str, report.batches))
        error, allowed = max(report.batches.values())
        # An approximation is allowed twice what was measured of it: no promise that it is close.
        limit = "" if report.format == "onnx-int8" else f"{allowed:.1e}"
        also = ", OpenVINO" if report.openvino == "ok" else ""
        return [f"✓ {file}", f"batch {sizes}{also}", f"{error:.1e}", limit]
    mark = "-" if report.status == "skipped" else "✗"
    return [f"{mark} {file}", f"{report.status}: {report.reason}", "", ""]
