"""Grammars: the text of plain generation under the same grammar, with forced tokens drafted, whatever the method."""

import copy
import json
import re
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.errors import ConfigError, SpecError
from tests.engine.sampling.conftest import GRAMMARS, PATTERN, PROMPTS
from tests.helpers.support import METHODS, plain, results_of

pytest.importorskip("llguidance")

OTHERS: dict[str, dict[str, Any]] = {
    "tree": {"spec_method": "auto", "spec_config": {"num_nodes": 8, "pool": "request"}},
    "eagle3": {"spec_method": "eagle3"},
}


def method_of(name: str, draft: Any) -> dict[str, Any]:
    if name == "eagle3":
        draft = hf_specdec.AutoDraftHead.from_pretrained(hf_specdec.embedded.path("head"))
    return (METHODS | OTHERS)[name] | ({"assistant_model": draft} if name in ("draft_model", "eagle3") else {})


@pytest.mark.each_value
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("method", [*METHODS, *OTHERS])
def test_texts_are_plain_generation_s(
    target: Any, draft: Any, prompt: Any, make: Any, method: str, grammar: str, do_sample: bool
) -> None:
    wanted = method_of(method, draft)
    options = {"max_new_tokens": 40, "do_sample": do_sample, "temperature": 0.9 if do_sample else None}
    torch.manual_seed(7)
    expected = plain(target, **prompt, **options, logits_processor=[make(grammar)])
    torch.manual_seed(7)
    output = target.generate(
        **prompt,
        **options,
        **wanted,
        logits_processor=[make(grammar)],
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert output.sequences.tolist() == expected.tolist()
    assert output.spec_stats.plain_reason is None


@pytest.mark.at_most(2)
@pytest.mark.parametrize("method", METHODS)
def test_batches_are_plain_generation_s_and_a_row_may_have_its_own(
    target: Any, draft: Any, batch: Any, make: Any, method: str
) -> None:
    def each() -> Any:
        return hf_specdec.PerRow(lambda row: make(list(GRAMMARS)[row]))

    for processor in (make, each):
        expected = plain(target, **batch, max_new_tokens=30, logits_processor=[processor()])
        output = target.generate(
            **batch,
            max_new_tokens=30,
            logits_processor=[processor()],
            return_dict_in_generate=True,
            **method_of(method, draft),
        )
        assert output.sequences.tolist() == expected.tolist()
        assert output.spec_stats.plain_reason is None


def test_a_drawn_batch_is_each_row_alone_with_its_seed(target: Any, batch: Any, make: Any, tokenizer: Any) -> None:
    options = {"max_new_tokens": 30, "do_sample": True, "logits_processor": [make()]}
    output = target.generate(**batch, **options, spec_method="auto", return_dict_in_generate=True)
    for row, number in enumerate(output.spec_stats.seeds):
        ids = batch["input_ids"][row][batch["attention_mask"][row].bool()][None]
        torch.manual_seed(number)
        alone = plain(target, ids, **(options | {"logits_processor": [make()]}))[0, ids.shape[1] :].tolist()
        assert output.sequences[row, batch["input_ids"].shape[1] :].tolist()[: len(alone)] == alone


@pytest.mark.at_most(1)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "drawn"])
def test_many_prompts_have_a_state_or_a_grammar_each(target: Any, make: Any, tokenizer: Any, do_sample: bool) -> None:
    for processor in (make(), hf_specdec.PerRow(lambda row: make(list(GRAMMARS)[row % 4]))):
        results = results_of(
            target,
            [*PROMPTS, *PROMPTS],
            tokenizer=tokenizer,
            max_batch_size=3,
            max_new_tokens=30,
            do_sample=do_sample,
            logits_processor=[processor],
            spec_method="auto",
        )
        for result in results:
            name = "schema" if processor.__class__.__name__ == "Grammar" else list(GRAMMARS)[result.index % 4]
            ids = tokenizer(result.prompt, return_tensors="pt")["input_ids"]
            if do_sample:
                torch.manual_seed(result.seed)
            alone = plain(target, ids, max_new_tokens=30, do_sample=do_sample, logits_processor=[make(name)])
            assert result.token_ids == alone[0, ids.shape[1] :].tolist()


