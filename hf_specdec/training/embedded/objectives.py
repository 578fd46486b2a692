"""What each stage minimises. A pure function from (model, batch) to a loss in nats a token.

``next_token``  plain language modelling, for the target
``unloop``      language modelling, plus distillation of texts in which the model began no loop
``distil``      the draft learns the target's distribution
"""

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from hf_specdec.compat import computes_bf16
from hf_specdec.training.embedded.loops import LooplessTexts


def next_token(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of every token but the first. `batch` is `(batch, window)`."""
    logits = _logits(model, batch)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def distil(model: PreTrainedModel, teacher: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the student under the teacher's distribution (its gradient is that of KL(teacher | student))."""
    with torch.no_grad():
        wanted = _logits(teacher, batch).softmax(-1)
    return F.cross_entropy(_logits(model, batch).flatten(0, 1), wanted.flatten(0, 1))


def unloop(model: PreTrainedModel, batch: torch.Tensor, texts: LooplessTexts, *, weight: float) -> torch.Tensor:
    """`next_token` of `batch`, plus the cross-entropy of `texts` under the distributions they were chosen from.

    A token counts `1 + weight * q` times, q being what the model gave to the tokens that would have begun a loop.
    """
    prompt_length = texts.ids.shape[1] - texts.wanted.shape[1]
    logits = _logits(model, texts.ids)[:, prompt_length - 1 : -1]
    loss = F.cross_entropy(logits.flatten(0, 1), texts.wanted.flatten(0, 1), reduction="none")
    own = (loss * (1 + weight * texts.taken.flatten())).sum() / batch.numel()
    return next_token(model, batch) + own


def _logits(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """`(batch, window, vocab)` in fp32, computed in bf16 where that is not slower."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=computes_bf16(batch.device)):
        logits: torch.Tensor = model(input_ids=batch, use_cache=False).logits
    return logits.float()
