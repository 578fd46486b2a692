"""Rejection sampling of drawn drafts, of one node or of all nodes of a chain without a read in between.

A drawn token x is accepted with probability min(1, p(x) / q(x)). If it is not, what is left of the target's
distribution decides, norm(max(p - q, 0)), so that every token is distributed as p. Sources:
https://arxiv.org/abs/2302.01318 and 2211.17192.
"""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from hf_specdec.common.transfer import HOST, upload

Array = npt.NDArray[Any]


class Rejections:
    """The tokens after some nodes of a chain.

    Which nodes are reached depends on earlier tokens, their own numbers do not: those of the others are left unused.

    Args:
        probabilities: `(T, vocab_size)` fp32, the target's.
        drafted_from: for each node `(vocab_size,)`, what its child was drawn from; `None` without a child.
        drawn: for each node the token of its child; any number without one.
        generator: of the device; `None` is the global one.

    Attributes:
        result: `(T,)` each: whether the drawn token is accepted, where there are any; the greatest p / e of what is
            left of the target's probabilities, and its token.
    """

    def __init__(
        self,
        probabilities: torch.Tensor,
        drafted_from: Sequence[torch.Tensor | None],
        drawn: Sequence[int],
        generator: torch.Generator | None,
    ) -> None:
        self._drawn = drawn
        accepted: list[torch.Tensor] = []
        rows = [row for row in drafted_from if row is not None]
        if rows:
            none = torch.zeros_like(rows[0])
            q = torch.stack([none if row is None else row for row in drafted_from]).to(probabilities)
            tokens = upload(torch.tensor(drawn, device=HOST), probabilities.device)[:, None]  # (T, 1)
            is_accepted, probabilities = _reject(probabilities, q, tokens, generator)
            accepted.append(is_accepted)
        noise = torch.empty_like(probabilities).exponential_(generator=generator)
        self.result = (*accepted, *(probabilities / noise).max(dim=-1))
        self._read: Sequence[Array] = ()

    def load(self, read: Sequence[Array]) -> None:
        """Take what was read of `result`."""
        self._read = read

    def token_after(self, node: int) -> int | None:
        """`None` where the probabilities are no numbers."""
        *accepted, greatest, last = (part[node] for part in self._read)
        if not greatest > 0.0:
            return None
        return self._drawn[node] if accepted and accepted[0] else int(last)


def _reject(
    p: torch.Tensor, q: torch.Tensor, drawn: torch.Tensor, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns whether each token of `(T, 1)` is accepted, `(T,)`, and what is left of `p`, `(T, vocab_size)`."""
    uniform = torch.rand(drawn.shape, generator=generator, device=p.device, dtype=p.dtype)
    share = q.gather(1, drawn)
    was_drawn = share > 0.0  # else it was not drawn from q, and says nothing
    is_accepted = (was_drawn & (uniform * share < p.gather(1, drawn))).squeeze(1)
    rest = (p - q).clamp_min_(0.0)
    total = rest.sum(dim=-1, keepdim=True)
    # p <= q everywhere is p = q but for rounding: then p itself is as good.
    return is_accepted, torch.where(was_drawn & (total > 0.0), rest.div_(total), p)
