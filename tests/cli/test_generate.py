"""`hf-specdec generate`: text on stdout, the rest on stderr, one JSON document with `--json`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, MistralConfig, MistralForCausalLM, StoppingCriteria

import hf_specdec
from hf_specdec import embedded
from hf_specdec.tools.cli.job import Job, Result
from hf_specdec.tools.cli.prompts import PROMPTS
from tests.cli.conftest import Run
from tests.helpers.support import plain

PROMPT = "def push(self, item):\n    self.items.append(item)\n\n\ndef pop(self):\n    return self.items."
SHORT = ("--max-new-tokens", "12", "--dtype", "fp32")


@pytest.fixture(scope="module")
def target() -> Any:
    return hf_specdec.AutoModelForCausalLM.from_pretrained(embedded.path("target"), precision="fp32")


@pytest.fixture
def windowed(tokenizer: Any, tmp_path: Path) -> Path:
    """A checkpoint whose attention sees the last 16 tokens."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
        initializer_range=0.3,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


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


@pytest.mark.parametrize("name", ["sliding_window", "hybrid_chunked"])
def test_a_checkpoint_that_calls_its_static_cache_by_an_older_name_is_speculated_on(
    run: Run, windowed: Path, tokenizer: Any, name: str
) -> None:
    """It drafts for itself, and its tokens are plain `generate`'s; `engine="assisted"` takes no static cache."""
    GenerationConfig(cache_implementation=name, pad_token_id=0).save_pretrained(windowed)
    words = ("--model", str(windowed), "--draft-model", str(windowed), *SHORT)
    model = MistralForCausalLM.from_pretrained(windowed)
    expected = reference(model, tokenizer, cache_implementation=name)
    found = document(run, PROMPT, *words, "--spec-config", '{"confidence_threshold": 0}')
    assert found["token_ids"] == expected
    assert found["spec_stats"]["num_accepted_tokens"] > 0 and found["spec_stats"]["plain_reason"] is None
    found = document(run, PROMPT, *words, "--engine", "assisted")
    assert found["token_ids"] == expected
    assert "static cache" in found["spec_stats"]["plain_reason"]


class Interrupt(StoppingCriteria):
    """Ctrl-C after five tokens."""

    def __init__(self) -> None:
        self.left = 5

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_a_pipe_gets_what_was_written_before_ctrl_c(
    run: Run, target: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Job.run
    monkeypatch.setattr(Job, "run", lambda job, *args, **how: call(job, *args, **how, stopping_criteria=[Interrupt()]))
    result = run("generate", PROMPT, *SHORT)
    assert result.exit_code == 130
    (start,) = [n for n in (4, 5) if result.stdout == tokenizer.decode(reference(target, tokenizer)[:n]) + "\n"]
    assert f"interrupted after {start} tokens" in result.stderr
    found = run("generate", PROMPT, *SHORT, "--json")
    assert found.exit_code == 130
    assert f"interrupted after {start} tokens\n" == found.stderr
    document = json.loads(found.stdout)
    assert (document["text"] + "\n", document["is_complete"]) == (result.stdout, False)
    assert len(document["token_ids"]) == start and document["seconds"] > 0 and document["spec_stats"] is None


@pytest.mark.parametrize("words", [(), ("--json",)], ids=["text", "json"])
def test_ctrl_c_before_the_first_token_is_said(run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str]) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "run", interrupt)
    result = run("generate", PROMPT, *SHORT, *words)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(("length", "is_noted"), [("12", False), ("2050", True)])
def test_texts_that_may_leave_the_model_s_positions_are_pointed_out(
    run: Run, monkeypatch: pytest.MonkeyPatch, length: str, is_noted: bool
) -> None:
    monkeypatch.setattr(Job, "run", lambda *_, **__: Result([5], 1.0, None))
    result = run("generate", PROMPT, "--max-new-tokens", length)
    assert result.exit_code == 0, result.stderr
    assert ("the model has 2048 positions" in result.stderr) is is_noted


def test_json_holds_tokens_setting_and_statistics(run: Run, target: Any, tokenizer: Any) -> None:
    found = document(run, PROMPT, *SHORT)
    assert found["token_ids"] == reference(target, tokenizer)
    assert found["text"] == tokenizer.decode(found["token_ids"], skip_special_tokens=True)
    assert found["spec_method"] == "auto"
    assert found["spec_stats"]["num_tokens"] == len(found["token_ids"])
    assert found["dtype"] == "float32"


@pytest.mark.parametrize("words", [("-",), ()], ids=["dash", "piped"])
def test_the_prompt_may_come_from_stdin(run: Run, words: tuple[str, ...]) -> None:
    assert document(run, *words, *SHORT, stdin=PROMPT)["prompt"] == PROMPT


def test_without_a_prompt_a_built_in_one_is_continued(run: Run) -> None:
    assert document(run, *SHORT)["prompt"] == PROMPTS[0]


