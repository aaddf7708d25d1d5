"""What stands at the end of each command's help page: two command lines that work."""

from __future__ import annotations

_MODEL = "vit_base_patch16_224"
EXAMPLES = {
    "list": ("elsa list swin", "elsa list 'vit_*' --json"),
    "inspect": (f"elsa inspect {_MODEL}", "elsa inspect model.safetensors --html sites.html"),
    "patch": (f"elsa patch {_MODEL} --check", f"elsa patch {_MODEL} --pretrained -o DIR"),
    "check": (f"elsa check {_MODEL} --images DIR", f"elsa check {_MODEL} --dtype bf16 --grad"),
    "profile": (f"elsa profile {_MODEL}", f"elsa profile {_MODEL} --img 384 --html report.html"),
    "eval": (
        f"elsa eval {_MODEL} --pretrained --images DIR",
        "elsa eval model.safetensors --images DIR --limit 500",
    ),
    "export": (
        f"elsa export {_MODEL} --pretrained -o DIR",
        "elsa export model.safetensors --formats onnx --onnx-mode standard",
    ),
    "verify": ("elsa verify DIR --files-only", "elsa verify DIR --key key.pub"),
    "bench": ("elsa bench --quick", "elsa bench attention --dry-run"),
    "doctor": ("elsa doctor", "elsa doctor --json"),
    "build": ("elsa build", "elsa build --cuda --arch sm_90"),
    "completion": ('eval "$(elsa completion bash)"', "elsa completion fish | source"),
    "help": ("elsa help patch", "elsa help bench models"),
}


def of(command: str) -> str:
    lines = EXAMPLES.get(command, ())
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)]) if lines else ""