@pytest.mark.at_most(1)
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_beams_follow_the_grammar(target: Any, prompt: Any, make: Any, grammar: str) -> None:
    """As with states that are made anew for each token."""

    def anew(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = [make(grammar).of_row(0) for _ in ids]
        for row in rows:
            row.follow(prompt["input_ids"][0].tolist())
        return torch.cat([row(ids[place][None], scores[place][None]) for place, row in enumerate(rows)])

    options = {"max_new_tokens": 30, "num_beams": 3, "do_sample": False}
    expected = plain(target, **prompt, **options, logits_processor=[anew])
    assert plain(target, **prompt, **options, logits_processor=[make(grammar)]).tolist() == expected.tolist()


def test_answers_follow_the_grammar(target: Any, prompt: Any, make: Any, tokenizer: Any) -> None:
    texts = {}
    for name in ("schema", "regex"):
        ids = target.generate(**prompt, max_new_tokens=80, logits_processor=[make(name)], spec_method="auto")
        texts[name] = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    answer = json.loads(texts["schema"])
    assert list(answer) == ["name", "kind", "sizes"] and json.dumps(answer) == texts["schema"]
    assert re.fullmatch(PATTERN, texts["regex"])


@pytest.mark.parametrize("method", METHODS)
def test_a_limit_a_stop_string_and_several_ends(
    target: Any, draft: Any, prompt: Any, make: Any, tokenizer: Any, method: str
) -> None:
    comma = tokenizer.convert_tokens_to_ids(",")
    cases: list[dict[str, Any]] = [
        {"max_new_tokens": 5},
        {"max_new_tokens": 60, "stop_strings": ['kind": "'], "tokenizer": tokenizer},
        {"max_new_tokens": 60, "eos_token_id": [comma, tokenizer.eos_token_id]},
    ]
    for options in cases:
        ends = {"eos_token_id": options["eos_token_id"]} if "eos_token_id" in options else {}
        expected = plain(target, **prompt, **options, logits_processor=[make(**ends)])
        ours = target.generate(**prompt, **options, **method_of(method, draft), logits_processor=[make(**ends)])
        assert ours.tolist() == expected.tolist()


def test_a_processor_goes_on_with_its_text_and_begins_anew_with_another(target: Any, prompt: Any, make: Any) -> None:
    whole = plain(target, **prompt, max_new_tokens=40, logits_processor=[make()])
    processor = make()
    for _ in range(2):
        begun = target.generate(**prompt, max_new_tokens=9, logits_processor=[processor], spec_method="auto")
        ids = target.generate(begun, max_new_tokens=31, logits_processor=[processor], spec_method="auto")
        assert ids.tolist() == whole.tolist()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "`grammar` must get one of json_schema, json_object, regex, lark, but is 'none'"),
        ({"regex": "a", "json_object": True}, "but is 'json_object and regex'"),
        ({"json_schema": {"type": "nothing"}}, "Invalid type: nothing"),
        ({"json_schema": "{"}, "`json_schema` must be a JSON schema, but is '{'"),
        ({"json_schema": {"type": object()}}, "`json_schema` must be a JSON schema"),
        ({"json_schema": True}, "`json_schema` must be a JSON schema, but is True"),
        ({"json_schema": {"$ref": "#"}}, "must be a grammar that llguidance can follow (no token may follow)"),
        ({"regex": r"[^\s\S]"}, "must be a grammar that llguidance can follow (no token may follow)"),
        ({"regex": 5}, "`regex` must be a string, but is 5"),
        ({"regex": "[a-"}, "`regex` must be a grammar that llguidance can follow"),
        ({"lark": "start: other"}, 'unknown name: "other"'),
        ({"regex": "a", "eos_token_id": []}, "`eos_token_id` must be given where the tokenizer has none"),
    ],
)
def test_what_is_no_grammar_is_refused_by_name(tokenizer: Any, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        hf_specdec.grammar(tokenizer, **inputs)


def test_a_pydantic_model_is_a_schema(target: Any, prompt: Any, tokenizer: Any) -> None:
    pydantic = pytest.importorskip("pydantic")
    kind = pydantic.create_model("Point", x=(int, ...), y=(bool, ...), __config__={"extra": "forbid"})
    made = hf_specdec.grammar(tokenizer, json_schema=kind)
    ids = target.generate(**prompt, max_new_tokens=60, logits_processor=[made], spec_method="auto")
    text = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert kind.model_validate_json(text)


def test_a_special_token_that_the_matcher_cannot_follow_ends_the_call(tokenizer: Any) -> None:
    marked = copy.deepcopy(tokenizer)
    marked.add_special_tokens({"additional_special_tokens": ["<call>"]})
    (mark,) = marked("<call>")["input_ids"]
    processor, scores = hf_specdec.grammar(marked, regex="<call>[a-z]"), torch.zeros(1, len(marked))
    assert processor(torch.tensor([[5]]), scores).isfinite().nonzero()[:, 1].tolist() == [mark]
    with pytest.raises(SpecError, match=re.escape(f"<[{mark}]>")):
        processor(torch.tensor([[5, mark]]), scores)
    named = hf_specdec.grammar(marked, lark=f'start: <[{mark}]> "a"')
    for ids in ([5], [5, mark]):
        assert named(torch.tensor([ids]), scores).isfinite().sum() == 1
