"""A model's first layers are a draft: it generates like a model built of them, and shares every weight."""

import copy
import pickle
import types
from typing import Any

import pytest
import torch
import transformers as tf
from accelerate import dispatch_model

import hf_specdec
from hf_specdec.errors import ConfigError, UnsupportedModelError
from hf_specdec.loading.self_drafting import self_draft
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import DECODER, FAMILIES, VOCAB_SIZE, build

pytestmark = pytest.mark.each_value_in_file

DECODERS = [name for name, family in FAMILIES.items() if not family.is_seq2seq]
CUT = {  # fields with an entry a layer
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
}


def text_of(model: Any, **kwargs: Any) -> list[int]:
    tokens: list[int] = model.generate(PROMPT, max_new_tokens=24, do_sample=False, **kwargs)[0].tolist()
    return tokens


def built_with(name: str, model: Any, layers: int) -> Any:
    """A model constructed with so many layers, its weights loaded from the whole model's."""
    family = FAMILIES[name]
    options = dict(family.options) | {"num_hidden_layers": layers} | CUT.get(name, {})
    if name == "gpt_neo":
        del options["num_hidden_layers"]
    if "layer_types" in options:
        options["layer_types"] = options["layer_types"][:layers]
    small = tf.AutoModelForCausalLM.from_config(getattr(tf, family.config)(**options)).eval()
    weights = model.state_dict()
    small.load_state_dict({key: weights[key] for key in small.state_dict()})
    small.generation_config = copy.deepcopy(model.generation_config)
    return small


@pytest.mark.at_most(1)
@pytest.mark.parametrize("name", DECODERS)
def test_it_generates_as_a_model_built_with_that_many_layers(name: str) -> None:
    model = build(FAMILIES[name])
    whole = text_of(model)
    draft = self_draft(model, layers=2)
    assert text_of(draft) == text_of(built_with(name, model, 2))
    assert text_of(draft) != whole
    assert text_of(model) == whole, "the model is as it was"
    assert draft.config.num_hidden_layers == 2
    assert model.config.num_hidden_layers == 3


@pytest.mark.parametrize("name", DECODERS)
def test_it_has_no_weight_of_its_own(name: str) -> None:
    model = build(FAMILIES[name])
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    draft = self_draft(model, layers=1)
    own = [id(tensor) for tensor in (*draft.parameters(), *draft.buffers())]
    assert set(own) < known
    assert draft.num_parameters() < model.num_parameters()
    assert type(draft) is type(model)


@pytest.mark.parametrize("layers", [0, -1, 3, 4, 1.5, "2", True, None])
def test_the_number_of_layers_has_bounds(layers: Any) -> None:
    with pytest.raises(ConfigError, match="`layers` must be a whole number of at least 1 and at most 2") as error:
        self_draft(build(FAMILIES["llama"]), layers=layers)
    assert error.value.remedy


def test_models_with_an_encoder_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="encoder"):
        self_draft(build(FAMILIES["t5"]), layers=1)


def test_a_model_whose_layers_cannot_be_found_is_refused() -> None:
    model = build(FAMILIES["llama"])
    model.model.layers = torch.nn.ModuleList([*model.model.layers, model.model.layers[0]])
    with pytest.raises(UnsupportedModelError, match="no list of 3 layers"):
        self_draft(model, layers=1)


def test_the_language_model_of_a_composite_model_is_cut() -> None:
    """Its vision tower has as many layers; they stay."""
    vision = {
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
        "model_type": "clip_vision_model",
        "projection_dim": 24,
    }
    text = DECODER | {"model_type": "llama"}
    config = tf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=VOCAB_SIZE - 1)
    model = tf.LlavaForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    whole = text_of(model)
    draft = self_draft(model, layers=1)
    assert draft.config.text_config.num_hidden_layers == 1
    assert draft.config.vision_config.num_hidden_layers == 3
    assert len(draft.model.language_model.layers) == 1
    assert len(text_of(draft)) == len(whole)
    assert text_of(model) == whole


def test_experts_are_not_mistaken_for_layers() -> None:
    """As many experts as layers, in lists of their own."""
    model = build(FAMILIES["llama"])
    for layer in model.model.layers:
        layer.mlp.experts = torch.nn.ModuleList([torch.nn.Identity() for _ in range(3)])
    assert len(self_draft(model, layers=1).model.layers) == 1


