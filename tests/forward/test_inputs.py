"""The arguments of a verify step: ids, positions and masks, as plain decoding would count them."""

from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache, GenerationConfig
from transformers.modeling_outputs import BaseModelOutput

from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.compat.caches import CACHE
from hf_specdec.forward.inputs import rows_of
from hf_specdec.forward.model_runner import ModelRunner
from hf_specdec.forward.text_rows import TokenBuffer
from tests.helpers.zoo import FAMILIES, build

IDS = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
MASK = (IDS > 0).long()


@pytest.fixture(scope="module")
def llama() -> object:
    return build(FAMILIES["llama"])


@pytest.fixture
def seen(llama: object, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """What each forward gets."""
    calls: list[dict[str, torch.Tensor]] = []
    inner = type(llama).forward

    def forward(self: object, **kwargs: object) -> object:
        calls.append({name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)})
        return inner(self, **kwargs)

    monkeypatch.setattr(llama, "forward", forward.__get__(llama))
    return calls


def runner(model: object, rows: slice) -> tuple[ModelRunner, list[TokenBuffer]]:
    """A runner that has read the prompts of some rows."""
    ids, mask = IDS[rows], MASK[rows]
    texts = [TokenBuffer(ids[row : row + 1], room=9) for row in range(len(ids))]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    kwargs = {"attention_mask": mask, "position_ids": positions, CACHE: DynamicCache(), "use_cache": True}
    result = ModelRunner(model, ids, GenerationConfig(max_length=20), kwargs, texts, tier="tree", keep_cache=False)
    with torch.no_grad():
        result.prefill()
    for text in texts:
        text.append(11)
    return result, texts


def fork(root: int) -> DraftTree:
    builder = TreeBuilder(root)
    builder.add(0, 12), builder.add(0, 13), builder.add(1, 14)
    return builder.build()


@torch.no_grad()
def test_a_chain_counts_on_and_needs_no_mask_of_ours(llama: object, seen: list[dict[str, torch.Tensor]]) -> None:
    target, _ = runner(llama, slice(0, 1))
    target.forward([DraftTree.chain(11, [12, 13])])
    assert seen[-1]["input_ids"].tolist() == [[11, 12, 13]]
    assert seen[-1]["position_ids"].tolist() == [[2, 3, 4]], "padding is not counted"
    assert seen[-1]["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1, 1]]


@torch.no_grad()
def test_siblings_stand_at_one_position_and_do_not_see_each_other(
    llama: object, seen: list[dict[str, torch.Tensor]]
) -> None:
    target, _ = runner(llama, slice(0, 1))
    target.forward([fork(11)])
    assert seen[-1]["position_ids"].tolist() == [[2, 3, 3, 4]]
    mask = seen[-1]["attention_mask"]  # (1, 1, 4, 8)
    visible = (mask if mask.dtype == torch.bool else mask >= 0)[0, 0].int().tolist()
    assert visible == [
        [0, 0, 1, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0, 1, 0],
        [0, 0, 1, 1, 1, 1, 0, 1],
    ]


@torch.no_grad()
@pytest.mark.parametrize(
    ("tree", "after"), [(lambda token: DraftTree.chain(token, [15, 16]), [6, 7]), (fork, [6, 6, 7])]
)
def test_tokens_that_the_cache_lacks_count_on_before_the_root(
    llama: object, seen: list[dict[str, torch.Tensor]], tree: Callable[[int], DraftTree], after: list[int]
) -> None:
    target, (text,) = runner(llama, slice(0, 1))
    target.forward([DraftTree.chain(11)])
    target.commit([[0]])
    for token in (12, 13, 14):
        text.append(token)
    target.forward([tree(14)])
    assert seen[-1]["input_ids"][0, :3].tolist() == [12, 13, 14]
    assert seen[-1]["position_ids"].tolist() == [[3, 4, 5, *after]]


@torch.no_grad()
@pytest.mark.parametrize("packs", [True, False])
def test_rows_of_different_lengths_count_each_from_its_own_end(
    llama: object, seen: list[dict[str, torch.Tensor]], packs: bool
) -> None:
    target, texts = runner(llama, slice(0, 2))
    target.__dict__["takes_packed_rows"] = packs
    target.forward([DraftTree.chain(11, [12, 13])] * 2)
    target.commit([[0, 1, 2], [0]])
    for token in (12, 13, 14):
        texts[0].append(token)
    texts[1].append(15)
    target.forward([DraftTree.chain(14), DraftTree.chain(15, [16])])
    ids, positions = ([[14, 15, 16]], [[5, 5, 6]]) if packs else ([[14, 14], [15, 16]], [[5, 5], [5, 6]])
    assert seen[-1]["input_ids"].tolist() == ids, "the shorter tree is padded with its last token, or packed"
    assert seen[-1]["position_ids"].tolist() == positions
    mask = seen[-1]["attention_mask"]  # (2, 1, 2, 9)
    visible = (mask if mask.dtype == torch.bool else mask >= 0)[:, 0].int()
    assert visible[0, 0].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 0]
    assert visible[1].tolist() == [[1, 1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 0, 0]]


def test_rows_of_takes_what_has_one_entry_a_row() -> None:
    kwargs = {
        "attention_mask": torch.arange(6).view(3, 2),
        "position_ids": torch.arange(24).view(2, 3, 4),
        "encoder_outputs": BaseModelOutput(last_hidden_state=torch.arange(12).view(3, 2, 2)),
        "scale": torch.tensor(2.0),
        "name": "kept",
    }
    result = rows_of(kwargs, [2, 0], 3)
    assert result["attention_mask"].tolist() == [[4, 5], [0, 1]]
    assert torch.equal(result["position_ids"], kwargs["position_ids"][:, [2, 0]])
    assert torch.equal(result["encoder_outputs"].last_hidden_state, kwargs["encoder_outputs"].last_hidden_state[[2, 0]])
    assert (result["scale"], result["name"]) == (2.0, "kept")


@torch.no_grad()
def test_hidden_states_are_those_of_the_layers_that_were_asked_for(llama: object) -> None:
    """Of the prompt's tokens and of each node, as a plain forward of the same text gives them."""
    ids = IDS[1:]
    text = TokenBuffer(ids, room=9)
    target = ModelRunner(
        llama,
        ids,
        GenerationConfig(max_length=20),
        {CACHE: DynamicCache(), "use_cache": True, "position_ids": torch.arange(4)[None]},
        [text],
        tier="tree",
        hidden_layers=(1, 3),
    )
    target.prefill()
    text.append(11)
    expected = llama(ids, output_hidden_states=True).hidden_states
    for result, layer in zip(target.states_read(0), (1, 3), strict=True):
        torch.testing.assert_close(result, expected[layer][0], atol=1e-5, rtol=1e-4)
    target.forward([fork(11)])
    states = target.states_read(0)
    for path in ([0, 1, 3], [0, 2]):
        tokens = torch.tensor([[*ids[0].tolist(), *(fork(11).tokens[node] for node in path)]])
        expected = llama(tokens, output_hidden_states=True).hidden_states
        for result, layer in zip(states, (1, 3), strict=True):
            torch.testing.assert_close(result[path], expected[layer][0, 4:], atol=1e-5, rtol=1e-4)
