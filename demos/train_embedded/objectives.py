"""What each stage minimises. A pure function from (model, batch) to a loss in nats a token.

``next_token``  plain language modelling, for the target
``unloop``      language modelling, and at one token of each loop that the model writes another one likelier
``distil``      the draft learns the target's distribution
"""

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from demos.train_embedded.loop_free import LoopFreeText
from hf_specdec.compat import computes_bf16

BELOW = 0.6  # a token that would go on with a loop, to the likeliest other one


def next_token(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of every token but the first. `batch` is `(batch, window)`."""
    logits = _logits(model, batch)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def distil(model: PreTrainedModel, teacher: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the student under the teacher's distribution (its gradient is that of KL(teacher | student))."""
    with torch.no_grad():
        wanted = _logits(teacher, batch).softmax(-1)
    return F.cross_entropy(_logits(model, batch).flatten(0, 1), wanted.flatten(0, 1))


def unloop(model: PreTrainedModel, batch: torch.Tensor, texts: list[LoopFreeText], *, weight: float) -> torch.Tensor:
    """`next_token` of `batch`, and that no avoided token of `texts` is the likeliest.

    At each place of avoided tokens it adds the divergence of `model` from its own distribution in which these are at
    most `BELOW` times as likely as the likeliest other token. A place counts `weight` times a token of `batch`.
    """
    loss = next_token(model, batch)
    if not texts:
        return loss
    tokens_at: dict[tuple[int, int], list[int]] = {}
    for row, text in enumerate(texts):
        for place, token in text.avoided:
            tokens_at.setdefault((row, place), []).append(token)
    rows, places = torch.tensor(list(tokens_at), device=batch.device).T
    ids = torch.tensor([text.ids for text in texts], device=batch.device)[:, : int(places.max())]
    scores = _logits(model, ids)[rows, places - 1]
    avoided = torch.zeros_like(scores, dtype=torch.bool)
    for mask, tokens in zip(avoided, tokens_at.values(), strict=True):
        mask[tokens] = True
    own = scores.detach().softmax(-1)
    most = BELOW * own.masked_fill(avoided, 0.0).amax(-1, keepdim=True)
    wanted = torch.where(avoided, own.minimum(most), own)
    wanted = wanted / wanted.sum(-1, keepdim=True)
    return loss + weight * F.kl_div(scores.log_softmax(-1), wanted, reduction="sum") / batch.numel()


def _logits(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """`(batch, window, vocab)` in fp32, computed in bf16 where that is not slower."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=computes_bf16(batch.device)):
        logits: torch.Tensor = model(input_ids=batch, use_cache=False).logits
    return logits.float()
