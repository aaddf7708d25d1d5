"""Calls past the dispatcher over a stub driver, run by `test_cuda_library.py`."""

import contextlib
import ctypes
import struct
import threading
from typing import Any

import torch
from cuda_calls import attention_inputs, lines, started
from cuda_checks import Seeing
from torch import Tensor
from torch.nn import Parameter

import elsa_core as elsa
from elsa_core import dispatch, ops
from elsa_core.backends import cuda
from elsa_core.backends.triton.linear import gate
from elsa_core.dispatch import launches as launch_cache
from elsa_core.ops.linear.api import served

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
    loaded, call = started(stub), ops.ATTENTION.overload
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
    loaded, call = started(stub), ops.WINDOW_ATTENTION.overload
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


def products(stub: str) -> None:
    """Linear layers, from `elsa.linear` and from a patched layer, with weights that follow."""
    loaded, call = started(stub), ops.LINEAR.overload
    serve, admit = loaded.short("linear")  # type: ignore[misc]
    launch_cache.LINEAR.find = serve
    dispatch.eager_least = lambda *_: 0  # no product is small
    x, layer = torch.empty(1, 64, 64), torch.nn.Linear(64, 128)
    residual, factors = torch.empty(1, 64, 128), torch.empty(128)
    for terms in (("none", None, None), ("gelu", residual, None), ("none", residual, factors)):
        given = [x, layer.weight, layer.bias, *terms, "strict"]
        call(*given)
        assert serve(*given) is None and admit(*given, *given) is True
        expected, first = launches(call, given)
        found, second = launches(serve, given)
        assert len(first) == len(second) == 2 and found.stride() == expected.stride()
        pointers = {word(t) for t in (x, layer.weight, layer.bias, found)}
        assert pointers <= {w for line in second for w in line}, "it reads the tensors given"
    plain = [x, layer.weight, layer.bias, "none", None, None, "strict"]
    tall, wide = torch.empty(128, 2, 64), torch.empty(1, 64, 72)[..., :64]
    beside = torch.empty(64 * 64 + 1)[1:].view(1, 64, 64)
    half, powers = torch.empty(2, 128, 64, dtype=HALF), torch.empty(128)
    for position, value in ((0, x[0]), (0, x.view(2, 32, 64)), (0, wide), (0, beside),
                            (0, x.half()), (1, tall[:, 0]), (1, layer.weight.double()), (2, None),
                            (3, "silu"), (4, factors), (5, residual), (6, "turbo"), (6, "ieee"),
                            (7, half), (8, powers)):  # fmt: skip
        assert serve(*plain[:position], value, *plain[position + 1 :]) is None, (position, value)
    for changed in (torch.nn.Parameter(torch.empty(128, 64)), layer.weight.detach().clone()):
        _, made = launches(serve, [x, changed, *plain[2:]])
        assert word(changed) in made[0] and word(layer.weight) not in made[0] + made[1]
    with torch.no_grad():
        before = loaded.counts()[1]
        elsa.linear(x, layer.weight, layer.bias)
        assert served(x, layer.weight, layer.bias).shape == (1, 64, 128)
        assert loaded.counts()[1] == before + 2
        with Seeing() as seeing:
            launch_cache.LINEAR._looked, launch_cache.LINEAR._admit = True, admit
            launch_cache.LINEAR.admit(tuple(plain), tuple(plain))
            elsa.linear(x, layer.weight, layer.bias)
        assert not any("is_neg" in each for each in seeing.names), seeing.names
        assert loaded.counts()[1] == before + 2
        for kept in ((torch.nested.nested_tensor([x[0], x[0, :9]]), "nested"), ([x], "list")):
            with contextlib.suppress(Exception):  # whatever PyTorch says of them
                elsa.linear(kept[0], layer.weight, layer.bias)
        assert loaded.counts()[1] == before + 2
    cuda._SERVED.add("linear")
    for forget in (gate.forget, cuda.forget):
        call(*plain)
        assert admit(*plain, *plain) is True and serve(*plain) is not None
        forget()  # what decided who serves was read again
        assert serve(*plain) is None


class Shown(ctypes.Structure):
    """The beginning of a DLTensor."""

    _fields_ = (("data", ctypes.c_uint64), ("type", ctypes.c_int32), ("index", ctypes.c_int32))


