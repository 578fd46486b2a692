"""What each stage minimises. A pure function from (model, batch) to a loss in nats a token.

``next_token``  plain language modelling, for the target
``unloop``      language modelling, plus unlikelihood of the tokens with which the model's own greedy text loops
``distil``      the draft learns the target's distribution
"""

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

MAX_PERIOD, REPEATS = 48, 3


def next_token(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of every token but the first. `batch` is `(batch, window)`."""
    logits = _logits(model, batch)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def distil(model: PreTrainedModel, teacher: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the student under the teacher's distribution (its gradient is that of KL(teacher | student))."""
    with torch.no_grad():
        wanted = _logits(teacher, batch).softmax(-1)
    return F.cross_entropy(_logits(model, batch).flatten(0, 1), wanted.flatten(0, 1))


def unloop(
    model: PreTrainedModel, batch: torch.Tensor, *, prompt_length: int, new_tokens: int, rows: int, weight: float
) -> torch.Tensor:
    """Language modelling on half of `batch`, plus sequence-level unlikelihood (Welleck et al., arXiv 1908.04319).

    The model continues `rows` prompts of `prompt_length` tokens, cut out of the batch, greedily; every token that
    repeats what stood one period and two periods before it, with the whole period in between, is made less likely.
    """
    pieces = batch.unfold(1, prompt_length, prompt_length).flatten(0, 1)
    prompts = pieces[torch.linspace(0, len(pieces) - 1, rows).long()]
    model.eval()
    text = model.generate(input_ids=prompts, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None)
    model.train()
    loss = next_token(model, batch[: max(len(batch) // 2, 1)])
    looping = loop_mask(text)
    looping[:, :prompt_length] = False
    if not looping.any():
        return loss
    taken = _logits(model, text)[:, :-1].log_softmax(-1).gather(-1, text[:, 1:, None]).squeeze(-1)
    unlikely = -torch.log1p(-taken.exp().clamp(max=1 - 1e-4))
    return loss + weight * unlikely[looping[:, 1:]].sum() / (rows * new_tokens)


def loop_mask(ids: torch.Tensor) -> torch.Tensor:
    """Where a text goes round in circles: True from a period's third time on. `(batch, length)` bool, as `ids`.

    A period of p tokens counts from `REPEATS` times in a row on, and only over at least 8 tokens in all.
    """
    mask = torch.zeros_like(ids, dtype=torch.bool)
    length = ids.shape[1]
    for period in range(1, min(MAX_PERIOD, length // REPEATS) + 1):
        run = max(period * (REPEATS - 1), 8 - period)
        same = torch.zeros_like(mask)
        same[:, period:] = ids[:, period:] == ids[:, :-period]
        total = F.pad(same.int().cumsum(1), (1, 0))
        full = (total[:, run:] - total[:, :-run]) == run
        mask[:, run - 1 :] |= full
    return mask


def _logits(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """`(batch, window, vocab)` in fp32, computed in bf16."""
    with torch.autocast(batch.device.type, torch.bfloat16):
        logits: torch.Tensor = model(input_ids=batch, use_cache=False).logits
    return logits.float()
