"""What is built is what is in the repository: two wheels, the first of which says what needs the second."""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MODEL_FILES = ("config.json", "generation_config.json", "packed.safetensors", "tokenizer.json", "tokenizer_config.json")
MODELS = [f"hf_specdec_models/{name}/{file}" for name in ("target", "draft") for file in MODEL_FILES]
MODELS += [f"hf_specdec_models/smollm2-head/{file}" for file in ("config.json", "packed.safetensors")]
SHIPPED = [
    "hf_specdec/py.typed",
    "hf_specdec/tools/cli/generate.py",
    "hf_specdec/tools/bench/default_prompts/edit/add_logging.txt",
]
MAX_WHEEL_BYTES = 1_500_000
CORE = "hf_specdec/kernels/native/_core.abi3.so"


def run_build(
    folder: Path, target: str, project: Path = ROOT, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run hatchling without a network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, env={**os.environ, **environment})


def build(folder: Path, target: str, project: Path = ROOT, **environment: str) -> Path:
    """What hatchling builds, with the machine's own C compiler unless CC names another."""
    done = run_build(folder, target, project, **environment)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the wheel, whose core is compiled without optimisation, in a fraction of the time."""
    folder = tmp_path_factory.mktemp("dist")
    quick = folder / "cc"
    quick.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    quick.chmod(0o755)
    return build(folder, "wheel", CC=str(quick))


def core_of(python: Path, folder: Path) -> str:
    """File of the compiled core that an environment's package uses, or `None`."""
    source = "from hf_specdec.kernels import native; print(native.core and native.core.__file__)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(python), "-c", source], capture_output=True, text=True, cwd=folder, env=environment, check=True
    )
    return result.stdout.strip()


@pytest.mark.wide
def test_the_wheel_carries_types_and_licence_and_no_models(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert set(SHIPPED) <= set(names)
    assert not [name for name in names if name.endswith(".safetensors")]
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "docs/")) or "__pycache__" in name]
    assert wheel.stat().st_size <= MAX_WHEEL_BYTES


@pytest.mark.wide
def test_a_package_index_gets_a_page_whose_links_and_picture_are_absolute(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    addresses = dict(value.split(", ") for value in metadata.get_all("Project-URL"))
    page = metadata.get_payload()
    assert addresses.keys() >= {"Repository", "Documentation", "Changelog", "Issues"}
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert f"]({addresses['Repository']}/raw/main/docs/images/auto-by-task.svg)" in page
    assert re.findall(r"\]\((?!https://)[^)]*\)", page) == []


@pytest.mark.wide
def test_the_sdist_carries_models_and_tests(tmp_path: Path) -> None:
    (sdist,) = build(tmp_path, "sdist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        *SHIPPED,
        *(f"demos/models/{name}" for name in MODELS),
        "demos/models/pyproject.toml",
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "pyproject.toml",
        "tests/project/test_packaging.py",
        "hatch_build.py",
        "hf_specdec/kernels/native/core.h",
    } <= names
    assert not [name for name in names if name.endswith((".so", ".pyd"))]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is installed")
def test_a_wheel_has_the_compiled_core_for_every_later_python(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert "-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        assert CORE in archive.namelist()


def test_without_a_compiler_the_build_fails_with_the_remedy(tmp_path: Path) -> None:
    done = run_build(tmp_path, "wheel", CC="/bin/false")
    assert done.returncode != 0
    assert "Install a C compiler (apt install gcc), or set HF_SPECDEC_NO_CORE=1" in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))


@pytest.mark.wide
def test_who_wants_no_core_gets_a_wheel_of_pure_python(tmp_path: Path) -> None:
    (wheel,) = build(tmp_path, "wheel", CC="/bin/false", HF_SPECDEC_NO_CORE="1").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert set(SHIPPED) <= set(names)
    assert not [name for name in names if name.endswith((".so", ".pyd"))]


@pytest.mark.wide
def test_installed_wheels_generate_and_the_first_alone_says_what_is_missing(built: Path, tmp_path: Path) -> None:
    """In a fresh environment that borrows only the dependencies; away from the repository."""
    (wheel,) = built.glob("*.whl")
    (models,) = build(tmp_path / "models", "wheel", ROOT / "demos" / "models").glob("*.whl")
    with zipfile.ZipFile(models) as archive:
        assert {*MODELS} <= set(archive.namelist())
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(tmp_path / "env")}))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*install, "--force-reinstall", str(wheel)], check=True, cwd=tmp_path)

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = [str(python), "-c", "import hf_specdec; print(hf_specdec.__file__)"]
    result = subprocess.run(where, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True)
    assert Path(result.stdout.strip()).is_relative_to(packages)

    core = core_of(python, tmp_path)
    assert (core == "None") == wheel.name.endswith("-py3-none-any.whl")
    assert core == "None" or Path(core).is_relative_to(packages)

    command = [str(tmp_path / "env" / "bin" / "hf-specdec"), "generate", "import os\n", "--model", "embedded", "--json"]

    def generate() -> "subprocess.CompletedProcess[str]":
        settings: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        return subprocess.run([*command, "--max-new-tokens", "6"], cwd=tmp_path, env=environment, **settings)

    alone = generate()
    assert alone.returncode == 2 and 'pip install "hf_specdec[models]"' in alone.stderr
    subprocess.run([*install, str(models)], check=True, cwd=tmp_path)
    done = generate()
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 6


def test_the_version_is_the_same_everywhere() -> None:
    import hf_specdec

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == hf_specdec.__version__
    models = tomllib.loads((ROOT / "demos" / "models" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["optional-dependencies"]["models"] == [f"{models['name']}>=0.1"] and models["version"] >= "0.1"
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert {f"version: {project['version']}", f"license: {project['license']}"} <= set(citation)
