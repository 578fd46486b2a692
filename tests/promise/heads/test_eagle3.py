"""`spec_method="eagle3"`: the text of plain `generate` with any head, and a cache that follows the accepted path."""

import copy
import functools
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationMixin

import hf_specdec
from hf_specdec.compat.caches import CACHE
from hf_specdec.errors import ConfigError, UnsupportedModelError
from tests.helpers.distributions import compare_pairs
from tests.helpers.heads import SHAPES, Zoo, random_head
from tests.helpers.heads import always as always_by
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, VOCAB_SIZE

always = functools.partial(always_by, "eagle3")


@pytest.mark.at_most(4)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("t5", "bart", "whisper", "marian")])
def test_any_decoder_writes_what_plain_generation_writes(zoo: Zoo, family: str) -> None:
    """Whatever its layers are, as long as `output_hidden_states` shows them."""
    model = zoo(family)
    if model.config.is_encoder_decoder:
        with pytest.raises(UnsupportedModelError, match="decoder-only"):
            model.generate(PROMPT, max_new_tokens=4, assistant_model=random_head(model), spec_method="eagle3")
        return
    head = random_head(model)
    expected = plain(model, PROMPT, max_new_tokens=12, do_sample=False)
    ours = model.generate(PROMPT, max_new_tokens=12, do_sample=False, assistant_model=head, **always(SHAPES["tree"]))
    assert torch.equal(ours, expected)


def test_a_conversation_goes_on_with_a_cache_from_plain_generation(model: Any) -> None:
    """The head reads what the second call computes; the first call's hidden states are gone."""
    head = random_head(model)
    turns = []
    for how in ({}, {"assistant_model": head, **always(SHAPES["tree"])}):
        cache = DynamicCache(config=model.config)
        generate = model.generate if how else lambda *args, **kwargs: GenerationMixin.generate(model, *args, **kwargs)
        first = plain(model, PROMPT[:, :20], max_new_tokens=6, do_sample=False, **{CACHE: cache})
        longer = torch.cat([first, PROMPT[:, :7]], dim=1)
        turns.append(generate(longer, max_new_tokens=12, do_sample=False, **{CACHE: cache}, **how))
    assert torch.equal(turns[0], turns[1])


