"""One compiling process of a build: it plans the same cases, then compiles each key it is told.

    python -m elsa_core.backends.triton.pack.worker FOLDER ARCH ONLY

Reads a key a line. Leaves `<key>.cubin` and `<key>.json` in FOLDER and answers with one line:
empty, or why the kernel cannot be compiled.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from elsa_core.backends.triton.pack.cases import Planner, expanded
from elsa_core.backends.triton.pack.specialize import Job
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
            compiled = jobs[key].compile()
            (folder / f"{key}.cubin").write_bytes(compiled.asm["cubin"])
            metadata = json.dumps(_added(jobs[key], compiled.metadata))
            (folder / f"{key}.json").write_text(metadata, encoding="utf-8")
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


def _added(job: Job, metadata: Any) -> dict[str, Any]:
    """What the compiler wrote beside its options, or changed of them."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    options = json.loads(json.dumps(job.options.__dict__, default=vars))  # as metadata went
    apart = {"hash", "target", "triton_version", *get_cache_invalidating_env_vars()}
    return {
        name: value
        for name, value in metadata._asdict().items()
        if name not in apart and (name not in options or options[name] != value)
    }


if __name__ == "__main__":
    main()
