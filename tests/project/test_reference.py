"""The generated page says what the docstrings say."""

import dataclasses
import runpy
from pathlib import Path

from hf_specdec.methods.registry import METHODS

DOCS = Path(__file__).parents[2] / "docs"


def test_the_configuration_page_is_current() -> None:
    """`make docs` would change nothing."""
    render = runpy.run_path(str(DOCS / "generate_reference.py"))["render"]
    assert (DOCS / "reference" / "configuration.md").read_text(encoding="utf-8") == render()


def test_every_field_of_every_method_has_its_row() -> None:
    page = (DOCS / "reference" / "configuration.md").read_text(encoding="utf-8")
    for method in METHODS.values():
        for field in dataclasses.fields(method.config_class):
            assert f"| `{field.name}` |" in page
