"""What most tests share: tiny models, prompts, comparisons with plain generate, hooks and counted forwards."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from transformers import GenerationMixin, PreTrainedModel

import hf_specdec
from hf_specdec.api.many_prompts.job import ManyResult
from hf_specdec.compat.caches import CACHE
from hf_specdec.kernels import cpu
from tests.helpers.drafts import OracleDrafter, RandomTreeDrafter


def seed(number: int) -> None:
    """Set the generators of the devices that are here."""
    if torch.cuda.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


# 30 tokens with repeated pieces, ending on the start of one; longer than the zoo's windows.
PROMPT = torch.tensor(
    [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 5, 6, 7, 8, 20, 21, 22, 23, 24, 25, 9, 10, 11, 12, 30, 31, 32, 5, 6, 7]]
)


# How to ask for drafts, given the text plain decoding emits. The last two are right (and wrong) at every step.
DRAFTS: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "prompt_lookup": lambda _: {"spec_method": "prompt_lookup"},
    "lookahead": lambda _: {"spec_method": "lookahead"},
    "auto": lambda _: {"spec_method": "auto", "spec_config": {"num_nodes": 9, "pool": "request"}},
    "oracle": lambda expected: {"spec_method": lambda: OracleDrafter(expected)},
    "random_trees": lambda expected: {"spec_method": lambda: RandomTreeDrafter(expected)},
}
TREE_DRAFTS = {"lookahead"}  # an error on a model that verifies chains only
CHAIN_DRAFTS = [name for name in DRAFTS if name not in TREE_DRAFTS]


def plain(model: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' own `generate`, whatever the model has been made to do."""
    return GenerationMixin.generate(model, *args, **kwargs)


@contextlib.contextmanager
def computed_by_torch() -> Iterator[None]:
    """A block in which torch computes all layers, in our forwards too, so that they round one token as plain does."""
    with mock.patch.object(cpu, "core", None):
        yield


