"""A draft model with a tokenizer of its own is left to transformers' universal assisted decoding."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hf_specdec
from tests.helpers.support import plain
from tests.helpers.zoo import DECODER


def test_a_draft_of_another_tokenizer_is_handed_over_with_its_arguments() -> None:
    """The result is plain `generate`'s, and the statistics say who decoded."""
    path = hf_specdec.embedded.path("target")
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(path, precision="fp32")
    tokenizer = AutoTokenizer.from_pretrained(path)
    letters = {chr(code): code - 32 for code in range(32, 127)}
    characters = Tokenizer(models.WordLevel(letters, unk_token="~"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    own_tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="~", eos_token="~", bos_token="~")
    torch.manual_seed(0)
    draft = LlamaForCausalLM(LlamaConfig(**{**DECODER, "vocab_size": len(letters)})).eval()

    inputs = tokenizer("def add(a, b):\n    return ", return_tensors="pt")
    ids = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    options = {"max_new_tokens": 16, "do_sample": False}
    output = model.generate(
        **ids,
        **options,
        spec_method="draft_model",
        assistant_model=draft,
        tokenizer=tokenizer,
        assistant_tokenizer=own_tokenizer,
        return_dict_in_generate=True,
    )
    assert output.sequences.tolist() == plain(model, **ids, **options).tolist()
    assert "universal assisted decoding" in output.spec_stats.plain_reason
    assert output.spec_stats.num_tokens == 16
