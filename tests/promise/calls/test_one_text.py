"""In bf16 and fp16 on a CPU plain `generate` of an enabled model writes the text of every method, to the last bit."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CompileConfig

import hf_specdec
from tests.helpers.support import PROMPT, plain

HALVES = (torch.bfloat16, torch.float16)
CALL: dict[str, Any] = {
    "max_new_tokens": 12,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}
TARGET = hf_specdec.embedded.path("target")


def logits_of(model: Any, prompt: torch.Tensor = PROMPT, **kwargs: Any) -> torch.Tensor:
    """`(tokens, batch, vocab_size)` raw logits of a greedy call."""
    return torch.stack(model.generate(prompt, **CALL, **kwargs).logits)


def load(dtype: torch.dtype = torch.bfloat16) -> Any:
    """The embedded target, not enabled."""
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=dtype)


@pytest.mark.at_most(1)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_plain_generate_of_an_enabled_model_writes_what_every_method_does(dtype: torch.dtype) -> None:
    model = hf_specdec.enable(load(dtype))
    text = logits_of(model)
    assert not torch.equal(text, torch.stack(plain(model, PROMPT, **CALL).logits)), "torch's kernels round otherwise"
    for method in ("plain", "auto", "prompt_lookup", "lookahead"):
        assert torch.equal(logits_of(model, spec_method=method), text)
    assert torch.equal(logits_of(model, cache_implementation="static"), text)
    padded = torch.nn.functional.pad(PROMPT[:, 7:], (7, 0))
    batch = torch.cat([PROMPT, padded])
    rows = {"attention_mask": torch.cat([torch.ones_like(PROMPT), (padded > 0).long()])}
    assert torch.equal(logits_of(model, batch, **rows), logits_of(model, batch, spec_method="auto", **rows))
    torch.manual_seed(3)
    sampled = model.generate(PROMPT, do_sample=True, max_new_tokens=12)
    torch.manual_seed(3)
    assert torch.equal(model.generate(PROMPT, do_sample=True, max_new_tokens=12, spec_method="auto"), sampled)
    beams = [model.generate(PROMPT, num_beams=2, max_new_tokens=8, do_sample=False) for _ in range(2)]
    assert torch.equal(*beams)


def enabled_class() -> Any:
    """A class of the user's own."""
    base = type(load())
    mixed: Any = type(base.__name__, (hf_specdec.SpecGenerationMixin, base), {})
    return mixed.from_pretrained(TARGET, dtype=torch.bfloat16)


def adapted() -> Any:
    """An enabled model in PEFT's wrapper."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(hf_specdec.enable(load()), config).eval()


WAYS: dict[str, Callable[[], Any]] = {
    "a copy": lambda: copy.deepcopy(hf_specdec.enable(load())),
    "a pickle": lambda: pickle.loads(pickle.dumps(hf_specdec.enable(load()))),
    "our loader": lambda: hf_specdec.AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16),
    "a class of the user's": enabled_class,
    "a model with an adapter": adapted,
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_an_enabled_model_writes_one_text(way: str) -> None:
    model = WAYS[way]()
    assert torch.equal(logits_of(model), logits_of(model, spec_method="prompt_lookup"))


def test_a_model_that_is_not_enabled_or_opts_out_generates_as_transformers_has_it() -> None:
    model = load()
    text, ours = logits_of(model), logits_of(hf_specdec.enable(load()))
    assert torch.equal(logits_of(model, custom_generate=hf_specdec.decode), text)
    assert torch.equal(logits_of(model, custom_generate=hf_specdec.decode, spec_method="auto"), ours)
    assert torch.equal(logits_of(hf_specdec.enable(model, plain_kernels=False)), text)
    assert torch.equal(logits_of(hf_specdec.enable(hf_specdec.disable(model))), ours)
    assert torch.equal(logits_of(hf_specdec.disable(model)), text)
    wide = hf_specdec.enable(load(torch.float32))
    assert torch.equal(logits_of(wide), torch.stack(plain(wide, PROMPT, **CALL).logits)), "fp32 stays as it is"


def test_a_call_that_transformers_compiles_keeps_the_kernels_it_is_traced_with() -> None:
    """A graph over replaced layers would break at each of them."""
    model, forward = hf_specdec.enable(load()), []

    def compiled(*args: Any, **kwargs: Any) -> Any:
        forward.append("forward" in vars(model.model.layers[0].mlp.up_proj))
        return model(*args, **kwargs)

    settings = CompileConfig(backend="eager")
    settings._compile_all_devices = True
    model.get_compiled_call = lambda config: compiled
    logits_of(model, cache_implementation="static", compile_config=settings)
    assert forward and not any(forward)