def observed(model: Any, head: Any, max_new_tokens: int, config: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The text, and what an observer saw of each step."""
    steps: list[Any] = []
    how = {"max_new_tokens": max_new_tokens, "do_sample": False, "spec_observer": steps.append, **always(config)}
    return model.generate(PROMPT, assistant_model=head, **how), steps


class Fed:
    """A head that notes what it was fed."""

    def __init__(self, head: Any) -> None:
        self.columns: list[int] = []
        self.fused = 0
        self._forward, self._fuse = head.forward, head.fuse
        head.forward, head.fuse = self.forward, self.fuse

    def forward(self, embeddings: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.columns.append(embeddings.shape[1])
        return self._forward(embeddings, *args, **kwargs)

    def fuse(self, features: torch.Tensor) -> Any:
        self.fused += len(features)
        return self._fuse(features)


def test_the_heads_cache_is_never_rebuilt(model: Any) -> None:
    """Every token of the text is fed once with the target's state, and every level of the tree by one forward."""
    head = random_head(model)
    fed = Fed(head)
    out, steps = observed(model, head, 20, {"num_branches": 2, "draft_len": 3, "max_nodes": 6})
    assert fed.fused <= out.shape[1] - 1
    assert len(fed.columns) <= 3 * len(steps)
    assert max(fed.columns[1:]) <= 10


def test_drafts_are_those_of_a_head_that_is_run_from_scratch(model: Any) -> None:
    """Each step's chain is what the network drafts over the whole text, its cache and states made anew."""
    head = random_head(model)
    out, steps = observed(model, head, 16, {"num_branches": 1, "draft_len": 3})
    with torch.no_grad():
        hidden = model(out, output_hidden_states=True).hidden_states
        features = torch.cat([hidden[layer] for layer in head.config.layer_ids], dim=-1)
    length = PROMPT.shape[1] + 1  # the prompt and its first token
    for step in steps:
        text = out[:, :length]
        cache, chain = DynamicCache(), []
        states, tokens = head.fuse(features[:, : length - 1]), text[:, 1:]
        positions = torch.arange(1, length)[None]
        for _ in range(len(step.tree) - 1):
            total = cache.get_seq_length() + tokens.shape[1]
            mask = torch.ones(tokens.shape[1], total).tril(total - tokens.shape[1]).bool()[None, None]
            states = head(model.get_input_embeddings()(tokens), states, positions, mask, cache)[:, -1:]
            chain.append(int(head.logits(states)[0, -1].argmax()))
            tokens, positions = torch.tensor([[chain[-1]]]), positions[:, -1:] + 1
        assert list(step.tree.tokens[1:]) == chain
        length += len(step.accepted)
    assert length == out.shape[1]


def test_a_long_prompt_is_fed_in_chunks_to_the_same_effect(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import hf_specdec.forward.networks.head_runner as module

    def trees() -> list[Any]:
        head, steps = random_head(model), []
        prompts = torch.cat([PROMPT, PROMPT.flip(1)])
        model.generate(
            prompts,
            max_new_tokens=8,
            do_sample=False,
            assistant_model=head,
            spec_observer=steps.append,
            **always(SHAPES["chain"]),
        )
        return [step.tree.tokens for step in steps]

    whole = trees()
    monkeypatch.setattr(module, "CHUNK", 7)
    assert trees() == whole


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_wrapped_target_works_with_a_head(model: Any) -> None:
    peft = pytest.importorskip("peft")

    base = copy.deepcopy(hf_specdec.disable(model))
    hf_specdec.enable(model)
    wrapped = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    hf_specdec.enable(wrapped)
    expected = plain(base, PROMPT, max_new_tokens=12, do_sample=False)
    ours = wrapped.generate(
        input_ids=PROMPT,
        max_new_tokens=12,
        do_sample=False,
        assistant_model=random_head(base),
        **always(SHAPES["tree"]),
    )
    assert torch.equal(ours, expected)


def test_use_logits_samples_the_targets_distribution(model: Any) -> None:
    """Of five tokens, one of which the head does not know. Odds of a right run failing: one in a million."""
    head = random_head(model, draft_vocab_size=64)
    allowed = {20, 40, 41, 60, 80}
    warps = {"temperature": 1.5, "top_k": 0, "suppress_tokens": sorted(set(range(VOCAB_SIZE)) - allowed)}
    how = always({**SHAPES["tree"], "use_logits": True})
    result = compare_pairs(model, warps, num_texts=250, assistant_model=head, **how)
    assert result.statistic < result.bound
    assert result.num_accepted > 100


def test_a_head_for_another_target_is_refused_with_both_sizes(zoo: Zoo) -> None:
    model = zoo("llama")
    narrow = random_head(model)
    narrow.target_hidden_size = 64
    with pytest.raises(ConfigError, match="hidden_size 48, .*'a head for 64 and"):
        model.generate(PROMPT, max_new_tokens=4, assistant_model=narrow, spec_method="eagle3")
    other = random_head(model)
    other.vocab_size = 5000
    with pytest.raises(ConfigError, match=rf"vocab_size {VOCAB_SIZE} .*'a head for 48 and 5000"):
        model.generate(PROMPT, max_new_tokens=4, assistant_model=other, spec_method="eagle3")
    deep = random_head(model, layer_ids=(1, 2, 9))
    with pytest.raises(ConfigError, match=r"and 3 layers, .* that reads the layers \(1, 2, 9\)"):
        model.generate(PROMPT, max_new_tokens=4, assistant_model=deep, spec_method="eagle3")


def test_without_a_method_the_kind_of_the_head_decides(model: Any) -> None:
    call: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    output = model.generate(PROMPT, assistant_model=random_head(model), **call)
    assert output.sequences.tolist() == plain(model, PROMPT, **call).sequences.tolist()
    assert (output.spec_stats.method, output.spec_stats.plain_reason) == ("eagle3", None)
