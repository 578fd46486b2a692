"""A draft model with a tokenizer of its own drafts in our loop, and at least as well as in transformers'."""

import functools
import itertools
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, StoppingCriteriaList

import hf_specdec
from hf_specdec import ConfigError
from hf_specdec.methods.common.translation import MOST_TAIL
from tests.helpers.cover import wide_but
from tests.helpers.support import noisy_copy, plain
from tests.helpers.tokenizers import byte_level, marked
from tests.helpers.zoo import DECODER

PROMPTS = [
    "def add(a, b):\n    return ",
    "class Reader:\n    def read(self, size=-1):\n        ",
    "import os\n\n\ndef walk",
]
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
CHAIN: dict[str, Any] = {"draft_len": 8, "confidence_threshold": 0.0}


class Pair:
    """The embedded target, and a draft that knows other tokens: a chart of which of its own tokens follows which.

    The chart is counted on the target's own greedy text, so that drafts are often right.
    """

    def __init__(self, kind: str) -> None:
        self.model, self.tokenizer, texts = target()
        self.draft_tokenizer = byte_level(texts, 300) if kind == "bytes" else marked(texts, 340)
        self.draft = following(self.draft_tokenizer, texts)

    def inputs(self, prompts: str | list[str]) -> dict[str, torch.Tensor]:
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        result = self.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        return {"input_ids": result["input_ids"], "attention_mask": result["attention_mask"]}

    @property
    def how(self) -> dict[str, Any]:
        names = {"tokenizer": self.tokenizer, "assistant_tokenizer": self.draft_tokenizer}
        return {"assistant_model": self.draft, **names}

    def generate(self, inputs: dict[str, torch.Tensor], config: dict[str, Any] = CHAIN, **options: Any) -> Any:
        return self.model.generate(
            **inputs,
            **{**OPTIONS, **options},
            spec_method="draft_model",
            spec_config=config,
            return_dict_in_generate=True,
            **self.how,
        )


@functools.cache
def target() -> tuple[Any, Any, list[str]]:
    """The embedded target, its tokenizer, and its greedy text after each prompt."""
    path = hf_specdec.embedded.path("target")
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(path, precision="fp32")
    tokenizer = AutoTokenizer.from_pretrained(path)
    inputs = [tokenizer(prompt, return_tensors="pt") for prompt in PROMPTS]
    outputs = [plain(model, **item, max_new_tokens=40, do_sample=False) for item in inputs]
    return model, tokenizer, [tokenizer.decode(output[0]) for output in outputs]


def following(tokenizer: Any, texts: list[str]) -> Any:
    """A one-layer Llama that says what followed its last token most often: attention and MLP add nothing."""
    size = max(tokenizer.get_vocab().values()) + 1
    config = LlamaConfig(
        **{**DECODER, "vocab_size": size, "hidden_size": size + size % 2, "num_hidden_layers": 1, "head_dim": 16}
    )
    model = LlamaForCausalLM(config).eval()
    counts = torch.zeros(size, size)
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        for token, after in itertools.pairwise(ids):
            counts[after, token] += 1
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, config.hidden_size))
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :size] = counts
    return model


