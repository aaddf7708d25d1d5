"""Which files are changed, which tests judge them, and how many mutants of each file there are."""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from . import cpp, python
from .source import Mutant, chosen, identity, mutant

CONFORMANCE = "tests/conformance/test_conformance.py"
CONTRACT = "tests/conformance/test_contract.py"
TRACE = "tests/bench/test_bench_trace.py"
MATH = "tests/backends/test_native_math.py"
BUILD = "tests/backends/test_native_build.py"
WRONG_SET = f"{BUILD}::test_a_process_without_elsa_is_told_of_a_wrong_set"
SETS = (
    f"{BUILD}::test_every_operator_runs_the_set_that_is_named",
    f"{BUILD}::test_the_best_set_that_the_processor_has_is_chosen",
)
LSE = "tests/distributed/test_shards.py::test_the_lse_of_a_state_keeps_the_digits_of_large_scores"
RUNTIME = ("tests/backends/test_ort_library.py",)
GRAPHS = tuple(f"tests/graphs/test_{name}.py" for name in ("graphed", "graphed_state", "training"))
FAMILIES = "tests/patching/test_adapters_"
SCOPE = "tests/patching/test_scope.py"


@dataclass(frozen=True)
class Suite:
    """Files and their judges.

    Attributes:
        pattern: of the files, from the root of the tree.
        tests: what pytest runs, those first that fail soonest.
        lines: a file of so many lines has one mutant.
        language: "c++", "python" or "triton" (functions that Triton compiles).
    """

    pattern: str
    tests: tuple[str, ...]
    lines: int = 36
    language: str = "c++"


