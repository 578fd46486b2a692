"""Rows are named, made afresh for each call, and appear by themselves when a method is added."""

import dataclasses
from typing import Any

import pytest

from hf_specdec.errors import ConfigError
from hf_specdec.methods.lookahead.config import LookaheadConfig
from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig
from hf_specdec.methods.registry import METHODS
from hf_specdec.tools.bench import naming as naming_module
from hf_specdec.tools.bench import rows as rows_module
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.rows import REFERENCE, default_rows, named_rows, row
from tests.bench.conftest import tiny_llama
from tests.helpers.heads import random_head


def test_every_method_has_a_row(loaded: LoadedModel) -> None:
    rows, left_out = default_rows(loaded)
    without_draft = [name for name, method in METHODS.items() if not method.needs_model]
    assert [row.name for row in rows] == [REFERENCE, "transformers:prompt_lookup", *without_draft]
    assert list(left_out) == ["transformers:assistant", "dflash", "draft_model", "eagle3", "mtp"]
    assert left_out["mtp"].startswith("LlamaForCausalLM must be a model with MTP layers that can be read here, but")


def test_default_stands_for_all_of_them(loaded: LoadedModel) -> None:
    rows, _ = named_rows(["default", "prompt_lookup=[4]"], loaded)
    assert rows[-1].name == "prompt_lookup=[4]"
    assert [row.name for row in rows[:-1]] == [row.name for row in default_rows(loaded)[0]]


@pytest.fixture
def helped(loaded: LoadedModel) -> LoadedModel:
    """The loaded with a draft model."""
    return dataclasses.replace(loaded, assistant=tiny_llama(len(loaded.tokenizer)), assistant_name="tiny draft")


def test_a_head_brings_the_row_of_its_method(loaded: LoadedModel) -> None:
    head = random_head(loaded.model)
    with_head = dataclasses.replace(loaded, head=head)
    rows, left_out = default_rows(with_head)
    assert "eagle3" in [row.name for row in rows]
    assert "eagle3" not in left_out
    assert row("eagle3:num_branches=1", with_head).arguments(None)["assistant_model"] is head
    assert row("auto+head:num_nodes=6", with_head).arguments(None)["assistant_model"] is head
    assert "assistant_model" not in row("auto", with_head).arguments(None)
    with pytest.raises(ConfigError, match="must have a draft head.*--head"):
        row("eagle3", loaded)
    with pytest.raises(ConfigError, match="not one for eagle3 or auto"):
        row("dflash", with_head)


def test_a_draft_model_brings_its_rows(helped: LoadedModel) -> None:
    rows, left_out = default_rows(helped)
    assert {"transformers:assistant", "draft_model"} <= {row.name for row in rows}
    assert list(left_out) == ["dflash", "eagle3", "mtp"]
    ours = row('draft_model={"num_branches": 3}', helped)
    assert ours.arguments(None)["assistant_model"] is helped.assistant
    assert ours.config is not None and ours.config["num_branches"] == 3
    assert (ours.config["assistant"], ours.config["assistant_dtype"]) == ("tiny draft", "float32")
    assert ours.is_seed_exact and not row("draft_model=[4,['cpu'],['cpu'],True]", helped).is_seed_exact


def test_auto_has_the_draft_model_where_the_row_says_so(helped: LoadedModel) -> None:
    for name in ("auto+draft_model", "auto+draft_model:num_nodes=6", 'auto+draft_model={"num_nodes": 6}'):
        ours = row(name, helped)
        assert ours.arguments(None)["assistant_model"] is helped.assistant
        assert ours.config is not None
        assert ours.config["num_nodes"] == (6 if "6" in name else None)
        assert ours.config["assistant"] == helped.assistant_name
    assert "assistant_model" not in row("auto", helped).arguments(None)


def test_a_draft_of_another_vocabulary_is_left_out(loaded: LoadedModel) -> None:
    stranger = dataclasses.replace(loaded, assistant=tiny_llama(9000), assistant_name="stranger")
    assert "share the target's tokenizer" in default_rows(stranger)[1]["draft_model"]


def test_a_row_must_not_move_the_models(helped: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="must name devices that are here"):
        row("draft_model=[4,[98],[99],False]", helped)
    with pytest.raises(ConfigError, match="must name devices that are here"):
        row("prompt_lookup=[10,2,[99]]", helped)


def test_lookahead_takes_its_sizes_and_needs_trees(loaded: LoadedModel, zoo: Any) -> None:
    assert row("lookahead=[15,5,15]", loaded).arguments(None)["spec_config"] == LookaheadConfig.parse([15, 5, 15])
    chains = dataclasses.replace(loaded, model=zoo("gpt_neo"))
    assert "verifies trees" in default_rows(chains)[1]["lookahead"]


