"""Calls past the dispatcher over a stub driver, run by `test_cuda_library.py`."""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

import torch
from cuda_calls import attention_inputs, lines, started
from cuda_checks import main
from torch import Tensor

from elsa_core import operators

HALF, SINGLE = torch.float16, torch.float32


def launches(call: Any, arguments: list[Any]) -> tuple[Any, list[list[str]]]:
    """What a call returns, and the words of its launches."""
    lines()
    result = call(*arguments)
    return result, [line.split() for line in lines() if line.startswith("launch")]


def word(tensor: Tensor) -> str:
    """An address as the stub writes it."""
    return tensor.data_ptr().to_bytes(8, "little").hex()


def same_launches(stub: str) -> None:
    """An admitted call launches what the dispatcher's does and gives the first result alone."""
    loaded, call = started(stub), operators.ATTENTION.overload
    serve, admit = loaded.short("attention")  # type: ignore[misc]
    for given in (
        {"shape": (2, 3, 77, 64), "dtype": HALF},
        {"shape": (1, 2, 50, 64), "dtype": HALF, "mask": "bool", "layout": "bnhd"},
        {"shape": (1, 2, 50, 64), "dtype": torch.bfloat16, "mask": "additive", "scale": -0.5},
        {"shape": (1, 4, 33, 40), "dtype": HALF, "heads": 2, "causal": True},
        {"shape": (1, 2, 1, 64), "keys": 5000, "dtype": HALF},
        {"shape": (1, 3, 197, 64), "dtype": SINGLE},
    ):
        arguments = attention_inputs(**given)  # type: ignore[arg-type]
        assert serve(*arguments) is None and admit(*arguments, *arguments) is None  # no plan yet
        call(*arguments)
        assert serve(*arguments) is None, "it was not admitted"
        assert admit(*arguments, *arguments) is True
        (out, _), expected = launches(call, arguments)
        before = loaded.counts()[1]
        found, made = launches(serve, arguments)
        assert loaded.counts()[1] == before + 1 and len(made) == len(expected) >= 1
        assert (found.shape, found.stride(), found.dtype) == (out.shape, out.stride(), out.dtype)
        assert type(found) is Tensor and not found.requires_grad
        places = {word(out): word(found)}
        for ours, theirs in zip(made, expected, strict=True):
            assert len(ours) == len(theirs)
            for mine, other in zip(ours, theirs, strict=True):
                assert mine == places.setdefault(other, mine) or other == "0" * 16
        assert word(found) in [w for line in made for w in line]
        strided = [t.clone() if isinstance(t, Tensor) else t for t in arguments]
        strided[0] = torch.empty((*arguments[0].shape[:3], 72), dtype=arguments[0].dtype)
        strided[0] = strided[0][..., : arguments[0].shape[3]]
        assert serve(*strided) is None, "another layout was not admitted"
        loaded.clear()
        assert serve(*arguments) is None, "its plan is forgotten"
        with torch.inference_mode():
            call(*arguments)
            assert admit(*arguments, *arguments) is True and serve(*arguments).is_inference()
    loaded.clear()
    given = attention_inputs((1, 3, 197, 64), dtype=SINGLE)
    call(*given)
    assert admit(*given, *given[:5], None, "strict") is True
    assert serve(*given) is None and serve(*given[:5], None, "strict") is not None
    nan = struct.unpack("<d", b"\xff" * 8)[0]  # no number is taken for none
    assert serve(*given[:5], nan, "strict") is None
    with torch.profiler.profile():  # as another thread's would be
        assert serve(*given[:5], None, "strict") is None
    assert serve(*given[:5], None, "strict") is not None
    assert admit(*given) is None and admit(*given, *given[:-1]) is None


