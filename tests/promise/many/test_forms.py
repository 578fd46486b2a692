"""`generate_many` understands prompts in the forms users have them, or refuses them by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding

import hf_specdec
from hf_specdec import embedded
from tests.helpers.support import PROMPT, plain

TEXTS = ["def main():\n", "import os\nimport"]
NEW: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def target() -> Any:
    return hf_specdec.enable(AutoModelForCausalLM.from_pretrained(embedded.path("target"), dtype="float32"))


@pytest.fixture
def chats() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(embedded.path("target"))
    tokenizer.chat_template = TEMPLATE
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def tokens(results: Any) -> list[list[int]]:
    return [result.token_ids for result in sorted(results, key=lambda result: result.index)]


def alone(model: Any, ids: Any) -> list[int]:
    ids = torch.as_tensor(ids)[None]
    return plain(model, ids, attention_mask=torch.ones_like(ids), **NEW)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("form", ["lists", "tensors", "batches of one"])
def test_rows_of_a_tokenized_data_set_are_prompts(target: Any, chats: Any, form: str) -> None:
    """Each a mapping with ids and mask, as `datasets` and a tokenizer called on one text give them."""
    rows = [chats(text, return_tensors="pt" if form == "batches of one" else None) for text in TEXTS]
    if form == "tensors":
        rows = [{name: torch.tensor(ids) for name, ids in row.items()} for row in rows]
    assert all("attention_mask" in row for row in rows)
    expected = [alone(target, chats(text).input_ids) for text in TEXTS]
    assert tokens(hf_specdec.generate_many(target, rows, **NEW)) == expected


def test_chats_go_through_the_tokenizers_template(target: Any, chats: Any) -> None:
    chat = [{"role": "user", "content": "def f():"}]
    ids = chats.apply_chat_template(chat, add_generation_prompt=True, return_dict=True).input_ids
    assert tokens(hf_specdec.generate_many(target, [chat], tokenizer=chats, **NEW)) == [alone(target, ids)]
    chats.chat_template = None
    item, other = sorted(
        hf_specdec.generate_many(target, [chat, "def f():"], tokenizer=chats, **NEW), key=lambda result: result.index
    )
    assert "`prompt` must be text or ids, as the tokenizer has no chat template" in str(item.error)
    assert other.error is None


WRONG: dict[str, Any] = {
    "one text": "def main():",
    "one prompt's ids": [5, 6, 7],
    "a tensor of one prompt": PROMPT[0],
    "one chat": [{"role": "user", "content": "a"}],
    "columns": {"text": ["a", "b"], "label": [0, 1]},
    "a tokenizer's output": BatchEncoding({"input_ids": [[5, 6], [7, 8]]}),
    "nothing": None,
}


@pytest.mark.parametrize("prompts", WRONG.values(), ids=WRONG)
def test_what_are_not_several_prompts_is_refused_at_once(model: Any, prompts: Any) -> None:
    with pytest.raises(ValueError, match="`prompts` must"):
        hf_specdec.generate_many(model, prompts, **NEW)


@pytest.mark.parametrize(
    "prompt", [{"text": "a"}, object(), [[1], [2, 3]], ["a", 1], {"input_ids": "a"}, [True, False]]
)
def test_a_prompt_in_no_known_form_is_its_results_error(model: Any, prompt: Any) -> None:
    results = list(hf_specdec.generate_many(model, [prompt, PROMPT], **NEW))
    errors = {result.index: result.error for result in results}
    assert "`prompt` must hold" in str(errors[0])
    assert errors[1] is None


@pytest.mark.parametrize(
    "ours", [{"max_new_tokenz": 4}, {"num_beams": 3}, {"spec_config": {"max_draft_len": 0}}, {"seed": 1.5}]
)
def test_one_prompts_wrong_setting_is_its_results_error(model: Any, ours: dict[str, Any]) -> None:
    prompts = [{"input_ids": PROMPT, **ours}, PROMPT]
    errors = {r.index: r.error for r in hf_specdec.generate_many(model, prompts, spec_method="prompt_lookup", **NEW)}
    assert f"`{next(iter(ours))}`" in str(errors[0]) or "max_draft_len" in str(errors[0])
    assert errors[1] is None


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokenz": 4},
        {"num_beams": 3},
        {"seed": "1"},
        {"seed": 1 << 70},
        {"input_ids": PROMPT},
        {"attention_mask": torch.ones(2, 3)},
        {"inputs_embeds": torch.ones(1, 3, 8)},
    ],
    ids=str,
)
def test_a_setting_that_is_wrong_for_all_raises_once(model: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(settings))}` must"):
        hf_specdec.generate_many(model, [PROMPT, PROMPT], **settings)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_our_loaders_load_adapters_as_transformers_does(tmp_path: Path) -> None:
    """A folder with an adapter and no model of its own."""
    peft = pytest.importorskip("peft")
    path = str(embedded.path("target"))
    base = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(base, config).save_pretrained(tmp_path)
    ours = hf_specdec.AutoModelForCausalLM.from_pretrained(tmp_path, precision="fp32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    expected = theirs.generate(PROMPT, **NEW).tolist()
    assert ours.generate(PROMPT, **NEW, spec_method="prompt_lookup").tolist() == expected
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(OSError, match="base_model_name_or_path"):
        hf_specdec.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_half_of_a_surrogate_pair_is_the_error_of_its_prompt(target: Any, chats: Any) -> None:
    bad, good = sorted(
        hf_specdec.generate_many(target, ["x = \ud800", TEXTS[0]], tokenizer=chats, **NEW), key=lambda item: item.index
    )
    assert "`prompt` must be Unicode text, without lone surrogates" in str(bad.error)
    assert good.token_ids == alone(target, chats(TEXTS[0]).input_ids)
