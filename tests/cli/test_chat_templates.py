"""`hf-specdec chat`: templates that are missing or refuse a chat, and messages that are no text."""

from pathlib import Path

import pytest

from tests.cli.conftest import TEMPLATE, Run, in_own_process

NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
SHORT = ("--dtype", "fp32", "--max-new-tokens", "12")


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