def elsewhere(stub: str) -> None:
    """No call is found whose operands lie elsewhere than those of the one that was admitted. The
    tensors are on the CPU, and PyTorch's own interface says of them what the test wants."""
    loaded, cuda_type = started(stub), 2
    tensors = attention_inputs((1, 3, 197, 64), dtype=SINGLE)
    ops.ATTENTION.overload(*tensors)
    assert loaded.short("attention")[1](*tensors, *tensors) is True  # type: ignore[index]
    api = ctypes.pythonapi.PyCapsule_GetPointer
    api.restype, api.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    exchange = torch.Tensor.__dlpack_c_exchange_api__  # type: ignore[attr-defined]
    words = (ctypes.c_uint64 * 7).from_address(api(exchange, b"dlpack_exchange_api"))
    kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Shown))
    own, places = kind(words[5]), dict[int, int]()

    @kind
    def describe(tensor: int, out: Any) -> int:
        answer = own(tensor, out)
        if out[0].data in places:
            out[0].type, out[0].index = cuda_type, places[out[0].data]
        return int(answer)

    played = (ctypes.c_uint64 * 7)(*words)
    played[5] = ctypes.cast(describe, ctypes.c_void_p).value or 0
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype = ctypes.py_object
    capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    changed = capsule(ctypes.addressof(played), b"dlpack_exchange_api", None)
    made: Any = (ctypes.py_object * 2)()
    given = (changed, torch.Tensor, torch.nn.Parameter, torch.Tensor.is_neg)
    assert not loaded._locked.elsa_cuda_short(b"attention", *map(ctypes.py_object, given), made)
    for devices in ((0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0), (0, 1, 0)):
        places.clear()
        for tensor, device in zip(tensors, devices, strict=False):
            if device is not None:
                places[tensor.data_ptr()] = device
        assert made[0](*tensors) is None, devices
    places.clear()
    assert made[0](*tensors) is not None


def told_as_ever(stub: str) -> None:
    """What is no plain tensor is told by the checks, which the cache of launches leaves it to."""
    loaded = started(stub)
    for short in (launch_cache.ATTENTION, launch_cache.WINDOW_ATTENTION, launch_cache.LINEAR):
        short.find = loaded.short(short._operator)[0]  # type: ignore[index]
    q, k, v = (torch.zeros(1, 2, 9, 8) for _ in range(3))
    for call, said in (
        (lambda: elsa.attention(q, k, v, [1]), "attn_mask must be a torch"),  # type: ignore[arg-type]
        (lambda: elsa.window_attention(q[..., :6], "b", num_heads=1, window_size=(1, 3)),  # type: ignore[arg-type]
         "bias must be a torch"),
        (lambda: elsa.linear(q, [1]), "weight must be a torch"),  # type: ignore[arg-type]
        (lambda: elsa.linear([1], q), "input must be a torch"),  # type: ignore[arg-type]
        (lambda: torch.fx.symbolic_trace(lambda a: elsa.attention(a, k, v)), "not Proxy"),
    ):  # fmt: skip
        try:
            call()
        except TypeError as error:
            assert said in str(error), error
        else:
            raise AssertionError(said)
    negated = torch._neg_view(q + 1)  # type: ignore[attr-defined]
    assert torch.equal(elsa.linear(negated, torch.eye(8)), -(q + 1))


def refused(stub: str) -> None:
    """Whatever is not as expected is None, and raises nothing."""
    loaded, call = started(stub), ops.ATTENTION.overload
    serve, admit = loaded.short("attention")  # type: ignore[misc]
    good = attention_inputs((1, 3, 197, 64), dtype=SINGLE)
    call(*good)
    assert admit(*good, *good) is True and serve(*good) is not None

    class Own(Tensor):
        pass

    class OwnParameter(Parameter):
        pass

    q = good[0]
    assert serve(Parameter(q), *good[1:]) is not None, "a parameter is no other tensor"
    assert not serve(Parameter(q), *good[1:]).requires_grad
    wrong: list[tuple[int, Any]] = [
        (0, None), (0, 3), (0, "q"), (0, q.as_subclass(Own)), (0, q.as_subclass(OwnParameter)),
        (0, torch._neg_view(q)), (2, torch._neg_view(q)), (3, torch._neg_view(q)),  # type: ignore[attr-defined]
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
        given = map(ctypes.py_object, (capsule, Tensor, Parameter, Tensor.is_neg))
        assert library.elsa_cuda_short(name, *given, made) == -1
    assert serve(*good) is not None


def objects(stub: str) -> None:
    """Calls hold no reference when they are over, from several threads at once."""
    import gc
    import sys

    loaded, call = started(stub), ops.ATTENTION.overload
    good = attention_inputs((1, 2, 50, 64), dtype=HALF, mask="bool")
    call(*good)
    text = "".join(["str", "ict"])
    good[6] = text
    before = [sys.getrefcount(each) for each in good[:4]], sys.getrefcount(text)

    def many(serve: Any) -> None:
        for _ in range(200):
            assert serve(*good) is not None
            assert serve(*good[:5], "x", text) is None

    serve, admit = loaded.short("attention")  # type: ignore[misc]
    assert admit(*good, *good) is True
    many(serve)
    gc.collect()
    alive = len(gc.get_objects())
    threads = [threading.Thread(target=many, args=(serve,)) for _ in range(4)]
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
    assert sys.getrefcount(out) == 2 and out._use_count() == 1 and type(out) is Tensor
    with torch.inference_mode():
        call(*good)
        assert admit(*good, *good) is True and serve(*good).is_inference()


CHECKS = (same_launches, windows, products, elsewhere, told_as_ever, refused, objects)
