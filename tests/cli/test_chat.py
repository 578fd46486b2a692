"""`hf-specdec chat`: answers are plain generation's, turns reuse the cache, drafts can be seen."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.cli.chat import _Chat
from tests.cli.conftest import Run
from tests.helpers.support import plain

TEMPLATE = (
    "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant: {% endif %}"
)
SHORT = ("--dtype", "fp32", "--max-new-tokens", "12")


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


def answers(tokenizer: Any, said: list[str], max_new_tokens: int = 12) -> list[str]:
    """What plain generation says, every prompt read from its beginning."""
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"), precision="fp32")
    text, found = "", []
    for line in said:
        text += f"# user: {line}\n# assistant: "
        ids = tokenizer(text, return_tensors="pt").input_ids
        new = plain(model, ids, max_new_tokens=max_new_tokens, do_sample=False)[0, ids.shape[1] :]
        found.append(tokenizer.decode(new, skip_special_tokens=True))
        text += found[-1] + "\n"
    return found


@pytest.mark.parametrize("method", ["prompt_lookup", "auto", "none"])
def test_answers_are_plain_generation_s(run: Run, tokenizer: Any, template: str, method: str) -> None:
    said = ["write a stack", "and a queue"]
    result = run("chat", "--chat-template", template, "--spec-method", method, *SHORT, stdin="\n".join(said) + "\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "".join(f"{answer}\n" for answer in answers(tokenizer, said))


def test_accepted_drafts_are_green_and_nothing_else_changes(run: Run, tokenizer: Any, template: str) -> None:
    said = "x = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2,"
    words = ("chat", "--chat-template", template, "--spec-method", "draft_model", *SHORT)
    result = run(*words, "--show-drafts", stdin=f"{said}\n")
    assert result.exit_code == 0, result.stderr
    assert "\x1b[32m" in result.stdout
    assert re.sub(r"\x1b\[\d+m", "", result.stdout) == answers(tokenizer, [said])[0] + "\n"


def test_commands_clear_count_and_end(run: Run, tokenizer: Any, template: str) -> None:
    lines = ["write a stack", "!stats", "!clear", "write a stack", "!dance", "!exit", "never read"]
    result = run("chat", "--chat-template", template, *SHORT, stdin="\n".join(lines) + "\n")
    assert result.exit_code == 0, result.stderr
    (answer,) = answers(tokenizer, ["write a stack"])
    assert result.stdout == f"{answer}\n" * 2
    assert "tokens a verify step" in result.stderr
    assert "unknown command !dance" in result.stderr


def test_the_cache_is_kept_from_turn_to_turn(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the template gives the same tokens again; else the prompt is read anew."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"), precision="fp32")
    talk = _Chat(model, tokenizer, {"max_new_tokens": 8, "do_sample": False, "spec_method": "auto"}, None, False)
    talk.answer("write a stack")
    assert talk.num_reused == 0
    count = len(talk._cached)
    talk.answer("and a queue")
    assert talk.num_reused == count > 10
    cached = talk._cached
    talk.messages[-1]["content"] = tokenizer.decode(cached[-4:])  # an answer edited by hand
    talk.answer("and a list")
    assert talk.num_reused == 0
    talk.clear()
    assert talk._cached == []


def test_an_interrupted_answer_stays_and_the_chat_goes_on(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"), precision="fp32")

    class Interrupt(torch.nn.Module):
        left = 4

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return torch.tensor([False])

    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "spec_method": "prompt_lookup"}
    talk = _Chat(model, tokenizer, {**options, "stopping_criteria": [Interrupt()]}, "Be brief.", False)
    talk.answer("write a stack")
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
    assert talk.messages[-1]["content"] and capsys.readouterr().out == talk.messages[-1]["content"] + "\n"
    assert "no answer" in talk.describe_last()
    talk.options = options
    talk.answer("and a queue")
    assert "tokens a verify step" in talk.describe_last()


def test_a_model_without_a_template_is_refused(run: Run, tmp_path: Path) -> None:
    result = run("chat", stdin="hello\n")
    assert result.exit_code == 2
    assert "--chat-template" in result.stderr
    result = run("chat", "--chat-template", str(tmp_path / "nowhere.jinja"), stdin="hello\n")
    assert result.exit_code == 2
    assert "nowhere.jinja" in result.stderr
