"""What a user got wrong is one line that begins with `error:`, a hint where there is a remedy, and exit code 2."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import hf_specdec
from hf_specdec import embedded
from hf_specdec.errors import ConfigError, MissingExtraError
from hf_specdec.tools.cli import inputs
from hf_specdec.tools.command_errors import run_program
from tests.cli.conftest import Run

LIST = "--prompt-lookup-config"
CONFIG = "--spec-config"
LOOKUP = ("--spec-method", "prompt_lookup")
ATTENTIONS = ", ".join(map(repr, inputs.ATTENTIONS))
LOOKAHEAD, DRAFT_LIST = "--lookahead-config", "--draft-model-config"
CASES = [
    (["--spec-method", "promt_lookup"], "`--spec-method` must be one of", "Did you mean 'prompt_lookup'?"),
    (
        [*LOOKUP, CONFIG, '{"max_draft_length": 4}'],
        "`--spec-config key` must be one of",
        "Did you mean 'max_draft_len'?",
    ),
    (
        [*LOOKUP, CONFIG, '{"max_draft_len": -1}'],
        "`--spec-config max_draft_len` must be a whole number of at least 1 and at most 4096, but is -1.",
        "4 to 10",
    ),
    ([CONFIG, '{"max_draft_len": '], "`--spec-config` must be a dict in the notation of", "Its form is {"),
    ([CONFIG, '{"pool": "global"}'], "`--spec-config pool` must be one of 'request', 'shared'", "Choose"),
    ([CONFIG, "7"], "`--spec-config` must be", ""),
    ([LIST, "[0,2]"], f"`{LIST} max_draft_len` must be a whole number of at least 1", "4 to 10"),
    ([LIST, "[10,0]"], f"`{LIST} max_matching_ngram_size` must be a whole number of at least 1", "2 to 4"),
    (
        ["--ngram-config", "[0]"],
        f"`{LIST} max_draft_len` must be a whole number of at least 1",
        "4 to 10",
    ),
    ([LIST, "[10,2,[0],1]"], "`--prompt-lookup-config` must have 1 to 3 entries", "Drop or add entries."),
    ([LIST, "ten"], "`--prompt-lookup-config` must be a list or dict in the", "Its form is [max_draft_len"),
    ([LIST, "[10,2,[]]"], f"`{LIST} device_list` must be a non-empty list", "Write [0]"),
    ([LIST, '[10,2,["gpu0"]]'], "`device_list` must name devices that torch knows", "Write [0]"),
    ([LIST, "[10,2]", CONFIG, "{}"], "must not come with --spec-config", "Give only one of the two."),
    ([LIST, "[10,2]", "--spec-method", "plain"], "must come with --spec-method prompt_lookup", "--spec-config"),
    ([LIST, "[10,2,[99]]"], "`device_list` must name devices that are here (cpu", "leave the list out"),
    ([DRAFT_LIST, "[4,[98],[99],False]"], "`target_model_device_list` must name devices that are here (cpu", "Write"),
    ([DRAFT_LIST, '[4,[98],["cpu"]]'], "`draft_model_device_list` must name devices that are here (cpu", "Write"),
    ([DRAFT_LIST, "[4]", "--spec-method", "lookahead"], "must come with --spec-method draft_model", "--spec-config"),
    ([DRAFT_LIST, "[4]", LOOKAHEAD, "[7,7,7]"], "`--draft-model-config` must come with --spec-method draft_", ""),
    ([LOOKAHEAD, "[7,7,7]", CONFIG, "{}"], "`--lookahead-config` must not come with --spec-config", "only one"),
    ([LOOKAHEAD, "[7,7]"], "`--lookahead-config` must have 3 entries", "Drop or add entries."),
    (
        [LOOKAHEAD, "[7,7,7]", "--draft-model", "x"],
        "`--draft-model` must come with --spec-method auto",
        "second",
    ),
    (
        [LOOKAHEAD, "[7,7,7]", "--head=./x"],
        "`--draft-model` must come with --spec-method auto",
        "second",
    ),
    (["--spec-method", "eagle3", "--head", "./no/such"], "`--draft-model` must be an existing folder", ""),
    (["--spec-method", "draft_model", "--assistant_model", "./no/such"], "`--draft-model` must be an existing", ""),
    (["--ngram-config", "[10,2,[0],1]"], "`--prompt-lookup-config` must have 1 to 3 entries", "Drop or add entries."),
    (
        ["--draft-model", "x", "--ngram-config", "[4]", CONFIG, "{}"],
        "`--prompt-lookup-config` must not come with",
        "only one",
    ),
    (["--draft-dtype", "fp32"], "`--draft-dtype` must come with --draft-model or --spec-method", "second model"),
    (["--spec-method", "draft_model", "--model", "x"], "`--draft-model` must be given with --model", "vocabulary"),
    (["--spec-method", "draft_model", "--draft-model", "./no/such"], "`--draft-model` must be an existing folder", ""),
    (["--spec-method", "none", LOOKAHEAD, "[7,7,7]"], "`--lookahead-config` must come with a method", ""),
    (["--spec-method", "none", CONFIG, "{}"], "`--spec-config` must come with a method", "--spec-method"),
    (["--spec-method", "none", "--engine", "loop"], "`--engine` must come with a method", "--spec-method"),
    (["--spec-method", "none", "--compare"], "`--compare` must come with a method", "--spec-method"),
    (["--engine", "turbo"], "`--engine` must be one of 'assisted', 'loop'", "Choose"),
    (["--dtype", "fp12"], "`--dtype` must be one of", "Did you mean"),
    (["--temperature", "0.5"], "`--temperature` must come with --do-sample", "Add --do-sample."),
    (["--top-k", "5"], "`--top-k` must come with --do-sample", "Add --do-sample."),
    *[
        (
            ["--do-sample", "--temperature", value],
            "`--temperature` must be a number of at least 0.000001",
            "--do-sample",
        )
        for value in ("-1", "0", "1e-300", "nan", "inf")
    ],
    ([CONFIG, '{"engine": "turbo"}'], "`--spec-config engine` must be one of 'assisted', 'loop'", "Choose"),
    (["--draft-model", "x", "--draft-dtype", "fp12"], "`--draft-dtype` must be one of", "Did you mean"),
    (["--do-sample", "--top-p", "1.5"], "`--top-p` must be a number from 0.0 to 1.0, but is 1.5.", "1.0"),
    (["--do-sample", "--top-p", "nan"], "`--top-p` must be a number from 0.0 to 1.0, but is nan.", "1.0"),
    (["--do-sample", "--top-k", "-1"], "`--top-k` must be a whole number of at least 0, but is -1.", "0 leaves"),
    (["--attn-implementation", "spda"], f"`--attn-implementation` must be one of {ATTENTIONS}, but", "'sdpa'?"),
    (["--attn-implementation", "flash_attention_4"], "`--attn-implementation` must be installed", "Use sdpa or eager"),
    (["--batch-size", "4"], "`--batch-size` must come with --prompts-file, but is 4.", "two files"),
    (["--retry-failed"], "`--retry-failed` must come with --prompts-file, but is True.", "two files"),
    (["--rounds", "3"], "`--rounds` must come with --compare, but is 3.", "Add --compare."),
    (["--model", "./no/such/folder"], "`--model` must be an existing folder, but there is no './no/such/folder'", ""),
    (["--device-map", "auto", "--max-memory", '{"cpu": "x"}'], "`--max-memory` must hold sizes, but is 'x'", "20GB"),
    (["--model", embedded.__file__], "is a file", ""),
    (["--model", " "], "`--model` must be an existing folder or a name on the hub, but ' ' is neither.", ""),
    (["--device-map", "{}"], "`--device-map` must name a part at least, but is {}.", "leave it out"),
    (
        ["--device-map", "auto", "--max-memory", '{"gpu": 9}'],
        "`--max-memory` must have sizes of cpu, disk, mps",
        "20GB",
    ),
    (["--spec-method", "dflash"], "`--draft-model` must be given with --spec-method dflash", "Name a draft head"),
]


def check(run: Run, words: list[str], message: str, hint: str) -> None:
    """The error is one line on stderr, the hint another; stdout stays empty."""
    result = run("generate", *words)
    assert result.exit_code == 2, (result.exit_code, result.exception, result.stderr)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    hints = [line for line in result.stderr.splitlines() if line.startswith("hint: ")]
    assert any(hint in line for line in hints) if hint else True


@pytest.mark.parametrize(("words", "message", "hint"), CASES, ids=[" ".join(words)[:60] for words, _, _ in CASES])
def test_a_mistake_is_one_line_with_its_remedy(run: Run, words: list[str], message: str, hint: str) -> None:
    check(run, ["x = 1", "--max-new-tokens", "4", *words], message, hint)


def test_an_empty_prompt_is_refused(run: Run) -> None:
    check(run, [""], "`PROMPT` must hold at least one token", "Type some text")


NO_FOLDER = "must be an existing folder or a name on the hub, but there is no folder 'my-modle' here"


@pytest.mark.parametrize("option", ["--model", "--draft-model"])
def test_a_mistyped_folder_is_none_before_it_is_a_name_on_the_hub(run: Run, option: str) -> None:
    method = ["--spec-method", "draft_model"] if option == "--draft-model" else []
    check(run, ["x", *method, option, "my-modle"], f"error: `{option}` {NO_FOLDER}", "")


def test_a_mistyped_folder_of_a_head_is_none_either(run: Run) -> None:
    result = run("bench", "--limit", "1", "--head", "my-modle")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: `--head` {NO_FOLDER}" in result.stderr
    with pytest.raises(hf_specdec.CheckpointError, match=f"`path` {NO_FOLDER}"):
        hf_specdec.AutoDraftHead.from_pretrained("my-modle")


def test_a_truncated_checkpoint_is_refused(run: Run, tmp_path: Path) -> None:
    shutil.copytree(embedded.path("target"), tmp_path / "broken")
    weights = tmp_path / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    check(run, ["x", "--model", str(tmp_path / "broken")], "could not be loaded", "")


def test_a_folder_without_a_model_is_refused(run: Run, tmp_path: Path) -> None:
    check(run, ["x", "--model", str(tmp_path)], "must hold a config.json", "")


def test_a_checkpoint_without_its_tokenizer_is_refused(run: Run, tmp_path: Path) -> None:
    shutil.copytree(embedded.path("target"), tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    check(run, ["x", "--model", str(tmp_path / "model")], "tokenizer", "")


def test_a_model_is_no_head(run: Run) -> None:
    """Told by the options, not by what loads a head in Python."""
    head, model = ("--head", embedded.path("draft")), ("--model", embedded.path("target"))
    message = "`--draft-model` must be a draft head with --spec-method eagle3, but is '"
    check(run, ["x", "--spec-method", "eagle3", *head, *model], message, "--spec-method draft_model")
    result = run("bench", "--limit", "1", "--row", "eagle3", "--head", embedded.path("target"))
    assert "error: `--head` must be a draft head, or a checkpoint of LlamaForCausalLM" in result.stderr
    assert "hint: Name a head; --draft-model takes a model.\n" in result.stderr


def told(capsys: pytest.CaptureFixture[str], command: Callable[..., None], *words: str) -> list[str]:
    """Lines on stderr of a program that fails."""
    with pytest.raises(SystemExit) as ended:
        run_program(command, words)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()


def test_a_missing_extra_s_hint_is_its_install_line(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise MissingExtraError("bitsandbytes", "bnb", "precision='nf4'")

    expected = ["error: precision='nf4' needs `bitsandbytes`.", 'hint: pip install "hf_specdec[bnb]"']
    assert told(capsys, command) == expected


REMEDIES = [
    ('Use spec_method="mtp" in its place.', "Use --spec-method mtp in its place."),
    ('Load it with precision="bf16".', "Load it with --dtype bf16."),
    ("Pass use_cache=True.", "Pass use_cache=True."),
    ('Leave out stop="x".', 'Leave out stop="x".'),
]


@pytest.mark.parametrize(("remedy", "typed"), REMEDIES)
def test_a_remedy_names_the_options_of_the_command(capsys: pytest.CaptureFixture[str], remedy: str, typed: str) -> None:
    """And stays as it is where no option says the same."""

    def command(spec_method: str = "auto", dtype: str = "fp32") -> None:
        raise ConfigError("spec_method", "must be another", "auto", remedy)

    assert told(capsys, command) == ["error: `--spec-method` must be another, but is 'auto'.", f"hint: {typed}"]


def test_a_full_disk_of_another_file_is_no_error_of_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert told(capsys, command) == ["error: [Errno 28] No space left on device"]


def test_a_folder_of_a_repeated_option_is_named_by_it(run: Run) -> None:
    result = run("bench", "--model", "./no/such/one", "--model", "./no/such/two", "--limit", "1")
    assert result.exit_code == 2
    assert "error: `--model` must be an existing folder, but there is no './no/such/one'" in result.stderr


@pytest.mark.parametrize("option", ["--prompts-file", "--out"])
def test_a_path_that_the_system_refuses_is_named_by_its_option(run: Run, tmp_path: Path, option: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x = 1"}')
    job = {"--prompts-file": str(prompts), "--out": str(tmp_path / "out.jsonl"), option: "x" * 300}
    result = run("generate", *(word for pair in job.items() for word in pair))
    assert result.exit_code == 2
    assert f"error: `{option}` must be a path that can be used, but is 'xxx" in result.stderr
    assert "hint: File name too long." in result.stderr


def test_a_model_of_too_long_a_name_is_named_by_its_option(run: Run) -> None:
    check(run, ["x = 1", "--model", "x" * 300], "`--model` must be a folder or a name on the hub", "too long")
