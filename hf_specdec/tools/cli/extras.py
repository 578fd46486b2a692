"""Versions of the core packages, and the extras with their packages, read from the package's own metadata."""

import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement

from hf_specdec.errors import SpecError

PACKAGE = "hf_specdec"
FOR_DEVELOPERS = ("dev", "docs")


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of the packages that it always needs."""
    core = {str(item.name): metadata.version(item.name) for item in _requirements("")}
    return {"python": platform.python_version(), PACKAGE: metadata.version(PACKAGE), **core}


def extras() -> list[dict[str, Any]]:
    """Extras for users: name, versions of installed packages, missing requirements, and the line that installs them."""
    core = [str(item) for item in _requirements("")]
    found = []
    for name in metadata.metadata(PACKAGE).get_all("Provides-Extra") or []:
        items = [item for item in _requirements(name) if str(item) not in core]
        if name in FOR_DEVELOPERS or not items:
            continue
        known = {item.name: _version(item) for item in items}
        installed = {package: version for package, version in known.items() if version is not None}
        missing = [f"{item.name}{item.specifier}" for item in items if item.name not in installed]
        install = f'pip install "{PACKAGE}[{name}]"'
        found.append({"name": name, "installed": installed, "missing": missing, "install": install})
    return found


def extra_line(extra: dict[str, Any]) -> str:
    """One extra for people."""
    here = ", ".join(f"{name} {version}" for name, version in extra["installed"].items())
    lacking = f"missing {', '.join(extra['missing'])}: {extra['install']}" if extra["missing"] else ""
    return "; ".join(filter(None, (here, lacking)))


def _requirements(extra: str) -> Iterator[Requirement]:
    """Requirements that hold here with an extra."""
    try:
        items = map(Requirement, metadata.requires(PACKAGE) or [])
    except metadata.PackageNotFoundError as error:
        raise SpecError(f"{PACKAGE} runs from a folder that is not installed. Run: pip install -e .") from error
    return (item for item in items if item.marker is None or item.marker.evaluate({"extra": extra}))


def _version(item: Requirement) -> str | None:
    """Version of an installed package that satisfies a requirement."""
    try:
        version = metadata.version(item.name)
    except metadata.PackageNotFoundError:
        return None
    return version if item.specifier.contains(version, prereleases=True) else None
