"""`elsa build`: compile the native library ahead of its first use."""

from __future__ import annotations

import time

import click

from elsa_cli.console import Session
from elsa_cli.options import Command, output_options, pass_session
from elsa_cli.probes import environment


@click.command("build", cls=Command)
@click.option("--force", is_flag=True, help="Compile even if the library is there.")
@output_options
@pass_session
def command(session: Session, /, force: bool) -> None:
    """Compile the native CPU library into the user's cache (ELSA_CACHE_DIR moves it).

    Without this, the first use compiles it. Needs a C++ compiler: CXX, or c++, g++, clang++.
    """
    from elsa_core.backends import native
    from elsa_core.backends.cache import is_sound

    present = is_sound(native.library_path())
    start = time.perf_counter()
    with session.stage("compiling the native library") as update:
        path = native.build(force=force, progress=lambda text: update(text, 0, 0))
    seconds = time.perf_counter() - start
    session.written.append(path)
    compiled = force or not present
    size = path.stat().st_size
    answer = native.load()
    results = {
        "path": str(path), "bytes": size, "compiled": compiled, "seconds": seconds,
        "loads": answer.ok, "reason": answer.reason, "isa": native.isa() if answer.ok else None,
    }  # fmt: skip
    session.document("build", environment(), results)
    what = f"compiled in {seconds:.1f} s" if compiled else "already built"
    runs = f"runs {native.isa()} kernels" if answer.ok else f"does not load: {answer.reason}"
    session.line(f"{path}")
    session.line(f"{what} · {size / 1000:.0f} kB · {runs}", even_quiet=True)
    if not answer.ok:
        from elsa_core.errors import UnavailableError

        raise UnavailableError(f"the native library was built but cannot be used: {answer.reason}")
