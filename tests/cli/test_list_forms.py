"""The list forms of TensorRT-LLM's examples are options of every command that generates, in either spelling."""

import json

import pytest

from tests.cli.conftest import Run

WRONG = {  # one that breaks a rule, so that no model has to generate
    "--prompt_lookup_config=[0,2,[0]]": "max_draft_len",
    "--ngram_config=[0,2,[0]]": "max_draft_len",
    "--lookahead_config=[7,7]": "lookahead",
    "--draft_target_model_config=[0,[0],[1],False]": "draft_len",
}
COMMANDS = ["generate", "chat", "summarize", "serve", "bench"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("words", WRONG)
def test_every_command_that_generates_knows_every_list_form(run: Run, command: str, words: str) -> None:
    for spelled in (words, words.split("=")[0].replace("_", "-") + "=" + words.split("=")[1]):
        result = run(command, spelled)
        assert result.exit_code == 2, (result.exit_code, result.exception, result.stderr)
        assert result.stderr.startswith("error: `")
        assert WRONG[words] in result.stderr.splitlines()[0]


def test_options_may_be_written_with_underscores(run: Run) -> None:
    words = ("--max_new_tokens", "2", "--dtype", "fp32", "--lookahead_config=[3,3,3]", "--no_such_thing")
    result = run("generate", "x = 1\n", *words)
    assert result.exit_code == 2 and "no-such-thing" in result.stderr
    result = run("generate", "x = 1\n", *words[:-1], "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["spec_method"] == "lookahead"
    assert document["spec_config"]["window_size"] == 3
    assert len(document["token_ids"]) == 2


def test_a_list_form_is_a_row_of_the_bench(run: Run) -> None:
    words = ("--limit", "1", "--max-new-tokens", "4", "--rounds", "1", "--no-do-sample", "--row", "plain", "--json")
    result = run("bench", *words, "--lookahead-config", "[3,3,3]")
    assert result.exit_code == 0, result.stderr
    (entry,) = json.loads(result.stdout)["models"]
    assert [row["name"] for row in entry["rows"]] == ["generate", "plain", "lookahead=[3,3,3]"]
    assert entry["summary"]["greedy"]["lookahead=[3,3,3]"]["share_equal"] == 1.0
