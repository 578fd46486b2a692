"""Draw docs/images/layers.svg, the layers of the package as pyproject.toml has them: `python docs/draw_layers.py`.

import-linter checks the same layers, and that none is missing.
"""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_specdec"
PICTURE = ROOT / "docs" / "images" / "layers.svg"
WIDTH, ROW, BOX, GAP = 640, 32, 24, 8
FOLDER, MODULE = "#cfe2ff", "#eeeeee"
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<rect width="{width}" height="{height}" fill="white"/>
<g font-family="DejaVu Sans Mono, monospace" font-size="12" text-anchor="middle">
"""


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(render(), encoding="utf-8")


def layers() -> list[list[str]]:
    """The modules of each layer, from the top to the bottom."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = next(c for c in document["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    return [layer.split(" | ") for layer in contract["layers"]]


def render() -> str:
    """The picture: a row of boxes for each layer, folders in blue."""
    rows = layers()
    parts = [HEAD.format(width=WIDTH, height=len(rows) * ROW + GAP)]
    for number, names in enumerate(rows):
        widths = [8 * len(_label(name)) + 20 for name in names]
        left = GAP
        for name, width in zip(names, widths, strict=True):
            parts.append(_box(name, left, GAP + number * ROW, width))
            left += width + GAP
    return "".join([*parts, "</g>\n</svg>\n"])


def _label(name: str) -> str:
    return f"{name}/" if (PACKAGE / name).is_dir() else name


def _box(name: str, left: float, top: int, width: int) -> str:
    """One module."""
    fill = FOLDER if (PACKAGE / name).is_dir() else MODULE
    box = f'<rect x="{left}" y="{top}" width="{width}" height="{BOX}" rx="4" fill="{fill}"/>'
    return f'{box}<text x="{left + width / 2}" y="{top + 16}">{_label(name)}</text>\n'


if __name__ == "__main__":
    main()
