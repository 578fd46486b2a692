"""DFlash heads from files: the network against the `speculators` package, both forms on disk, errors."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hf_specdec
from hf_specdec.common.tree import DraftTree
from hf_specdec.errors import ConfigError
from hf_specdec.forward.networks.block_runner import BlockRunner
from hf_specdec.forward.networks.head_base import HeadCall
from hf_specdec.loading.drafts import is_draft_head
from hf_specdec.methods.common.draft_head import AttentionSpan
from hf_specdec.methods.dflash.network import DFlashHead, DFlashHeadConfig

load_head = DFlashHead.read
FIXTURES = Path(__file__).parents[2] / "fixtures" / "dflash"
VARIANTS = sorted(folder.name for folder in FIXTURES.iterdir())
ANCHORS = (1, 6, 13)
VOCAB = 48


def runner_of(head: DFlashHead, target: dict[str, torch.Tensor], texts: list[list[int]]) -> BlockRunner:
    """The head's side of a call for these prompts, on the embeddings and the output head of `target`."""

    def project(states: torch.Tensor) -> torch.Tensor:
        return states @ target["lm_head"].T

    def embed(ids: torch.Tensor) -> torch.Tensor:
        return target["embed_tokens"][ids]

    call = HeadCall(
        prompts=texts,
        embed=embed,
        hidden_layers=head.layer_ids(4),
        vocab_size=VOCAB,
        relative_cost=1.0,
        device=torch.device("cpu"),
    )
    return BlockRunner(head, call, head.lm_head or project)


def rows_of(head: DFlashHead, expected: dict[str, torch.Tensor], anchors: list[int], *, split: int = 0) -> Any:
    """What the head says of the blocks at these anchors, one a row of a batch, over the target's vocabulary.

    Args:
        split: tokens that are read by a step of their own, with a block whose drafts are all rejected.
    """
    ids, features = expected["input_ids"].tolist(), expected["hidden_states"].chunk(2, dim=-1)
    starts = [max(anchor - split, 0) if split else anchor for anchor in anchors]
    runner = runner_of(head, expected, [ids[:start] for start in starts])
    scorers = [runner.row(row) for row in range(len(anchors))]
    for row, start in enumerate(starts):
        runner.read(row, [layer[:start] for layer in features])
    if split:
        for row, start in enumerate(starts):
            runner.keep(row, ids[start : start + 1])
        runner.score([DraftTree.chain(ids[start]) for start in starts])
        for row, (start, anchor) in enumerate(zip(starts, anchors, strict=True)):
            runner.keep(row, ids[start + 1 : anchor + 1])
            runner.read(row, [layer[start:anchor] for layer in features])
    else:
        for row, anchor in enumerate(anchors):
            runner.keep(row, ids[anchor : anchor + 1])
    paths = [expected[f"tokens_{anchor}"][: head.num_drafted].tolist() for anchor in anchors]
    trees = [DraftTree.chain(path[0], path[1:]) for path in paths]
    assert [scorer.max_draft_len for scorer in scorers] == [head.num_drafted] * len(anchors)
    return [rows.logits for rows in runner.score(list(trees))]


def over_target(head: DFlashHead, rows: torch.Tensor) -> torch.Tensor:
    if head.target_ids is None:
        return rows
    return torch.full((len(rows), VOCAB), float("-inf")).index_copy_(1, head.target_ids, rows)


