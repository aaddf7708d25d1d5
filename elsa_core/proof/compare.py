"""The criterion of `check`: errors of two models against a float64 oracle, and the verdict.

For every output, with e(x) = x - oracle, both in the Euclidean norm and in the maximum norm:

    |e(patched)| <= factor * |e(original)| + band * |oracle|

The band is two ulp, 2 eps = 4 u (u the unit roundoff of the output's dtype). An exact kernel
cannot avoid four roundings after the softmax: of the weighted sum, of its division by S, of its
store in the dtype, and of the projection. So an original that happens to be exact (uniform weights
over 2^n keys) must not condemn a replacement that is correctly rounded; nothing wider is granted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from elsa_core.errors import ModelError
from elsa_core.proof.samples import jittered

BAND_ULPS = 2.0

# Significands of 11 bits are what turbo promises (TF32): its rounding, not float32's, sets the ulp.
TURBO_EPS = 2.0**-10

# Two errors of n normal values, equally good, differ by more than 2x once in 10^4 draws at n = 32
# and once in 30 at n = 8: an output with fewer values is judged on nearby inputs as well.
MIN_VALUES = 32

# Samples of a case, where the first alone condemns the patched model. Two equally good errors that
# one dot product dominates differ by more than 2x once in 3 with one sample, once in 40 with 10 and
# once in 10^4 with 32.
SITE_SAMPLES = 32
MODEL_SAMPLES = 10

# After 8 samples, two equally good errors differ by more than 10x once in 10^7: no more are run.
HOPELESS_SAMPLES = 8
_HOPELESS = 5.0


def floating_outputs(output: Any) -> dict[str, Tensor]:
    """Every floating tensor of a model's or module's output, by its place in it."""
    leaves, _ = pytree.tree_flatten_with_path(output)
    return {
        f"output{pytree.keystr(path)}": leaf
        for path, leaf in leaves
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    }


def map_floating(value: Any, dtype: torch.dtype) -> Any:
    """The same nested value with its floating tensors cast; everything else is left alone."""
    return pytree.tree_map_only(
        Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, value
    )


@dataclass
class Norms:
    """Running Euclidean norm (as a sum of squares) and maximum norm."""

    square: float = 0.0
    maximum: float = 0.0

    def add(self, values: Tensor) -> None:
        if values.numel():
            self.square += float(values.square().sum())
            self.maximum = max(self.maximum, float(values.abs().max()))

    @property
    def l2(self) -> float:
        return math.sqrt(self.square)


@dataclass
class Comparison:
    """One output of original and patched against the oracle, accumulated over batches.

    `samples` counts the inputs that stand for one case: where one of them condemns the patched
    model, nearby ones are run too. With few rows and sharp logits a single dot product can carry
    the whole error.
    """

    factor: float
    eps: float | None = None
    _: KW_ONLY
    bound: float = 0.0  # relative error granted beside that, of what leaves out weights on purpose
    values: int = 0
    oracle: Norms = field(default_factory=Norms)
    original: Norms = field(default_factory=Norms)
    patched: Norms = field(default_factory=Norms)
    difference: Norms = field(default_factory=Norms)
    oracle_bad: int = 0
    original_bad: int = 0
    patched_bad: int = 0
    mismatch: str = ""
    samples: int = 1

    def add(self, oracle: Tensor, original: Tensor, patched: Tensor) -> None:
        """Takes tensors of one shape: oracle in float64, the other two in the model's dtype."""
        if patched.shape != original.shape or patched.dtype != original.dtype:
            given, wanted = (
                f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                for tensor in (patched, original)
            )
            self.mismatch = f"the patched output is {given}, the original's {wanted}"
            return
        self.eps = max(self.eps or 0.0, torch.finfo(original.dtype).eps)
        exact = oracle.to(original.device)
        one, two = original.double(), patched.double()
        self.values += exact.numel()
        # An infinity that the oracle shares is an agreement; a NaN never is.
        finite = exact.isfinite()
        self.oracle_bad += int(exact.isnan().sum())
        agreed = exact.isinf()
        self.original_bad += int(((finite & ~one.isfinite()) | (agreed & (one != exact))).sum())
        self.patched_bad += int(((finite & ~two.isfinite()) | (agreed & (two != exact))).sum())
        usable = finite & one.isfinite() & two.isfinite()
        if not bool(usable.all()):
            exact, one, two = exact[usable], one[usable], two[usable]
        self.oracle.add(exact)
        self.original.add(one - exact)
        self.patched.add(two - exact)
        self.difference.add(two - one)

    @property
    def band(self) -> float:
        return BAND_ULPS * (self.eps or 0.0) + self.bound

    @property
    def original_error(self) -> float:
        """Relative Euclidean error of the original; inf where it is not finite."""
        return math.inf if self.original_bad else ratio(self.original.l2, self.oracle.l2)

    @property
    def patched_error(self) -> float:
        """Relative Euclidean error of the patched; inf where it is not finite."""
        bad = self.patched_bad or self.mismatch
        return math.inf if bad else ratio(self.patched.l2, self.oracle.l2)

    @property
    def allowed(self) -> float:
        return self.factor * ratio(self.original.l2, self.oracle.l2) + self.band

    @property
    def excess(self) -> float:
        """Error over what is allowed, in the worse of the two norms: above 1 fails."""
        if self.oracle_bad or self.patched_bad or self.mismatch:
            return math.inf
        euclidean = self.factor * self.original.l2 + self.band * self.oracle.l2
        largest = self.factor * self.original.maximum + self.band * self.oracle.maximum
        return max(ratio(self.patched.l2, euclidean), ratio(self.patched.maximum, largest))

    def reason(self) -> str:
        if self.mismatch:
            return self.mismatch
        if self.oracle_bad:
            return f"NaN in the float64 oracle ({self.oracle_bad} of {self.values} values)"
        if self.patched_bad:
            also = " (the original is not finite either)" if self.original_bad else ""
            return f"not finite where the oracle is: {self.patched_bad} of {self.values}{also}"
        if self.excess <= 1.0:
            return ""
        if self.patched_error > self.allowed:
            return (
                f"error {self.patched_error:.2e} against float64, allowed {self.allowed:.2e} "
                f"({self.factor:g} x the original's {self.original_error:.2e} + {self.band:.1e})"
            )
        largest = self.factor * self.original.maximum + self.band * self.oracle.maximum
        return (
            f"largest error {self.patched.maximum:.2e} against float64, allowed {largest:.2e} "
            f"({self.factor:g} x the original's {self.original.maximum:.2e} + rounding)"
        )


