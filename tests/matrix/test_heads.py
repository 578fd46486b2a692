"""Every kind of draft head in every call: the same tokens as plain `generate`, seed for seed.

A further kind is a line of `tests/helpers/heads.py`.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.modeling_layers import MtpModel

import hf_specdec
from hf_specdec.methods.mtp.network import MtpHead
from tests.helpers.cover import wide_but
from tests.helpers.heads import CACHES, CASES, FITTED, INPUTS, MODES, SHAPES, Zoo, always
from tests.helpers.support import PROMPT, plain

ONE_OF_EACH = (
    "eagle3, llama",
    "mtp, glm4_moe, 3 layers",
    "dflash, llama",
)
Pair = tuple[Any, Any]


@pytest.fixture(scope="module")
def pairs(zoo: Zoo) -> Callable[[str], Pair]:
    """The target and the head of a case, built once."""

    @functools.cache
    def pair(name: str) -> Pair:
        target = CASES[name].target(zoo)
        return target, CASES[name].head(target)

    return lambda name: (hf_specdec.enable(pair(name)[0]), pair(name)[1])


@pytest.mark.at_most(6)
@pytest.mark.each_value
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", CASES)
def test_a_head_changes_nothing(
    pairs: Callable[[str], Pair], name: str, inputs: str, mode: str, cache: str, shape: str
) -> None:
    """Rows of a sampled batch have generators of their own: there, the method without drafts is the reference."""
    (target, head), method = pairs(name), CASES[name].method
    options = {"max_new_tokens": 12, **INPUTS[inputs], **MODES[mode], **CACHES[cache]}
    reference = functools.partial(plain, target)
    if inputs == "padded batch" and mode == "sampled":
        reference = functools.partial(target.generate, spec_method="plain")
    torch.manual_seed(5)
    expected = reference(**options)
    torch.manual_seed(5)
    how = always(method, SHAPES[shape])
    ours = target.generate(**options, assistant_model=head, return_dict_in_generate=True, **how)
    assert torch.equal(ours.sequences, expected)
    assert ours.spec_stats.num_draft_tokens > 0
    assert ours.spec_stats.method == method
    assert ours.spec_stats.plain_reason is None


@pytest.mark.at_most(2)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_generate_many_keeps_every_text(pairs: Callable[[str], Pair], name: str) -> None:
    target, head = pairs(name)
    prompts = [PROMPT[0, start : start + length] for start, length in ((0, 9), (3, 14), (8, 2), (1, 20), (5, 1))]
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    expected = [plain(target, prompt[None], **options)[0, len(prompt) :].tolist() for prompt in prompts]
    how = always(CASES[name].method, SHAPES["tree"])
    output = hf_specdec.generate_many(target, prompts, max_batch_size=2, assistant_model=head, **options, **how)
    ours = {result.index: result.token_ids for result in output}
    assert [ours[index] for index in range(len(prompts))] == expected


@pytest.mark.parametrize("name", wide_but(["mtp, glm4_moe, 1 layer"], FITTED))
def test_as_many_drafts_are_accepted_as_in_transformers_own_loop(
    zoo: Zoo, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that was fitted to the text, the same prompt and length: fewer forwards of the target, or as many.

    `auto` asks it too, and calls it by its method.
    """
    fitted = FITTED[name]
    target, prompt = fitted.case.target(zoo), PROMPT[:, : fitted.length]
    options: dict[str, Any] = {"max_new_tokens": fitted.num_tokens, "do_sample": False}
    expected = plain(target, prompt, **options)
    layers = fitted.fit(target, expected)
    head = MtpHead(layers)
    monkeypatch.setattr(
        MtpModel, "from_pretrained", lambda *args, **kwargs: layers
    )  # the target came from no checkpoint
    forwards = []
    handle = target.register_forward_hook(lambda *_: forwards.append(1))
    theirs = plain(target, prompt, **options, **fitted.theirs(layers))
    handle.remove()
    assert torch.equal(theirs, expected)
    how = always(fitted.case.method, fitted.config)
    ours = target.generate(prompt, assistant_model=head, return_dict_in_generate=True, **options, **how)
    assert torch.equal(ours.sequences, expected)
    assert len(forwards) < fitted.most_forwards, "the head was fitted, so that transformers' loop accepts"
    assert ours.spec_stats.num_forwards + 1 <= len(forwards)

    sources: set[str] = set()
    blended = target.generate(
        prompt,
        assistant_model=head,
        spec_method="auto",
        spec_config={"num_nodes": 8, "pool": "request"},
        spec_observer=lambda step: sources.update(vote.source for node in step.nodes for vote in node.votes),
        **options,
    )
    assert torch.equal(blended, expected)
    assert fitted.case.method in sources
