"""An assistant of Gemma 4 as the draft model: the text of plain `generate`, drafts of transformers' own network."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.errors import ConfigError
from tests.helpers.head_models import build_gemma, draft_chain, random_assistant
from tests.helpers.heads import always as always_by
from tests.helpers.support import PROMPT, plain

always = functools.partial(always_by, "draft_model")


@pytest.fixture(scope="module")
def target() -> Any:
    return build_gemma()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_drafts_are_those_of_transformers_network_over_the_targets_keys(target: Any, attention: str) -> None:
    """Each step's chain is what the assistant drafts from keys and states that the target computes anew."""
    assistant = random_assistant()
    assistant.set_attn_implementation(attention)
    steps: list[Any] = []
    out = target.generate(
        PROMPT,
        max_new_tokens=14,
        do_sample=False,
        assistant_model=assistant,
        spec_observer=steps.append,
        **always({"num_branches": 1}),
    )
    with torch.no_grad():
        read = target(out, output_hidden_states=True, return_shared_kv_states=True)
        length, compared = PROMPT.shape[1] + 1, 0
        for step in steps:
            depth = len(step.tree) - 1
            drafted, _ = draft_chain(assistant, target, out[:, :length], read, depth)
            assert list(step.tree.tokens[1:]) == drafted
            compared += depth
            length += len(step.accepted)
    assert length == out.shape[1]
    assert compared > 20


def test_auto_takes_it_as_one_more_source_from_its_folder(target: Any, tmp_path: Path) -> None:
    random_assistant().save_pretrained(tmp_path)
    head = hf_specdec.AutoDraftHead.from_pretrained(tmp_path)
    expected = plain(target, PROMPT, max_new_tokens=16, do_sample=False)
    config = {"num_nodes": 8, "pool": "request"}
    for how in ({"spec_method": "auto", "spec_config": config}, always({})):
        ours = target.generate(PROMPT, max_new_tokens=16, do_sample=False, assistant_model=head, **how)
        assert torch.equal(ours, expected)


def test_an_assistant_for_another_target_is_refused_with_both_sizes(target: Any, zoo: Any) -> None:
    def generate(assistant: Any, model: Any = target, **options: Any) -> None:
        model.generate(PROMPT, max_new_tokens=4, spec_method="draft_model", assistant_model=assistant, **options)

    with pytest.raises(ConfigError, match=r"hidden_size 48, but is 'a head for 64'"):
        generate(random_assistant(backbone_hidden_size=64))
    with pytest.raises(ConfigError, match=r"sizes .*\(2, 12\).*a head that reads .*\(2, 20\)"):
        generate(random_assistant(text={"head_dim": 20}))
    with pytest.raises(ConfigError, match=r"key/value heads and their sizes \{\}"):
        generate(random_assistant(), zoo("llama"))
    with pytest.raises(ConfigError, match="engine"):
        generate(random_assistant(), spec_config={"engine": "assisted"})
