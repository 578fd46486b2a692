"""Tier of a model, found by trying: a few tokens as a tree, a rollback, then some in sequence; of one text, or of the
rows of a batch, padded and of different lengths.

Logits, and in the end all that the cache holds, are compared with a reference: the model as plain `generate` drives it,
a prompt and then token by token. Never a list of model names.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.compat.attention import attention_implementation, counts_masks_in_columns, knows_windows
from hf_specdec.compat.caches import CACHE
from hf_specdec.compat.devices import input_device
from hf_specdec.compat.generation import fresh_cache
from hf_specdec.compat.models import counts_padding_out, readable_padding, rounds_tokens_together, text_config
from hf_specdec.compat.state_layers import limits_time_steps, places_trees
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.forward.capabilities.reference import (
    REFUSALS,
    ProbeFailed,
    Reference,
    arguments,
    encoded,
    module_tensors,
    reference,
    sentence,
    tokens_of,
    tolerance_of,
    tried,
)
from hf_specdec.forward.inputs import rows_of
from hf_specdec.forward.model_runner import ModelRunner, Tier
from hf_specdec.forward.text_rows import TokenBuffer
from hf_specdec.forward.tree_mask import TreeMasks

UNTRIED = "several tokens in one forward could not be tried"
NUM_READ = 3  # tokens after a prompt that are computed; the others that follow are wrong ones
PADDING = 3  # tokens in front of a second row


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
        sample = functools.cache(lambda attempt: _Sample(model, encoder_kwargs, attempt))
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
def probe_rows(model: PreTrainedModel, encoder_kwargs: dict[str, Any] | None = None) -> str | None:
    """Reason not to verify several tokens of each row of a batch; `None` where each row is computed as it is alone.

    Raises:
        ProbeFailed: as of `probe`.
    """
    try:
        if model.config.is_encoder_decoder:
            encoder_kwargs = encoder_kwargs or tried(lambda _: encoded(model))
        tried(lambda attempt: _try_tree(_Sample(model, encoder_kwargs, attempt, num_rows=2)))
    except REFUSALS as exception:
        return f"several sequences at once do not work: {sentence(exception)}"
    return None


@torch.no_grad()
def rounds_alike(model: PreTrainedModel) -> bool:
    """Returns whether the logits of a tree's nodes are the bits of forwards of one token each.

    Raises:
        ProbeFailed: as of `probe`.
    """
    prompt, t = tokens_of(model, 0)

    def logits_of(*trees: DraftTree, nodes: list[int]) -> torch.Tensor:
        target = _runner(model, [prompt], arguments(model, _ids(model, [prompt]), {}), "tree")
        rows = []
        for tree in trees:
            target.texts[0].append(tree.tokens[0])
            rows.append(target.forward([tree])[0][nodes])
            target.commit([[0]])
        return torch.cat(rows)

    builder, right = _begun(t)
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
    if counts_masks_in_columns(model):
        return "its windows are counted in columns of the cache, of which a tree has more than its text"
    if not places_trees(model):
        of_cache = "its decoder takes positions from the cache"
        return of_cache if model.config.is_encoder_decoder else "its forward takes no position_ids"
    return None


class _Sample:
    """A text, or several of which the second is padded, computed plainly once for a tree and a chain.

    Attributes:
        coming: for each row the tokens that come after its prompt; the first three are computed, the others are wrong.
    """

    def __init__(
        self, model: PreTrainedModel, encoder_kwargs: dict[str, Any] | None, attempt: int, *, num_rows: int = 1
    ) -> None:
        self.model, self._encoder_kwargs = model, encoder_kwargs
        prompt, coming = tokens_of(model, attempt)
        self.prompts = [prompt, _padded(model, prompt)][:num_rows]
        self.coming = [coming[2 * row :] for row in range(num_rows)]
        self.wanted = self._read(_ids(model, self.prompts), _ids(model, [row[:NUM_READ] for row in self.coming]))
        self._tolerance = tolerance_of(model, self.wanted, lambda whole: self._read(whole, whole[:, :0]))

    def _read(self, prompt: torch.Tensor, coming: torch.Tensor) -> Reference:
        return reference(self.model, self._arguments(prompt), prompt, coming)

    def _arguments(self, ids: torch.Tensor) -> dict[str, Any]:
        """Arguments that `generate` hands to a decoding method for the rows."""
        if len(ids) == 1 or self._encoder_kwargs is not None:
            return arguments(self.model, ids, rows_of(self._encoder_kwargs or {}, [0] * len(ids), 1))
        mask = torch.ones_like(ids)
        mask[1, :PADDING] = 0
        return arguments(self.model, ids, {"attention_mask": mask})

    def begin(self, tier: Tier) -> ModelRunner:
        """A runner that has read the prompts, with the first token of each text after them."""
        kwargs = self._arguments(_ids(self.model, self.prompts))
        target = _runner(self.model, self.prompts, kwargs, tier)
        for text, coming in zip(target.texts, self.coming, strict=True):
            text.append(coming[0])
        return target

    def compare(self, rows: Sequence[torch.Tensor], nodes: Sequence[int], first: Sequence[int]) -> float:
        """The error of the logits of some nodes of each row, the first of which is the row's token `first`."""
        return max(
            self._tolerance.check_logits(logits[list(nodes)].float(), wanted[start : start + len(nodes)])
            for logits, wanted, start in zip(rows, self.wanted.logits, first, strict=False)
        )

    def compare_states(self, target: ModelRunner) -> None:
        """Check what is in the caller's cache once the three tokens are read."""
        target.close()
        self._tolerance.check_states(target.cache.handed_out, self.wanted.cache)

    def compare_modules(self) -> None:
        """Check states that modules keep next to the cache, of fixed shape, where the last token read is the text's."""
        tensors = [tensor for _, _, tensor in module_tensors(self.model)]
        pairs = [pair for pair in zip(tensors, self.wanted.kept, strict=False) if pair[0].shape == pair[1].shape]
        self._tolerance.check_states(
            [tensor for tensor, _ in pairs], [wanted for _, wanted in pairs], kept_by="modules"
        )


