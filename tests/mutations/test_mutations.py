"""The command's own parts: what it changes, which changes it takes, and what it must notice."""

import json
from pathlib import Path

import pytest
from processes import environment, python

from . import cpp
from . import python as sources
from .judge import ROOT, tracked
from .report import tables
from .source import chosen, identity
from .suites import NAMED, plan, suite_of

CPP = """// a < b
float f(const float* a, int64_t n) {
  float sum = 0.0f;
  for (int64_t i = 0; i < n; ++i) sum += a[i];
  if (!ready(n)) return smaller(sum, most);
  return n > 4 ? sum : 1e-3f;
}
"""
PYTHON = '''"""A docstring with 3 < 4."""
@triton.jit
def kernel(x, y, N: tl.constexpr = 4):
    m = tl.load(x, mask=x < N, other=0.0)
    m += 2
    return tl.where(m > 1, m, tl.max(y, 0))


def host(a):
    raise ValueError("3" + a)
'''


def changes(mutants: object) -> set[tuple[str, str]]:
    return {(one.before.strip(), one.after.strip()) for one in mutants}  # type: ignore[attr-defined]


def test_changes_of_cpp() -> None:
    found = changes(cpp.mutants("a.cpp", CPP))
    assert {
        ("<", "<="), (">", ">="), ("+=", "-="), ("!", ""), ("4", "5"), ("0.0f", "1.0f"),
        ("1e-3f", "0.002f"), ("smaller", "larger"), ("i", "0"), ("sum, most", "most, sum"),
        ("? sum : 1e-3f", "? 1e-3f : sum"),
    } <= found  # fmt: skip
    assert not any(one.line == 1 for one in cpp.mutants("a.cpp", CPP))


def test_changes_of_python() -> None:
    found = changes(sources.mutants("a.py", PYTHON, kernels=True))
    assert ("x < N", "(x <= N)") in found
    assert ("tl.load(x, mask=x < N, other=0.0)", "(tl.load(x, other=0.0))") in found
    assert ("tl.where(m > 1, m, tl.max(y, 0))", "(m)") in found
    assert ("tl.max(y, 0)", "(tl.min(y, 0))") in found and ("m += 2", "pass") in found
    assert not any("4" in before or "ValueError" in before for before, _ in found)


@pytest.mark.parametrize(("mutants", "text"), [(cpp.mutants, CPP), (sources.mutants, PYTHON)])
def test_a_mutant_differs_in_its_place_alone(mutants: object, text: str) -> None:
    for one in mutants("a", text):  # type: ignore[operator]
        other = one.applied(text)
        assert other != text and other.startswith(text[: one.start])
        assert other.endswith(text[one.end :])
        with pytest.raises(ValueError, match="does not hold"):
            one.applied("x" + text)


def test_names_stay_where_other_lines_change() -> None:
    """A run that goes on after an edit judges what the edit changed, and nothing again."""
    before = {identity(one, CPP) for one in cpp.mutants("a.cpp", CPP)}
    longer = CPP.replace("float sum", "int other = n;\n  float sum")
    after = {identity(one, longer) for one in cpp.mutants("a.cpp", longer)}
    assert before <= after


def test_the_plan_covers_what_it_promises() -> None:
    """At least 200 mutants, the same ones every time, the named ones among them."""
    found = list(plan(ROOT, tracked()))
    assert len(found) >= 200 and found == list(plan(ROOT, tracked()))
    assert len({name for name, _ in found}) == len(found)
    files = {one.file for _, one in found}
    for folder in ("csrc/elsa/", "csrc/torch/", "csrc/onnxruntime/", "elsa_core/backends/triton/",
                   "elsa_core/patching/adapters/"):  # fmt: skip
        assert any(file.startswith(folder) for file in files), folder
    named = {(one.file, one.before, one.after) for _, one in found}
    assert set(NAMED) <= named
    for file in files:
        suite = suite_of(file)
        assert suite is not None
        assert all(
            (ROOT / test.partition("::")[0]).is_file()
            for test in suite.tests
            if test.startswith("tests/")
        ), suite


def test_kinds_take_turns() -> None:
    found = [(identity(one, CPP), one) for one in cpp.mutants("a.cpp", CPP)]
    kinds = [one.kind for _, one in chosen(found, 5)]
    assert len(set(kinds)) == 5


NOTICED = """
import pathlib, sys
from tests.mutations.judge import ROOT, Judge
from tests.mutations.suites import NAMED, plan
judge = Judge(pathlib.Path(sys.argv[1]))
file, before, _ = NAMED[2]
text = (ROOT / file).read_text()
verdict = judge.judge(next(one for _, one in plan(ROOT, [file]) if one.before == before))
assert (ROOT / file).read_text() == text == (judge.changed / file).read_text()
print(verdict.word, verdict.by)
"""


@pytest.mark.long
def test_a_mutant_is_noticed(tmp_path: Path) -> None:
    """From the copy to the verdict: the cache of derived tensors, kept in training.

    In a process of its own: those that judge are forked, and must not hold the unchanged package.
    The tests that notice it need no kernels, which would be compiled for the copy.
    """
    env = environment(ELSA_NATIVE="0")
    done = python("-c", NOTICED, tmp_path, cwd=ROOT, timeout=600, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("killed ") and "test_stale" in done.stdout


def test_every_survivor_is_argued_for() -> None:
    rows = json.loads((ROOT / "docs/mutations.json").read_text())["mutants"]
    survivors = [row for row in rows.values() if row["verdict"] == "survived"]
    assert survivors and all(row.get("argument", "open") != "open" for row in survivors)
    assert tables(rows).count("\n| `") == len(survivors)
