"""What is installed: versions of the core packages, and the extras with what each brings or lacks.

Read from the package's own metadata, so that pyproject.toml is the only list.
"""

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

from hf_specdec.errors import SpecError

PACKAGE = "hf_specdec"
FOR_DEVELOPERS = ("dev", "docs")


@dataclass(frozen=True, slots=True)
class Extra:
    """One optional extra.

    Attributes:
        installed (`dict[str, str]`): its packages that are here, with their versions.
        missing (`list[str]`): its packages that are not, or are too old, as requirements.
    """

    name: str
    installed: dict[str, str]
    missing: list[str]

    @property
    def install(self) -> str:
        """The line that installs it."""
        return f'pip install "{PACKAGE}[{self.name}]"'

    def __str__(self) -> str:
        here = ", ".join(f"{name} {version}" for name, version in self.installed.items())
        lacking = f"missing {', '.join(self.missing)}: {self.install}" if self.missing else ""
        return "; ".join(part for part in (here, lacking) if part)


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of what it always needs."""
    core = {str(item.name): metadata.version(item.name) for item in _requirements() if _applies(item, "")}
    return {"python": platform.python_version(), PACKAGE: metadata.version(PACKAGE), **core}


def extras() -> list[Extra]:
    """All extras for users, in the order of the metadata."""
    names = metadata.metadata(PACKAGE).get_all("Provides-Extra") or []
    found = [_extra(name) for name in names if name not in FOR_DEVELOPERS]
    return [extra for extra in found if extra.installed or extra.missing]


def _extra(name: str) -> Extra:
    installed, missing = {}, []
    for item in _requirements():
        if not _applies(item, name) or _applies(item, ""):
            continue
        version = _version(item.name)
        if version is not None and item.specifier.contains(version, prereleases=True):
            installed[item.name] = version
        else:
            missing.append(f"{item.name}{item.specifier}")
    return Extra(name, installed, missing)


def _requirements() -> Iterator[Requirement]:
    try:
        lines = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError as error:
        raise SpecError(f"{PACKAGE} runs from a folder that is not installed. Run: pip install -e .") from error
    yield from map(Requirement, lines)


def _applies(item: Requirement, extra: str) -> bool:
    return item.marker is None or item.marker.evaluate({"extra": extra})


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
