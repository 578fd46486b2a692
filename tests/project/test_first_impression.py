"""What a newcomer meets first: imports and help that are there at once, signatures that show, types that check."""

import importlib.util
import inspect
import pydoc
import re
import subprocess
import sys
import tomllib
import typing
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

import hf_specdec
from hf_specdec.methods.registry import METHODS, config_arguments
from hf_specdec.tools.cli import COMMANDS, app

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "accelerate", "safetensors", "numpy")


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_no_library() -> None:
    loaded = run_python(f"import sys, hf_specdec; print([name for name in {HEAVY!r} if name in sys.modules])")
    assert loaded.strip() == "[]"


SHOWN, REFUSED = (
    (["--help"], ["--version"]),
    (
        ["nonsense"],
        ["generate", "--model", "./nosuch"],
        ["serve", "--spec-method", "none_"],
        ["demo", "--model", "smolm2"],
        ["info", "--assistant-model", "./nosuch"],
    ),
)


def test_what_is_shown_or_refused_without_a_model_imports_no_library() -> None:
    code = f"""
import sys
from hf_specdec.tools.cli import app
for words in {(*SHOWN, *REFUSED)!r}:
    try:
        app(words, prog_name="hf-specdec")
    except SystemExit as end:
        print("ended:", words, end.code, [name for name in {HEAVY[:2]!r} if name in sys.modules])
"""
    lines = [line for line in run_python(code).splitlines() if line.startswith("ended:")]
    assert lines == [f"ended: {words} {2 * (words in REFUSED)} []" for words in (*SHOWN, *REFUSED)]


def test_version_prints_the_version() -> None:
    done = subprocess.run([sys.executable, "-m", "hf_specdec", "--version"], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == hf_specdec.__version__ + "\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_each_command_says_first(name: str) -> None:
    command = getattr(importlib.import_module(f"hf_specdec.tools.cli.{name}"), name)
    first, _, _ = inspect.getdoc(command).partition("\n")
    assert first.replace("`", "") == COMMANDS[name]


def test_a_draft_model_is_named_alike_by_all_commands() -> None:
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    commands = [group.commands[name].make_context(name, [], resilient_parsing=True).command for name in COMMANDS]
    named = [option.opts for command in commands for option in command.params if "--assistant-model" in option.opts]
    assert len(named) > 5


def test_every_public_name_is_imported_when_it_is_used() -> None:
    """Each alone, and `from hf_specdec import *` gives them all."""
    namespace: dict[str, object] = {}
    exec("from hf_specdec import *", namespace)
    assert namespace.keys() >= set(hf_specdec.__all__)
    assert dir(hf_specdec) == sorted(hf_specdec.__all__)
    for name in hf_specdec.__all__:
        result = getattr(hf_specdec, name)
        module = inspect.getmodule(result)
        assert name.startswith("__") or (module is not None and module.__name__.startswith("hf_specdec"))
    with pytest.raises(AttributeError, match="no attribute 'enabel'"):
        hf_specdec.enabel  # noqa: B018


def test_no_module_has_the_name_of_a_public_function() -> None:
    """Importing such a module would put it in the place of the function."""
    shadowed = [name for name in hf_specdec.__all__ if importlib.util.find_spec(f"hf_specdec.{name}") is not None]
    assert shadowed == []


def test_generate_shows_its_arguments(model: typing.Any) -> None:
    wanted = {"spec_method", "spec_config", "spec_observer", "auto_config", "prompt_lookup_config"}
    for generate in (model.generate, hf_specdec.SpecGenerationMixin.generate):
        names = inspect.signature(generate).parameters.keys()
        assert wanted <= names
        assert {"generation_config", "streamer", "custom_generate"} <= names
        shown = pydoc.render_doc(generate, renderer=pydoc.plaintext)
        assert all(name in shown for name in wanted), shown
        assert "spec_method=None" in shown


def test_generate_s_help_names_every_method_and_configuration() -> None:
    shown = inspect.getdoc(hf_specdec.SpecGenerationMixin.generate) or ""
    assert [name for name in METHODS if f'`"{name}"`' not in shown] == []
    assert [name for name in config_arguments() if not re.search(rf"\b{name}\b", shown)] == []


def test_outputs_and_loaders_are_typed() -> None:
    returned = [typing.get_type_hints(form)["return"] for form in typing.get_overloads(_generate())]
    assert hf_specdec.SpecOutput in returned
    assert typing.get_type_hints(hf_specdec.SpecOutput)["spec_stats"] is hf_specdec.SpecStats
    assert inspect.signature(hf_specdec.AutoModelForCausalLM.from_pretrained).return_annotation == "SpecModel"


def _generate() -> typing.Any:
    """The function behind `SpecGenerationMixin.generate`."""
    return vars(hf_specdec.SpecGenerationMixin)["generate"]


def test_one_default_everywhere() -> None:
    from hf_specdec.tools.cli.models import load
    from hf_specdec.tools.cli.options import LoadOptions, MethodOptions

    default = inspect.signature(hf_specdec.generate_many).parameters["spec_method"].default
    assert repr(default) == "'auto'"
    assert load(LoadOptions(model="embedded"), MethodOptions())[1]["spec_method"] == "auto"


def test_the_metadata_names_only_what_is_there() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = document["project"]
    assert project["dynamic"] == ["readme"]
    assert project["authors"]
    sdist = document["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert [path for path in sdist if not (ROOT / path.lstrip("/")).exists()] == []
    versions = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    assert versions == ["3.11", "3.12", "3.13"], "the interpreters that the tests have run on"
