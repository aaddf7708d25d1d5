"""The portable kernels compiled for GPUs that are not here, and what is in their code."""

import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path

from elsa_core.backends.portable import nvrtc
from elsa_core.backends.portable.tiling import Instance

# Bytes of shared memory that a block may have, as the driver says of these devices.
LIMITS = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
# Matrix products of sm_70 to sm_120, in machine code and in PTX; HFMA2.MMA moves constants.
_MATRIX_SASS = re.compile(r"(U?[A-Z]*MMA|UTC\w*|WARPGROUP)(\.|$)")
_MATRIX_PTX = re.compile(r"\b(mma|wmma|wgmma|tcgen05)\.\S+")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_.]*)")


def compiled(instance: Instance, arch: str) -> bytes:
    return nvrtc.library().compile(nvrtc.source(), instance.macros, arch)


def disassembler() -> str | None:
    """NVIDIA's, which Triton's wheel brings."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return str(found) if found.exists() else None


def opcodes(cubin: bytes, tool: str) -> list[str]:
    """The instructions of machine code, with their modifiers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, file.name], capture_output=True, text=True, check=True).stdout
    return [m[1] for line in text.splitlines() if (m := _INSTRUCTION.match(line))]


def matrix_instructions(found: list[str]) -> list[str]:
    """Those of machine code that multiply matrices."""
    return [opcode for opcode in found if _MATRIX_SASS.match(opcode)]


def matrix_lines(ptx: bytes) -> list[bytes]:
    """The same of PTX."""
    return [line for line in ptx.splitlines() if _MATRIX_PTX.search(line.decode())]
