"""Promises that no single row of the table says: where NaN stays, tokens and lengths of nobody,
equal bits of packed and single sequences, tiles left out. Each raises AssertionError where it does
not hold, of a backend on a device.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import elsa_core as elsa


def _make(device: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def nan_stays_in_its_rows(device: str, backend: str) -> None:
    """Of a query in its row alone; of a value in its channel alone."""
    for operator in ("attention", "entmax_attention"):
        for dtype in (torch.float32, torch.float16):
            q, k, v = (_make(device, 1, 2, 150, 16, seed=s, dtype=dtype) for s in range(3))
            call = getattr(elsa, operator)
            broken = q.clone()
            broken[0, 0, 70, 3] = math.nan
            out = call(broken, k, v, backend=backend)
            bad = out.isnan().any(-1)
            assert bad[0, 0, 70] and int(bad.sum()) == 1, operator
            assert out[0, 0, 70].isnan().all(), operator
            broken = v.clone()
            broken[0, 0, 5, 3] = math.nan
            bad = call(q, k, broken, backend=backend).isnan()
            assert not bad[0, 1].any() and bad[0, 0, :, 3].any(), operator
            if operator == "attention":
                assert bad[0, 0, :, 3].all()


def a_row_of_the_least_finite_number_is_finite(device: str, backend: str) -> None:
    q, k, v = (6 * _make(device, 1, 2, n, 40, seed=n) for n in (40, 5, 5))
    mask = torch.zeros(40, 5, device=device)
    mask[7] = torch.finfo(torch.float32).min
    assert elsa.attention(q, k, v, mask, backend=backend).isfinite().all()


def nan_stays_in_its_window(device: str, backend: str) -> None:
    for dtype in (torch.float32, torch.float16):
        qkv = _make(device, 1, 8, 8, 48, dtype=dtype)
        qkv[0, 1, 1, 3] = math.nan
        out = elsa.window_attention(qkv, num_heads=2, window_size=(4, 4), backend=backend)
        assert out[:, :4, :4].isnan().any()
        assert out[:, 4:].isfinite().all() and out[:, :, 4:].isfinite().all()


def an_entry_beyond_the_table_is_nan_in_its_row(device: str, backend: str) -> None:
    """By the operator: the function refuses such an index where looking does not wait."""
    for outside in (-1, 40):
        table, qkv = _make(device, 40, 2), _make(device, 1, 1, 4, 8, 96, seed=1)
        index = torch.randint(40, (16, 16), generator=torch.Generator().manual_seed(0)).to(device)
        index[3, 5] = outside
        out = torch.ops.elsa.window_attention(
            qkv, table, index, None, None, 2, [1, 4, 4], [0, 2, 1], 0.25, -100.0, "qkv", False,
            "strict",
        )  # fmt: skip
        assert int(out.isnan().any(-1).sum()) == 2, outside  # row 3 of each window


def _packed(device: str, lengths: list[int], dtype: torch.dtype) -> list[Tensor]:
    tokens = sum(lengths)
    return [_make(device, tokens, 2, 16, seed=s, dtype=dtype) for s in range(4)]


def _step(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, ends: Tensor, causal: bool, longest: int = 70
) -> list[Tensor]:
    """Output and gradients of packed alpha-entmax, past the checks of the function."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = torch.ops.elsa.entmax_varlen_attention(
        *leaves, ends, ends, None, longest, longest, 1.5, causal, 0.25, "strict"
    )[0]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _ends(device: str, lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def tokens_of_no_sequence_change_nothing(device: str, backend: str) -> None:
    """Tokens before the first sequence and behind the last, which are NaN."""
    for dtype in (torch.float32, torch.float16):
        for before, causal in ((3, False), (200, True)):
            inner = _packed(device, [135], dtype)
            around = []
            for t in inner:
                around.append(t.new_full((before + 150, *t.shape[1:]), math.nan))
                around[-1][before : before + 135] = t
            ends = _ends(device, [70, 0, 65])
            found = _step(*around, ends + before, causal)
            for x, y in zip(found, _step(*inner, ends, causal), strict=True):
                assert torch.equal(x[before : before + 135], y) and bool(y.isfinite().all())


def without_sequences_results_are_zeros(device: str, backend: str) -> None:
    """Of tokens that there are all the same."""
    tensors = _packed(device, [100], torch.float32)
    assert not any(t.any() for t in _step(*tensors, _ends(device, []), False))


def wrong_lengths_write_nothing_outside(device: str, backend: str) -> None:
    """Ends beyond the tokens, negative ones and longest lengths that are too small."""
    tensors = _packed(device, [200], torch.float32)
    for ends in ([0, 5, 200], [0, 150, 900], [-5, 20, 100]):
        _step(*tensors, torch.tensor(ends, dtype=torch.int32, device=device), False)


def a_packed_sequence_has_the_bits_of_a_call_of_it_alone(device: str, backend: str) -> None:
    lengths = [70, 5, 64]
    for dtype in (torch.float32, torch.float16):
        q, k, v, grad = _packed(device, lengths, dtype)
        together = _step(q, k, v, grad, _ends(device, lengths), True)
        start = 0
        for length in lengths:
            rows = slice(start, start + length)
            start += length
            alone = [t[rows].transpose(0, 1)[None].requires_grad_() for t in (q, k, v)]
            out = elsa.entmax_attention(*alone, is_causal=True, scale=0.25, backend=backend)
            grads = torch.autograd.grad(out, alone, grad[rows].transpose(0, 1)[None])
            for x, y in zip(together, (out, *grads), strict=True):
                assert torch.equal(x[rows], y[0].transpose(0, 1)), (dtype, start)


def sparsity_leaves_out_tiles_and_says_so(device: str, backend: str) -> None:
    """Keys in runs, so that whole tiles weigh next to nothing; maxima frozen early are found."""
    runs = torch.nn.functional.one_hot(torch.arange(512) // 64, 8)
    k = (runs.float() * 30)[None, None].to(device)
    q, v = k / 4, _make(device, 1, 1, 512, 8)
    for sparsity, error in (("exact", 1e-6), (1e-3, 1e-2)):
        report = elsa.sparsity_report(q, k, v, sparsity=sparsity, backend=backend)
        assert report.skipped > report.tiles / 2 and report.error < error, sparsity
    late = _make(device, 1, 1, 400, 16, seed=1)
    late[:, :, -3:] *= 60
    q, v = 3 * _make(device, 1, 1, 70, 16), _make(device, 1, 1, 400, 16, seed=2)
    relief = ("summaries", "order", "frozen")
    report = elsa.sparsity_report(q, late, v, relief=relief, backend=backend)
    assert report.error < 1e-6


def splits_fall_back_on_channels_not_on_single_numbers(device: str, backend: str) -> None:
    """A last tile of one key has a small channel by chance; both are as exact as PyTorch."""
    for shape in ((65, 129), (20, 150)):
        q, k, v = (_make(device, 1, 1, n, 64, seed=i) for i, n in enumerate((*shape, shape[1])))
        k[..., -1, 5], v[..., -1, 3], q[..., -1, 9] = 1e-9, -1e-9, 1e-10
        for factor in (1.0, 2.0**20):
            k[..., 5] *= factor
            q[..., 9] *= factor
            v[..., 3] *= factor
            out = elsa.attention(q, k, v, backend=backend).double()
            exact = elsa.attention(q.double(), k.double(), v.double(), backend="eager")
            peer = torch.nn.functional.scaled_dot_product_attention(q, k, v).double()
            error, of_peer = (out - exact).norm(), (peer - exact).norm()
            assert error <= 2 * of_peer + 6e-7 * exact.norm(), (shape, factor)


Edge = Callable[[str, str], Any]
EVERYWHERE: tuple[Edge, ...] = (
    nan_stays_in_its_rows, nan_stays_in_its_window, a_row_of_the_least_finite_number_is_finite,
    splits_fall_back_on_channels_not_on_single_numbers,
)  # fmt: skip
# Of Triton's kernels, which cannot look at lengths and indices.
TRITON: tuple[Edge, ...] = (
    *EVERYWHERE, an_entry_beyond_the_table_is_nan_in_its_row,
    sparsity_leaves_out_tiles_and_says_so, tokens_of_no_sequence_change_nothing,
    without_sequences_results_are_zeros,
    wrong_lengths_write_nothing_outside,
)  # fmt: skip
# numpy, which multiplies in the interpreter, gives equal products no equal bits
GPU: tuple[Edge, ...] = (*TRITON, a_packed_sequence_has_the_bits_of_a_call_of_it_alone)


def main(device: str, backend: str) -> int:
    """How many do not hold; each of them is printed."""
    failed = 0
    for edge in TRITON if backend == "triton" else EVERYWHERE:
        try:
            edge(device, backend)
        except Exception as error:
            failed += 1
            print(f"{edge.__name__}: {type(error).__name__}: {error}", flush=True)
    return failed
