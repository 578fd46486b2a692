"""A model that drafts with its own first layers: the drafts of a model cut there, in the target's own cache."""

import copy
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
import transformers as tf

import hf_specdec
from hf_specdec import ConfigError
from hf_specdec.cache.spec_cache import SpecLayer
from hf_specdec.compat import CACHE
from tests.helpers.support import PROMPT, assert_same_cache, plain
from tests.helpers.zoo import FAMILIES, build

OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
CHAIN: dict[str, Any] = {"exit_layer": 2, "draft_len": 4, "confidence_threshold": 0.0}
TREE: dict[str, Any] = {**CHAIN, "num_branches": 3, "max_nodes": 9}
SHAPES = {"chain": CHAIN, "tree": TREE}
BATCH = torch.stack([PROMPT[0], PROMPT[0].roll(3), PROMPT[0].roll(7)])
MASK = torch.ones_like(BATCH)
MASK[1, :4] = 0


def exits(model: Any, ids: torch.Tensor = PROMPT, config: dict[str, Any] = CHAIN, **options: Any) -> Any:
    return model.generate(
        ids, spec_method="draft_model", spec_config=config, return_dict_in_generate=True, **{**OPTIONS, **options}
    )


def layers_of(model: Any) -> Any:
    return model.model.layers


@pytest.mark.at_most(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["llama", "gemma3", "bloom", "deepseek_v3", "gpt_neo"])
def test_it_drafts_what_a_model_of_the_first_layers_drafts(family: str, shape: str) -> None:
    """Step for step, the trees of `self_draft`, which reads the text into a cache of its own."""
    model, config = hf_specdec.enable(build(FAMILIES[family])), SHAPES[shape]
    steps: list[Any] = []
    ours = exits(model, config=config, spec_observer=steps.append)
    trees, steps = [step.tree for step in steps], []
    apart = {name: value for name, value in config.items() if name != "exit_layer"}
    other = hf_specdec.enable(build(FAMILIES[family]))  # which has learned nothing from the drafts of the first
    first = hf_specdec.self_draft(other, layers=2)
    theirs = exits(other, config=apart, assistant_model=first, spec_observer=steps.append)
    assert [tree.tokens for tree in trees] == [step.tree.tokens for step in steps]
    assert [tree.parents for tree in trees] == [step.tree.parents for step in steps]
    assert ours.sequences.tolist() == theirs.sequences.tolist() == plain(model, PROMPT, **OPTIONS).tolist()
    assert ours.spec_stats.num_accepted_tokens > 0


def test_the_prompt_is_read_once() -> None:
    """The first layers draft node by node; the verify pass, like the prompt's, computes all layers."""
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    exits(model)  # the probes
    computed: list[list[int]] = [[], [], []]
    for index, layer in enumerate(layers_of(model)):
        product = layer.self_attn.q_proj  # what stands for a layer that is skipped holds no modules
        product.register_forward_pre_hook(lambda module, args, index=index: computed[index].append(args[0].shape[1]))
    exits(model, max_new_tokens=2)  # the probes of the hooked model
    for layer in computed:
        layer.clear()
    steps: list[Any] = []
    exits(model, spec_observer=steps.append)
    sizes = [len(step.tree) for step in steps]
    assert computed[2] == [PROMPT.shape[1], *sizes]
    assert computed[0] == computed[1]
    assert computed[0].count(PROMPT.shape[1]) == 1
    drafted = sum(computed[0]) - sum(computed[2])
    assert 0 < drafted <= CHAIN["draft_len"] * len(steps), "the root and all drafts but the last, once a step"


