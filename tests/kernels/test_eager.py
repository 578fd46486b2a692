"""The attention functions of models' own files: the core takes their place where it computes the same."""

from typing import Any

import pytest
import torch
from transformers.models.gemma2 import modeling_gemma2

from hf_specdec.compat.attention import EAGER, eager_attention_of, files_with_eager_attention
from hf_specdec.compat.caches import CACHE
from hf_specdec.kernels.cpu_kernels import CpuKernels
from hf_specdec.kernels.few_query import what_it_reads
from tests.helpers.support import PROMPT
from tests.kernels.families import family_model, implementation
from tests.kernels.layer_cases import has_core

pytestmark = has_core
READ = {"llama": set(), "gemma2": {"softcap"}, "gpt_oss": {"sinks"}, "t5": {"position_bias"}}


@torch.no_grad()
def outputs(family: str, *, inside: bool = True, **options: Any) -> Any:
    """Of a forward of the last seven tokens of the prompt."""
    model = family_model(family)
    inputs = {CACHE: model(PROMPT[:, :-7])[CACHE], **options}
    if not inside:
        return model(PROMPT[:, -7:], **inputs)
    with CpuKernels(model):
        return model(PROMPT[:, -7:], **inputs)


@pytest.mark.parametrize("family", READ)
def test_what_a_function_reads_is_found_by_trying_it(family: str) -> None:
    (file,) = files_with_eager_attention(family_model(family))
    assert what_it_reads(getattr(file[EAGER], "__wrapped__", file[EAGER])) == READ[family]


def test_a_function_that_computes_something_else_is_left() -> None:
    eager = modeling_gemma2.eager_attention_forward

    def doubled(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        return (eager(module, query, key, value, attention_mask, **kwargs)[0] * 2,)

    def asks_more(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        return eager(module.own, query, key, value, attention_mask, **kwargs)

    def has_more(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, power: Any, **_: Any) -> Any: ...

    assert [what_it_reads(item) for item in (doubled, asks_more, has_more)] == [None] * 3


@pytest.mark.parametrize("family", ["llama_mha", "gemma2"])
def test_logits_are_those_of_the_function_but_for_rounding(family: str, calls: list[Any]) -> None:
    with implementation(family_model(family), "eager"):
        expected = outputs(family, inside=False).logits
        assert calls == []
        torch.testing.assert_close(outputs(family).logits, expected, atol=2e-4, rtol=1e-4)
    assert calls


def test_weights_that_are_asked_for_are_given(calls: list[Any]) -> None:
    """By an argument, by the configuration, and to a hook."""
    layer, config = family_model("gemma2").model.layers[0].self_attn, family_model("gemma2").config
    expected = outputs("gemma2", inside=False, output_attentions=True).attentions[0]
    seen = [outputs("gemma2", output_attentions=True).attentions[0]]
    config.output_attentions = True
    seen.append(outputs("gemma2").attentions[0])
    config.output_attentions = False
    assert calls == []
    handle = layer.register_forward_hook(lambda *args: seen.append(args[2][1]))
    outputs("gemma2")
    handle.remove()
    assert torch.equal(seen[0], expected) and torch.equal(seen[1], expected)
    torch.testing.assert_close(seen[-1], expected)
    assert calls, "by the other layers"


def test_a_function_that_somebody_has_put_there_is_called(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen, ours = [], eager_attention_of(family_model("gemma2").model.layers[0].self_attn)
    monkeypatch.setattr(modeling_gemma2, EAGER, lambda *args, **kwargs: seen.append(args) or ours(*args, **kwargs))
    outputs("gemma2", inside=False)
    assert seen and calls == []
    outputs("gemma2")
    assert modeling_gemma2.eager_attention_forward.__name__ == "<lambda>"
