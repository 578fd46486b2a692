"""The draft tree: what a drafter proposes and the target verifies in one forward."""

from hf_specdec.common.tree.draft_tree import ANY_DEPTH, DraftTree, TreeBuilder
from hf_specdec.common.tree.extra_tokens import ExtraTokens

__all__ = ["ANY_DEPTH", "DraftTree", "ExtraTokens", "TreeBuilder"]
