"""`hf_specdec.pipeline`: the texts of transformers' pipeline, for models that were not enabled too."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoTokenizer

import hf_specdec
from hf_specdec.loading import pipelines
from hf_specdec.loading.drafts import load_draft

PROMPT = "def push(self, item):\n    self.items.append(item)\n\n\ndef pop(self):\n    return self.items."
OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
PATH = str(hf_specdec.embedded.path("target"))


@pytest.fixture(scope="module")
def plain_texts(tokenizer: Any) -> dict[str, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(PATH, dtype="float32")
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    return {"one": pipe(PROMPT, **OPTIONS), "batch": pipe([PROMPT, "import "], batch_size=2, **OPTIONS)}


def unenabled() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(PATH, dtype="float32")


@pytest.mark.at_most(1)
@pytest.mark.parametrize("how", [{}, {"spec_method": "prompt_lookup"}, {"spec_method": "lookahead"}])
def test_a_model_that_was_not_enabled_gives_the_same_text(plain_texts: Any, how: dict[str, Any]) -> None:
    model = unenabled()
    pipe = hf_specdec.pipeline(model=model, **how)
    assert pipe.model is model
    assert pipe(PROMPT, **OPTIONS) == plain_texts["one"]
    assert pipe.spec_stats is not None
    assert pipe.spec_stats.method == how.get("spec_method", "auto")
    assert pipe.spec_stats.num_tokens == 16


@pytest.mark.at_most(1)
@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_is_loaded_with_its_tokenizer(plain_texts: Any, kind: Any) -> None:
    pipe = hf_specdec.pipeline("text-generation", kind(PATH), precision="fp32", **OPTIONS)
    assert pipe(PROMPT) == plain_texts["one"]


@pytest.mark.parametrize("how", [{"dtype": "float32"}, {"dtype": torch.float32}, {"torch_dtype": torch.float32}])
def test_a_folder_is_loaded_in_the_dtype_that_transformers_pipeline_takes(how: dict[str, Any]) -> None:
    assert hf_specdec.pipeline(model=PATH, **how).model.dtype == torch.float32
    with pytest.raises(hf_specdec.ConfigError, match="must be unset for a loaded model"):
        hf_specdec.pipeline(model=unenabled(), **how)


def test_a_revision_is_that_of_the_model_and_of_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    for owner in (pipelines.AutoModelForCausalLM, AutoTokenizer):
        load = owner.from_pretrained
        monkeypatch.setattr(
            owner, "from_pretrained", lambda *a, load=load, **k: (asked.append(k.get("revision")), load(*a, **k))[1]
        )
    hf_specdec.pipeline(model=PATH, revision="main")
    assert asked.count("main") == 2


def test_a_call_may_choose_another_method(plain_texts: Any) -> None:
    pipe = hf_specdec.pipeline(model=unenabled(), spec_method="prompt_lookup")
    assert pipe(PROMPT, spec_method="lookahead", lookahead_config=[3, 3, 3], **OPTIONS) == plain_texts["one"]
    assert pipe.spec_stats is not None and pipe.spec_stats.method == "lookahead"
    assert pipe(PROMPT, spec_method=None, **OPTIONS) == plain_texts["one"]
    assert pipe.spec_stats is None


def test_a_call_s_generation_configuration_may_choose_another_method(plain_texts: Any) -> None:
    pipe = hf_specdec.pipeline(model=unenabled())
    config = transformers.GenerationConfig(**OPTIONS, pad_token_id=0)
    config.spec_method = "lookahead"
    pipe(PROMPT, generation_config=config)
    assert pipe.spec_stats is not None and pipe.spec_stats.method == "lookahead"


@pytest.mark.at_most(1)
@pytest.mark.parametrize("value", [None, "none"])
def test_a_pipeline_may_have_transformers_own_loop(plain_texts: Any, value: str | None) -> None:
    pipe = hf_specdec.pipeline(model=unenabled(), spec_method=value)
    assert pipe(PROMPT, **OPTIONS) == plain_texts["one"]
    assert pipe.spec_stats is None
    pipe(PROMPT, prompt_lookup_num_tokens=4, spec_method="prompt_lookup", **OPTIONS)
    assert pipe.spec_stats is not None and pipe.spec_stats.method == "prompt_lookup"


def test_a_list_form_names_the_method_of_every_call(plain_texts: Any) -> None:
    pipe = hf_specdec.pipeline(model=unenabled(), lookahead_config=[3, 3, 3], **OPTIONS)
    assert pipe(PROMPT) == plain_texts["one"]
    assert pipe.spec_stats is not None and pipe.spec_stats.method == "lookahead"


def test_a_draft_model_joins_in(plain_texts: Any) -> None:
    draft = transformers.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("draft"), dtype="float32")
    pipe = hf_specdec.pipeline(model=unenabled(), spec_method="draft_model", assistant_model=draft)
    assert pipe(PROMPT, **OPTIONS) == plain_texts["one"]
    assert pipe.spec_stats is not None and pipe.spec_stats.num_accepted_tokens > 0


@pytest.mark.at_most(1)
@pytest.mark.parametrize(("method", "name", "load"), [("eagle3", "head", load_draft), ("draft_model", "draft", str)])
def test_a_call_with_its_own_method_leaves_the_pipelines_draft_and_configuration_aside(
    plain_texts: dict[str, Any], method: str, name: str, load: Any
) -> None:
    draft = load(hf_specdec.embedded.path(name))
    pipe = hf_specdec.pipeline(
        model=unenabled(), spec_method=method, assistant_model=draft, spec_config={"draft_len": 3}
    )
    calls = [({}, method), ({"prompt_lookup_config": [4, 2]}, "prompt_lookup"), ({"spec_method": "plain"}, "plain")]
    for own, wanted in calls:
        assert pipe(PROMPT, **OPTIONS, **own) == plain_texts["one"]
        assert pipe.spec_stats is not None and pipe.spec_stats.method == wanted


def test_a_batch_gives_the_same_texts(plain_texts: Any) -> None:
    pipe = hf_specdec.pipeline(model=unenabled(), batch_size=2)
    assert pipe([PROMPT, "import "], **OPTIONS) == plain_texts["batch"]
    assert pipe.spec_stats is None
    texts = pipe([PROMPT, "import "], return_dict_in_generate=True, **OPTIONS)
    assert texts == plain_texts["batch"]
    assert pipe.spec_stats is not None and pipe.spec_stats.num_tokens > 16


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"task": "image-to-text", "model": PATH}, "task"),
        ({}, "model"),
        ({"model": object(), "precision": "fp32"}, "precision"),
        ({"model": object(), "model_kwargs": {}}, "model_kwargs"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(hf_specdec.ConfigError) as raised:
        hf_specdec.pipeline(**arguments)
    assert raised.value.field == field


def test_a_head_where_transformers_makes_a_pipeline_is_refused_with_two_ways_that_work(plain_texts: Any) -> None:
    head = load_draft(hf_specdec.embedded.path("head"), precision="fp32")
    model, tokenizer = hf_specdec.enable(unenabled()), transformers.AutoTokenizer.from_pretrained(PATH)
    with pytest.raises(hf_specdec.ConfigError, match="`assistant_model` must be a transformers model") as error:
        transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=head)
    assert "pipe(text, assistant_model=head, spec_method=...)" in error.value.remedy
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert pipe(PROMPT, assistant_model=head, spec_method="eagle3", **OPTIONS) == plain_texts["one"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"spec_method": "promt_lookup"}, "Did you mean 'prompt_lookup'"),
        ({"spec_method": "lookahead", "spec_config": [0, 3, 3]}, "must be"),
        ({"lookahead_config": [3]}, "must have"),
        ({"spec_method": "plain", "lookahead_config": [3, 3, 3]}, "must not come with"),
    ],
)
def test_a_wrong_method_is_an_error_before_the_model_is_loaded(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(hf_specdec.ConfigError, match=message):
        hf_specdec.pipeline(model="no such folder", **kwargs)
