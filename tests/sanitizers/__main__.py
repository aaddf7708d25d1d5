"""`python -m tests.sanitizers [--set NAME] [--short]`: every instruction set, all operator tests.

Minutes for each set. The exit code is 1 where a sanitizer or a test found something, 3 where the
compiler has no sanitizers.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from elsa_core.backends import compiler, native

from .run import EVERYTHING, SHORT, build, missing, run


def main() -> int:
    """Build and run; see the module."""
    names = [name.lower() for name in compiler.kernels()]
    parser = argparse.ArgumentParser(prog="python -m tests.sanitizers", description=__doc__)
    parser.add_argument("--set", choices=names, help="default: every one of this machine")
    parser.add_argument("--short", action="store_true", help="the tests of the short pass")
    given = parser.parse_args()
    if reason := missing():
        print(f"error: {reason}", file=sys.stderr)
        return 3
    here = names[: names.index(native.isa()) + 1]
    found = 0
    for name in [given.set] if given.set else here:
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="elsa-sanitizers-") as folder:
            build(Path(folder), name)
            code, text = run(Path(folder), name, SHORT if given.short else EVERYTHING)
        found += code != 0
        words = "clean" if code == 0 else f"exit {code}\n{text}"
        print(f"{name}: {words} ({time.monotonic() - start:.0f} s)", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
