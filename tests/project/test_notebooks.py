"""The tutorials run from top to bottom: two short ones in `make test`, all in `make test-all`.

Offline: the embedded target, with a chat template, stands in for the model that they fetch.
"""

import json
import shutil
from pathlib import Path

import pytest

import hf_specdec

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TEMPLATE = "{% for message in messages %}# {{ message.content }}\n{% endfor %}"
QUICK = ("1-first-generate", "3-chat")


@pytest.mark.at_most(1)
@pytest.mark.parametrize(
    "notebook",
    [pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.wide) for path in NOTEBOOKS],
)
def test_the_cells_run_in_order(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot

    monkeypatch.chdir(tmp_path)
    fetched = shutil.copytree(hf_specdec.embedded.path("target"), tmp_path / "smollm2")
    (fetched / "chat_template.jinja").write_text(TEMPLATE)
    monkeypatch.setattr(hf_specdec, "fetch", {"smollm2": str(fetched)}.__getitem__)
    matplotlib.pyplot.switch_backend("Agg")
    namespace: dict[str, object] = {"__name__": "__tutorial__"}
    for number, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{notebook.name}, cell {number}", "exec"), namespace)
    matplotlib.pyplot.close("all")


def test_there_are_tutorials() -> None:
    assert len(NOTEBOOKS) >= 5
