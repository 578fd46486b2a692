"""The reference and the comparisons: plain `generate`, and whether ours gave the same.

expected, ours = run_both(model, prompt, max_new_tokens=16, method={"spec_method": "prompt_lookup"})
"""

import copy
from typing import Any

import torch
from transformers import GenerationMixin

__all__ = ["PROMPT", "assert_same_cache", "assert_same_tensors", "generated", "plain", "run_both", "seq_length"]

# 30 tokens with repeated pieces, ending on the start of one; longer than the zoo's windows.
PROMPT = torch.tensor(
    [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 5, 6, 7, 8, 20, 21, 22, 23, 24, 25, 9, 10, 11, 12, 30, 31, 32, 5, 6, 7]]
)


def plain(model: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' own `generate`, whatever the model has been made to do."""
    return GenerationMixin.generate(model, *args, **kwargs)


def run_both(model: Any, *args: Any, method: dict[str, Any], seed: int = 7, **kwargs: Any) -> tuple[Any, Any]:
    """The same call plain and by `method`, each from the same seed and with its own copy of the caches."""
    outputs = []
    for call, extra in ((plain, {}), (type(model).generate, method)):
        if call is not plain:
            call = _bound_generate
        torch.manual_seed(seed)
        outputs.append(call(model, *args, **copy.deepcopy(kwargs), **extra))
    return outputs[0], outputs[1]


def _bound_generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model.generate(*args, **kwargs)


def generated(output: Any, prompt: torch.Tensor = PROMPT) -> list[int]:
    """The new tokens of a batch of one."""
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    tokens: list[int] = sequences[0, prompt.shape[1] :].tolist()
    return tokens


def seq_length(cache: Any) -> int:
    return int(cache.get_seq_length())


def assert_same_cache(ours: Any, expected: Any) -> None:
    """Both caches hold the same text; where one keeps more columns than the other, the common last ones agree."""
    assert seq_length(ours) == seq_length(expected)
    for attention in ("self_attention_cache", "cross_attention_cache"):
        if hasattr(expected, attention):
            assert_same_cache(getattr(ours, attention), getattr(expected, attention))
            return
    assert len(ours.layers) == len(expected.layers)
    for own, other in zip(ours.layers, expected.layers, strict=True):
        for name in ("keys", "values"):
            a, b = getattr(own, name), getattr(other, name)
            width = min(a.shape[-2], b.shape[-2])
            assert width > 0
            torch.testing.assert_close(a[:, :, -width:], b[:, :, -width:], atol=1e-4, rtol=1e-4)


def assert_same_tensors(ours: Any, expected: Any, *, atol: float = 1e-4) -> None:
    """Nested tuples of tensors: the same structure and shapes, values equal up to fp32 rounding."""
    assert type(ours) is type(expected)
    if isinstance(expected, tuple):
        assert len(ours) == len(expected)
        for own, other in zip(ours, expected, strict=True):
            assert_same_tensors(own, other, atol=atol)
    elif isinstance(expected, torch.Tensor):
        assert ours.shape == expected.shape
        assert ours.dtype == expected.dtype
        torch.testing.assert_close(ours, expected, atol=atol, rtol=1e-4)