def test_a_new_method_appears_by_itself(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    added = dataclasses.replace(METHODS["plain"], name="brand_new")
    for module in (rows_module, naming_module):
        monkeypatch.setattr(module, "METHODS", {**METHODS, "brand_new": added})
    monkeypatch.setattr(rows_module, "resolve", {**METHODS, "brand_new": added}.__getitem__)
    assert default_rows(loaded)[0][-1].name == "brand_new"


@pytest.mark.parametrize("config", ['{"max_draft_len": 4}', "[4]", "{'max_draft_len': 4}"])
def test_a_configuration_is_part_of_the_name(loaded: LoadedModel, config: str) -> None:
    found = row(f"prompt_lookup={config}", loaded)
    assert found.arguments(None)["spec_config"] == PromptLookupConfig(max_draft_len=4)
    assert found.config is not None and found.config["max_draft_len"] == 4


def test_a_configuration_is_written_key_by_key_too(loaded: LoadedModel) -> None:
    """Words are texts, brackets hold their commas together, and each spelling is a row of its own."""
    names = ["prompt_lookup:num_branches=4,pool=shared", "ngram:max_draft_len=4,device_list=None", "prompt_lookup"]
    rows, _ = named_rows(names, loaded)
    configs = [row.arguments(None)["spec_config"] for row in rows[1:]]
    assert [row.name for row in rows[1:]] == names
    assert configs == [
        PromptLookupConfig(num_branches=4, pool="shared"),
        PromptLookupConfig(max_draft_len=4),
        PromptLookupConfig(),
    ]


def test_the_assisted_engine_promises_no_seeds(loaded: LoadedModel) -> None:
    assert row("prompt_lookup", loaded).is_seed_exact
    assert not row('prompt_lookup={"engine": "assisted"}', loaded).is_seed_exact
    assert not row("transformers:prompt_lookup", loaded).is_seed_exact


def test_a_class_of_the_user_s_own_is_a_row(loaded: LoadedModel) -> None:
    drafter = row("hf_specdec.methods.plain.drafter:PlainDrafter", loaded)
    assert drafter.kind == "drafter" and drafter.is_seed_exact
    one, other = (drafter.arguments(None)["spec_method"]() for _ in range(2))
    assert one is not other
    assert row("tests.bench.wrong_rows:HonestCandidates", loaded).kind == "candidates"


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("promt_lookup", "Did you mean 'prompt_lookup'"),
        ('prompt_lookup={"max_draft": 1}', "max_draft_len"),
        ("no_such_module:Thing", "can be imported"),
        ("tests.bench.wrong_rows:NoSuchClass", "can be imported"),
        ("tests.bench.wrong_rows:torch", "must name a class or a function"),
        ("tests.bench.wrong_rows:NeedsArguments", "datastore"),
        ("tests.bench.wrong_rows:Nothing", "must be a Drafter"),
        ("transformers:assistant", "--draft-model"),
        ("transformers:magic", "must be one of"),
        ("draft_model", "--draft-model"),
        ("auto+draft_model", "--draft-model"),
        ("prompt_lookup+draft_model", "takes a draft_model"),
        ("lookahead+head", "takes a head"),
        ("auto+head", "--head"),
        ("unheard_of+draft_model", "unheard_of"),
        ("lookahead=[7,5]", "must have 3 entries"),
        ("prompt_lookup:max_draft=1", "max_draft_len"),
        ("prompt_lookup:max_draft_len=0", "at least 1"),
        ("prompt_lookup:4", "method:key=value"),
        ("prompt_lookup:num_branches", "method:key=value"),
        ("prompt_lookup:pool=print('x')", "method:key=value"),
        ("prompt_lookup:**x", "method:key=value"),
        ("promt_lookup:num_branches=4", "Did you mean 'prompt_lookup'"),
    ],
)
def test_a_name_that_is_no_row_is_an_error(loaded: LoadedModel, name: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        row(name, loaded)


def test_a_row_named_twice_is_measured_once(loaded: LoadedModel) -> None:
    rows, _ = named_rows([REFERENCE, "plain", "plain"], loaded)
    assert [row.name for row in rows] == [REFERENCE, "plain"]


def test_streamers_reach_every_row(loaded: LoadedModel) -> None:
    streamer: Any = object()
    for name in ("generate", "transformers:prompt_lookup", "plain", "tests.bench.wrong_rows:HonestCandidates"):
        assert row(name, loaded).arguments(streamer)["streamer"] is streamer
        assert "streamer" not in row(name, loaded).arguments(None)
