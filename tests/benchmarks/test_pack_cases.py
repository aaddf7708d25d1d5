"""The list of cases that kernel packs are built for is what its models compute."""

import json
from pathlib import Path

import elsa_core
from benchmarks import pack_cases
from elsa_core import dispatch

LIST = Path(elsa_core.__file__).parent / "backends/triton/pack/cases.json"


def test_the_shipped_list_is_up_to_date() -> None:
    """By the models that come first with a ViT's calls, and with those of windows."""
    shipped = json.loads(LIST.read_text())
    for model in ("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"):
        found = pack_cases.collect([f"timm:{model}"])["cases"]
        expected = [case for case in shipped["cases"] if case["model"] == model]
        assert len(expected) > 5
        assert all(case in found for case in expected)
        operators = {case["operator"] for case in found}
        assert operators == {"linear", "window_attention" if "swin" in model else "attention"}
    assert shipped["about"] == pack_cases.ABOUT
    assert "collect" not in dispatch.names()
