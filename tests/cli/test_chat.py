"""`hf-specdec chat`: answers are plain generation's, and turns reuse the cache."""

import dataclasses
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.cli.conversation import Conversation
from tests.cli.conftest import TEMPLATE, Run
from tests.helpers.support import plain
from tests.helpers.zoo import FALLBACK, FAMILIES, build
from tests.helpers.zoo_wide import build as build_wide
from tests.helpers.zoo_wide import shrunk

SHORT = ("--dtype", "fp32", "--max-new-tokens", "12")
AUTO = {"spec_method": "auto"}


@pytest.fixture
def chatting(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a conversation with a model."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)

    def make(model: Any = None, method: dict[str, Any] = AUTO, **kwargs: Any) -> Conversation:
        if model is None:
            path = hf_specdec.embedded.path("target")
            model = hf_specdec.AutoModelForCausalLM.from_pretrained(path, precision="fp32")
        return Conversation(
            LoadedModel(model, tokenizer, "model"), {"max_new_tokens": 8, "do_sample": False, **method, **kwargs}
        )

    return make


def check_turns(talk: Conversation) -> None:
    """Two answers are those of plain generation that reads every prompt from its beginning."""
    model, tokenizer, text = talk.loaded.model, talk.loaded.tokenizer, ""
    for message in ("write a stack", "and a queue"):
        text += f"# user: {message}\n# assistant: "
        ids = tokenizer(text, return_tensors="pt").input_ids
        start = 1 if model.config.is_encoder_decoder else ids.shape[1]
        new = plain(model, ids, max_new_tokens=talk.kwargs["max_new_tokens"], do_sample=False)[0, start:]
        talk.answer(message)
        answer = talk.messages[-1]["content"]
        assert answer == tokenizer.decode(new, skip_special_tokens=True)
        text += answer + "\n"


@pytest.mark.at_most(1)
@pytest.mark.parametrize("method", ["prompt_lookup", "auto", "none"])
def test_the_command_answers_and_counts_until_it_ends(run: Run, chat_model: str, method: str) -> None:
    lines = ["write a stack", "!stats", "!clear", "write a stack", "!dance", "", "!exit", "never read"]
    words = ("chat", "--model", chat_model, "--spec-method", method, *SHORT)
    result = run(*words, stdin="\n".join(lines) + "\n")
    assert result.exit_code == 0, result.stderr
    first, second = result.stdout[: len(result.stdout) // 2], result.stdout[len(result.stdout) // 2 :]
    assert first == second and first.strip()
    assert ("no answer with drafts" if method == "none" else "tokens a verify step") in result.stderr
    assert "unknown command !dance" in result.stderr


def test_a_model_without_a_template_is_refused_and_one_may_be_given(run: Run, tmp_path: Any) -> None:
    result = run("chat", stdin="hello\n")
    assert result.exit_code == 2 and "--chat-template" in result.stderr
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    result = run("chat", "--chat-template", str(tmp_path / "template.jinja"), *SHORT, stdin="hello\n")
    assert result.exit_code == 0 and result.stdout
    (tmp_path / "template.jinja").write_text("{{ raise_exception('No.') }}")
    result = run("chat", "--chat-template", str(tmp_path / "template.jinja"), *SHORT, stdin="hello\n")
    assert "error: " in result.stderr and "No." in result.stderr and result.stdout == ""


@pytest.mark.parametrize("method", [AUTO, {"spec_method": None}], ids=["auto", "plain"])
@pytest.mark.parametrize("kind", [None, "static"])
def test_the_cache_is_kept_from_turn_to_turn(chatting: Any, method: dict[str, Any], kind: str | None) -> None:
    """Whatever kind of cache the generation configuration asks for."""
    talk = chatting(method=method)
    talk.loaded.model.generation_config.cache_implementation = kind
    check_turns(talk)
    assert talk.num_reused > 10
    talk.clear()
    talk.answer("write a stack")
    assert talk.num_reused == 0


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_an_edited_chat_is_read_from_its_first_change_on(tokenizer: Any, chatting: Any, family: str) -> None:
    """A cache with a window is none to be cut: the whole of it is computed anew."""
    options = {**FAMILIES[family].options, "vocab_size": len(tokenizer)}
    model = hf_specdec.enable(build(dataclasses.replace(FAMILIES[family], options=options)))
    talk = chatting(model)
    talk.answer("write a stack")
    talk.messages[-1]["content"] = "pop"
    text = "# user: write a stack\n# assistant: pop\n# user: and a list\n# assistant: "
    ids = tokenizer(text, return_tensors="pt").input_ids
    expected = plain(model, ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    talk.answer("and a list")
    assert talk.messages[-1]["content"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert (talk.num_reused > 10) == (family == "llama")


@pytest.mark.parametrize("family", ["recurrent_gemma", "t5"])
def test_a_model_that_takes_no_cache_reads_the_chat_anew(tokenizer: Any, chatting: Any, family: str) -> None:
    known = {**FAMILIES, **FALLBACK}[family]
    options = {**known.options, "vocab_size": len(tokenizer)}
    check_turns(chatting(hf_specdec.enable(build(dataclasses.replace(known, options=options)))))


@pytest.mark.at_most(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", [{"spec_method": None}, AUTO], ids=["plain", "auto"])
@pytest.mark.parametrize("family", ["jamba", "prophetnet", "xlm"])
def test_a_cache_that_cannot_be_continued_is_not(
    tokenizer: Any, chatting: Any, family: str, method: dict[str, Any]
) -> None:
    """Jamba forgets its state where several tokens follow, ProphetNet raises, XLM's holds a mask token."""
    config = shrunk(family)
    setattr(config, "n_words" if family == "xlm" else "vocab_size", len(tokenizer))
    talk = chatting(hf_specdec.enable(build_wide(config, "causal", 0.15)), method)
    check_turns(talk)
    assert talk.num_reused == 0


def test_an_interrupted_answer_stays_and_the_chat_goes_on(chatting: Any, capsys: pytest.CaptureFixture[str]) -> None:
    left = iter(range(4))

    def criterion(input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        if next(left) == 3:
            raise KeyboardInterrupt
        return torch.tensor([False])

    talk = chatting(stopping_criteria=[criterion])
    talk.answer("write a stack")
    assert talk.messages[-1]["role"] == "assistant"
    assert talk.messages[-1]["content"] and capsys.readouterr().out == talk.messages[-1]["content"] + "\n"
    assert "no answer" in talk.describe_last()
    del talk.kwargs["stopping_criteria"]
    talk.answer("and a queue")
    assert "tokens a verify step" in talk.describe_last()


def test_a_chat_that_fills_the_model_s_positions_says_so(
    tokenizer: Any, chatting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last answer is as long as there is room; then the chat is refused as it is, and goes on after `!clear`."""
    talk = chatting()
    first = len(tokenizer(f"# user: {'x ' * 20}\n# assistant: ").input_ids)
    monkeypatch.setattr(talk.loaded.model.config, "max_position_embeddings", first + 5)
    talk.answer("x " * 20)
    assert talk.stats.num_tokens == 5
    before = list(talk.messages)
    with pytest.raises(hf_specdec.ConfigError, match=rf"the model's {first + 5} positions.*!clear begins anew"):
        talk.answer("more")
    assert talk.messages == before
