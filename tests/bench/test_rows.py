"""Rows come from names: transformers' ways, and methods with their options and drafts."""

import dataclasses
from typing import Any

import pytest

import hf_specdec
from hf_specdec.errors import ConfigError
from hf_specdec.methods.registry import METHODS
from hf_specdec.tools.bench.loaded_model import LoadedModel, load_model
from hf_specdec.tools.bench.rows import PLAIN, TRANSFORMERS, default_names, make_row, make_rows
from tests.bench.conftest import tiny_llama
from tests.helpers.heads import random_head


@pytest.fixture(scope="module")
def with_drafts(loaded: LoadedModel) -> LoadedModel:
    draft = hf_specdec.enable(tiny_llama(len(loaded.tokenizer)))
    return dataclasses.replace(loaded, draft_model=draft, head=random_head(loaded.model))


def test_every_run_has_transformers_generate_and_plain_decoding_first(loaded: LoadedModel) -> None:
    transformers, plain, auto = make_rows(["auto", "auto"], loaded)
    assert (transformers.name, transformers.kwargs, transformers.is_transformers) == (TRANSFORMERS, {}, True)
    assert (plain.name, plain.kwargs, plain.is_transformers) == (PLAIN, {"spec_method": "plain"}, False)
    assert auto.name == "auto"


def test_the_default_rows_are_those_that_the_drafts_allow(loaded: LoadedModel, with_drafts: LoadedModel) -> None:
    names = default_names(loaded)
    assert names == ["transformers:prompt_lookup", "prompt_lookup", "lookahead", "auto"]
    assert {"transformers:assistant", "draft_model", "eagle3", "auto+head"} < set(default_names(with_drafts))
    assert len(make_rows(default_names(with_drafts), with_drafts)) == 2 + len(default_names(with_drafts))


def test_every_method_is_a_row(with_drafts: LoadedModel) -> None:
    for name in METHODS:
        assert make_row(name, with_drafts).kwargs["spec_method"] == name


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("draft_model", "draft_model"),
        ("auto+draft_model", "draft_model"),
        ("transformers:assistant", "draft_model"),
        ("eagle3", "head"),
        ("auto+head", "head"),
        ("auto", None),
    ],
)
def test_a_row_brings_its_draft(with_drafts: LoadedModel, name: str, draft: str | None) -> None:
    expected = None if draft is None else getattr(with_drafts, draft)
    assert make_row(name, with_drafts).kwargs.get("assistant_model") is expected


def test_options_follow_the_methods_name(loaded: LoadedModel) -> None:
    config: Any = make_row("prompt_lookup:max_draft_len=4,pool=shared,draft_len_per_match=null", loaded).kwargs[
        "spec_config"
    ]
    assert (config.max_draft_len, config.pool, config.draft_len_per_match) == (4, "shared", None)


def test_what_promises_no_seed_says_so(with_drafts: LoadedModel) -> None:
    assert not make_row("draft_model:use_logits=true", with_drafts).is_seed_exact
    assert not make_row("transformers:prompt_lookup", with_drafts).is_seed_exact
    assert make_row("auto", with_drafts).is_seed_exact


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("promt_lookup", "Did you mean 'prompt_lookup'"),
        ("economize:lookup", "`row` must be one of"),
        ("auto:nodes", "METHOD:FIELD=VALUE,FIELD=VALUE"),
        ("prompt_lookup:max_draft=1", "max_draft_len"),
        ("prompt_lookup:max_draft_len=0", "at least 1"),
        ("auto+heads", "Did you mean 'head'"),
        ("draft_model", "must have a draft model"),
        ("eagle3", "must have a head"),
    ],
)
def test_a_name_that_is_no_row_is_an_error(loaded: LoadedModel, name: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_row(name, loaded)


def test_the_embedded_target_has_its_draft_and_head() -> None:
    loaded = load_model(device="cpu")
    assert loaded.name == "embedded"
    assert loaded.model.dtype == loaded.draft_model.dtype
    assert loaded.head.methods[0] == "eagle3"
    assert loaded.draft_tokenizer is None
