"""Models that count positions by themselves: their hooks act in one forward of one thread, and are gone after it."""

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import hf_specdec
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.forward.adapters import adapter_of
from tests.helpers.cover import wide_but
from tests.helpers.support import DRAFTS, PROMPT, plain, speculative
from tests.helpers.zoo import FAMILIES, build
from tests.promise.outputs.test_threads import CALLS, PROMPTS, expected_texts, job, run_threads

ADAPTED = ("bloom", "falcon", "mpt", "t5", "bart", "m2m_100")


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Threads take turns a thousand times more often than usual, so that a race shows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def hooks_of(model: Any) -> list[Any]:
    return [
        hook
        for module in model.modules()
        for name in (
            "_forward_hooks",
            "_forward_pre_hooks",
            "_forward_hooks_with_kwargs",
            "_forward_pre_hooks_with_kwargs",
        )
        for hook in getattr(module, name).items()
    ]


@pytest.mark.parametrize("family", wide_but(["bloom"], ADAPTED))
def test_plain_generation_beside_trees_on_one_model(zoo: Callable[[str], Any], family: str) -> None:
    """Two threads draft trees of different shapes, two decode plainly, all on one model."""
    model = zoo(family)
    before = hooks_of(model)
    expected = expected_texts(model)
    methods = [DRAFTS["oracle"](expected[0]), {}, DRAFTS["random_trees"](expected[2]), {}]
    jobs = [job(model, prompt, method) for prompt, method in zip(PROMPTS, methods, strict=True)]
    for number, texts in enumerate(run_threads(jobs)):
        assert texts == [expected[number]] * CALLS
    assert hooks_of(model) == before


@pytest.mark.at_most(1)
@pytest.mark.parametrize("family", ADAPTED)
def test_no_hook_is_left_behind(zoo: Callable[[str], Any], family: str) -> None:
    """Not after a call, and not after one that was interrupted inside a forward; nor is the model changed."""
    model = zoo(family)
    before = hooks_of(model)
    text = plain(model, PROMPT, max_new_tokens=24, do_sample=False)[0].tolist()
    assert adapter_of(model) is not None
    assert speculative(model, PROMPT, max_new_tokens=24, do_sample=False, **DRAFTS["oracle"](text))[0].tolist() == text
    assert hooks_of(model) == before
    seen = []

    def interrupt(module: Any, args: Any) -> None:
        seen.append(len(hooks_of(model)))
        if seen[-1] > 1:
            raise KeyboardInterrupt

    handle = model.lm_head.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        speculative(model, PROMPT, max_new_tokens=24, do_sample=False, **DRAFTS["oracle"](text))
    handle.remove()
    assert max(seen) > 1
    assert hooks_of(model) == before
    assert plain(model, PROMPT, max_new_tokens=24, do_sample=False)[0].tolist() == text


class Padding(LogitsProcessor):
    """Writes the padding token in every third place."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] % 3 == 0:
            scores = scores.clone()
            scores[:, self.token] = scores.max() + 1
        return scores


@pytest.mark.parametrize("draft", ["oracle", "random_trees", "prompt_lookup"])
def test_padding_tokens_in_the_text_count_as_they_do_alone(zoo: Callable[[str], Any], draft: str) -> None:
    """M2M100 gives padding no position, and tokens fed behind it in one forward one less than when fed alone."""
    model = zoo("m2m_100")
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    options["logits_processor"] = LogitsProcessorList([Padding(model.config.pad_token_id)])
    text = plain(model, PROMPT, **options)[0].tolist()
    assert text.count(model.config.pad_token_id) > 4
    output = speculative(model, PROMPT, return_dict_in_generate=True, **options, **DRAFTS[draft](text))
    assert output.sequences[0].tolist() == text
    assert draft != "oracle" or output.spec_stats.num_accepted_tokens > 4


@pytest.mark.parametrize("family", ["bart", "bloom", "falcon"])
def test_a_compiled_model_drafts_chains(family: str) -> None:
    """Compiled code may run without hooks, so it is not trusted with a tree, whenever it was compiled."""
    model = hf_specdec.enable(build(FAMILIES[family]))
    assert hf_specdec.capability(model).tier == "tree"
    text = plain(model, PROMPT, max_new_tokens=8, do_sample=False)[0].tolist()
    inner = model.get_decoder() if family == "bart" else model.transformer.h[0]
    inner._compiled_call_impl = inner._call_impl  # as inner.compile() would, without its minutes
    assert adapter_of(model) is None
    assert hf_specdec.capability(model).tier == "chain"
    assert speculative(model, PROMPT, max_new_tokens=8, do_sample=False, **DRAFTS["oracle"](text))[0].tolist() == text


def test_positions_that_are_counted_elsewhere_are_an_error() -> None:
    """A tree whose hooks were not called would be wrong, so it ends the call."""
    model = hf_specdec.enable(build(FAMILIES["bart"]))
    assert hf_specdec.capability(model).tier == "tree"
    text = plain(model, PROMPT, max_new_tokens=24, do_sample=False)[0].tolist()
    decoder = model.get_decoder()

    class Swap(LogitsProcessor):
        """Replaces the positions in the middle of the call, which no look at its beginning can notice."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            decoder.embed_positions = copy.deepcopy(decoder.embed_positions)
            return scores

    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    options["logits_processor"] = LogitsProcessorList([Swap()])
    with pytest.raises(UnsupportedModelError, match="spec_method=None"):
        speculative(model, PROMPT, **options, **DRAFTS["oracle"](text))
    assert hooks_of(model) == []
