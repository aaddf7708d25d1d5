"""Screenshots of the page of --html, by Chromium, at three widths, light and dark.

`python -m tests.profiling.screens` takes the pictures that the tests compare with again, after a
change of the page: look at them before you commit them. The document is fixed, and so is the font:
DejaVu Sans, which matplotlib ships.
"""

from __future__ import annotations

import base64
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops

from elsa_core.profiling import page

FOLDER = Path(__file__).parent / "screens"
BROWSERS = (
    "chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell",
)  # fmt: skip
WIDTHS = {390: 6400, 800: 6000, 1280: 3200}  # and a height that holds the page
SCHEMES = {"light": 1, "dark": 0}
_KEPT = 4  # pixels of the screen, each way, that are one of a picture that is kept
_TILE = 4  # pixels of a kept picture, each way, whose mean colour is compared
# Of 255. Other versions of Chromium draw edges differently: 2 to 4. A line of text that is missing
# or elsewhere changes the tiles it lies in by 20 and more.
TOLERANCE = 12


def browser() -> str | None:
    """The Chromium of this machine."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def document() -> dict[str, Any]:
    """A profile at two sizes, with all that a page shows: gains, losses, what is left out."""
    return {
        "schema_version": 1,
        "elsa_version": "1.0",
        "command": "profile",
        "environment": {
            "cpu": "A processor with a name of usual length @ 2.40GHz", "threads": 2, "gpu": None,
            "cpu_count": 2, "isa": "AVX2", "kernels": "avx2",
            "packages": {"torch": "2.15.0", "timm": "1.0.29"}, "date": "2026-01-02T03:04:05",
        },
        "results": {
            "model": {
                "given": "swin_tiny", "name": "swin_tiny_patch4_window7_224", "seed": 0,
                "weights": "random (seed 0)", "pretrained": False,
            },
            "settings": {"budget_seconds": 60.0, "baselines": ["eager", "compile"]},
            "complete": True,
            "points": [_point(224, 1.0, 4), _point(512, 6.5, 0)],
        },
    }  # fmt: skip


def _point(size: int, times: float, count: int) -> dict[str, Any]:
    half = {"value": 2.0, "low": 1.9, "high": 2.1, "rounds": 20, "verdict": "faster"}
    gain = {"value": 1.19, "low": 1.14, "high": 1.24, "rounds": 20, "verdict": "faster"}
    same = {"value": 1.0, "low": 0.97, "high": 1.02, "rounds": 20, "verdict": "no difference"}
    few = {"value": 2.0, "low": 0.9, "high": 2.6, "rounds": 3, "verdict": "unsure"}
    runs = [_run("eager", 0.1 * times, None), _run("compile", 0.105 * times, same),
            _run("patched", 0.084 * times, gain)]  # fmt: skip
    sites = [_site(f"layers.{i // 2}.blocks.{i % 2}.attn", 0.008 * times, 0.004 * times,
                   half if i else few) for i in range(count)]  # fmt: skip
    sites.append({
        "path": "rest of the model", "kind": "rest", "query_tokens": None, "key_tokens": None,
        "num_heads": None, "head_dim": None, "seconds_before": 0.068 * times,
        "seconds_after": 0.068 * times, "share": 0.68, "ratio": same, "error": None,
        "backend": "", "schedule": "", "precision": "",
    })  # fmt: skip
    found = {
        "device": "cpu", "dtype": "float32", "batch": 1, "image_size": [size, size],
        "precision": "strict", "backend": "auto", "rounds": 20, "weight_bytes": 113_000_000,
        "runs": runs, "best_baseline": "eager", "best_patched": "patched", "gain": gain,
        "left_out": {"sdpa": "fused attention is on already: the same as eager"},
        "patched": 4, "kept": 0, "wrong": [], "notes": [], "sites": sites,
        "warnings": ["other programs used 23% of the processors meanwhile"],
    }  # fmt: skip
    asked = {"image_size": [size, size], "batch": 1, "dtype": "fp32", "precision": "strict"}
    return {"configuration": asked, "status": "done", "reason": "", "profile": found}


def _run(name: str, seconds: float, ratio: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "name": name, "patched": name == "patched", "seconds": seconds,
        "seconds_p10": 0.96 * seconds, "seconds_p90": 1.08 * seconds, "spread": 0.12,
        "images_per_second": 1 / seconds, "memory_bytes": round(4e8 * seconds), "bound": "",
        "host_seconds": None, "device_seconds": None, "joules": None, "error": 4e-7,
        "ratio": ratio, "ratio_to_best": ratio, "parts": {},
    }  # fmt: skip


def _site(path: str, before: float, after: float, ratio: dict[str, Any]) -> dict[str, Any]:
    return {
        "path": path, "kind": "window", "query_tokens": 49, "key_tokens": 49, "num_heads": 3,
        "head_dim": 32, "seconds_before": before, "seconds_after": after, "share": 0.08,
        "ratio": ratio, "error": 3.4e-7, "backend": "native", "precision": "strict",
        "schedule": "avx2 kernels, one window after another over 2 threads",
    }  # fmt: skip


def html() -> str:
    """The page of the document, in a font that is the same on every machine."""
    import matplotlib

    font = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    data = base64.b64encode(font.read_bytes()).decode()
    face = f'@font-face {{ font-family: fixed; src: url("data:font/ttf;base64,{data}"); }}'
    style = f"<style>{face} * {{ font-family: fixed !important; }}</style></head>"
    return page.page(document()).replace("</head>", style, 1)


def shot(program: str, text: str, width: int, scheme: str) -> Image.Image:
    """What Chromium shows of a page, at a quarter of its size."""
    with tempfile.TemporaryDirectory() as folder:
        path, picture = Path(folder) / "page.html", Path(folder) / "shot.png"
        path.write_text(text, encoding="utf-8")
        subprocess.run(
            [
                program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--hide-scrollbars", f"--window-size={width},{WIDTHS[width]}",
                "--force-device-scale-factor=1", "--font-render-hinting=none",
                f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
                f"--user-data-dir={folder}/browser", f"--screenshot={picture}", path.as_uri(),
            ],
            capture_output=True, timeout=120, check=True,
        )  # fmt: skip
        with Image.open(picture) as whole:
            small = whole.convert("RGB").reduce(_KEPT)
    blank = small.crop((0, small.height - 4, *small.size)).getextrema()
    assert all(low == high for low, high in blank), f"the page is longer than {WIDTHS[width]}"
    return small


def difference(one: Image.Image, other: Image.Image) -> tuple[float, tuple[int, int]]:
    """The largest difference of the mean colours of two tiles, and where on the page it is."""
    assert one.size == other.size
    tiles = ImageChops.difference(one.reduce(_TILE), other.reduce(_TILE)).convert("RGB")
    values = tiles.tobytes()
    largest = [max(values[i : i + 3]) for i in range(0, len(values), 3)]
    place = max(range(len(largest)), key=largest.__getitem__)
    side = _KEPT * _TILE
    return largest[place], (place % tiles.width * side, place // tiles.width * side)


def kept(width: int, scheme: str) -> Path:
    """The picture that a test compares with."""
    return FOLDER / f"{width}-{scheme}.png"


def main() -> None:
    """Takes every picture again."""
    program = browser()
    assert program is not None, "Chromium is not installed"
    FOLDER.mkdir(exist_ok=True)
    for width in WIDTHS:
        for scheme in SCHEMES:
            picture = shot(program, html(), width, scheme)
            picture.save(kept(width, scheme), optimize=True)
            print(kept(width, scheme))


if __name__ == "__main__":
    main()
