"""`hf-specdec chat`: answers are plain generation's, turns reuse the cache, drafts can be seen."""

import contextlib
import dataclasses
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

import hf_specdec
from hf_specdec.compat import takes_cache
from hf_specdec.tools.cli.chat import _Chat
from tests.cli.conftest import TEMPLATE, Run, hearing_interrupts
from tests.helpers.support import plain
from tests.helpers.zoo import FALLBACK, FAMILIES, build
from tests.helpers.zoo_wide import build as build_wide
from tests.helpers.zoo_wide import shrunk, varied

SHORT = ("--dtype", "fp32", "--max-new-tokens", "12")


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


@pytest.mark.at_most(1)
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
    lines = ["write a stack", "!stats", "!clear", "write a stack", "!dance", "!help", "!exit", "never read"]
    result = run("chat", "--chat-template", template, *SHORT, stdin="\n".join(lines) + "\n")
    assert result.exit_code == 0, result.stderr
    (answer,) = answers(tokenizer, ["write a stack"])
    assert result.stdout == f"{answer}\n" * 2
    assert "tokens a verify step" in result.stderr
    assert "unknown command !dance" in result.stderr
    assert result.stderr.count("!clear begins anew") == 3  # at the beginning, after !dance and after !help


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
    talk.clear()
    assert talk._cached == []


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_an_edited_chat_is_read_from_its_first_change_on(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """A cache with a window is none to be cut: the whole of it is computed anew."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    options = {**FAMILIES[family].options, "vocab_size": len(tokenizer)}
    model = hf_specdec.enable(build(dataclasses.replace(FAMILIES[family], options=options)))
    talk = _Chat(model, tokenizer, {"max_new_tokens": 8, "do_sample": False, "spec_method": "auto"}, None, False)
    talk.answer("write a stack")
    count = len(talk._cached)
    talk.messages[-1]["content"] = "pop"
    ids = tokenizer(talk.text_of("and a list"), return_tensors="pt").input_ids
    expected = plain(model, ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    talk.answer("and a list")
    assert talk.messages[-1]["content"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert 10 < talk.num_reused < count if family == "llama" else talk.num_reused == 0


@pytest.mark.parametrize("family", ["recurrent_gemma", "t5"])
def test_a_model_that_takes_no_cache_reads_the_chat_anew(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    known = {**FAMILIES, **FALLBACK}[family]
    options = {**known.options, "vocab_size": len(tokenizer)}
    model = hf_specdec.enable(build(dataclasses.replace(known, options=options)))
    talk = _Chat(model, tokenizer, {"max_new_tokens": 4, "do_sample": False, "spec_method": "auto"}, None, False)
    for said in ("write a stack", "and a queue"):
        ids = tokenizer(talk.text_of(said), return_tensors="pt").input_ids
        new = plain(model, ids, max_new_tokens=4, do_sample=False)[0, 1 if family == "t5" else ids.shape[1] :]
        talk.answer(said)
        assert talk.messages[-1]["content"] == tokenizer.decode(new, skip_special_tokens=True)


def test_a_cache_that_holds_more_than_the_text_is_not_continued(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLM reads a mask token after the text; from 5.24 on it leaves it in transformers' own cache."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    config = shrunk("xlm")
    config.n_words = len(tokenizer)
    model = hf_specdec.enable(build_wide(config, "causal", 0.15))
    talk = _Chat(model, tokenizer, {"max_new_tokens": 4, "do_sample": False, "spec_method": "auto"}, None, False)
    for said in ("write a stack", "and a queue"):
        ids = tokenizer(talk.text_of(said), return_tensors="pt").input_ids
        new = plain(model, ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
        talk.answer(said)
        assert talk.messages[-1]["content"] == tokenizer.decode(new, skip_special_tokens=True)
        assert talk.num_reused == 0


@pytest.mark.at_most(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", [{}, {"spec_method": "auto"}], ids=["plain", "auto"])
@pytest.mark.parametrize("family", ["jamba", "prophetnet"])
def test_a_cache_that_one_token_alone_may_follow_is_not_continued(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, family: str, method: dict[str, str]
) -> None:
    """Jamba forgets its state where several tokens follow, and ProphetNet raises."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    config = shrunk(family)
    config.vocab_size = len(tokenizer)
    model = hf_specdec.enable(build_wide(config, "causal", 0.15))
    talk = _Chat(model, tokenizer, {"max_new_tokens": 4, "do_sample": False, **method}, None, False)
    for said in ("write a stack", "and a queue"):
        ids = tokenizer(talk.text_of(said), return_tensors="pt").input_ids
        new = plain(model, ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
        talk.answer(said)
        assert talk.messages[-1]["content"] == tokenizer.decode(new, skip_special_tokens=True)
        assert talk._cached == []


def test_a_chat_keeps_no_cache_of_a_kind_that_a_model_has_to_itself() -> None:
    """xLSTM's has the name that transformers' own have from 5.24 on."""
    assert not takes_cache(varied("xlstm", "causal"))
    assert takes_cache(build(FAMILIES["llama"]))


@pytest.mark.at_most(1)
@pytest.mark.parametrize("kind", ["static", "dynamic", "offloaded"])
def test_a_cache_of_the_generation_configuration_gives_way_to_the_chat_s(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"), precision="fp32")
    model.generation_config.cache_implementation = kind
    for method in ({}, {"spec_method": "auto"}):
        talk = _Chat(model, tokenizer, {"max_new_tokens": 8, "do_sample": False, **method}, None, False)
        talk.answer("write a stack")
        talk.answer("and a queue")
        assert talk.num_reused > 10


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


@pytest.mark.parametrize("how", [{}, {"spec_method": "auto"}])
def test_what_is_not_drafted_is_written_as_it_comes(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: dict[str, Any]
) -> None:
    """Also where drafts are to be shown: without a method, and by a model that is decoded plainly."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    family = FALLBACK["recurrent_gemma"] if how else FAMILIES["llama"]
    model = build(dataclasses.replace(family, options={**family.options, "vocab_size": len(tokenizer)}))
    seen: list[str] = []

    class Interrupt(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            seen.append(capsys.readouterr().out)
            if len(seen) == 8:
                raise KeyboardInterrupt
            return torch.tensor([False])

    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "stopping_criteria": [Interrupt()], **how}
    talk = _Chat(hf_specdec.enable(model), tokenizer, options, None, True)
    talk.answer("write a stack")
    written = "".join(seen) + capsys.readouterr().out
    assert sum(map(bool, seen)) > 2
    assert written == talk.messages[-1]["content"] + "\n"


def test_a_chat_that_fills_the_model_s_positions_says_so(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last answer is as long as there is room; then the chat is refused as it is, and goes on after `!clear`."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"), precision="fp32")
    first = len(tokenizer(f"# user: {'x ' * 20}\n# assistant: ").input_ids)
    monkeypatch.setattr(model.config, "max_position_embeddings", first + 5)
    talk = _Chat(model, tokenizer, {"max_new_tokens": 8, "do_sample": False, "spec_method": "auto"}, None, False)
    talk.answer("x " * 20)
    assert talk.stats.num_tokens == 5
    before = list(talk.messages)
    with pytest.raises(hf_specdec.ConfigError, match=rf"the model's {first + 5} positions.*!clear begins anew"):
        talk.answer("more")
    assert talk.messages == before
    talk.clear()
    talk.answer("y")
    assert talk.stats.num_tokens == 8


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.own, other = pty.openpty()
        self._rest = ""
        environment = {**os.environ, "TERM": "xterm", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        command = [sys.executable, "-m", "hf_specdec", *words]
        with hearing_interrupts():
            self.process = subprocess.Popen(
                command, stdin=other, stdout=other, stderr=other, env=environment, start_new_session=True
            )
        os.close(other)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait(60)
        os.close(self.own)

    def until(self, wanted: str) -> str:
        """What is shown until a text comes; what was read after it is left for the next time."""
        found, end = self._rest, time.monotonic() + 120
        while wanted not in found:
            if time.monotonic() > end:
                pytest.fail(f"waited in vain for {wanted!r} after {found!r} at {self.stacks()}")
            found += self.shown(0.2)
        seen = found.rindex(wanted) + len(wanted)
        self._rest = found[seen:]
        return found[:seen]

    def shown(self, seconds: float) -> str:
        """What is shown next; empty where nothing comes in time."""
        is_ready = bool(select.select([self.own], [], [], seconds)[0])
        return os.read(self.own, 4096).decode(errors="replace") if is_ready else ""

    def stacks(self) -> str:
        """What the threads of the command do; ends it."""
        self.process.send_signal(signal.SIGABRT)
        found = ""
        with contextlib.suppress(OSError):  # it has ended
            while more := self.shown(5.0):
                found += more
        return found

    def interrupt(self) -> None:
        """Where it waits for input: again until it is heard, as Python misses one just before it begins to wait."""
        for _ in range(20):
            self.process.send_signal(signal.SIGINT)
            if select.select([self.own], [], [], 5.0)[0]:
                return

    def type(self, text: str) -> None:
        os.write(self.own, text.encode())


@pytest.mark.wide
def test_in_a_terminal_errors_and_interrupts_end_an_answer_and_not_the_chat(template: str) -> None:
    words = ("chat", "--chat-template", template, "--dtype", "fp32", "--max-new-tokens", "1900", "--show-drafts")
    with Terminal(*words, "--spec-method", "prompt_lookup") as terminal:
        terminal.until("> ")
        terminal.type("x = [1, 2, 3, 1, 2, 3, 1, 2,\n")
        assert "\x1b[32m" in terminal.until("\x1b[0m")  # an accepted draft
        terminal.process.send_signal(signal.SIGINT)
        terminal.type("!stats\n")
        terminal.until("there is no answer with drafts yet")
        terminal.until("> ")
        terminal.type("!help\n")
        assert "Ctrl-C ends an answer" in terminal.until("> ")
        terminal.interrupt()
        terminal.until("> ")
        terminal.type("y " * 1500 + "\n" + "z " * 1500 + "\n")
        assert "error: `chat` must be shorter" in terminal.until("begins anew.")
        terminal.type("!exit\n")
        assert terminal.process.wait(60) == 0