def windows(stub: str) -> None:
    """An image [B, H, W, 3 * C], of which the operator is given [B, 1, H, W, 3 * C]."""
    loaded, call = started(stub), operators.WINDOW_ATTENTION.overload
    serve, admit = loaded.short("window_attention")  # type: ignore[misc]
    image = torch.empty(2, 14, 14, 3 * 96, dtype=HALF)
    bias = torch.zeros(3, 49, 49)
    own = [image, bias, None, None, None, 3, (7, 7), [3, 3], None, -100.0, "qkv", False, "strict"]
    given = [image[:, None], *own[1:6], (1, 7, 7), (0, 3, 3), 32**-0.5, *own[9:]]
    assert admit(*given, *own) is None
    call(*given)
    assert admit(*given, *own) is True
    expected, first = launches(call, given)
    found, second = launches(serve, own)
    assert found.shape == (2, 14, 14, 96) and found.is_contiguous()
    assert expected.squeeze(1).stride() == found.stride()
    assert [w for line in first for w in line if w != word(expected)] == [
        w for line in second for w in line if w != word(found)
    ]
    for position, value in ((5, 2), (6, (7, 8)), (6, (7, 7.0)), (6, 7), (7, [3, 2]), (7, (3,)),
                            (8, 1), (9, float("-inf")), (11, True), (5, 1 << 70)):  # fmt: skip
        assert serve(*own[:position], value, *own[position + 1 :]) is None, (position, value)
    assert serve(*own[:7], (3, 3), *own[8:]) is not None, "a tuple or a list"
    wide = torch.empty(2, 14, 14, 6 * 96, dtype=HALF)[..., ::2]
    dense = wide.contiguous()
    call(dense[:, None], *given[1:])
    assert admit(dense[:, None], *given[1:], wide, *own[1:]) is None, "the operator's is a copy"
    deep = torch.empty(2, 4, 14, 14, 3 * 96, dtype=HALF)
    call(deep, *given[1:])
    assert admit(deep, *given[1:], deep[:, 0], *own[1:]) is None, "its result is another one"


def refused(stub: str) -> None:
    """Whatever is not as expected is None, and raises nothing."""
    loaded, call = started(stub), operators.ATTENTION.overload
    serve, admit = loaded.short("attention")  # type: ignore[misc]
    good = attention_inputs((1, 3, 197, 64), dtype=SINGLE)
    call(*good)
    assert admit(*good, *good) is True and serve(*good) is not None

    class Own(Tensor):
        pass

    q = good[0]
    wrong: list[tuple[int, Any]] = [
        (0, None), (0, 3), (0, "q"), (0, q.as_subclass(Own)), (0, torch.nn.Parameter(q)),
        (0, q.to_sparse()), (0, q.to(torch.complex64)), (0, torch.tensor(1.0)), (0, q[:0]),
        (0, torch.empty(q.shape, device="meta")), (0, q.double()), (0, torch.zeros(1, 3, 197, 32)),
        (0, torch._efficientzerotensor(q.shape)), (1, object()), (3, True), (3, 0.5), (4, None),
        (4, 0), (4, 1), (5, "0.125"), (5, torch.tensor(0.125)), (5, float("nan")), (5, 0.25),
        (6, None), (6, b"strict"), (6, "ieee"), (6, "\udc80"), (6, "strict" * 1000),
    ]  # fmt: skip
    for position, value in wrong:
        arguments = list(good)
        arguments[position] = value
        assert serve(*arguments) is None, (position, value)
        assert position in (5, 6) or admit(*arguments, *arguments) is None, (position, value)
    for arguments in ([], good[:6], [*good, None]):
        assert serve(*arguments) is None and admit(*arguments, *arguments) is None
    made = (ctypes.py_object * 2)()
    library = loaded._locked
    exchange = torch.Tensor.__dlpack_c_exchange_api__  # type: ignore[attr-defined]
    for name, capsule in ((b"nothing", exchange), (b"attention", object()), (b"attention", None)):
        given = map(ctypes.py_object, (capsule, Tensor, print))
        assert library.elsa_cuda_short(name, *given, made) == -1
    assert serve(*good) is not None


def objects(stub: str) -> None:
    """Calls hold no reference when they are over, from several threads at once."""
    import gc
    import sys

    loaded, call = started(stub), operators.ATTENTION.overload
    serve, admit = loaded.short("attention")  # type: ignore[misc]
    good = attention_inputs((1, 2, 50, 64), dtype=HALF, mask="bool")
    call(*good)
    assert admit(*good, *good) is True
    text = "".join(["str", "ict"])
    good[6] = text
    before = [sys.getrefcount(each) for each in good[:4]], sys.getrefcount(text)

    def many() -> None:
        for _ in range(200):
            assert serve(*good) is not None
            assert serve(*good[:5], "x", text) is None

    many()
    gc.collect()
    alive = len(gc.get_objects())
    threads = [threading.Thread(target=many) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    lines()
    del threads, each
    assert ([sys.getrefcount(each) for each in good[:4]], sys.getrefcount(text)) == before
    gc.collect()
    grown = len(gc.get_objects()) - alive
    assert grown < 100, grown
    out = serve(*good)
    assert sys.getrefcount(out) == 2


if __name__ == "__main__":
    main(same_launches, windows, refused, objects)
