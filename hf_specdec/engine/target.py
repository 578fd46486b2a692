"""The target model behind one call: the prompt's forward, then forwards of trees, then what stays in the cache.

Knows nothing about drafters, sampling or stopping. After `prefill` (or `commit`) the cache holds the text but for
its last token; `forward` takes a tree whose root is that token.

    target = Target(model, input_ids, generation_config, model_kwargs, tier="tree")
    outputs = target.prefill()
    outputs = target.forward(tree, text)    # outputs.logits: (1, T, vocab_size)
    target.commit(verdict.path, len(tree))
    target.close()
"""

from typing import Any, Literal

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec import compat
from hf_specdec.engine.inputs import StepInputs
from hf_specdec.engine.kept import kept_cache
from hf_specdec.engine.text import Text
from hf_specdec.tree import DraftTree

__all__ = ["Target", "Tier"]

Tier = Literal["tree", "chain", "plain"]
RESERVE = 1024  # cache columns allocated at once behind the prompt, at most
MAX_DRAFT = 64  # columns that the last step may write beyond the text's end without growing the cache


class Target:
    """One call's target.

    Args:
        model_kwargs: those that `generate` hands to a decoding method.
        tier: `"tree"` or `"chain"`, as the model's capability says.
        keep_cache: whether anybody will look at the cache in `model_kwargs` afterwards.

    Raises:
        UnsupportedModelError: the cache cannot be rolled back.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *,
        tier: Tier,
        keep_cache: bool = True,
    ) -> None:
        self.model, self.input_ids, self.generation_config = model, input_ids, generation_config
        self.keep_cache = keep_cache
        length = input_ids.shape[1]
        longest = generation_config.max_length or length + RESERVE
        reserve = min(longest + MAX_DRAFT, length + RESERVE)
        self.cache = kept_cache(model_kwargs.get("past_key_values"), reserve=reserve)
        self.tier: Tier = tier if self.cache.takes_trees else "chain"
        self.kwargs = {**model_kwargs, "past_key_values": self.cache.model_cache}
        self._inputs: StepInputs | None = None
        self._uncommitted = False
        self._ahead = 0

    @property
    def position(self) -> int:
        """Position of the next root, or a little more where the prompt is padded."""
        return int(self.cache.model_cache.get_seq_length()) + self._ahead

    def prefill(self) -> Any:
        """The prompt's forward. `outputs.logits[:, -1]` decides the first token."""
        self._uncommitted = True
        outputs = compat.prefill(self.model, self.input_ids, self.generation_config, self.kwargs)
        self.cache.settle()
        self._uncommitted = False
        self.kwargs = compat.updated_kwargs(self.model, outputs, self.kwargs)
        self.kwargs["past_key_values"] = self.cache.model_cache
        self.kwargs.pop("logits_to_keep", None)
        positions = self.kwargs.get("position_ids")
        if positions is not None:  # a caller may count from elsewhere than 0
            self._ahead = max(int(positions[..., -1].max()) - self.position, 0)
        return outputs

    def forward(self, tree: DraftTree, text: Text) -> Any:
        """One forward of the tree's T tokens behind the cached text. `outputs.logits` is `(1, T, vocab_size)`."""
        if self._inputs is None:
            self._inputs = StepInputs(self.model, self.kwargs, text)
        inputs = self._inputs.of(tree, text)
        self._uncommitted = True
        return self.model(**inputs, return_dict=True)

    def commit(self, path: list[int], num_nodes: int) -> None:
        """Keep the keys and values of the nodes in `path`, of the `num_nodes` verified last."""
        self.cache.commit(path, num_nodes)
        self._uncommitted = False

    def close(self) -> None:
        """Give the caller's cache what plain generation would have left in it, also after an interrupted forward."""
        if self._uncommitted:
            self.cache.rollback()
        if self.keep_cache:
            self.cache.close()