def _native(*operators: str, also: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The CPU kernels' rows of these operators in the conformance suite, as words of pytest, after
    other files or tests."""
    rows = " or ".join(f"cpu-{name}-" for name in operators)
    wanted = f"({rows}) and -native and not compiled and not exported"
    names = [one.rpartition("::")[2].rpartition("/")[2].removesuffix(".py") for one in also]
    words = " or ".join([wanted, "native_operators", "pytorch_is_told", "strict_rounds", *names])
    return *also, CONFORMANCE, CONTRACT, "-k", words


def _host(folder: str, *operators: str) -> Suite:
    """The functions of operators: what they promise, and their rows with gradients on the CPU."""
    names = ("routing", "what_attention_takes", "packed_entmax", "nested", "flops")
    files = (CONTRACT, *(f"tests/core/test_{name}.py" for name in names))
    rows = " or ".join(f"cpu-{name}-" for name in operators)
    words = " or ".join(Path(file).stem for file in files)
    chosen = f"(({rows}) and -train- and not many) or {words}"
    tests = (*files, CONFORMANCE, "-k", f"not memory and not compiled and ({chosen})")
    return Suite(f"elsa_core/ops/{folder}", tests, 80, "python")


def _adapter(pattern: str, *tests: str) -> Suite:
    paths = tuple(name if "/" in name else f"{FAMILIES}{name}.py" for name in tests)
    return Suite(f"elsa_core/patching/adapters/{pattern}.py", paths, 34, "python")


def _triton(pattern: str, *tests: str, lines: int = 50) -> Suite:
    return Suite(f"elsa_core/backends/triton/{pattern}.py", tests, lines, "triton")


def _interpreted(*operators: str) -> tuple[str, ...]:
    """Triton's kernels of these operators by its interpreter."""
    name = f"{CONFORMANCE}::test_triton_kernels_by_the_interpreter"
    return tuple(f"{name}[{operator}]" for operator in operators)


_FORWARD = _interpreted("attention")
_WINDOWS = _interpreted("window_attention")
_APART = "tests/backends/test_interpreted.py::test_kernels_by_the_interpreter"
_LINEAR = (f"{_APART}[linear]", *_interpreted("linear"))
_TRAINED = "(cpu- and -train and -native and not compiled) or derivatives"

# Declarations without code: what they say is what the files that include them do.
_DECLARATIONS = frozenset(
    f"csrc/elsa/{name}.h"
    for name in ("attention", "gradient", "gradient_kernel", "kernel", "varlen", "window",
                 "window_kernel")
)  # fmt: skip
# The first that fits a file is its own.
SUITES = (
    Suite("csrc/*/varlen.cpp", _native("varlen_attention")),
    Suite("csrc/*/entmax*", _native("entmax_attention")),
    Suite("csrc/elsa/gradient*", _native("attention", "varlen_attention", "window_attention")),
    Suite("csrc/elsa/philox.h", _native("dropout")),
    Suite("csrc/elsa/window*", _native("window_attention")),
    Suite("csrc/elsa/attention*", _native("attention", "sparsity", "dropout", also=(*SETS, LSE))),
    Suite("csrc/elsa/simd.h", _native("attention", "window_attention", also=(MATH,))),
    Suite("csrc/elsa/*", _native("attention", "window_attention", "dropout", also=SETS)),
    Suite("csrc/torch/common.h", _native("attention", "window_attention", also=(WRONG_SET,))),
    Suite("csrc/torch/window.cpp", _native("window_attention")),
    Suite("csrc/torch/*", _native("attention", "sparsity", "dropout", also=(TRACE,))),
    Suite("csrc/onnxruntime/*", RUNTIME, 50),
    _adapter("timm_swin*", "swin", "tests/patching/test_stale.py"),
    _adapter("timm_windows", "windows", "tests/patching/test_stale.py"),
    _adapter("windows", "windows", "swin"),
    _adapter("torchvision_*", "swin", "tests/patching/test_stale.py"),
    _adapter("derived", "tests/patching/test_stale.py", "swin"),
    _adapter("torch_multihead", "multihead", SCOPE),
    _adapter("hf_transformers", "transformers", "padded"),
    _adapter("watched", "tests/patching/test_own_forward.py", "watched"),
    _adapter("timm_decomposed", "eager", "timm"),
    _adapter("timm_naflex", "padded"),
    _adapter("timm_blocks", SCOPE),
    _adapter("timm_attention", "timm", "watched", SCOPE),
    _adapter("timm_sharded", "tests/distributed/test_models.py"),
    _adapter("transformers_siglip2", "padded"),
    _adapter("padding", "padded"),
    _adapter("torch_layers", SCOPE),
    _adapter("timm_*", "timm", "eager", "watched", SCOPE),
    _adapter("common", "transformers", "timm", "eager", "watched", SCOPE),
    *(
        Suite(f"elsa_core/graphs/{name}.py", GRAPHS, 40, "python")  # capture.py needs a GPU
        for name in ("cache", "checks", "entries", "model")
    ),
    _host("linear/*", "linear"),
    _host("window/*", "window_attention"),
    _host("varlen/*", "varlen_attention"),
    _host("entmax/*", "entmax_attention", "entmax_varlen_attention"),
    _host("sparse/*", "sparsity"),
    _host("*", "attention", "dropout"),
    Suite(
        "elsa_core/backends/native_backward.py",
        (CONFORMANCE, CONTRACT, "-k", _TRAINED),
        40,
        "python",
    ),
    _triton("attention/fma_fallback", f"{_APART}[fma_fallback]"),
    _triton("attention/backward_*", *_FORWARD, lines=80),
    _triton("attention/decode", *_FORWARD),
    *(_triton(f"attention/{name}", *_FORWARD) for name in ("exact", "fold", "merge", "split")),
    _triton("window/*", *_WINDOWS),
    _triton("linear/*", *_LINEAR),
    _triton("attention/forward", *_interpreted("attention", "varlen_attention")),
    _triton("attention/sparse_kernels", *_interpreted("sparsity")),
    _triton("attention/entmax_*", *_interpreted("entmax_attention", "entmax_varlen_attention")),
    _triton("shared/helpers", *_FORWARD, *_LINEAR, *_WINDOWS),
)

# Defects that no test noticed once: file, text, what it becomes.
_DERIVED = "elsa_core/patching/adapters/derived.py"
NAMED = (
    ("csrc/elsa/window_tokens.h", "0.0f : a.mask_value", "0.0f : -100.0f"),
    ("csrc/elsa/window_tokens.h", "kNormEps = 1e-12f", "kNormEps = 1e-6f"),
    (
        _DERIVED,
        "not any(m.training for m in (derivation.site, derivation.attention, *parts))",
        "True",
    ),
    (_DERIVED, "t.is_inference() or t._version", "True"),
)


def suite_of(file: str) -> Suite | None:
    """The suite that judges a file."""
    if file in _DECLARATIONS:
        return None
    return next((suite for suite in SUITES if fnmatch(file, suite.pattern)), None)


def plan(root: Path, files: list[str]) -> Iterator[tuple[str, Mutant]]:
    """The mutants of a tree, each with its name.

    Args:
        root: the tree.
        files: paths from there; those without a suite have no mutants.
    """
    for file in files:
        suite = suite_of(file)
        if suite is None or not file.endswith((".cpp", ".h", ".py")):
            continue
        text = (root / file).read_text()
        if suite.language == "c++":
            found = cpp.mutants(file, text)
        else:
            found = python.mutants(file, text, kernels=suite.language == "triton")
        unique = {identity(one, text): one for one in found}
        yield from _named(file, text)
        yield from chosen(unique.items(), -(-text.count("\n") // suite.lines))


def _named(file: str, text: str) -> Iterator[tuple[str, Mutant]]:
    for where, before, after in NAMED:
        if where == file:
            start = text.index(before)
            one = mutant(file, text, start, start + len(before), after, "named")
            yield identity(one, text), one
