"""A default `spec_method` never refuses what plain `generate` accepts; asked for in the call, it is refused by name."""

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

import hf_specdec
from hf_specdec.compat.caches import CACHE
from tests.helpers.heads import random_head
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build
from tests.helpers.zoo_wide import varied
from tests.promise.errors.test_refused import MODES

UNAVAILABLE = {"constraints", "dola_layers", "force_words_ids", "token_healing", "use_mtp", "assistant_early_exit"}
HONOURED_BY_PLAIN = sorted(MODES.keys() - UNAVAILABLE - {"penalty_alpha", "cache_implementation"})


@pytest.fixture
def by_default(model: Any) -> Iterator[Any]:
    """The model with a method in its generation configuration, and nothing said about it yet."""
    hf_specdec.enable(hf_specdec.disable(model)).generation_config.spec_method = "prompt_lookup"
    yield model
    del model.generation_config.spec_method


def ids_of(output: Any) -> list[list[int]]:
    return (output if isinstance(output, torch.Tensor) else output.sequences).tolist()


@pytest.mark.parametrize("mode", HONOURED_BY_PLAIN)
def test_a_default_steps_aside_for_a_mode_with_one_warning(
    by_default: Any, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = ids_of(plain(by_default, PROMPT, max_new_tokens=8, do_sample=False, **MODES[mode]))
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        for _ in range(2):
            assert ids_of(by_default.generate(PROMPT, max_new_tokens=8, do_sample=False, **MODES[mode])) == expected
    assert [f"`{mode}`" in record.getMessage() for record in caplog.records] == [True]


def test_a_default_beside_transformers_own_speculation_leaves_it_to_transformers(by_default: Any) -> None:
    draft = build(FAMILIES["llama"])
    expected = plain(by_default, PROMPT, max_new_tokens=8, do_sample=False)
    assert by_default.generate(PROMPT, max_new_tokens=8, do_sample=False, assistant_model=draft).tolist() == (
        expected.tolist()
    )


@pytest.mark.parametrize("engine", ["loop", "assisted"])
def test_a_default_of_a_draft_model_leaves_its_drafts_to_transformers(engine: str) -> None:
    """Its `generate` is called once a step by transformers' assisted generation, over one cache."""
    target, draft = build(FAMILIES["mistral"]), build(FAMILIES["mistral"])
    call: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "assistant_model": draft}
    torch.manual_seed(3)
    expected = target.generate(PROMPT, **call).tolist()
    draft.generation_config.spec_method, draft.generation_config.spec_config = "prompt_lookup", {"engine": engine}
    hf_specdec.enable(draft)
    torch.manual_seed(3)
    assert target.generate(PROMPT, **call).tolist() == expected


@pytest.mark.parametrize("mode", HONOURED_BY_PLAIN)
@pytest.mark.parametrize("method", ["draft_model", "auto"])
def test_a_default_that_steps_aside_takes_what_it_drafts_with_along(model: Any, method: str, mode: str) -> None:
    """transformers' assisted generation, which no one asked for, refuses these modes too."""
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, **MODES[mode]}
    expected = ids_of(plain(model, PROMPT, **settings))
    call = {"assistant_model": build(FAMILIES["llama"])}
    config = GenerationConfig(spec_method=method, pad_token_id=0)
    assert ids_of(model.generate(PROMPT, generation_config=config, **settings, **call)) == expected


@pytest.mark.parametrize("method", ["draft_model", "lookahead"])
def test_a_default_whose_needs_are_not_met_decodes_plainly(
    method: str, zoo: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """No `assistant_model`, or a model that verifies chains only."""
    model = zoo("llama" if method == "draft_model" else "minimax")
    hf_specdec.enable(hf_specdec.disable(model))
    expected = plain(model, PROMPT, max_new_tokens=8, do_sample=False).tolist()
    config = GenerationConfig(spec_method=method, pad_token_id=0, max_new_tokens=8, do_sample=False)
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        assert model.generate(PROMPT, generation_config=config).tolist() == expected
        assert model.generate(PROMPT, generation_config=config).tolist() == expected
    assert len(caplog.records) == 1
    with pytest.raises(ValueError, match="assistant_model" if method == "draft_model" else "trees"):
        model.generate(PROMPT, max_new_tokens=8, spec_method=method)


@pytest.mark.parametrize("method", ["eagle3", "prompt_lookup"])
def test_a_default_that_steps_aside_takes_the_draft_head_with_it(model: Any, method: str) -> None:
    """It has none for attentions, or none for this head; transformers drafts with no head."""
    call: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "output_attentions": method == "eagle3"}
    config = GenerationConfig(spec_method=method, pad_token_id=0, return_dict_in_generate=True)
    output = model.generate(PROMPT, generation_config=config, assistant_model=random_head(model), **call)
    expected = plain(model, PROMPT, generation_config=config, **call)
    assert ids_of(output) == ids_of(expected)


