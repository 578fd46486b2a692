"""`hf-specdec generate`: text on stdout, the rest on stderr, one JSON document with `--json`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, MistralConfig, MistralForCausalLM

import hf_specdec
from hf_specdec import embedded
from hf_specdec.tools.cli.job import PROMPTS, QUESTION, Job
from tests.cli.conftest import Run
from tests.helpers.support import plain
from tests.helpers.tokenizers import save_foreign_draft

PROMPT = "def push(self, item):\n    self.items.append(item)\n\n\ndef pop(self):\n    return self.items."
SHORT = ("--max-new-tokens", "12", "--dtype", "fp32")


@pytest.fixture(scope="module")
def target() -> Any:
    return hf_specdec.AutoModelForCausalLM.from_pretrained(embedded.path("target"), precision="fp32")


def reference(target: Any, tokenizer: Any, prompt: str = PROMPT, **options: Any) -> list[int]:
    """New tokens of plain `generate`."""
    inputs = tokenizer(prompt, return_tensors="pt")
    output = plain(target, **inputs, max_new_tokens=12, **{"do_sample": False, **options})
    tokens: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens


def document(run: Run, *words: str, stdin: str = "") -> dict[str, Any]:
    result = run("generate", *words, "--json", stdin=stdin)
    assert result.exit_code == 0, result.stderr
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def test_stdout_is_the_continuation_and_nothing_else(run: Run, target: Any, tokenizer: Any) -> None:
    result = run("generate", PROMPT, *SHORT)
    assert result.exit_code == 0
    assert result.stdout == tokenizer.decode(reference(target, tokenizer), skip_special_tokens=True) + "\n"
    assert "tokens/s" in result.stderr


def test_json_holds_tokens_setting_and_statistics(run: Run, target: Any, tokenizer: Any) -> None:
    found = document(run, PROMPT, *SHORT)
    assert found["token_ids"] == reference(target, tokenizer)
    assert found["text"] == tokenizer.decode(found["token_ids"], skip_special_tokens=True)
    assert (found["spec_method"], found["dtype"], found["attention"]) == ("auto", "float32", "sdpa")
    assert found["spec_stats"]["num_tokens"] == len(found["token_ids"])


def test_a_checkpoint_that_calls_its_static_cache_by_an_older_name_is_speculated_on(
    run: Run, tokenizer: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(
        vocab_size=len(tokenizer), num_key_value_heads=2, sliding_window=16, initializer_range=0.3, **sizes
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    GenerationConfig(cache_implementation="sliding_window", pad_token_id=0).save_pretrained(tmp_path)
    model = MistralForCausalLM.from_pretrained(tmp_path)
    words = ("--model", str(tmp_path), "--assistant-model", str(tmp_path), *SHORT)
    found = document(run, PROMPT, *words, "--spec-config", '{"confidence_threshold": 0}')
    assert found["token_ids"] == reference(model, tokenizer, cache_implementation="sliding_window")
    assert found["spec_stats"]["num_accepted_tokens"] > 0 and found["spec_stats"]["plain_reason"] is None


@pytest.mark.parametrize("words", [("-",), ()], ids=["dash", "piped"])
def test_the_prompt_may_come_from_stdin(run: Run, words: tuple[str, ...]) -> None:
    assert document(run, *words, *SHORT, stdin=PROMPT)["prompt"] == PROMPT


def test_without_a_prompt_code_is_continued_or_a_question_answered(run: Run, chat_model: str) -> None:
    assert document(run, *SHORT)["prompt"] == PROMPTS[0]
    found = document(run, *SHORT, "--model", chat_model)
    assert (found["prompt"], found["chat"]) == (QUESTION, True)


@pytest.mark.parametrize("method", ["none", "plain"])
def test_nothing_is_drafted_without_a_method(run: Run, target: Any, tokenizer: Any, method: str) -> None:
    found = document(run, PROMPT, *SHORT, "--spec-method", method)
    assert found["token_ids"] == reference(target, tokenizer)
    assert found["spec_stats"] is None if method == "none" else found["spec_stats"]["num_draft_tokens"] == 0


def test_a_sample_follows_the_seed_of_plain_generate(run: Run, target: Any, tokenizer: Any) -> None:
    sampling = {"temperature": 0.7, "top_k": 20, "top_p": 0.95}
    words = [word for name, value in sampling.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    torch.manual_seed(5)
    expected = reference(target, tokenizer, do_sample=True, **sampling)
    assert document(run, PROMPT, *SHORT, "--do-sample", *words, "--seed", "5")["token_ids"] == expected


@pytest.mark.at_most(3)
@pytest.mark.parametrize(
    ("words", "method"),
    [
        (["--spec-config", '{"engine": "assisted"}'], "auto"),
        (["--spec-config", "{'num_nodes': 7}"], "auto"),
        (["--ngram-config", "[6,3,['cpu']]"], "prompt_lookup"),
        (["--lookahead-config", "[5,3,5]"], "lookahead"),
        (["--draft-model-config", '[4,["cpu"],["cpu"],False]'], "draft_model"),
        (["--assistant-model", "embedded-draft"], "draft_model"),
        (["--assistant-model", "embedded-head"], "eagle3"),
        (["--spec-method", "draft_target"], "draft_model"),
        (["--spec-method", "eagle3"], "eagle3"),
        (["--spec-method", "auto", "--assistant-model", "embedded-head"], "auto"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_option_picks_its_method(run: Run, target: Any, tokenizer: Any, words: list[str], method: str) -> None:
    """Among them a draft head without a method: its own."""
    found = document(run, PROMPT, *SHORT, *words)
    assert found["token_ids"] == reference(target, tokenizer)
    assert found["spec_method"] == method
    assert found["spec_stats"]["num_draft_tokens"] > 0


def test_a_draft_model_with_a_tokenizer_of_its_own_is_translated(run: Run, tmp_path: Path) -> None:
    text = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"
    words = ("--spec-config", '{"confidence_threshold": 0}', "--assistant-model", save_foreign_draft(tmp_path, [text]))
    found = document(run, text, *SHORT, *words)
    assert found["token_ids"] == document(run, text, *SHORT, "--spec-method", "none")["token_ids"]
    assert found["spec_stats"]["num_draft_tokens"] > 0 and found["spec_stats"]["plain_reason"] is None


def test_a_chat_goes_through_the_template(run: Run, chat_model: str) -> None:
    words = ("Hello", "--model", chat_model, "--chat", "--system", "Be brief.", *SHORT)
    found = document(run, *words)
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(chat_model, dtype="float32")
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert found["token_ids"] == expected.tolist()
    assert (found["chat"], found["system"]) == (True, "Be brief.")


def test_texts_that_may_leave_the_model_s_positions_are_pointed_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "run", stop)
    for length, is_noted in {"12": False, "2050": True}.items():
        result = run("generate", PROMPT, "--max-new-tokens", length)
        assert result.exit_code == 130 and result.stderr.endswith("interrupted\n")
        assert ("the model has 2048 positions" in result.stderr) is is_noted
