"""Builds the compiled core into the wheel, and README.md with absolute links into its metadata.

An editable install gets the core beside its sources.

With HF_SPECDEC_NO_CORE=1 in the environment the wheel is pure Python.
"""

import os
import re
import runpy
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

FOLDER = "hf_specdec/kernels/native"
NO_CORE = "HF_SPECDEC_NO_CORE"
ABI = "0x030B0000"  # the stable ABI of Python 3.11: one library serves all later versions
# Python computes in steps of 64 bits: a fused multiply-add would round differently. Comparisons are taken to raise no
# signal, without which GCC vectorises the reading of logits for AVX-512 alone.
FLAGS = ["-O3", "-std=c11", "-ffp-contract=off", "-fno-trapping-math"]

LINK = re.compile(r"(?P<is_picture>!?)\[(?P<text>[^\]]*)\]\((?!\w+:|#)(?P<path>[^)\s]+)\)")


def built(root: Path, target: Path) -> Path:
    """The library, compiled into `target`.

    Raises:
        RuntimeError: it cannot be compiled; with the remedy.
    """
    from setuptools import Distribution, Extension

    number = runpy.run_path(str(root / FOLDER / "sources.py"))["sources_number"](root / FOLDER)
    unix = sysconfig.get_config_var("CC") is not None
    extension = Extension(
        "_core",
        sorted(str(source) for source in (root / FOLDER).glob("*.c")),
        define_macros=[("Py_LIMITED_API", ABI), ("SOURCES_NUMBER", str(number))],
        extra_compile_args=FLAGS if unix else ["/std:c11"],
        libraries=["m"] if unix else [],
        py_limited_api=True,
    )
    distribution = Distribution({"name": "hf_specdec", "ext_modules": [extension]})
    command: Any = distribution.get_command_obj("build_ext")
    with tempfile.TemporaryDirectory() as objects:
        command.build_lib, command.build_temp, command.force = str(target), objects, True  # headers may have changed
        command.ensure_finalized()
        try:
            command.run()
        except Exception as error:  # of distutils, which has a class for each step
            raise RuntimeError(
                f"The compiled core of hf_specdec cannot be built: {error}. Install a C compiler (apt install gcc), or "
                f"set {NO_CORE}=1 for an install without it, whose drafts and layers take longer."
            ) from error
    return Path(command.get_outputs()[0])


class CustomBuildHook(BuildHookInterface[Any]):
    """Puts the core into wheels."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name the platform that the wheel is for."""
        if self.target_name != "wheel":
            return
        root, is_editable = Path(self.root), version == "editable"
        target = root / FOLDER if is_editable else root / "build" / "lib"
        for old in target.glob("_core.*"):
            if old.suffix in (".so", ".pyd"):
                old.unlink()
        if os.environ.get(NO_CORE) == "1":
            return
        library = built(root, target)
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"], build_data["tag"] = False, f"cp311-abi3-{platform}"
        if not is_editable:
            build_data["force_include"][str(library)] = f"{FOLDER}/{library.name}"


class CustomMetadataHook(MetadataHookInterface):
    """Gives a package index README.md with links and pictures of the repository."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme."""
        repository = metadata["urls"]["Repository"]

        def absolute(link: re.Match[str]) -> str:
            kind = "raw" if link["is_picture"] else "blob"
            return f"{link['is_picture']}[{link['text']}]({repository}/{kind}/main/{link['path']})"

        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": LINK.sub(absolute, text)}