def test_a_default_meets_a_cache_that_it_cannot_use(by_default: Any) -> None:
    """A static cache too short for what drafts need, and one whose layers are moved away."""
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    expected = plain(by_default, PROMPT, **settings).tolist()
    short = StaticCache(config=by_default.config, max_cache_len=PROMPT.shape[1] + 2)
    offloaded = DynamicCache(config=by_default.config, offloading=False)
    offloaded.offloading = True  # as far as a check can see
    for cache in (short, offloaded):
        with pytest.raises(ValueError, match=f"`{CACHE}`"):
            by_default.generate(PROMPT, **{CACHE: cache}, spec_method="prompt_lookup", **settings)
    del offloaded.offloading
    long = StaticCache(config=by_default.config, max_cache_len=64)
    assert by_default.generate(PROMPT, **{CACHE: long}, **settings).tolist() == expected


def test_a_method_in_the_call_is_told_which_argument_overrides_the_configuration(model: Any) -> None:
    config = GenerationConfig(**MODES["num_beams"], pad_token_id=0, max_new_tokens=4, do_sample=False)
    with pytest.raises(ValueError, match="`num_beams`") as error:
        model.generate(PROMPT, generation_config=config, spec_method="prompt_lookup")
    assert "num_beams=1" in str(error.value)
    output = model.generate(PROMPT, generation_config=config, spec_method="prompt_lookup", num_beams=1)
    assert ids_of(output) == plain(model, PROMPT, max_new_tokens=4, do_sample=False).tolist()


def test_a_checkpoint_saved_without_a_cache_drafts_too(tmp_path: Path) -> None:
    """As MPT's checkpoints say; in batches of many prompts too."""
    family = FAMILIES["mpt"]
    build(dataclasses.replace(family, options=family.options | {"use_cache": False})).save_pretrained(tmp_path)
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert model.config.use_cache is False
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    expected = plain(model, PROMPT, **settings)[0].tolist()
    output = model.generate(PROMPT, **settings, spec_method="prompt_lookup", return_dict_in_generate=True)
    assert output.sequences[0].tolist() == expected
    assert output.spec_stats.plain_reason is None
    (result,) = hf_specdec.generate_many(model, [PROMPT], spec_method="prompt_lookup", **settings)
    assert result.token_ids == expected[PROMPT.shape[1] :]


@pytest.mark.parametrize("enabled_first", [True, False])
def test_a_default_survives_saving_and_loading(model: Any, tmp_path: Path, enabled_first: bool) -> None:
    """Also where the configuration was made from the model's own, whose unknown settings transformers drops."""
    ours = build(FAMILIES["llama"])
    ours.generation_config = GenerationConfig.from_model_config(ours.config)
    if enabled_first:
        hf_specdec.enable(ours)
    ours.generation_config.spec_method = "prompt_lookup"
    ours.generation_config.spec_config = {"max_draft_len": 5}
    if not enabled_first:
        hf_specdec.enable(ours)
    ours.save_pretrained(tmp_path)
    loaded = type(ours).from_pretrained(tmp_path)
    assert loaded.generation_config.spec_method == "prompt_lookup"
    assert loaded.generation_config.spec_config == {"max_draft_len": 5}


def test_our_loaders_read_a_default_that_transformers_dropped(model: Any, tmp_path: Path) -> None:
    """Of a folder saved by a model that was never enabled."""
    ours = build(FAMILIES["llama"])
    ours.generation_config = GenerationConfig.from_model_config(ours.config)
    ours.generation_config.spec_method = "prompt_lookup"
    ours.save_pretrained(tmp_path)
    loaded = hf_specdec.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.spec_method == "prompt_lookup"


@pytest.mark.parametrize("family", ["minimax", "led"])
def test_a_default_that_needs_trees_steps_aside_on_a_model_of_chains(family: str) -> None:
    """Asked for by name, in the call or by a configuration of its own, it is refused."""
    model = build(FAMILIES[family]) if family in FAMILIES else varied(family, "seq2seq")
    expected = plain(model, PROMPT, max_new_tokens=8, do_sample=False)
    hf_specdec.enable(model).generation_config.spec_method = "lookahead"
    output = model.generate(PROMPT, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    assert output.sequences.equal(expected)
    assert "takes chains only" in output.spec_stats.plain_reason
    for wanted in ({"spec_method": "lookahead"}, {"lookahead_config": {}}):
        with pytest.raises(hf_specdec.UnsupportedModelError, match="takes chains only"):
            model.generate(PROMPT, max_new_tokens=8, do_sample=False, **wanted)


def test_a_disabled_model_knows_no_default() -> None:
    """transformers takes every setting that the generation configuration has, and would leave this one unsaid."""
    model, other = build(FAMILIES["llama"]), build(FAMILIES["llama"])
    settings = hf_specdec.enable(model).generation_config
    hf_specdec.enable(other).generation_config = settings
    settings.spec_method, settings.prompt_lookup_config = "prompt_lookup", [3, 2, ["cpu"]]
    hf_specdec.disable(model)
    for name in ("spec_method", "prompt_lookup_config"):
        with pytest.raises(ValueError, match=name):
            model.generate(PROMPT, max_new_tokens=8, **{name: "auto"})
    output = other.generate(PROMPT, max_new_tokens=8, return_dict_in_generate=True)
    assert output.spec_stats.method == "prompt_lookup", "a configuration that models share is left to the others"