def test_accelerate_s_hooks_run_the_draft_not_the_model() -> None:
    """A dispatched model's `forward` is bound to the instance; the draft's runs the draft's layers."""
    model = build(FAMILIES["llama"])
    expected = text_of(self_draft(model, layers=2))
    dispatch_model(model, device_map={"": "cpu"}, main_device="cpu", force_hooks=True)
    whole = text_of(model)
    assert text_of(self_draft(model, layers=2)) == expected
    assert text_of(model) == whole != expected


@pytest.mark.parametrize("inside", [False, True])
def test_a_compiled_forward_runs_the_draft_not_the_model(inside: bool) -> None:
    """As transformers' documentation compiles it: `model.forward = torch.compile(model.forward)`."""
    model = build(FAMILIES["llama"])
    expected = text_of(self_draft(model, layers=2))
    part = model.model if inside else model
    part.forward = torch.compile(part.forward, backend="eager")
    with torch.compiler.set_stance("force_eager"):
        assert text_of(self_draft(model, layers=2)) == expected


def test_a_function_that_reaches_the_model_in_a_way_of_its_own_is_refused() -> None:
    """Such as by a variable: a copy would run the model's own layers."""
    model, held = hf_specdec.enable(build(FAMILIES["llama"])), types.SimpleNamespace()
    held.forward = model.model.forward
    model.model.forward = lambda *args, **kwargs: held.forward(*args, **kwargs)
    what = "LlamaForCausalLM has the `forward` of its LlamaModel replaced by '.*lambda>'"
    with pytest.raises(UnsupportedModelError, match=f"{what}.*Set types.MethodType"):
        self_draft(model, layers=2)


def test_an_enabled_model_s_draft_is_not_enabled() -> None:
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    draft = self_draft(model, layers=2)
    expected = text_of(draft)
    with pytest.raises(ValueError, match="spec_method"):
        text_of(draft, spec_method="prompt_lookup")
    assert text_of(model, spec_method="prompt_lookup") == text_of(model)
    assert text_of(hf_specdec.enable(draft), spec_method="prompt_lookup") == expected
    hf_specdec.disable(model)
    assert text_of(draft, spec_method="prompt_lookup") == expected


def test_a_draft_of_a_draft_and_a_copy_of_one() -> None:
    model = build(FAMILIES["qwen3"])
    twice = self_draft(self_draft(model, layers=2), layers=1)
    expected = text_of(self_draft(model, layers=1))
    assert text_of(twice) == expected
    assert text_of(copy.deepcopy(twice)) == text_of(pickle.loads(pickle.dumps(twice))) == expected


def test_transformers_takes_it_as_assistant() -> None:
    model = build(FAMILIES["llama"])
    assert text_of(model, assistant_model=self_draft(model, layers=2)) == text_of(model)


@pytest.mark.at_most(1)
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("spec_config", [{"draft_len": 3}, {"draft_len": 3, "num_branches": 2}], ids=["chain", "tree"])
def test_a_model_speculates_with_its_own_first_layers(name: str, spec_config: dict[str, int]) -> None:
    """Both share modules, and neither disturbs the other."""
    model = build(FAMILIES[name])
    expected = text_of(model)
    draft = self_draft(hf_specdec.enable(model), layers=2)
    config = {**spec_config, "confidence_threshold": 0.0}
    assert text_of(model, spec_method="draft_model", assistant_model=draft, spec_config=config) == expected


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_go_along() -> None:
    """The draft of a PEFT-wrapped model has the adapters of the layers it keeps."""
    peft = pytest.importorskip("peft")

    model = build(FAMILIES["llama"])
    bare = text_of(self_draft(model, layers=2))
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    draft = self_draft(adapted, layers=2)
    assert sum("lora_" in name for name, _ in draft.named_parameters()) == 2 * 2 * 2
    assert text_of(draft) != bare


def test_the_model_goes_on_showing_hidden_states() -> None:
    """transformers' hooks that collect them are on layers that the draft shares."""
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    options: dict[str, Any] = {"max_new_tokens": 2, "output_hidden_states": True, "return_dict_in_generate": True}
    before = plain(model, PROMPT, **options)
    self_draft(model, layers=1)
    after = plain(model, PROMPT, **options)
    assert [len(states) for states in after.hidden_states] == [len(states) for states in before.hidden_states]
