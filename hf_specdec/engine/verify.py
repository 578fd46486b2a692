"""Which drafted tokens are part of the text: pure functions over a tree and the target's choices.

The walk starts at the root. At each node the target chooses its next token, as plain decoding would at this point
of the text; if a child holds that token, the walk goes on there, else it ends. So every token is one that plain
decoding chose.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hf_specdec.tree import DraftTree

__all__ = ["VerifyResult", "rejection_sample", "verify_tree"]


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The outcome of one verify step.

    Attributes:
        tokens (`list[int]`): tokens added to the text; the last one's key and value are not in the cache.
        path (`list[int]`): nodes from the root on that are part of the text; as many as `tokens`.
    """

    tokens: list[int]
    path: list[int]

    @property
    def num_accepted(self) -> int:
        """Drafted tokens among `tokens`."""
        return len(self.path) - 1


def verify_tree(tree: DraftTree, choose: Callable[[int], tuple[int, bool]]) -> VerifyResult:
    """Follow the target's choices down `tree`.

    Args:
        tree: the verified tree.
        choose: called once per emitted token with the node whose row decides it; returns the token and whether the
            text ends with it.
    """
    node, path, tokens = 0, [0], []
    while True:
        token, stop = choose(node)
        tokens.append(token)
        child = tree.child(node, token)
        if stop or child is None:
            break
        path.append(child)
        node = child
    return VerifyResult(tokens, path)


def rejection_sample(
    p: torch.Tensor, q: torch.Tensor, drawn: Sequence[int], generator: torch.Generator | None = None
) -> int:
    """A token distributed as `p`, one of `drawn` as often as that allows.

    Each drawn token x in turn is accepted with probability min(1, p(x) / q(x)). If it is not, what is left of the
    target's distribution is p <- norm(max(p - q, 0)), and the next one was drawn from q without x. The last p decides
    if none is accepted. Sources: https://arxiv.org/abs/2302.01318 and 2211.17192 for one token, 2305.09781 and
    2402.12374 for several without replacement.

    Args:
        p: `(vocab_size,)` fp32, the target's probabilities.
        q: `(vocab_size,)` fp32, the probabilities that the first of `drawn` was drawn from.
        drawn: different tokens, each drawn from `q` without those before it. How many there are may not depend on
            the values of those that might have been left out.
        generator: of `p`'s device; `None` is the global one. One uniform number a drawn token, then one multinomial
            draw, as far as they are needed.
    """
    q = q.to(p.device, copy=True)
    for token in drawn:
        share = q[token]
        was_drawn = share > 0.0  # else it was not drawn from q, and says nothing
        uniform = torch.rand((), generator=generator, device=p.device, dtype=p.dtype)
        if was_drawn & (uniform * share < p[token]):
            return token
        rest = (p - q).clamp_min_(0.0)
        total = rest.sum()
        # p <= q everywhere is p = q but for rounding: then p itself is as good.
        p = torch.where(was_drawn & (total > 0.0), rest / total, p)
        q[token] = 0.0
        q /= q.sum().clamp_min(torch.finfo(q.dtype).tiny)
    return int(torch.multinomial(p, num_samples=1, generator=generator))
