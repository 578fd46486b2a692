"""Write docs/reference/configuration.md from the docstrings of the configuration classes.

python docs/generate_reference.py
"""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.registry import METHODS

PAGE = Path(__file__).parent / "reference" / "configuration.md"
DEFAULT = re.compile(r"defaults to `(.+)`")
ARGUMENT = re.compile(r"^(\w+) \((.+)\):\n", re.MULTILINE)
HEAD = """\
# Configuration

<!-- Written by docs/generate_reference.py from the docstrings of the configuration classes. Change those. -->

`spec_config` takes a configuration object, a dict of its fields, or the list form where a method has one. It may stand
in `generation_config` too; an argument of `generate` overrides it. An unknown key is an error that names the nearest
one.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(), encoding="utf-8")


def render() -> str:
    """The page's text."""
    sections = [HEAD, _section("Every method", SpecConfig)]
    for name, method in METHODS.items():
        aliases = "".join(f", alias `{alias}`" for alias in method.aliases)
        sections.append(_section(f"`{name}`{aliases}", method.config_class))
    return "\n".join(sections)


def _section(heading: str, config_class: type[SpecConfig]) -> str:
    """One class: what it is, its fields as a table, its list form."""
    summary = inspect.cleandoc(config_class.__doc__ or "").partition("\nArgs:\n")[0].partition("\nFurther")[0]
    parts = [f"## {heading}", f"Class `{config_class.__name__}`. {summary.strip()}"]
    fields = list(_fields(config_class))
    if fields:
        rows = [f"| `{name}` | {kind} | {meaning} |" for name, kind, meaning in fields]
        parts.append("\n".join(["| Field | Type and default | Meaning |", "|---|---|---|", *rows]))
    if config_class.list_form:
        is_whole = config_class.min_list_entries == len(config_class.list_form)
        entries = "all entries needed" if is_whole else "later entries optional"
        parts.append(f"List form: `[{', '.join(config_class.list_form)}]`, {entries}.")
    return "\n\n".join(parts) + "\n"


def _fields(config_class: type[SpecConfig]) -> Iterator[tuple[str, str, str]]:
    """Name, type and meaning of each field, by the class that describes it last; those of every method apart."""
    described: dict[str, tuple[str, str]] = {}
    for one in reversed(config_class.__mro__):
        if one is config_class or (issubclass(one, SpecConfig) and one is not SpecConfig):
            block = inspect.cleandoc(one.__doc__ or "").partition("\nArgs:\n")[2].partition("\nAttributes:\n")[0]
            pieces = ARGUMENT.split(textwrap.dedent(block))[1:]  # name, type, meaning, name, type, meaning, ...
            described |= dict(zip(pieces[::3], zip(pieces[1::3], pieces[2::3], strict=True), strict=True))
    for field in dataclasses.fields(config_class):
        if field.name in described:
            kind, meaning = described[field.name]
            stated = DEFAULT.search(kind)
            if stated is not None and ast.literal_eval(stated[1]) != field.default:
                kind = kind.replace(stated[1], repr(field.default))
            yield field.name, kind.replace("|", "\\|"), " ".join(meaning.split())


if __name__ == "__main__":
    main()