def test_none_is_transformers_own_loop(run: Run, target: Any, tokenizer: Any) -> None:
    found = document(run, PROMPT, *SHORT, "--spec-method", "none")
    assert found["token_ids"] == reference(target, tokenizer)
    assert found["spec_stats"] is None


def test_plain_is_our_loop_with_nothing_drafted(run: Run, target: Any, tokenizer: Any) -> None:
    found = document(run, PROMPT, *SHORT, "--spec-method", "plain")
    assert found["token_ids"] == reference(target, tokenizer)
    assert found["spec_stats"]["num_draft_tokens"] == 0


def test_the_assisted_engine_gives_the_same_text(run: Run, target: Any, tokenizer: Any) -> None:
    found = document(run, PROMPT, *SHORT, "--engine", "assisted")
    assert found["token_ids"] == reference(target, tokenizer)
    assert found["spec_config"]["engine"] == "assisted"


def test_a_sample_follows_the_seed_of_plain_generate(run: Run, target: Any, tokenizer: Any) -> None:
    sampling = {"temperature": 0.7, "top_k": 20, "top_p": 0.95}
    words = [word for name, value in sampling.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    torch.manual_seed(5)
    expected = reference(target, tokenizer, do_sample=True, **sampling)
    found = document(run, PROMPT, *SHORT, "--do-sample", *words, "--seed", "5")
    assert found["token_ids"] == expected


@pytest.mark.parametrize("option", ["--prompt-lookup-config", "--ngram-config"])
def test_the_list_form_sets_the_method(run: Run, option: str) -> None:
    config = document(run, PROMPT, *SHORT, "--spec-method", "ngram", option, "[6,3]")["spec_config"]
    assert (config["max_draft_len"], config["max_matching_ngram_size"]) == (6, 3)


@pytest.mark.parametrize("text", ['{"max_draft_len": 7, "max_nodes": null}', "{'max_draft_len': 7, 'max_nodes': None}"])
def test_spec_config_is_json_or_python(run: Run, text: str) -> None:
    assert (
        document(run, PROMPT, *SHORT, "--spec-method", "prompt_lookup", "--spec-config", text)["spec_config"][
            "max_draft_len"
        ]
        == 7
    )


def test_device_list_may_name_the_cpu(run: Run) -> None:
    result = run("generate", PROMPT, *SHORT, "--json", "--prompt-lookup-config", '[10,2,["cpu"]]')
    assert json.loads(result.stdout)["device"] == "cpu"


@pytest.mark.at_most(2)
@pytest.mark.parametrize(
    ("words", "method"),
    [
        (["--lookahead-config", "[5,3,5]"], "lookahead"),
        (["--draft-model-config", '[4,["cpu"],["cpu"],False]'], "draft_model"),
        (["--draft-target-model-config", "[4]"], "draft_model"),
        (["--draft-model", embedded.path("draft")], "draft_model"),
        (["--spec-method", "draft_target"], "draft_model"),
        (["--spec-method", "eagle3"], "eagle3"),
        (["--prompt-lookup-config", "[4]"], "prompt_lookup"),
    ],
    ids=" ".join,
)
def test_an_option_picks_its_method(run: Run, target: Any, tokenizer: Any, words: list[str], method: str) -> None:
    found = document(run, PROMPT, *SHORT, *words)
    assert found["token_ids"] == reference(target, tokenizer)
    assert found["spec_method"] == method
    assert found["spec_stats"]["num_draft_tokens"] > 0


def test_the_draft_has_a_precision_of_its_own(run: Run) -> None:
    found = document(run, PROMPT, *SHORT, "--spec-method", "draft_model", "--draft-dtype", "bf16")
    assert (found["dtype"], found["draft"]["dtype"]) == ("float32", "bfloat16")
    assert found["draft"]["model"] == embedded.path("draft")
    assert document(run, PROMPT, *SHORT, "--spec-method", "draft_model")["draft"]["dtype"] == "float32"


@pytest.mark.wide
def test_target_and_draft_have_precisions_of_their_own(run: Run) -> None:
    words = ("--max-new-tokens", "8", "--spec-method", "draft_model", "--dtype", "fp8", "--draft-dtype", "nf4")
    found = document(run, PROMPT, *words)
    assert (found["dtype"], found["draft"]["dtype"]) == ("fp8", "nf4")
    assert len(found["token_ids"]) == 8


def test_the_attention_is_the_user_s_choice(run: Run) -> None:
    options = ("generate", "x = 1", "--max-new-tokens", "8", "--dtype", "fp32", "--json")
    ours, usual = (json.loads(run(*options, *more).stdout) for more in (("--attn-implementation", "eager"), ()))
    assert (ours["attention"], usual["attention"]) == ("eager", "sdpa")
    assert ours["token_ids"] == usual["token_ids"]


def test_an_attention_that_is_not_here_is_an_error(run: Run) -> None:
    done = run("generate", "x = 1", "--attn-implementation", "flash_attention_2")
    assert done.exit_code == 2
    assert "`--attn-implementation` must be installed" in done.stderr
