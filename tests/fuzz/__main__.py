"""`python -m tests.fuzz --minutes N [--seed S] [--only NAME]`: fuzzing for hours.

Every round has a seed of its own, which is printed before it: a round that fails, or that takes the
process with it, is repeated by `--seed`.
"""

import argparse
import faulthandler
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

from .engine import explore
from .hostile import TARGETS

ROUND_SECONDS = 30


def main() -> int:
    """Fuzz until the time is over; the exit code is 1 where something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="of the first round; default: another each time")
    parser.add_argument("--only", choices=[target.name for target in TARGETS])
    given = parser.parse_args()
    faulthandler.enable()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(2**31)
    targets = [target for target in TARGETS if given.only in (None, target.name)]
    end = time.monotonic() + 60 * given.minutes
    found = 0
    while (left := end - time.monotonic()) > 0:
        for target in targets:
            print(f"{target.name}: seed {seed}", flush=True)
            seconds = min(ROUND_SECONDS, left / len(targets))
            with tempfile.TemporaryDirectory(prefix="elsa-fuzz-") as folder:
                try:
                    count = explore(target, Path(folder), seconds=seconds, seed=seed)
                    print(f"{target.name}: {count} inputs", flush=True)
                except Exception:
                    found += 1
                    traceback.print_exc()
        seed += 1
    print(f"{found} findings", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