def test_it_keeps_no_keys_of_its_own(zoo: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One pair of buffers for each layer of the target; the cache that comes out is plain `generate`'s."""
    model = zoo("llama")
    exits(model, config=TREE)
    made: list[Any] = []
    allocate = SpecLayer._allocate

    def counted(layer: SpecLayer, *shapes: Any) -> None:
        made.append(layer)
        allocate(layer, *shapes)

    monkeypatch.setattr(SpecLayer, "_allocate", counted)
    output = exits(model, config=TREE)
    assert len(made) == len(layers_of(model))
    expected = plain(model, PROMPT, **OPTIONS, return_dict_in_generate=True)
    assert_same_cache(output[CACHE], expected[CACHE])


@pytest.mark.at_most(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_each_row_of_a_batch_is_plain_generates(zoo: Callable[[str], Any], shape: str, cache: str) -> None:
    model = zoo("mistral")
    options = {"attention_mask": MASK, "cache_implementation": cache}
    free = plain(model, BATCH, **OPTIONS, **options)
    options["eos_token_id"] = [int(free[0, -9]), int(free[1, -3])]
    expected = plain(model, BATCH, **OPTIONS, **options)
    output = exits(model, BATCH, SHAPES[shape], **options)
    assert output.sequences.tolist() == expected.tolist()
    assert output.spec_stats.num_accepted_tokens > 0
    assert output.spec_stats.tier == "tree"


@pytest.mark.at_most(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
def test_a_seed_gives_plain_generates_text(model: Any, shape: str, seed: int) -> None:
    options = {"do_sample": True, "temperature": 0.8}
    torch.manual_seed(seed)
    expected = plain(model, PROMPT, **{**OPTIONS, **options})
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    assert exits(model, config=SHAPES[shape], **options).sequences.tolist() == expected.tolist()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_prompt_of_embeddings_is_drafted_for(model: Any) -> None:
    """The cache has read it; a draft model of its own could not."""
    embeddings = model.get_input_embeddings()(PROMPT)
    expected = plain(model, inputs_embeds=embeddings, **OPTIONS)
    output = model.generate(inputs_embeds=embeddings, spec_method="draft_model", spec_config=CHAIN, **OPTIONS)
    assert output.tolist() == expected.tolist()


def with_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def with_compiled_forward(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


MADE: dict[str, Callable[[Any], Any]] = {
    "copied": copy.deepcopy,
    "dispatched": lambda model: hf_specdec.enable(
        accelerate.dispatch_model(
            hf_specdec.disable(copy.deepcopy(model)), device_map={"": "cpu"}, main_device="cpu", force_hooks=True
        )
    ),
    "adapted": lambda model: hf_specdec.enable(with_lora(hf_specdec.disable(copy.deepcopy(model)))),
    "compiled": lambda model: hf_specdec.enable(torch.compile(copy.deepcopy(model), backend="eager")),
    "compiled forward": lambda model: with_compiled_forward(copy.deepcopy(model)),
}


@pytest.mark.at_most(1)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("made", MADE)
def test_it_works_on_models_that_were_copied_or_wrapped(model: Any, made: str) -> None:
    target = MADE[made](model)
    inner = hf_specdec.compat.generation_model(target)
    options = {**OPTIONS, "spec_method": "draft_model", "spec_config": TREE}
    with torch.compiler.set_stance("force_eager"):  # what is compiled does not matter, what it is bound to does
        expected = plain(inner, input_ids=PROMPT, **OPTIONS)
        assert target.generate(input_ids=PROMPT, **options).tolist() == expected.tolist()


def test_transformers_argument_sets_it(model: Any) -> None:
    """Adding `spec_method` is enough; in a generation configuration too."""
    expected = plain(model, PROMPT, **OPTIONS)
    how = {"spec_method": "draft_model", "return_dict_in_generate": True, "assistant_confidence_threshold": 0.0}
    output = model.generate(PROMPT, assistant_early_exit=2, **how, **OPTIONS)
    assert output.sequences.tolist() == expected.tolist()
    assert output.spec_stats.num_draft_tokens > 0
    config = copy.deepcopy(model.generation_config)
    config.update(assistant_early_exit=2, **OPTIONS)
    output = model.generate(PROMPT, generation_config=config, **how)
    assert output.sequences.tolist() == expected.tolist()
    assert output.spec_stats.num_draft_tokens > 0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"exit_layer": 0}, "`exit_layer` must be a whole number of at least 1"),
    "a share": ({"exit_layer": 0.5}, "`exit_layer` must be a whole number"),
    "all": ({"exit_layer": 3}, "`exit_layer` must be from 1 to 2, one less than the layers of LlamaForCausalLM"),
    "transformers' loop": ({"exit_layer": 1, "engine": "assisted"}, '`engine` must be "loop" with exit_layer'),
    "a device": (
        {"exit_layer": 1, "draft_model_device_list": ["cpu"]},
        "`draft_model_device_list` must be unset with exit_layer",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_field_and_remedy(model: Any, case: str) -> None:
    config, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message) as error:
        exits(model, config=config)
    assert error.value.remedy


def test_a_draft_model_beside_it_is_refused(model: Any) -> None:
    first = hf_specdec.self_draft(model, layers=2)
    with pytest.raises(ConfigError, match="`exit_layer` must be unset with an assistant_model, but is 2"):
        exits(model, assistant_model=first)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("t5", "encoder-decoder"),
        ("lfm2", "whose cache holds more than keys and values"),
        ("qwen3_next", "whose cache holds more than keys and values"),
    ],
)
def test_a_model_that_cannot_be_left_early_is_refused(zoo: Callable[[str], Any], family: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"`exit_layer` must be unset .*{message}"):
        exits(zoo(family))


@pytest.mark.parametrize("layer", [None, tf.cache_utils.DynamicLayer], ids=["cache", "layer"])
def test_a_cache_of_a_class_of_its_own_is_decoded_over_plainly(model: Any, layer: Any) -> None:
    cache = type("OwnCache", (tf.DynamicCache,), {})() if layer is None else tf.DynamicCache()
    if layer is not None:
        cache.layers = [type("OwnLayer", (layer,), {})() for _ in range(model.config.num_hidden_layers)]
    output = exits(model, config={**CHAIN, "exit_layer": 1}, **{CACHE: cache})
    assert output[CACHE] is cache
    assert "its cache has code of its own (Own" in output.spec_stats.plain_reason
