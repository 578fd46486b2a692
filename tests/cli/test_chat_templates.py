"""`hf-specdec chat`: templates that are missing or refuse a chat, and messages that are no text."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import embedded
from tests.cli.conftest import TEMPLATE, Run, in_own_process

NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
SHORT = ("--dtype", "fp32", "--max-new-tokens", "12")


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    """The embedded target with a chat template."""
    folder = shutil.copytree(embedded.path("target"), tmp_path / "chat-model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_a_model_without_a_template_is_refused(run: Run, tmp_path: Path) -> None:
    result = run("chat", stdin="hello\n")
    assert result.exit_code == 2
    assert "--chat-template" in result.stderr
    result = run("chat", "--chat-template", str(tmp_path / "nowhere.jinja"), stdin="hello\n")
    assert result.exit_code == 2
    assert "nowhere.jinja" in result.stderr


def test_a_template_that_writes_nothing_is_told_at_once(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty.jinja").write_text("")
    result = run("chat", "--chat-template", str(tmp_path / "empty.jinja"), stdin="hello\n")
    assert result.exit_code == 2
    assert "`--chat-template` must have a template that takes a message" in " ".join(result.stderr.split())


def test_generate_takes_a_chat(run: Run, chat_model: Path) -> None:
    """The prompt and what the model is told first go through the template, also where ways are compared."""
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    words = ("generate", "Hello", "--model", str(chat_model), "--chat", "--system", "Be brief.", *SHORT, "--json")
    found = json.loads(run(*words, "--spec-method", "prompt_lookup").stdout)
    model = AutoModelForCausalLM.from_pretrained(chat_model, dtype="float32")
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    inputs = tokenizer.apply_chat_template(told, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert found["token_ids"] == expected.tolist()
    assert (found["chat"], found["system"]) == (True, "Be brief.")
    compared = json.loads(run(*words, "--spec-method", "prompt_lookup", "--compare", "--rounds", "1").stdout)
    assert [row["tokens"] for row in compared["rows"]] == [len(expected)] * 3


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--chat", "Hello"), "--chat"),
        (("--system", "Be brief.", "Hello"), "--system"),
        (("--chat", "--prompts-file", "p.jsonl", "--out", "o.jsonl"), "--chat"),
    ],
    ids=["no template", "no chat", "a file"],
)
def test_a_chat_that_cannot_be_is_told(run: Run, words: tuple[str, ...], field: str) -> None:
    result = run("generate", *words, *SHORT)
    assert result.exit_code == 2
    assert f"error: `{field}` must" in result.stderr


def test_chats_of_a_file_go_through_the_template(run: Run, chat_model: Path, tmp_path: Path) -> None:
    said = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]}
    (tmp_path / "p.jsonl").write_text(json.dumps(said) + '\n{"turns": ["Hello", "And?"]}\n"Hello"\n')
    words = ("generate", "--model", str(chat_model), "--prompts-file", str(tmp_path / "p.jsonl"))
    assert run(*words, "--out", str(tmp_path / "o.jsonl"), *SHORT).exit_code == 0
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == [said["messages"], [{"role": "user", "content": "Hello"}], "Hello"]
    alone = run("generate", "Hello", "--model", str(chat_model), "--chat", *SHORT, "--json")
    assert lines[1]["token_ids"] == json.loads(alone.stdout)["token_ids"] != lines[2]["token_ids"]


def test_a_message_that_is_no_text_is_its_own_error(run: Run, template: str) -> None:
    status, errors = in_own_process(["chat", "--chat-template", template, *SHORT], stdin=b"caf\xe9(\n")
    assert status == 2
    assert "`message` must be Unicode text" in " ".join(errors.split())
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("template", "words", "told"),
    [
        (NO_SYSTEM + TEMPLATE, ("--system", "Be brief."), "The template says: System role not supported"),
        ("{% for m in messages %}", (), "The template says: "),
    ],
    ids=["no system role", "no template"],
)
def test_a_template_that_refuses_the_chat_is_told_at_once(
    run: Run, tmp_path: Path, template: str, words: tuple[str, ...], told: str
) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(template)
    result = run("chat", "--chat-template", str(path), *words, stdin="hello\n")
    assert result.exit_code == 2, (result.exit_code, result.exception)
    assert "error: `--chat-template` must have a template that takes a message" in result.stderr
    assert told in result.stderr and result.stdout == ""
