"""Rejection sampling of drawn drafts, of one node or of all nodes of a tree without a read in between.

Each drawn token x in turn is accepted with probability min(1, p(x) / q(x)). If it is not, what is left of the target's
distribution is p <- norm(max(p - q, 0)), and the next one was drawn from q without x. The last p decides if none is
accepted, so that every token is distributed as p. Sources: https://arxiv.org/abs/2302.01318 and 2211.17192 for one
token, 2305.09781 and 2402.12374 for several without replacement.
"""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from hf_specdec.common.transfer import HOST, upload
from hf_specdec.errors import ConfigError

Array = npt.NDArray[Any]


class Rejections:
    """The tokens after some nodes of a tree.

    Which nodes are reached depends on earlier tokens, their own numbers do not: those of the others are left unused.

    Args:
        probabilities: `(T, vocab_size)` fp32, the target's.
        drafted_from: for each node `(vocab_size,)`, what its children were drawn from; `None` without children.
        drawn: for each node the tokens of its children, in the order of their draws: different ones. How many there are
            may not depend on the values of those that might have been left out.
        generator: of the device; `None` is the global one.

    Raises:
        ConfigError: what children were drawn from is not of this vocabulary.

    Attributes:
        result: `(T,)` each: whether the first drawn token is accepted, the second and so on, then the greatest p / e of
            what is left of the target's probabilities, and its token.
    """

    def __init__(
        self,
        probabilities: torch.Tensor,
        drafted_from: Sequence[torch.Tensor | None],
        drawn: Sequence[Sequence[int]],
        generator: torch.Generator | None,
    ) -> None:
        self._drawn = drawn
        width = max(map(len, drawn))
        accepted: list[torch.Tensor] = []
        if width:
            rows = [row for row in drafted_from if row is not None]
            for row in rows:
                _check_width(row, probabilities.shape[-1])
            none = torch.zeros_like(rows[0])
            q = torch.stack([none if row is None else row for row in drafted_from]).to(probabilities)
            # What fills a row up is drawn with probability 0 by then: a token of no row, or one that was drawn before.
            filled = [[*tokens, *[tokens[-1] if tokens else 0] * (width - len(tokens))] for tokens in drawn]
            tokens = upload(torch.tensor(filled, device=HOST), probabilities.device)  # (T, C)
            accepted, probabilities = _reject(probabilities, q, tokens, generator)
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
        drawn = self._drawn[node]
        return next((token for token, is_accepted in zip(drawn, accepted, strict=False) if is_accepted), int(last))


def _check_width(row: torch.Tensor, vocab_size: int) -> None:
    """Raise where what tokens were drawn from has more or fewer of them than the target."""
    if len(row) != vocab_size:
        rule = f"must have a probability for each of the target's {vocab_size} tokens"
        raise ConfigError("drafted_from", rule, f"of {len(row)} tokens", "Set those that are never drawn to 0.0.")


def _reject(
    p: torch.Tensor, q: torch.Tensor, drawn: torch.Tensor, generator: torch.Generator | None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns whether each token is accepted, `(T,)` for each of the C, and what is left of `p`, `(T, vocab_size)`."""
    accepted = []
    uniforms = torch.rand(drawn.shape, generator=generator, device=p.device, dtype=p.dtype)
    for place in range(drawn.shape[1]):
        token, uniform = drawn[:, place : place + 1], uniforms[:, place : place + 1]
        share = q.gather(1, token)  # (T, 1)
        was_drawn = share > 0.0  # else it was not drawn from q, and says nothing
        accepted.append((was_drawn & (uniform * share < p.gather(1, token))).squeeze(1))
        rest = (p - q).clamp_min_(0.0)
        total = rest.sum(dim=-1, keepdim=True)
        # p <= q everywhere is p = q but for rounding: then p itself is as good.
        p = torch.where(was_drawn & (total > 0.0), rest.div_(total), p)
        if place + 1 < drawn.shape[1]:
            q.scatter_(1, token, 0.0)
            q /= q.sum(dim=-1, keepdim=True).clamp_min_(torch.finfo(q.dtype).tiny)
    return accepted, p
