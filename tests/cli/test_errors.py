"""What a user got wrong is one line that begins with `error:`, a hint where there is a remedy, and an exit code."""

import shutil
from pathlib import Path

import pytest
import typer

from hf_specdec import embedded
from hf_specdec.errors import ConfigError, MissingExtraError, RankError
from hf_specdec.tools.command_errors import Command
from tests.cli.conftest import Run

LOOKUP = ("--spec-method", "prompt_lookup")
CONFIG, LIST, LOOKAHEAD, DRAFT_LIST = (
    "--spec-config",
    "--prompt-lookup-config",
    "--lookahead-config",
    "--draft-model-config",
)
CASES = [
    (["--spec-method", "promt_lookup"], "`spec_method` must be one of", "Did you mean 'prompt_lookup'?"),
    ([*LOOKUP, CONFIG, '{"max_draft_len": -1}'], "`max_draft_len` must be a whole number of at least 1", "4 to 10"),
    ([CONFIG, '{"max_draft_len": '], "`spec_config` must be a dict in the notation of", "Its form is {"),
    ([CONFIG, "[" * 100_000], "`spec_config` must be", ""),
    ([LIST, "[10,2,[99]]"], "`device_list` must name devices that are here (cpu", "leave the list out"),
    ([DRAFT_LIST, "[4]", LOOKAHEAD, "[7,7,7]"], "must not come with spec_method=", ""),
    ([LOOKAHEAD, "[7,7,7]", "--assistant-model", "x"], "`assistant_model` must be unset", "Leave it out."),
    (["--spec-method", "eagle3", "--assistant-model", "./no/such"], "`assistant_model` must be an existing", ""),
    (["--spec-method", "dflash"], "`assistant_model` must be given with spec_method='dflash'", "Name a draft head"),
    (["--spec-method", "none", LOOKAHEAD, "[7,7,7]"], "`lookahead_config` must come with a spec_method", ""),
    (["--spec-method", "none", "--compare"], "`compare` must come with a method", "--spec-method"),
    (["--dtype", "fp12"], "`dtype` must be one of", "Did you mean"),
    (["--spec-method", "draft_model", "--assistant-dtype", "bfloat18"], "`assistant_dtype` must be", "bfloat16"),
    (["--temperature", "0.5"], "`temperature` must come with do_sample", "Add --do-sample."),
    (["--attn-implementation", "spda"], "spda", ""),
    (["--system", "Be brief."], "`system` must come with chat", "Add --chat."),
    (["--chat"], "`chat` must come with a model that has a chat template", "smollm2"),
    (["--batch-size", "4"], "`batch_size` must come with prompts_file, but is 4.", "--prompts-file"),
    (["--prompts-file", "x.jsonl"], "`out` must be given with prompts_file", "--out"),
    (["--prompts-file", "x.jsonl", "--out", "y.jsonl"], "`prompt` must be unset with prompts_file", ""),
    (["--model", "./no/such/folder"], "`model` must be an existing folder, but there is no './no/such/folder'", ""),
    (["--model", "smolm2"], "`model` must be a folder, a GGUF file, a name on the hub", "Did you mean 'smollm2'?"),
    (["--model", "my-modle"], "must be an existing folder or a name on the hub, but there is no folder 'my-m", ""),
    (["--model", embedded.__file__], "is a file", ""),
    (["--device-map", "somewhere"], "`device_map` must be a device that is here (cpu", "Name one of them"),
    (["\udce9"], "Unicode", ""),
]


@pytest.mark.parametrize(("words", "message", "hint"), CASES, ids=[" ".join(words)[:60] for words, _, _ in CASES])
def test_a_mistake_is_one_line_with_its_remedy(run: Run, words: list[str], message: str, hint: str) -> None:
    prompt = [] if words == ["\udce9"] else ["x = 1"]
    result = run("generate", *prompt, "--max-new-tokens", "4", *words)
    assert result.exit_code == 2, (result.exit_code, result.exception, result.stderr)
    assert result.stdout == "" and "Traceback" not in result.stderr
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    hints = [line for line in result.stderr.splitlines() if line.startswith("hint: ")]
    assert message in error
    assert not hint or any(hint in line for line in hints), result.stderr


def test_a_truncated_checkpoint_is_refused(run: Run, tmp_path: Path) -> None:
    shutil.copytree(embedded.path("target"), tmp_path / "broken")
    weights = tmp_path / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    result = run("generate", "x", "--model", str(tmp_path / "broken"))
    assert result.exit_code == 2 and "could not be loaded" in result.stderr


USAGE = [
    ("generate x --max-new-tokens 0", "--max-new-tokens"),
    ("generate x --max_new_tokens=x", "--max-new-tokens"),
    ("generate x --seed -1", "--seed"),
    ("generate x --max-new-token 3", "--max-new-tokens"),  # what is meant is said
    ("generate x y", "y"),
    ("gennerate", "generate"),
    ("--no-such", "--no-such"),
]


@pytest.mark.parametrize(("line", "named"), USAGE, ids=[line for line, _ in USAGE])
def test_a_wrong_word_is_an_error_that_names_it(run: Run, line: str, named: str) -> None:
    result = run(*line.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert named in result.stderr and "Traceback" not in result.stderr


def failed(capsys: pytest.CaptureFixture[str], error: BaseException) -> tuple[object, list[str]]:
    """Exit code and lines on stderr of a program that raises."""

    def command() -> None:
        raise error

    app = typer.Typer()
    app.command(cls=Command)(command)
    with pytest.raises(SystemExit) as ended:
        app([])
    return ended.value.code, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (
            ConfigError("spec_method", "must be another", "auto", 'Use "mtp".'),
            2,
            ["error: `spec_method` must be another, but is 'auto'.", 'hint: Use "mtp".'],
        ),
        (
            MissingExtraError("bitsandbytes", "bnb", "nf4"),
            2,
            ["error: nf4 needs `bitsandbytes`.", 'hint: Install it with: pip install "hf_specdec[bnb]"'],
        ),
        (RankError("rank 1\nfailed"), 1, ["error: rank 1 failed"]),
        (OSError(28, "No space left on device"), 1, ["error: [Errno 28] No space left on device"]),
        (KeyboardInterrupt(), 130, ["interrupted"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_is_printed_as_it_was_raised(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, lines: list[str]
) -> None:
    """2 is for what cannot be used, 1 for what failed, 130 for Ctrl-C."""
    assert failed(capsys, error) == (code, lines)
