"""`generate_many` with prompts and settings of every kind: each result is plain `generate` of its prompt alone."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers as tf

import hf_specdec
from hf_specdec.compat.caches import CACHE
from tests.helpers.support import METHODS, method_of, noisy_copy, plain, seq_length
from tests.helpers.zoo import DECODER, FAMILIES, build

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
COMMON = list(range(5, 25))
PROMPTS = [COMMON, [*COMMON, 30, 31], [9], [7, 8, 9, 7, 8, 9], [9], COMMON]


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    return model, noisy_copy(model)


def alone(model: Any, prompt: Any, **options: Any) -> list[int]:
    """The new tokens of plain `generate`."""
    inputs = prompt if isinstance(prompt, dict) else {"input_ids": torch.tensor([prompt])}
    tokens: list[int] = plain(model, **{**options, **inputs})[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens


def many(model: Any, prompts: Any, **options: Any) -> dict[int, Any]:
    """Tokens of each prompt, in the prompts' order; an error is an error."""
    output = {}
    for result in hf_specdec.generate_many(model, prompts, **options):
        assert result.error is None
        output[result.index] = result.token_ids
    return dict(sorted(output.items()))


@pytest.mark.parametrize("size", [1, 2, 6])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [1, 2, 12])
def test_twins_short_and_long_prompts(pair: tuple[Any, Any], method: str, size: int, length: int) -> None:
    model, draft = pair
    options = OPTIONS | {"max_new_tokens": length}
    expected = {index: alone(model, prompt, **options) for index, prompt in enumerate(PROMPTS)}
    assert many(model, PROMPTS, max_batch_size=size, **options, **method_of(method, draft)) == expected


def test_positions_of_ones_own_are_not_mixed_with_others(pair: tuple[Any, Any]) -> None:
    """A shared beginning at other positions has other keys."""
    positions = torch.arange(len(COMMON))[None] * 3
    prompts = [COMMON, {"input_ids": torch.tensor([COMMON]), "position_ids": positions}, COMMON]
    expected = {index: alone(pair[0], prompt, **OPTIONS) for index, prompt in enumerate(prompts)}
    assert expected[0] != expected[1]
    assert many(pair[0], prompts, **OPTIONS) == expected


def test_a_prompt_may_bring_its_cache_which_is_continued(pair: tuple[Any, Any]) -> None:
    model = pair[0]

    def conversation() -> dict[str, Any]:
        kept = tf.DynamicCache(config=model.config)
        said = plain(model, torch.tensor([COMMON]), **{CACHE: kept}, max_new_tokens=3, do_sample=False)
        return {"input_ids": torch.cat([said, torch.tensor([[40, 41]])], dim=1), CACHE: kept}

    ours, reference = conversation(), conversation()
    expected = [alone(model, prompt, **OPTIONS) for prompt in (COMMON, reference, [9])]
    assert list(many(model, [COMMON, ours, [9]], **OPTIONS).values()) == expected
    assert seq_length(ours[CACHE]) == seq_length(reference[CACHE])


def test_a_prompt_may_have_settings_and_masks_of_its_own(pair: tuple[Any, Any]) -> None:
    ids = torch.tensor([PROMPTS[1]])
    prompts: list[Any] = [
        {"input_ids": ids, "max_new_tokens": 5},
        {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) > 3).long()[None]},
        PROMPTS[1],
    ]
    expected = {index: alone(pair[0], prompt, **OPTIONS) for index, prompt in enumerate(prompts)}
    assert many(pair[0], prompts, **OPTIONS) == expected


@pytest.mark.parametrize("setting", [{"num_return_sequences": 2}, {"streamer": print}])
def test_what_a_single_prompt_cannot_ask_for_is_its_own_error(pair: tuple[Any, Any], setting: dict[str, Any]) -> None:
    prompts = [{"input_ids": torch.tensor([COMMON]), **setting}, [9]]
    results = {result.index: result for result in hf_specdec.generate_many(pair[0], prompts, **OPTIONS)}
    assert next(iter(setting)) in str(results[0].error)
    assert results[1].token_ids == alone(pair[0], [9], **OPTIONS)


def test_a_prompt_that_samples_draws_alike_wherever_it_stands(pair: tuple[Any, Any]) -> None:
    """Its result says the seed that gives it again; greedy prompts have none."""
    sampled = {"do_sample": True, "temperature": 1.5}
    prompts: list[Any] = [{"input_ids": torch.tensor([p]), **(sampled if i % 2 else {})} for i, p in enumerate(PROMPTS)]
    output = []
    for order in (range(6), (5, 3, 0, 1, 4, 2)):
        torch.manual_seed(3)
        ordered = [prompts[i] for i in order]
        results = hf_specdec.generate_many(pair[0], ordered, indices=order, max_batch_size=3, **OPTIONS)
        output.append({result.index: result for result in results})
    for index, result in output[0].items():
        assert result.token_ids == output[1][index].token_ids
        assert result.seed == output[1][index].seed
        assert result.stats.seeds == (None if result.seed is None else [result.seed])
        assert (result.seed is not None) == bool(index % 2)
        torch.manual_seed(result.seed or 0)
        assert result.token_ids == alone(pair[0], result.prompt, **OPTIONS)


