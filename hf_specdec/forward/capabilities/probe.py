"""Tier of a model, found by trying: a few tokens as a tree, a rollback, then some in sequence.

Logits, and in the end all that the cache holds, are compared with a reference: the model as plain `generate` drives it,
a prompt and then token by token. Never a list of model names.
"""

import functools
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.compat.attention import attention_implementation, has_table_with_window, knows_windows
from hf_specdec.compat.caches import CACHE
from hf_specdec.compat.devices import input_device
from hf_specdec.compat.generation import fresh_cache
from hf_specdec.compat.models import counts_padding_out, rounds_tokens_together
from hf_specdec.compat.state_layers import limits_time_steps, places_trees
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.forward.capabilities.attempts import REFUSALS, ProbeFailed, Tolerance, sentence, tolerance_of, tried
from hf_specdec.forward.capabilities.reference import (
    Reference,
    arguments,
    encoded,
    module_tensors,
    reference,
    tokens_of,
)
from hf_specdec.forward.model_runner import ModelRunner, Tier
from hf_specdec.forward.token_buffer import TokenBuffer
from hf_specdec.forward.tree_mask import TreeMasks

UNTRIED = "several tokens in one forward could not be tried"


@dataclass(frozen=True, slots=True)
class Capability:
    """Forwards that a model computes as plain generation does.

    Attributes:
        tier (`str`): `"tree"`: any tree is verified in one forward. `"chain"`: several tokens in sequence are.
            `"plain"`: one token a forward.
        reason (`str`): what was found, in a sentence.
        attention (`str | None`): the attention implementation it was found with.
        dtype (`str`): the dtype it was found with.
        error (`float`): largest difference of a logit from the reference, over the largest logit; NaN where nothing
            was compared.
    """

    tier: Tier
    reason: str
    attention: str | None
    dtype: str
    error: float

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values; no error where nothing was compared."""
        return {**asdict(self), "error": None if math.isnan(self.error) else self.error}


@torch.no_grad()
def probe(model: PreTrainedModel, encoder_kwargs: dict[str, Any] | None = None) -> Capability:
    """Find the tier of `model`. Uses no random numbers and leaves the model as it is.

    Args:
        encoder_kwargs: for encoder-decoder models, `encoder_outputs` and `attention_mask` of one row; by default a
            few tokens are encoded.

    Raises:
        ProbeFailed: a fault that may pass; it says nothing of the model.
    """
    if _forgets_what_it_sees(model):
        reason = "several tokens in one forward do not work: its cache has a window that its mask does not have"
        return _found(model, "plain", reason)
    why_not_tree = _known_reason(model)
    try:
        if model.config.is_encoder_decoder:
            encoder_kwargs = encoder_kwargs or tried(lambda _: encoded(model))
        sample = functools.cache(lambda attempt: _Sample(model, encoder_kwargs or {}, attempt))
        if why_not_tree is None:
            try:
                error = tried(lambda attempt: _try_tree(sample(attempt)))
                return _found(model, "tree", "a tree of tokens gives the logits of the same tokens in sequence", error)
            except REFUSALS as exception:
                why_not_tree = sentence(exception)
        if counts_padding_out(model):
            reason = "its positions count a token of padding in a text otherwise than plain decoding"
            raise UnsupportedModelError(reason)
        if limits_time_steps(model):
            raise UnsupportedModelError("its layers limit the time steps of several tokens, and not that of one")
        error = tried(lambda attempt: _try_chain(sample(attempt)))
        return _found(model, "chain", f"several tokens in sequence work; no tree: {why_not_tree}", error)
    except REFUSALS as exception:
        reason = f"several tokens in one forward do not work: {sentence(exception)}"
        if model.training:
            reason += " (it is in train mode; call its eval() for forwards without dropout)"
        elif rounds_tokens_together(model):
            reason += " (its int8 layers round a token by the outliers of others; llm_int8_threshold=0.0 does not)"
        return _found(model, "plain", reason)


@torch.no_grad()
def rounds_alike(model: PreTrainedModel) -> bool:
    """Returns whether the logits of a tree's nodes are the bits of forwards of one token each.

    Raises:
        ProbeFailed: as of `probe`.
    """
    prompt, t = tokens_of(model, 0)

    def logits_of(*trees: DraftTree, nodes: list[int]) -> torch.Tensor:
        target, text = runner_of(model, {}, prompt, "tree")
        target.prefill()
        rows = []
        for tree in trees:
            text.append(tree.tokens[0])
            rows.append(target.forward([tree])[0][nodes])
            target.commit([[0]])
        return torch.cat(rows)

    builder = TreeBuilder(t[0])
    wrong, right = builder.add(0, t[3]), builder.add(0, t[1])
    builder.add(wrong, t[4])
    last = builder.add(right, t[2])
    alone = [DraftTree.chain(token, []) for token in t[:3]]
    return tried(
        lambda _: torch.equal(logits_of(builder.build(), nodes=[0, right, last]), logits_of(*alone, nodes=[0]))
    )


def untried(model: PreTrainedModel, error: ProbeFailed) -> Capability:
    """Plain decoding, for a call whose probe failed."""
    return _found(model, "plain", f"{UNTRIED}: {error}")


def _found(model: PreTrainedModel, tier: Tier, reason: str, error: float = math.nan) -> Capability:
    attention, dtype = attention_implementation(model.config), str(model.dtype).removeprefix("torch.")
    return Capability(tier, reason, attention, dtype, error)


def _forgets_what_it_sees(model: PreTrainedModel) -> bool:
    """Returns whether a window is in the cache alone: a token then sees more with others at once."""
    is_sliding = getattr(fresh_cache(model).get(CACHE), "is_sliding", [])
    return any(is_sliding) and not knows_windows(model)


def _known_reason(model: PreTrainedModel) -> str | None:
    """Reason not to try a tree, where it can be seen without trying; else `None`."""
    if not TreeMasks(model).supported:
        name = attention_implementation(model.config)
        return f'{name!r} attention takes no mask of a tree; attn_implementation="sdpa" does'
    if has_table_with_window(model):
        return "its windows are counted in columns of the cache, of which a tree has more than its text"
    if not places_trees(model):
        of_cache = "its decoder takes positions from the cache"
        return of_cache if model.config.is_encoder_decoder else "its forward takes no position_ids"
    return None


class _Sample:
    """A text, computed plainly once for a tree and a chain.

    Attributes:
        prompt, coming: its token ids; the first three of `coming` are computed, the others are wrong ones.
    """

    def __init__(self, model: PreTrainedModel, encoder_kwargs: dict[str, Any], attempt: int) -> None:
        self.model, self.encoder_kwargs = model, encoder_kwargs
        self.prompt, self.coming = tokens_of(model, attempt)
        self.wanted, self.tolerance = known_text(model, encoder_kwargs, self.prompt, self.coming[:3])

    def begin(self, tier: Tier) -> tuple[ModelRunner, TokenBuffer]:
        """A runner that has read the prompt, and the text with its first token."""
        target, text = runner_of(self.model, self.encoder_kwargs, self.prompt, tier)
        if target.tier != tier:
            raise UnsupportedModelError("its cache holds states besides keys and values")
        target.prefill()
        text.append(self.coming[0])
        return target, text

    def compare(self, rows: torch.Tensor, first: int) -> float:
        """The error of `(n, vocab_size)` logits after `coming[first]` and the tokens that follow it."""
        wanted = self.wanted.logits[0, first : first + len(rows)]
        return self.tolerance.check_logits(rows.float(), wanted)

    def compare_states(self, target: ModelRunner) -> None:
        """Check what is in the caller's cache once the three tokens are read."""
        target.close()
        self.tolerance.check_states(target.cache.handed_out, self.wanted.cache)

    def compare_modules(self) -> None:
        """Check states that modules keep next to the cache, of fixed shape, where the last token read is the text's."""
        tensors = [tensor for _, _, tensor in module_tensors(self.model)]
        pairs = [pair for pair in zip(tensors, self.wanted.kept, strict=False) if pair[0].shape == pair[1].shape]
        self.tolerance.check_states([tensor for tensor, _ in pairs], [wanted for _, wanted in pairs], kept_by="modules")


