"""Rows of different widths share a forward without padding: in a line, with the same logits."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.compat.caches import CACHE
from hf_specdec.forward.model_runner import ModelRunner
from hf_specdec.forward.text_rows import TokenBuffer
from tests.helpers.zoo import FAMILIES, build


def forked(root: int) -> DraftTree:
    builder = TreeBuilder(root)
    child = builder.add(0, 8)
    builder.add(0, 9)
    builder.add(child, 10)
    return builder.build()


def computed(model: Any, *, packs: bool) -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
    """The logits of three forwards of four rows, and the shapes of the ids that the model got."""
    shapes: list[tuple[int, ...]] = []
    ids = torch.randint(3, 90, (4, 20), generator=torch.Generator().manual_seed(0))
    texts = [TokenBuffer(ids[row : row + 1], room=64) for row in range(4)]
    kwargs = {CACHE: DynamicCache(config=model.config), "attention_mask": torch.ones_like(ids), "use_cache": True}
    runner = ModelRunner(model, ids, model.generation_config, kwargs, texts, tier="tree", keep_cache=False)
    if not packs:
        runner.__dict__["takes_packed_rows"] = False
    embeddings = model.get_input_embeddings()
    original, logits = embeddings.forward, []
    with torch.no_grad():
        runner.prefill()
        embeddings.forward = lambda inputs: shapes.append(tuple(inputs.shape)) or original(inputs)
        for width in range(3):
            trees = [DraftTree.chain(7, range(8, 8 + width * row)) for row in range(4)]
            trees[1] = forked(7)
            for text in texts:
                text.append(7)
            logits += [part.clone() for part in runner.forward(trees)]
            runner.commit([[0], [0, 2], [0], [0, 1] if width else [0]])
            texts[1].append(9)
            if width:
                texts[3].append(8)
    del embeddings.forward
    return logits, shapes


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral", "deepseek_v3"])
def test_packed_rows_have_the_logits_of_padded_ones(family: str) -> None:
    model = build(FAMILIES[family])
    packed, shapes = computed(model, packs=True)
    padded, wide = computed(model, packs=False)
    torch.testing.assert_close(packed, padded, atol=2e-5, rtol=2e-5)
    assert shapes == [(1, 7), (1, 1 + 4 + 3 + 4), (1, 1 + 4 + 5 + 7)]
    assert wide == [(4, 4), (4, 4), (4, 7)]


def test_nothing_is_packed_where_rows_are_equally_wide_or_a_hook_sees_them() -> None:
    model = build(FAMILIES["llama"])
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert computed(model, packs=True)[1] == computed(model, packs=False)[1]
    handle.remove()
    assert computed(model, packs=True)[1] != computed(model, packs=False)[1]