@dataclass
class Top1:
    """Agreement of the predicted class, for outputs [rows, classes].

    A row is a tie where the oracle's two best classes are closer than twice the original's largest
    error: there the original's own rounding can flip the class. Ties are counted, never failed.
    """

    rows: int = 0
    ties: int = 0
    tie_flips: int = 0
    flips: int = 0

    def add(self, oracle: Tensor, original: Tensor, patched: Tensor) -> None:
        exact = oracle.to(original.device)
        error = (original.double() - exact).abs().amax(dim=1).max()
        best, order = exact.topk(2, dim=1)
        tie = ~(best[:, 0] - best[:, 1] > 2 * error)
        flip = patched.argmax(dim=1) != order[:, 0]
        self.rows += len(tie)
        self.ties += int(tie.sum())
        self.tie_flips += int((flip & tie).sum())
        self.flips += int((flip & ~tie).sum())


@dataclass
class Judgement:
    """What is known of one case so far: of a model by one path, of a site, or of gradients.

    `factor` times the original's own error is allowed, and `bound` beside that where sparsity is
    granted it (before anything is added); `eps` sets the ulp where it is not the dtype's (turbo);
    `error` is what the patched code raised.
    """

    factor: float
    eps: float | None = None
    bound: float = 0.0
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    top1: Top1 = field(default_factory=Top1)
    error: str = ""

    def add(self, exact: Any, one: Any, two: Any, *, top1: bool = False) -> None:
        """Takes what the oracle, the original and the patched code returned for one input."""
        exacts, ones, twos = (floating_outputs(output) for output in (exact, one, two))
        if not ones:
            raise ModelError("check: the original returns no floating tensor to compare")
        self.add_tensors(exacts, ones, twos)
        # a top-1 means something where the output is one tensor [rows, classes]
        alike = isinstance(one, Tensor) and isinstance(two, Tensor) and one.shape == two.shape
        if top1 and alike and one.ndim == 2 and one.shape[0] > 0 and one.shape[1] > 1:
            self.top1.add(exact, one, two)

    def add_tensors(
        self, exacts: Mapping[str, Tensor], ones: Mapping[str, Tensor], twos: Mapping[str, Tensor]
    ) -> None:
        for name, expected in ones.items():
            comparison = self.comparisons.setdefault(
                name, Comparison(self.factor, self.eps, bound=self.bound)
            )
            if name not in twos:
                comparison.mismatch = f"{name} is missing from what the patched code returns"
            else:
                comparison.add(exacts[name], expected, twos[name])

    @property
    def in_doubt(self) -> bool:
        """Whether finite errors condemn the patched code on the samples so far."""
        return any(1.0 < each.excess < math.inf for each in self.comparisons.values())


def settle(
    judgements: Iterable[Judgement], samples: int, given: Any, again: Callable[[Any, int], None]
) -> None:
    """Takes more samples for judgements that one sample alone condemns: up to `samples` in all, 8
    where the errors are far beyond what is allowed. `again` adds one more to each of them, given
    arguments near `given` and their seed."""
    several = [each.comparisons for each in judgements if each.in_doubt]
    for seed in range(1, samples if several else 1):
        again(jittered(given, seed), seed)
        for comparisons in several:
            for comparison in comparisons.values():
                comparison.samples = seed + 1
        if seed + 1 >= HOPELESS_SAMPLES and all(
            any(comparison.excess > _HOPELESS for comparison in comparisons.values())
            for comparisons in several
        ):
            break


def ratio(part: float, whole: float) -> float:
    if part == 0.0:
        return 0.0
    return part / whole if whole > 0.0 else math.inf
