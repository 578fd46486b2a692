"""Pages about other packages are true: all their blocks run, also those whose packages [dev] does not bring."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore")]  # those of their imports
GUIDES = Path(__file__).parents[2] / "docs" / "guides"
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def no_cluster() -> Iterator[None]:
    """Ends the cluster that a page started."""
    yield
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("page", "packages"),
    [
        (
            "other-libraries.md",
            ("langchain_huggingface", "trl", "outlines", "lm_eval", "smolagents"),
        ),
        ("many-prompts.md", ("ray",)),
    ],
)
def test_every_block_runs_as_written(
    page: str, packages: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in packages:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    text = (GUIDES / page).read_text("utf-8")
    for match in BLOCK.finditer(text):
        lines_before = text.count("\n", 0, match.start("code"))
        exec(compile("\n" * lines_before + match["code"], page, "exec"), namespace)