def _try_tree(sample: _Sample) -> float:
    """A tree that grows by one node, a rollback, and a chain; the right nodes are among wrong ones."""
    t, (target, text) = sample.coming, sample.begin("tree")
    builder = TreeBuilder(t[0])
    wrong, right = builder.add(0, t[3]), builder.add(0, t[1])
    builder.add(wrong, t[4])
    rows = target.forward([builder.build()])[0]
    error = sample.compare(rows[[0, right]], 0)
    builder.add(right, t[2])
    error = max(error, sample.compare(target.forward([builder.build()])[0], 2))  # some drop the mask of one token
    target.commit([[0, right]])
    text.append(t[1])
    text.append(t[2])
    error = max(error, sample.compare(target.forward([DraftTree.chain(t[2], [t[5]])])[0][:1], 2))
    target.commit([[0]])
    sample.compare_states(target)
    return error


def _try_chain(sample: _Sample) -> float:
    """A chain whose drafts are rejected, and one that is kept whole."""
    t, (target, text) = sample.coming, sample.begin("chain")
    error = sample.compare(target.forward([DraftTree.chain(t[0], t[3:5])])[0][:1], 0)
    target.commit([[0]])
    text.append(t[1])
    error = max(error, sample.compare(target.forward([DraftTree.chain(t[1], t[2:3])])[0], 1))
    target.commit([[0, 1]])
    sample.compare_states(target)
    sample.compare_modules()
    return error


def known_text(
    model: PreTrainedModel, encoder_kwargs: dict[str, Any], prompt: list[int], coming: list[int]
) -> tuple[Reference, Tolerance]:
    """Results of plain generation for one text, and the difference from them that rounding can explain."""
    ids = torch.tensor([prompt + coming], device=input_device(model))

    def read(first: torch.Tensor, rest: torch.Tensor) -> Reference:
        return reference(model, arguments(model, first, encoder_kwargs), first, rest)

    text = read(ids[:, : len(prompt)], ids[:, len(prompt) :])
    return text, tolerance_of(model, text, lambda whole: read(whole, whole[:, :0]))


def runner_of(
    model: PreTrainedModel, encoder_kwargs: dict[str, Any], prompt: list[int], tier: Tier
) -> tuple[ModelRunner, TokenBuffer]:
    """A runner of a model that has `prompt` to read, and the text that goes with it."""
    ids = torch.tensor([prompt], device=input_device(model))
    text = TokenBuffer(ids, room=16)
    return ModelRunner(model, ids, GenerationConfig(), arguments(model, ids, encoder_kwargs), [text], tier=tier), text
