"""The draft tree: what a drafter proposes and the target verifies in one forward."""

from hf_specdec.common.tree.draft_tree import ANY_DEPTH, DraftTree, ExtraTokens
from hf_specdec.common.tree.tree_builder import TreeBuilder

__all__ = ["ANY_DEPTH", "DraftTree", "ExtraTokens", "TreeBuilder"]
