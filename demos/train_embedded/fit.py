"""One optimisation loop for every stage: Muon on the hidden matrices, AdamW on the rest, a schedule in time.

The learning rate follows the share of the time budget that is used, so a slow machine trains less instead of longer.
A checkpoint holds everything: killed at any moment, a stage goes on where it was.
"""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_specdec.tools.train.optimiser import Muon

logger = logging.getLogger(__name__)
WARM_UP, COOL_DOWN = 0.01, 0.6  # shares of the budget
REPORT_EVERY = 300.0  # seconds; checkpoints are saved as often


def fit(
    model: PreTrainedModel,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    batches: Iterator[torch.Tensor],
    *,
    checkpoint: Path,
    minutes: float,
    matrix_lr: float,
    other_lr: float,
    evaluate: Callable[[], dict[str, float]],
) -> None:
    """Trains `model` in place for `minutes`, the time before a resume counted in."""
    device = next(model.parameters()).device
    optimisers = _optimisers(model, matrix_lr, other_lr)
    used, step = 0.0, 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        used, step = state["seconds"], state["step"]
    budget, smooth, reported, tokens, began = 60 * minutes, 0.0, used, 0, used
    model.train()
    while used < budget:
        start = time.perf_counter()
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["peak_lr"] * _schedule(used / budget)
        batch = next(batches).to(device)
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + batch.numel()
        used += time.perf_counter() - start
        smooth = loss.item() if not smooth else 0.98 * smooth + 0.02 * loss.item()
        if used - reported >= REPORT_EVERY or used >= budget:
            rate = tokens / max(used - began, 1e-9)
            reported = used
            _save(checkpoint, model, optimisers, used, step)
            model.eval()
            line = "%s step %d, %.0f s, %.0f tokens/s, loss %.3f, %s"
            logger.info(line, checkpoint.stem, step, used, rate, smooth, evaluate())
            model.train()
    model.eval()


def _schedule(progress: float) -> float:
    """Linear warm-up, a plateau, then a linear way down to 2 % of the peak."""
    if progress < WARM_UP:
        return max(progress, 1e-3) / WARM_UP
    return max(min(1.0, (1.0 - progress) / COOL_DOWN), 0.02)


def _optimisers(model: PreTrainedModel, matrix_lr: float, other_lr: float) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    muon = Muon(matrices, matrix_lr, like_adamw=False)
    adamw = torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0)
    for optimiser, peak in ((muon, matrix_lr), (adamw, other_lr)):
        for group in optimiser.param_groups:
            group["peak_lr"] = peak
    return [muon, adamw]


def _save(
    path: Path, model: PreTrainedModel, optimisers: list[torch.optim.Optimizer], seconds: float, step: int
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    state = {
        "model": model.state_dict(),
        "optimisers": [o.state_dict() for o in optimisers],
        "seconds": seconds,
        "step": step,
    }
    torch.save(state, partial)
    partial.replace(path)