@pytest.fixture(scope="module", params=["bytes", "marked"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


def in_transformers(pair: Pair, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> list[list[int]]:
    """The text after each step of universal assisted decoding with as long drafts."""
    config = pair.draft.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = CHAIN["draft_len"], "constant"
    config.assistant_confidence_threshold = 0.0
    texts: list[list[int]] = []

    def keep(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        texts.append(ids[0].tolist())
        return torch.tensor([False])

    plain(pair.model, **inputs, **options, **pair.how, stopping_criteria=StoppingCriteriaList([keep]))
    return texts


@pytest.mark.wide
def test_it_drafts_at_least_as_well_as_universal_assisted_decoding(pair: Pair) -> None:
    """Tokens of the steps that begin after the same text in both; every text is plain `generate`'s."""
    ours, theirs = 0, 0
    for prompt in PROMPTS:
        inputs = pair.inputs(prompt)
        expected = plain(pair.model, **inputs, **OPTIONS)[0].tolist()
        accepted: list[int] = []
        output = pair.generate(inputs, spec_observer=lambda step, seen=accepted: seen.append(len(step.accepted)))
        assert output.sequences[0].tolist() == expected
        assert output.spec_stats.plain_reason is None
        starts = itertools.accumulate(accepted, initial=inputs["input_ids"].shape[1] + 1)
        our_steps = dict(itertools.pairwise(starts))
        texts = in_transformers(pair, inputs, OPTIONS)
        assert texts[-1] == expected
        their_steps = dict(itertools.pairwise(map(len, texts)))
        both = our_steps.keys() & their_steps.keys()
        ours += sum(our_steps[start] - start for start in both)
        theirs += sum(their_steps[start] - start for start in both)
        assert len(both) > len(their_steps) / 2
    assert ours >= theirs > 50


@pytest.mark.wide
def test_each_row_of_a_batch_is_plain_generates(pair: Pair) -> None:
    inputs = pair.inputs(PROMPTS)
    expected = plain(pair.model, **inputs, **OPTIONS)
    output = pair.generate(inputs)
    assert output.sequences.tolist() == expected.tolist()
    assert output.spec_stats.num_accepted_tokens > len(PROMPTS)


@pytest.mark.parametrize("seed", wide_but([0], range(3)))
def test_a_seed_gives_plain_generates_text(pair: Pair, seed: int) -> None:
    inputs, options = pair.inputs(PROMPTS[0]), {**OPTIONS, "do_sample": True, "temperature": 0.7}
    torch.manual_seed(seed)
    expected = plain(pair.model, **inputs, **options)
    torch.manual_seed(seed)
    assert pair.generate(inputs, **options).sequences.tolist() == expected.tolist()


def test_the_text_stops_where_plain_generates_does(pair: Pair) -> None:
    inputs, options = pair.inputs(PROMPTS[1]), {"stop_strings": [")"], "tokenizer": pair.tokenizer}
    expected = plain(pair.model, **inputs, **OPTIONS, **options)
    output = pair.generate(inputs, stop_strings=[")"])
    assert output.sequences.tolist() == expected.tolist()


def test_the_drafts_cache_is_never_rebuilt(pair: Pair) -> None:
    """The prompt is read once; each later forward reads a few tokens of the text and of the draft."""
    fed: list[int] = []
    prompt = 8 * PROMPTS[1]
    pair.generate(pair.inputs(prompt))
    handle = pair.draft.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    hf_specdec.capability(pair.draft)
    fed.clear()
    pair.generate(pair.inputs(prompt))
    handle.remove()
    assert fed[0] >= len(pair.draft_tokenizer.encode(prompt)) - MOST_TAIL - 2
    assert max(fed[1:]) <= 2 * MOST_TAIL + 2 < fed[0]


@pytest.mark.wide
def test_many_prompts_share_a_batch(pair: Pair) -> None:
    how = {name: value for name, value in pair.how.items() if name != "tokenizer"}
    done = list(
        hf_specdec.generate_many(
            pair.model,
            PROMPTS,
            tokenizer=pair.tokenizer,
            max_batch_size=2,
            spec_method="draft_model",
            spec_config=CHAIN,
            **OPTIONS,
            **how,
        )
    )
    for result in sorted(done, key=lambda result: result.index):
        assert result.error is None
        ids = pair.inputs(PROMPTS[result.index])["input_ids"]
        expected = plain(pair.model, ids, **OPTIONS)[0, ids.shape[1] :]
        assert result.token_ids == expected.tolist()
        assert result.stats.num_accepted_tokens > 0


def test_what_cannot_be_is_refused(pair: Pair) -> None:
    inputs = pair.inputs(PROMPTS[0])
    with pytest.raises(ConfigError, match="`assistant_tokenizer` must be unset but with .* no use_logits"):
        pair.generate(inputs, {"use_logits": True})
    with pytest.raises(ConfigError, match="`num_branches` must be 1 with an assistant_tokenizer"):
        pair.generate(inputs, {"num_branches": 3})
    with pytest.raises(ConfigError, match="`assistant_tokenizer` must be unset but with .*draft_model"):
        pair.model.generate(**inputs, **OPTIONS, spec_method="auto", **pair.how)
    with pytest.raises(ConfigError, match="`tokenizer` must be a tokenizer where the draft model has one of its own"):
        pair.model.generate(
            **inputs,
            **OPTIONS,
            spec_method="draft_model",
            assistant_model=pair.draft,
            assistant_tokenizer=pair.draft_tokenizer,
        )
    head = hf_specdec.AutoDraftHead.from_pretrained(hf_specdec.embedded.path("head"))
    with pytest.raises(ConfigError, match="`assistant_tokenizer` must be unset but with a model"):
        pair.model.generate(**inputs, **OPTIONS, spec_method="auto", **{**pair.how, "assistant_model": head})


def test_tokenizers_of_one_vocabulary_need_no_translation(pair: Pair) -> None:
    """Probabilities can be compared then."""
    how = {"assistant_model": noisy_copy(pair.model), "tokenizer": pair.tokenizer}
    again = AutoTokenizer.from_pretrained(hf_specdec.embedded.path("target"))
    output = pair.model.generate(
        **pair.inputs(PROMPTS[0]),
        **{**OPTIONS, "do_sample": True},
        spec_method="draft_model",
        spec_config={"use_logits": True},
        assistant_tokenizer=again,
        return_dict_in_generate=True,
        **how,
    )
    assert output.spec_stats.plain_reason is None
    assert output.spec_stats.num_draft_tokens
