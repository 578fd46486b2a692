"""A draft head on targets that were copied, wrapped, dispatched, compiled or quantised, and from the command line."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

import hf_specdec
from hf_specdec import embedded
from hf_specdec.errors import ConfigError, UnsupportedModelError
from tests.cli.conftest import run  # noqa: F401 a fixture
from tests.helpers.head_models import random_dflash_head
from tests.helpers.heads import random_head
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build
from tests.helpers.zoo_wide import varied

TREE = {"confidence_threshold": 0.0, "num_branches": 3, "draft_len": 4, "max_nodes": 9}
BATCH = torch.cat([PROMPT, PROMPT.flip(1)])
MADE: dict[str, Callable[[Any], Any]] = {
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "compiled": lambda model: hf_specdec.enable(torch.compile(copy.deepcopy(model), backend="eager")),
    "dispatched": lambda model: hf_specdec.enable(
        accelerate.dispatch_model(
            hf_specdec.disable(copy.deepcopy(model)), device_map={"": "cpu"}, main_device="cpu", force_hooks=True
        )
    ),
}


@pytest.mark.at_most(1)
@pytest.mark.parametrize("made", MADE)
def test_a_head_drafts_for_a_target_that_was_copied_or_wrapped(made: str) -> None:
    model = hf_specdec.enable(build(FAMILIES["llama"]))  # transformers' hooks for hidden states cannot be pickled
    expected = plain(model, BATCH, max_new_tokens=12, do_sample=False)
    target = MADE[made](model)
    ours = target.generate(
        input_ids=BATCH,
        max_new_tokens=12,
        do_sample=False,
        spec_method="eagle3",
        spec_config=TREE,
        assistant_model=random_head(model),
    )
    assert torch.equal(ours, expected)


@pytest.mark.at_most(1)
@pytest.mark.parametrize("precision", ["fp8", "nf4"])
def test_a_head_drafts_for_a_quantised_target(precision: str) -> None:
    path = embedded.path("draft")
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(path, precision=precision)
    ids = AutoTokenizer.from_pretrained(path)("def area(width, height):\n", return_tensors="pt").input_ids
    head = random_head(model).to(torch.bfloat16)
    ours = model.generate(
        ids,
        max_new_tokens=12,
        do_sample=False,
        return_dict_in_generate=True,
        spec_method="eagle3",
        spec_config=TREE,
        assistant_model=head,
    )
    # Rounding of several tokens at once may turn a near-tie, as the fourth token is in nf4; the first are far from one.
    expected = plain(model, ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(ours.sequences[:, : ids.shape[1] + 3], expected[:, : ids.shape[1] + 3])
    assert ours.spec_stats.num_draft_tokens > 0


def test_a_target_that_gives_fewer_hidden_states_than_it_has_layers_is_named() -> None:
    """Layers that run several times in a forward are recorded once for some of these."""
    model = hf_specdec.enable(varied("hrm_text", "causal"))
    how: dict[str, Any] = {"spec_method": "eagle3", "max_new_tokens": 8, "do_sample": False}
    with pytest.raises(
        UnsupportedModelError, match="reads hidden state 9 of HrmTextForCausalLM, whose forward gives 0 to 8"
    ):
        model.generate(PROMPT, **how, assistant_model=random_head(model))
    head = random_head(model, layer_ids=(2, 6, 8))
    expected = plain(model, PROMPT, max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(PROMPT, **how, assistant_model=head), expected)


class Silent(LlamaForCausalLM):
    """Gives no hidden states, or only the first."""

    shown: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs["hidden_states"] = None if self.shown is None else (outputs.hidden_states or ())[: self.shown]
        return outputs


@pytest.mark.parametrize(
    ("inputs", "message"), [(None, "none. Use a spec"), (0, "none. Use a spec"), (1, "0. Use a head")]
)
def test_a_target_that_gives_no_hidden_states_is_named(zoo: Any, inputs: int | None, message: str) -> None:
    model = hf_specdec.enable(Silent(zoo("llama").config).eval())
    model.shown = inputs
    with pytest.raises(UnsupportedModelError, match=f"hidden state 3 of Silent, whose forward gives {message}"):
        model.generate(PROMPT, max_new_tokens=4, spec_method="eagle3", assistant_model=random_head(model))


def test_hidden_states_that_a_caller_asks_for_are_those_of_plain_generation(model: Any) -> None:
    """The head reads three of them; the caller gets all."""
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_hidden_states": True}
    expected = plain(model, PROMPT, **options)
    ours = model.generate(PROMPT, **options, spec_method="eagle3", spec_config=TREE, assistant_model=random_head(model))
    assert torch.equal(ours.sequences, expected.sequences)
    for mine, other in zip(ours.hidden_states, expected.hidden_states, strict=True):
        assert len(mine) == len(other) == 4
        for layer, reference in zip(mine, other, strict=True):
            torch.testing.assert_close(layer, reference, atol=1e-4, rtol=1e-4)


def test_a_head_goes_where_the_target_reads_its_inputs(model: Any) -> None:
    head = random_head(model).to("meta")
    with pytest.raises(NotImplementedError, match="meta"):  # torch refuses to move a head without weights
        model.generate(PROMPT, max_new_tokens=4, spec_method="eagle3", assistant_model=head)
    with pytest.raises(ConfigError, match="draft_model_device_list"):
        model.generate(
            PROMPT,
            max_new_tokens=4,
            spec_method="eagle3",
            spec_config={"draft_model_device_list": [77]},
            assistant_model=random_head(model),
        )


@pytest.mark.at_most(2)
@pytest.mark.parametrize(
    ("model_type", "method", "message"),
    [
        ("roformer", "eagle3", "those of RoFormerForCausalLM have 768 columns and its layers 64"),
        ("roformer", "dflash", "those of RoFormerForCausalLM have 768 columns and its layers 64"),
        ("qwen4_exp", "eagle3", "hidden_size 64, but one of its layers passes on"),
        ("qwen4_exp", "dflash", "hidden_size 64, but one of its layers passes on"),
        ("rembert", "dflash", "hidden_size 64, but that of RemBertForCausalLM reads 1664"),
    ],
)
def test_targets_whose_states_no_head_can_read(model_type: str, method: str, message: str) -> None:
    """An error that names both widths, not one of a matrix product; the target goes on as before."""
    model = hf_specdec.enable(varied(model_type, "causal"))
    head = random_head(model) if method == "eagle3" else random_dflash_head(model, kind="dflash")
    call: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    with pytest.raises(UnsupportedModelError, match=message):
        model.generate(PROMPT, **call, spec_method=method, assistant_model=head)
    assert torch.equal(model.generate(PROMPT, **call, spec_method="auto"), plain(model, PROMPT, **call))
