"""Whether sampled texts come as often as the target alone would write them, judged by their first two tokens."""

from typing import Any, NamedTuple

import torch

from tests.helpers.drafts import chi_square, critical_value
from tests.helpers.support import PROMPT, plain

__all__ = ["Comparison", "compare_pairs"]


class Comparison(NamedTuple):
    """Pearson's statistic, what a right run exceeds once in a million, and how many drafted tokens were accepted."""

    statistic: float
    bound: float
    num_accepted: int


def compare_pairs(model: Any, logits_processor: dict[str, Any], *, num_texts: int, **how: Any) -> Comparison:
    """Draw texts and compare them with the exact distribution.

    Args:
        logits_processor: arguments of `generate` that leave few tokens, such as `top_k`.
        how: arguments of `generate` that choose the method.
    """
    torch.manual_seed(0)
    output = model.generate(
        PROMPT,
        num_return_sequences=num_texts,
        do_sample=True,
        max_new_tokens=4,
        return_dict_in_generate=True,
        **logits_processor,
        **how,
    )
    length, seen = PROMPT.shape[1], dict[tuple[int, ...], int]()
    for pair in map(tuple, output.sequences[:, length : length + 2].tolist()):
        seen[pair] = seen.get(pair, 0) + 1
    value, degrees = chi_square(seen, _exact_pairs(model, logits_processor))
    return Comparison(value, critical_value(degrees), output.spec_stats.num_accepted_tokens)


def _exact_pairs(model: Any, logits_processor: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """What plain sampling draws as the next two tokens."""

    def row(ids: torch.Tensor) -> torch.Tensor:
        options = {"do_sample": True, "max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True}
        return torch.softmax(plain(model, ids, **options, **logits_processor).scores[0][0], dim=-1)

    first = row(PROMPT)
    cells: dict[tuple[int, ...], float] = {}
    for token in first.nonzero().flatten().tolist():
        second = row(torch.cat([PROMPT, torch.tensor([[token]])], dim=1))
        for after in second.nonzero().flatten().tolist():
            cells[token, after] = float(first[token] * second[after])
    return cells
