"""The changelog follows Keep a Changelog, one user-facing sentence an entry."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def test_it_begins_with_what_is_unreleased() -> None:
    headings = re.findall(r"^## (.+)$", TEXT, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", heading) for heading in headings[1:])


def test_the_newest_release_is_the_package_s_version() -> None:
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", TEXT, re.MULTILINE)
    assert not released or released[0] == VERSION


def test_kinds_of_change_are_the_known_ones() -> None:
    assert set(re.findall(r"^### (.+)$", TEXT, re.MULTILINE)) <= KINDS


def test_an_entry_is_one_sentence() -> None:
    entries = [" ".join(entry.split()) for entry in re.findall(r"^- (.+(?:\n  .+)*)", TEXT, re.MULTILINE)]
    assert entries
    for entry in entries:
        assert entry.endswith("."), entry
        assert not re.search(r"[.!?] [A-Z]", entry), entry
