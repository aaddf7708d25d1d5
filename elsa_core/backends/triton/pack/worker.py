"""One compiling process of a build: it plans the same cases, then compiles each key it is told.

    python -m elsa_core.backends.triton.pack.worker FOLDER ARCH ONLY

Reads a key a line. Leaves `<key>.cubin`, `<key>.ptx` and `<key>.json` in FOLDER and answers with
one line: empty, or why the kernel cannot be compiled.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from elsa_core.backends.triton.pack import sources
from elsa_core.backends.triton.pack.cases import expanded
from elsa_core.backends.triton.pack.plan import Job, Planner
from elsa_core.base.messages import first_line


def main() -> None:
    """Serve the build that started this process until its end of the pipe is closed."""
    folder, arch, only = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a compiler prints is no answer
    _without_debug_sections()
    jobs = Planner(arch).add(expanded(only)).jobs
    for line in sys.stdin:
        key = line.strip()
        try:
            _compile(jobs[key], folder / key)
            answer = ""
        except Exception as error:  # a compiler may raise anything
            answer = f"{type(error).__name__}: {first_line(error)}"
        answers.write(f"{answer}\n")
        answers.flush()


def _without_debug_sections() -> None:
    """Have cubins without lines of sources, which are most of their bytes.

    Lines are left in until the assembler has made the code of them: compiled without from the
    start, some kernels come out with other registers than the JIT's.
    """
    from triton import knobs

    def changed(*given: Any) -> tuple[str, str]:
        if given:  # else Triton asks what its cache is to be keyed by
            stages = given[1]
            assemble = stages["cubin"]
            stages["cubin"] = lambda text, metadata: suppressed(assemble, text, metadata)
        return "", ""

    def suppressed(assemble: Any, text: str, metadata: Any) -> Any:
        with knobs.compilation.scope():
            knobs.compilation.disable_line_info = True  # -lineinfo -suppress-debug-info
            return assemble(text, metadata)

    knobs.runtime.add_stages_inspection_hook = changed


def _named_neutrally(text: str) -> str:
    """PTX that names files of sources below their packages instead of on this machine."""
    import triton

    for root in (sources.KERNELS.parents[2], Path(triton.__file__).parents[1]):
        text = text.replace(f'"{root}/', '"')
    return text


def _compile(job: Job, stem: Path) -> None:
    import triton

    options = job.special.options.__dict__
    compiled = triton.compile(job.special.source, target=job.target, options=options)
    stem.with_suffix(".cubin").write_bytes(compiled.asm["cubin"])
    stem.with_suffix(".ptx").write_text(_named_neutrally(compiled.asm["ptx"]), encoding="utf-8")
    found = {"kernel": _kernel(job, compiled.metadata), "metadata": _added(job, compiled.metadata)}
    stem.with_suffix(".json").write_text(json.dumps(found), encoding="utf-8")


def _kernel(job: Job, metadata: Any) -> dict[str, Any]:
    """`record.Kernel` as plain data, but for where its code will lie."""
    signature = job.special.source.signature
    return {
        "symbol": metadata.name, "shared": metadata.shared, "warps": metadata.num_warps,
        "cluster": getattr(metadata, "cluster_dims", (metadata.num_ctas, 1, 1)),
        "scratch": (metadata.global_scratch_size, metadata.global_scratch_align),
        "profile_scratch": (metadata.profile_scratch_size, metadata.profile_scratch_align),
        "overlaps": metadata.launch_pdl, "cooperative": metadata.launch_cooperative_grid,
        "arguments": [(name, kind) for name, kind in signature.items() if kind != "constexpr"],
    }  # fmt: skip


def _added(job: Job, metadata: Any) -> dict[str, Any]:
    """What the compiler wrote beside its options, or changed of them."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    options = job.special.options.__dict__
    apart = {"hash", "target", "triton_version", *get_cache_invalidating_env_vars()}
    return {
        name: value
        for name, value in metadata._asdict().items()
        if name not in apart and (name not in options or not _same(options[name], value))
    }


def _same(option: Any, value: Any) -> bool:
    """Whether a value is an option that went through JSON."""
    return bool(json.loads(json.dumps(option, default=vars)) == value)


if __name__ == "__main__":
    main()
