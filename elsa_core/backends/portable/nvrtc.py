"""Compiling the kernels with NVRTC, the compiler library that PyTorch's CUDA wheels bring.

No GPU, driver, toolkit or header is needed. Compiled code is kept in the user's cache under the
rules of `elsa_core.backends.cache`: the user's own folder, each file beside its SHA-256.

Environment variables:
    ELSA_CACHE_DIR: see `elsa_core.backends.cache`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging

import torch

from elsa_core.backends import cache
from elsa_core.backends.compiler import source_directory
from elsa_core.backends.portable.tiling import Instance
from elsa_core.base.files import scratch
from elsa_core.errors import UnavailableError

_LOG = logging.getLogger("elsa")

SYMBOL = b"elsa_portable_attention"
FLAGS = ("--std=c++17", "--fmad=true", "--ftz=false", "--prec-div=true")


class Nvrtc:
    """The library.

    Attributes:
        version: (major, minor) of its CUDA.
        archs: what it compiles for, 90 for sm_90, ascending.
    """

    def __init__(self, library: ctypes.CDLL):
        self._calls = library
        self._calls.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._ask("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        self._ask("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._ask("nvrtcGetSupportedArchs", numbers)
        self.archs = tuple(sorted(numbers))

    def compile(self, source: bytes, macros: dict[str, int], arch: str) -> bytes:
        """Machine code for arch "sm_90", or PTX for "compute_90".

        Raises:
            UnavailableError: what the compiler said first.
        """
        options = [f"--gpu-architecture={arch}", *FLAGS, *(f"-D{k}={v}" for k, v in macros.items())]
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        form = "CUBIN" if arch.startswith("sm_") else "PTX"
        program = ctypes.c_void_p()
        self._ask(
            "nvrtcCreateProgram", ctypes.byref(program), source, b"attention.cu", 0, None, None
        )
        try:
            failed = self._calls.nvrtcCompileProgram(program, len(options), given)
            what = "ProgramLog" if failed else form
            size = ctypes.c_size_t()
            self._ask(f"nvrtcGet{what}Size", program, ctypes.byref(size))
            content = ctypes.create_string_buffer(size.value)
            self._ask(f"nvrtcGet{what}", program, content)
        finally:
            self._calls.nvrtcDestroyProgram(ctypes.byref(program))
        if failed:
            said = content.raw.decode(errors="replace").split("\n")
            line = next((text for text in said if "error" in text), said[0]).strip()
            raise UnavailableError(f"NVRTC does not compile the portable kernels: {line}")
        return content.raw

    def _ask(self, function: str, *arguments: object) -> None:
        try:
            result = getattr(self._calls, function)(*arguments)
        except AttributeError:
            raise UnavailableError(f"NVRTC has no {function}: it is older than CUDA 12") from None
        if result:
            text = self._calls.nvrtcGetErrorString(result)
            raise UnavailableError(f"{function} failed: {text.decode()}")


@functools.cache
def library() -> Nvrtc:
    """NVRTC of PyTorch's CUDA version, which PyTorch loads itself or the system's loader finds.

    Raises:
        UnavailableError: there is none.
    """
    wanted = (torch.version.cuda or "13").partition(".")[0]
    try:
        return Nvrtc(ctypes.CDLL(f"libnvrtc.so.{wanted}"))
    except OSError as error:
        raise UnavailableError(
            f"NVRTC was not found ({error}); install the nvidia-cuda-nvrtc wheel of PyTorch's CUDA"
        ) from None


def source() -> bytes:
    """The kernel's source.

    Raises:
        UnavailableError: it is missing.
    """
    path = source_directory() / "cuda" / "portable" / "attention.cu"
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnavailableError(f"{path} cannot be read: {error.strerror}") from None


def target(device_arch: int) -> str:
    """What to compile for: the device's own code, or PTX for one that is newer than NVRTC.

    Raises:
        UnavailableError: the device is older than what NVRTC compiles for.
    """
    archs = library().archs
    if device_arch in archs:
        return f"sm_{device_arch}"
    older = [arch for arch in archs if arch <= device_arch]
    if not older:
        raise UnavailableError(
            f"sm_{device_arch} is older than sm_{archs[0]}, the oldest GPU that this NVRTC knows"
        )
    return f"compute_{older[-1]}"


def compiled(instance: Instance, device_arch: int) -> bytes:
    """The code of an instance for a device, from the cache or compiled and put there.

    Raises:
        UnavailableError: it cannot be compiled, or the cache cannot be read.
    """
    compiler, text, arch = library(), source(), target(device_arch)
    facts = repr((compiler.version, FLAGS, arch, sorted(instance.macros.items()))).encode()
    key = hashlib.sha256(text + b"\0" + facts).hexdigest()[:24]
    path = cache.directory() / f"portable-{arch}-{key}.{'cubin' if arch[0] == 's' else 'ptx'}"
    found = cache.read(path)
    if found is not None:
        return found
    code = compiler.compile(text, instance.macros, arch)
    try:
        cache.make(path.parent)
        with scratch(".portable-", folder=path.parent) as folder:
            (folder / path.name).write_bytes(code)
            cache.put(folder / path.name, path)
    except OSError as error:
        _LOG.warning(
            "compiled kernels cannot be written to %s: %s; set ELSA_CACHE_DIR to a directory that "
            "can be written", path.parent, error.strerror or error,
        )  # fmt: skip
    return code