def _try_tree(sample: _Sample) -> float:
    """Trees that grow by one node, a rollback that leaves rows of different lengths, and chains; the right nodes are
    among wrong ones.
    """
    target, coming = sample.begin("tree"), sample.coming
    builders, (right, *_) = zip(*map(_begun, coming), strict=True)
    error = sample.compare(target.forward([builder.build() for builder in builders]), [0, right], [0, 0])
    for builder, t in zip(builders, coming, strict=True):
        builder.add(right, t[2])
    grown = target.forward([builder.build() for builder in builders])  # some drop the mask of one token
    error = max(error, sample.compare(grown, [0], [2, 2]))
    kept = [2, 1][: len(coming)]
    target.commit([[0, right][:count] for count in kept])
    for text, t, count in zip(target.texts, coming, kept, strict=True):
        for token in t[1 : count + 1]:
            text.append(token)
    chains = [DraftTree.chain(t[count], [t[5]]) for t, count in zip(coming, kept, strict=True)]
    error = max(error, sample.compare(target.forward(chains), [0], kept))
    target.commit([[0]] * len(coming))
    if len(coming) == 1:
        sample.compare_states(target)
    return error


def _try_chain(sample: _Sample) -> float:
    """A chain whose drafts are rejected, and one that is kept whole."""
    target, (t,) = sample.begin("chain"), sample.coming
    error = sample.compare(target.forward([DraftTree.chain(t[0], t[3:5])]), [0], [0])
    target.commit([[0]])
    target.texts[0].append(t[1])
    error = max(error, sample.compare(target.forward([DraftTree.chain(t[1], t[2:3])]), [0, 1], [1]))
    target.commit([[0, 1]])
    sample.compare_states(target)
    sample.compare_modules()
    return error


def _begun(t: list[int]) -> tuple[TreeBuilder, int]:
    """A tree with a right token beside a wrong one, which has another below it; and the right one's node."""
    builder = TreeBuilder(t[0])
    wrong, right = builder.add(0, t[3]), builder.add(0, t[1])
    builder.add(wrong, t[4])
    return builder, right


def _runner(model: PreTrainedModel, prompts: list[list[int]], kwargs: dict[str, Any], tier: Tier) -> ModelRunner:
    """A runner that has read prompts."""
    ids = _ids(model, prompts)
    texts = [TokenBuffer(row[None], room=16) for row in ids]
    target = ModelRunner(model, ids, GenerationConfig(), kwargs, texts, tier=tier)
    if target.tier != tier:
        raise UnsupportedModelError("its cache holds states besides keys and values")
    target.prefill()
    return target


def _ids(model: PreTrainedModel, rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, device=input_device(model))


def _padded(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """A shorter prompt after padding; decoders of an encoder's text begin together."""
    if model.config.is_encoder_decoder:
        return prompt
    padding = readable_padding(model, getattr(text_config(model.config), "pad_token_id", None))
    return [padding] * PADDING + prompt[PADDING:]