def speculative(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The enabled model's own `generate`; the tests pass `spec_method`."""
    return model.generate(*args, **kwargs)


def results_of(model: Any, prompts: Sequence[Any], **options: Any) -> list[ManyResult]:
    """What `generate_many` gives: one result for each prompt."""
    output = list(hf_specdec.generate_many(model, prompts, **options))
    assert sorted(result.index for result in output) == list(range(len(prompts)))
    return output


def noisy_copy(model: Any, *, noise: float = 0.1, seed: int = 3) -> Any:
    """A draft model: the same one with noise in its weights, right often and wrong often."""
    draft = copy.deepcopy(hf_specdec.disable(model))
    hf_specdec.enable(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for weight in draft.parameters():
            if weight.ndim > 1:
                weight.add_(torch.randn_like(weight), alpha=noise * float(weight.std()))
    return draft


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One call: what it returned, the arguments it was given (recorders among them), the random state it left."""

    output: Any
    kwargs: dict[str, Any]
    random_state: torch.Tensor

    @property
    def ids(self) -> list[int]:
        """Prompt and new tokens of the first row."""
        sequences = self.output if isinstance(self.output, torch.Tensor) else self.output.sequences
        ids: list[int] = sequences[0].tolist()
        return ids

    @property
    def stats(self) -> Any:
        return self.output.spec_stats


def run(model: Any, generate: Callable[..., Any], make: Callable[[], dict[str, Any]], **method: Any) -> Run:
    """One call with freshly made arguments, from a fixed seed; 16 greedy tokens after `PROMPT` unless they say more."""
    kwargs = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True} | make()
    if not kwargs.keys() & {"input_ids", "inputs", "inputs_embeds"}:
        kwargs["input_ids"] = PROMPT
    seed(7)
    output = generate(model, **{name: value for name, value in kwargs.items() if value is not None}, **method)
    return Run(output, kwargs, torch.get_rng_state())


def both(
    model: Any,
    make: Callable[[], dict[str, Any]],
    draft: Callable[[list[int]], dict[str, Any]],
    coming: list[int] | None = None,
) -> tuple[Run, Run]:
    """The same call plain and with drafts, arguments made anew for each.

    Args:
        coming: the text that drafters which know the answer believe in, prompt included; by default plain's output.
    """
    reference = run(model, plain, make)
    ours = run(model, speculative, make, **draft(coming or reference.ids))
    return reference, ours


def assert_same_run(ours: Run, reference: Run) -> None:
    """The same tokens, and the random generator left in the same state."""
    assert ours.ids == reference.ids
    assert torch.equal(ours.random_state, reference.random_state)


def seq_length(cache: Any) -> int:
    return int(cache.get_seq_length())


def assert_same_cache(ours: Any, expected: Any) -> None:
    """Both caches hold the same text; where one keeps more columns than the other, the common last ones agree."""
    assert seq_length(ours) == seq_length(expected)
    if hasattr(expected, "self_attention_cache"):
        assert_same_cache(ours.self_attention_cache, expected.self_attention_cache)
        assert_same_cache(ours.cross_attention_cache, expected.cross_attention_cache)
        return
    assert len(ours.layers) == len(expected.layers)
    for mine, other in zip(ours.layers, expected.layers, strict=True):
        assert getattr(mine, "record_past", None) == getattr(other, "record_past", None)
        for name in ("keys", "values"):
            _assert_same_end(getattr(mine, name, None), getattr(other, name, None), dim=-2)
        for index, state in getattr(other, "conv_states", {}).items():
            _assert_same_end(mine.conv_states[index], state, dim=-1)


def _assert_same_end(ours: torch.Tensor | None, expected: torch.Tensor | None, *, dim: int) -> None:
    if ours is None or expected is None:
        assert ours is expected
        return
    width = min(ours.shape[dim], expected.shape[dim])
    assert width > 0
    ends = [tensor.narrow(dim, tensor.shape[dim] - width, width) for tensor in (ours, expected)]
    torch.testing.assert_close(*ends, atol=1e-4, rtol=1e-4)


def assert_same_tensors(ours: Any, expected: Any, *, atol: float = 1e-4) -> None:
    """Nested tuples of tensors: the same structure and shapes, values equal up to fp32 rounding."""
    assert type(ours) is type(expected)
    if isinstance(expected, tuple):
        assert len(ours) == len(expected)
        for mine, other in zip(ours, expected, strict=True):
            assert_same_tensors(mine, other, atol=atol)
    elif isinstance(expected, torch.Tensor):
        assert ours.shape == expected.shape
        assert ours.dtype == expected.dtype
        torch.testing.assert_close(ours, expected, atol=atol, rtol=1e-4)


def steer(model: Any) -> None:
    """Change hidden states at the last position of each forward: no tree is right then."""

    def change(module: Any, args: Any, output: Any) -> Any:
        states = (output[0] if isinstance(output, tuple) else output).clone()
        states[:, -1] = states[:, -1].flip(-1)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    model.model.layers[1].register_forward_hook(change)


def see_all(model: Any) -> None:
    """Let every token see those before it in a forward, whatever mask it is given."""

    class Blind(type(model.model.layers[0].self_attn)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs | {"attention_mask": None})

    for layer in model.model.layers:
        layer.self_attn.__class__ = Blind


@dataclass(slots=True)
class ForwardCount:
    """Calls of a model's forward, and the tokens fed to it."""

    calls: int = 0
    tokens: int = 0


@contextmanager
def count_forwards(model: PreTrainedModel) -> Iterator[ForwardCount]:
    """Count the model's forwards: how drafts show in a loop that keeps no statistics."""
    count = ForwardCount()

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        count.calls += 1
        count.tokens += kwargs["input_ids"].shape[1]

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield count
    finally:
        handle.remove()


IDS = torch.stack([PROMPT[0].roll(3 * row) for row in range(3)])
MASK = (torch.arange(IDS.shape[1])[None] >= torch.tensor([0, 4, 9])[:, None]).long()
PADDED = IDS * MASK
METHODS: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"spec_method": "prompt_lookup"},
    "lookahead": {"spec_method": "lookahead", "lookahead_config": [4, 3, 5]},
    "auto": {"spec_method": "auto", "spec_config": {"num_nodes": 9}},
    "draft_model": {"spec_method": "draft_model", "spec_config": {"confidence_threshold": 0.0}},
}


def method_of(name: str, draft: Any) -> dict[str, Any]:
    """The arguments that ask for a method; those of the draft model with it."""
    return METHODS[name] | ({"assistant_model": draft} if name == "draft_model" else {})


def assert_same_batch(model: Any, method: dict[str, Any], ids: torch.Tensor, **kwargs: Any) -> None:
    """Tokens, padding and cache, once as a bare tensor and once with the dictionary."""
    expected = plain(model, ids, **kwargs, return_dict_in_generate=True)
    assert model.generate(ids, **kwargs, **method).tolist() == expected.sequences.tolist()
    ours = model.generate(ids, **kwargs, **method, return_dict_in_generate=True)
    assert ours.sequences.tolist() == expected.sequences.tolist()
    assert_same_cache(ours[CACHE], expected[CACHE])