class Fragile(hf_specdec.Drafter):
    """Fails at `where` on the text that begins with 7."""

    def __init__(self, where: str) -> None:
        self.where = where

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.last, self.is_bad, self.steps = prompt_ids[-1], prompt_ids[0] == 7, 0
        self.fail("begin")

    def propose(self, budget: int) -> hf_specdec.DraftTree:
        self.steps += 1
        self.fail("propose")
        root = 1 if self.is_bad and self.where == "root" and self.steps > 3 else self.last
        return hf_specdec.DraftTree.chain(root, [self.last])

    def observe(self, tree: hf_specdec.DraftTree, logits: torch.Tensor | None, accepted: Sequence[int]) -> None:
        self.last = accepted[-1]
        self.fail("observe")

    def fail(self, where: str) -> None:
        if self.is_bad and self.where == where and (where == "begin" or self.steps > 3):
            raise RuntimeError("no idea")


@pytest.mark.at_most(2)
@pytest.mark.parametrize("where", ["begin", "propose", "root", "observe"])
def test_a_drafter_that_fails_on_one_text_ends_that_text_alone(pair: tuple[Any, Any], where: str) -> None:
    options: dict[str, Any] = OPTIONS | {"spec_method": lambda: Fragile(where), "max_batch_size": 3}
    results = {result.index: result for result in hf_specdec.generate_many(pair[0], PROMPTS, **options)}
    for index, result in results.items():
        expected = alone(pair[0], PROMPTS[index], **OPTIONS)
        assert (result.error is not None) == (index == 3)
        assert result.token_ids == (expected[: len(result.token_ids)] if index == 3 else expected)
    assert ("tokens[0]" if where == "root" else "no idea") in str(results[3].error)
    assert 0 < len(results[3].token_ids) < OPTIONS["max_new_tokens"]


def test_a_generation_configuration_may_not_ask_for_several_answers(pair: tuple[Any, Any]) -> None:
    config = tf.GenerationConfig(max_new_tokens=8, do_sample=True, num_return_sequences=2)
    with pytest.raises(hf_specdec.ConfigError, match="num_return_sequences"):
        hf_specdec.generate_many(pair[0], PROMPTS, generation_config=config)


def test_transformers_own_loop_decodes_one_prompt_after_the_other(pair: tuple[Any, Any]) -> None:
    wanted = {"spec_method": "prompt_lookup", "spec_config": {"engine": "assisted"}}
    expected = {index: alone(pair[0], prompt, **OPTIONS) for index, prompt in enumerate(PROMPTS)}
    assert many(pair[0], PROMPTS, **OPTIONS, **wanted) == expected
    results = hf_specdec.generate_many(pair[0], PROMPTS, **OPTIONS, **wanted)
    assert [result.stats.num_tokens for result in results] == [12] * len(PROMPTS)


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_an_observer_sees_the_steps_of_every_prompt(family: str) -> None:
    model, steps = hf_specdec.enable(build(FAMILIES[family])), []
    tokens = many(model, PROMPTS, spec_observer=steps.append, max_batch_size=3, **OPTIONS)
    for index, expected in tokens.items():
        assert [token for step in steps if step.row == index for token in step.accepted] == expected[1:]


def test_stop_strings_end_prompts_of_token_ids_too(tokenizer: Any) -> None:
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"), precision="fp32")
    texts = ["def add(a, b):\n    ", "import "]
    prompts = [tokenizer(texts[0])["input_ids"], texts[1]]
    wanted = {"stop_strings": [")", "\n"], "max_new_tokens": 40, "do_sample": False, "tokenizer": tokenizer}
    expected = [alone(model, tokenizer(text)["input_ids"], **wanted) for text in texts]
    assert any(len(tokens) < 40 for tokens in expected)
    assert list(many(model, prompts, **wanted).values()) == expected


def test_two_jobs_on_one_model_take_turns(pair: tuple[Any, Any]) -> None:
    jobs = [hf_specdec.generate_many(pair[0], p, max_batch_size=2, **OPTIONS) for p in (PROMPTS, PROMPTS[::-1])]
    for results in zip(*jobs, strict=True):
        for result in results:
            assert result.token_ids == alone(pair[0], result.prompt, **OPTIONS)


@pytest.mark.at_most(1)
@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("method", ["prompt_lookup", "lookahead"])
def test_a_shared_beginning_may_be_longer_than_the_window(family: str, method: str) -> None:
    model = hf_specdec.enable(build(FAMILIES[family]))
    common = [(5 * place) % 120 + 3 for place in range(50)]
    prompts = [[*common, number, number + 1] for number in range(3, 8)] + [common[:40]]
    expected = {index: alone(model, prompt, **OPTIONS) for index, prompt in enumerate(prompts)}
    for chunk in ({}, {"prefill_chunk_size": 8}):
        assert many(model, prompts, max_batch_size=3, **OPTIONS, **METHODS[method], **chunk) == expected


def test_prompts_beyond_the_drafts_positions_are_decoded_without_it(pair: tuple[Any, Any]) -> None:
    """Its embeddings of positions end at 16; other prompts are drafted for, here and next to it."""
    torch.manual_seed(0)
    options = {name: value for name, value in DECODER.items() if name != "num_key_value_heads"}
    draft = tf.GPT2LMHeadModel(tf.GPT2Config(**{**options, "max_position_embeddings": 16})).eval()
    steps: list[Any] = []
    wanted = method_of("draft_model", draft) | {"spec_observer": steps.append}
    expected = {index: alone(pair[0], prompt, **OPTIONS) for index, prompt in enumerate(PROMPTS)}
    assert many(pair[0], PROMPTS, max_batch_size=3, **OPTIONS, **wanted) == expected
    drafted = {step.row for step in steps if step.tree.num_draft_tokens}
    assert drafted == {2, 3, 4}
    ids = torch.tensor([COMMON, COMMON[::-1]])
    output = pair[0].generate(ids, eos_token_id=expected[0][3], **OPTIONS, **wanted)
    assert output.tolist() == plain(pair[0], ids, eos_token_id=expected[0][3], **OPTIONS).tolist()