@pytest.mark.parametrize("split", [0, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_head_drafts_what_the_speculators_package_drafts(name: str, split: int) -> None:
    """Alone and as rows of a batch; over a whole prompt, and over one that a second step goes on with."""
    head, expected = load_head(FIXTURES / name), load_file(FIXTURES / name / "expected.safetensors")
    anchors = [anchor for anchor in ANCHORS if anchor > split]
    batch = rows_of(head, expected, anchors, split=split)
    for anchor, rows in zip(anchors, batch, strict=True):
        wanted = over_target(head, expected[f"logits_{anchor}"])
        torch.testing.assert_close(rows, wanted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(rows_of(head, expected, [anchor])[0], wanted, atol=1e-4, rtol=1e-4)


def test_only_the_request_that_computes_a_block_costs_a_forward() -> None:
    head, expected = load_head(FIXTURES / VARIANTS[0]), load_file(FIXTURES / VARIANTS[0] / "expected.safetensors")
    ids, features = expected["input_ids"].tolist(), expected["hidden_states"].chunk(2, dim=-1)
    runner = runner_of(head, expected, [ids[:6]])
    scorer = runner.row(0)
    runner.read(0, [layer[:6] for layer in features])
    for start in (6, 7):
        runner.keep(0, ids[start : start + 1])
        assert scorer.relative_cost == 1.0
        runner.score([DraftTree.chain(ids[start])])
        assert scorer.relative_cost == 0.0
        runner.read(0, [layer[start : start + 1] for layer in features])


def as_authors(source: Path, folder: Path, *, nested: bool) -> None:
    """The same head in the flat form, its own fields next to the layers' or in a `dflash_config`."""
    values = json.loads((source / "config.json").read_text())
    fields = {name: values[name] for name in ("mask_token_id", "block_size")}
    fields["target_layer_ids"] = [layer - 1 for layer in values["aux_hidden_state_layer_ids"]]
    if "sliding" in source.name:
        fields["causal"] = not values["sliding_window_non_causal"]
    flat = {"architectures": ["DFlashDraftModel"], **values["transformer_layer_config"]}
    flat |= {"dflash_config": fields} if nested else fields
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(flat))
    shutil.copy(source / "model.safetensors", folder)


@pytest.mark.parametrize("nested", [True, False])
def test_the_authors_form_is_the_same_head(nested: bool, tmp_path: Path) -> None:
    name = "dflash"
    as_authors(FIXTURES / name, tmp_path, nested=nested)
    assert is_draft_head(tmp_path)
    ours, theirs = hf_specdec.AutoDraftHead.from_pretrained(tmp_path), load_head(FIXTURES / name)
    assert isinstance(ours, DFlashHead)
    assert ours.layer_ids(4) == theirs.layer_ids(4) == (1, 3)
    expected = load_file(FIXTURES / name / "expected.safetensors")
    for rows, other in zip(rows_of(ours, expected, [6]), rows_of(theirs, expected, [6]), strict=True):
        torch.testing.assert_close(rows, other)


LAYERS = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
FLAT = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_attention_heads": 2, **LAYERS}
OWN = {"mask_token_id": 47, "block_size": 4, "target_layer_ids": [0, 2]}


@pytest.mark.parametrize(
    ("fields", "span", "sliding"),
    [
        ({}, AttentionSpan(), None),
        ({"causal": True}, AttentionSpan(None, 0), None),
        ({"use_swa": True, "swa_window_size": 7}, AttentionSpan(), AttentionSpan(6, 0)),
        ({"use_swa": True, "swa_window_size": 7, "causal": False}, AttentionSpan(), AttentionSpan(6, 6)),
    ],
)
def test_which_keys_layers_see(fields: dict[str, Any], span: AttentionSpan, sliding: AttentionSpan | None) -> None:
    """As vLLM reads the authors' files: layers with a window look back, unless a field says otherwise."""
    config = DFlashHeadConfig.from_dict({**FLAT, "dflash_config": {**OWN, **fields}})
    assert (config.span, config.sliding_span) == (span, sliding)


def test_layers_of_a_file_that_names_none() -> None:
    """Evenly from the second layer to the last but two, as in the authors' program; one layer reads the middle."""
    left = {name: value for name, value in OWN.items() if name != "target_layer_ids"}
    for num_layers, ids in ((5, (2, 10, 18, 26, 34)), (1, (19,))):
        values = {**FLAT, "num_hidden_layers": num_layers, "num_target_layers": 36, "dflash_config": left}
        assert DFlashHeadConfig.from_dict(values).layer_ids == ids


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "`architectures` must name DFlashDraftModel"),
        ({"speculators_model_type": "xpress"}, "speculators_model_type"),
        ({"speculators_model_type": "dflash"}, "`transformer_layer_config` must be"),
        ({"dflash_config": {**OWN, "attention_sink_bias": True}}, "`attention_sink_bias` must be False"),
        ({"is_neox_style": False}, "`is_neox_style` must be True"),
        ({"block_size": 1}, "`block_size` must leave room"),
        ({"target_layer_ids": [1, 1]}, "`target_layer_ids` must be different"),
        ({"draft_vocab_size": 90}, "`draft_vocab_size` must be from 1 to"),
        ({"use_swa": True}, "`sliding_window` must be given"),
        ({"architectures": ["DFlash2DraftModel"]}, "`architectures` must name DFlashDraftModel"),
        ({"sample_from_anchor": True}, "`sample_from_anchor` must be False"),
    ],
)
def test_configurations_of_other_networks(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DFlashHeadConfig.from_dict({**FLAT, **OWN, **fields})


@pytest.mark.parametrize("field", OWN)
def test_fields_that_have_to_be_there(field: str) -> None:
    values = {**FLAT, **{name: value for name, value in OWN.items() if name != field}}
    with pytest.raises(ConfigError, match="num_target_layers" if field == "target_layer_ids" else field):
        DFlashHeadConfig.from_dict(values)


def test_another_vocabulary_needs_an_output_head(tmp_path: Path) -> None:
    reduced = Path(shutil.copytree(FIXTURES / "dflash_reduced_vocabulary", tmp_path / "reduced"))
    weights = load_file(reduced / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, reduced / "model.safetensors")
    with pytest.raises(
        ConfigError, match="`draft_vocab_size` must be the target's 48 without lm_head.weight, but is 20"
    ):
        load_head(reduced)


def test_an_embedding_of_the_mask_in_a_file_of_its_own(tmp_path: Path) -> None:
    """It is read instead of the token's: the same head where both are the same, and another where not."""
    expected = load_file(FIXTURES / "dflash" / "expected.safetensors")
    folder = Path(shutil.copytree(FIXTURES / "dflash", tmp_path / "head"))
    usual = rows_of(load_head(folder), expected, [6])[0]
    for embedding, is_same in ((expected["embed_tokens"][47], True), (torch.ones(16), False)):
        torch.save({"mask_token_id": 47, "embedding": embedding.clone()}, folder / "mask_embedding.pt")
        rows = rows_of(load_head(folder), expected, [6])[0]
        assert torch.allclose(rows, usual, atol=1e-5) == is_same
