"""Probes whether a model verifies the rows of a batch, padded and of different lengths, by trying two of them.

The reference is the same batch as plain `generate` drives it: token by token.
"""

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.compat.devices import input_device
from hf_specdec.compat.models import readable_padding, text_config
from hf_specdec.forward.capabilities.attempts import REFUSALS, sentence, tolerance_of, tried
from hf_specdec.forward.capabilities.reference import Reference, arguments, encoded, reference, tokens_of
from hf_specdec.forward.forward_arguments import rows_of
from hf_specdec.forward.model_runner import ModelRunner
from hf_specdec.forward.token_buffer import TokenBuffer

PADDING = 3  # tokens in front of the second row
NUM_COMING = 3  # tokens of each row that are computed


@torch.no_grad()
def probe_rows(model: PreTrainedModel, encoder_kwargs: dict[str, Any] | None = None) -> str | None:
    """Reason not to verify several tokens of each row of a batch; `None` where each row is computed as it is alone.

    Raises:
        ProbeFailed: a fault that may pass; it says nothing of the model.
    """
    try:
        tried(lambda attempt: _try_rows(model, encoder_kwargs, attempt))
    except REFUSALS as exception:
        return f"several sequences at once do not work: {sentence(exception)}"
    return None


def _try_rows(model: PreTrainedModel, encoder_kwargs: dict[str, Any] | None, attempt: int) -> None:
    """Two steps, before the second of which the rows differ in length."""
    prompt, t = tokens_of(model, attempt)
    if model.config.is_encoder_decoder:
        encoder_kwargs = encoder_kwargs or encoded(model)
    ids = torch.tensor([prompt, _padded(model, prompt)], device=input_device(model))
    coming = [t[:NUM_COMING], t[2 : 2 + NUM_COMING]]

    def read(first: torch.Tensor, rest: torch.Tensor) -> Reference:
        return reference(model, _arguments(model, first, encoder_kwargs), first, rest)

    wanted = read(ids, ids.new_tensor(coming))
    tolerance = tolerance_of(model, wanted, lambda whole: read(whole, whole[:, :0]))
    texts = [TokenBuffer(ids[row : row + 1], room=16) for row in range(2)]
    target = ModelRunner(model, ids, GenerationConfig(), _arguments(model, ids, encoder_kwargs), texts, tier="tree")
    target.prefill()
    done = [0, 0]  # tokens of `coming` before each row's root
    for accepted in ((1, 0), (0, 0)):
        trees = []
        for row, text in enumerate(texts):
            _extend(text, prompt, coming[row][: done[row] + 1])
            trees.append(_tree(coming[row][done[row] :], wrong=t[7]))
        logits = target.forward([tree for tree, _ in trees])
        for row, (_, path) in enumerate(trees):
            expected = wanted.logits[row, done[row] : done[row] + len(path)]
            tolerance.check_logits(logits[row][path].float(), expected)
        target.commit([path[: count + 1] for (_, path), count in zip(trees, accepted, strict=True)])
        done = [before + count + 1 for before, count in zip(done, accepted, strict=True)]


def _extend(text: TokenBuffer, prompt: list[int], coming: list[int]) -> None:
    """Let a text hold these tokens after its prompt."""
    for token in coming[len(text) - len(prompt) :]:
        text.append(token)


def _tree(coming: list[int], *, wrong: int) -> tuple[DraftTree, list[int]]:
    """A tree of the right tokens and a wrong one, and the right ones' nodes."""
    builder, path = TreeBuilder(coming[0]), [0]
    builder.add(0, wrong)
    for token in coming[1:]:
        path.append(builder.add(path[-1], token))
    return builder.build(), path


def _padded(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """A shorter prompt after padding; decoders of an encoder's text begin together."""
    if model.config.is_encoder_decoder:
        return prompt
    padding = readable_padding(model, getattr(text_config(model.config), "pad_token_id", None))
    return [padding] * PADDING + prompt[PADDING:]


def _arguments(model: PreTrainedModel, ids: torch.Tensor, encoder_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Arguments that `generate` hands to a decoding method for the two rows."""
    if encoder_kwargs is not None:
        return arguments(model, ids, rows_of(encoder_kwargs, [0, 0], 1))
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    return arguments(model, ids, {"attention_mask": mask})
