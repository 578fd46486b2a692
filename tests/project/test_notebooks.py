"""The tutorials run from top to bottom: two short ones in `make test`, all in `make test-all`."""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
QUICK = ("1-first-generate", "3-chat")


@pytest.mark.at_most(1)
@pytest.mark.parametrize(
    "notebook",
    [pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.wide) for path in NOTEBOOKS],
)
def test_the_cells_run_in_order(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot

    monkeypatch.chdir(tmp_path)
    matplotlib.pyplot.switch_backend("Agg")
    namespace: dict[str, object] = {"__name__": "__tutorial__"}
    for number, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{notebook.name}, cell {number}", "exec"), namespace)
    matplotlib.pyplot.close("all")


def test_there_are_tutorials() -> None:
    assert len(NOTEBOOKS) >= 5
