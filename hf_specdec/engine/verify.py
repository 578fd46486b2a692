"""Verifies drafted tokens: pure functions over a tree and the target's choices.

The walk starts at the root. At each node the target chooses its next token, as plain decoding would at this point
of the text; if a child holds that token, the walk goes on there, else it ends. So every token is one that plain
decoding chose.
"""

from collections.abc import Callable
from dataclasses import dataclass

from hf_specdec.common.tree import DraftTree


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
