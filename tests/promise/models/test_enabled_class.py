"""The class of an enabled model: each form of one expression generates, and no name or table sees another class."""

import abc
import copy
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers as tf
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

import hf_specdec
from tests.helpers.support import PROMPT
from tests.helpers.zoo import FAMILIES, build

CALL: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
LLAMA: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "pad_token_id": 0,
}


class Importable(tf.LlamaForCausalLM):
    """A class of the user's own file."""


def llama(cls: Any = tf.LlamaForCausalLM) -> Any:
    torch.manual_seed(1)
    return cls(tf.LlamaConfig(**LLAMA)).eval()


def of_a_function() -> Any:
    """Of a class that only its models know, as code from the hub makes them."""

    class Local(tf.LlamaForCausalLM):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            return super().generate(*args, **kwargs)

    return llama(Local)


def with_slots_and_a_metaclass() -> Any:
    class Registered(abc.ABCMeta):
        def __new__(cls, name: str, bases: Any, body: Any) -> Any:
            return super().__new__(cls, name, bases, {**body, "registered": True})

    class Slotted(tf.LlamaForCausalLM, metaclass=Registered):
        __slots__ = ("own",)
        subclasses: ClassVar[list[type]] = []

        def __init_subclass__(cls, *, key: str) -> None:
            cls.subclasses.append(cls)

    return llama(Slotted)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "gpt2": lambda: build(FAMILIES["gpt2"]),
    "t5": lambda: build(FAMILIES["t5"]),
    "importable": lambda: llama(Importable),
    "of a function": of_a_function,
    "slots and a metaclass": with_slots_and_a_metaclass,
    "with the mixin": lambda: llama(type("Mixed", (hf_specdec.SpecGenerationMixin, tf.LlamaForCausalLM), {})),
}
FORMS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "enable(make()).generate": lambda make: hf_specdec.enable(make()).generate,
    "deepcopy": lambda make: copy.deepcopy(hf_specdec.enable(make())).generate,
    "copy": lambda make: copy.copy(hf_specdec.enable(make())).generate,
    "pickle": lambda make: pickle.loads(pickle.dumps(hf_specdec.enable(make()))).generate,
    "a copy of a copy": lambda make: copy.deepcopy(copy.copy(hf_specdec.enable(make()))).generate,
}
UNPICKLED = {"of a function", "slots and a metaclass", "with the mixin"}  # their classes cannot be imported


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", FORMS)
def test_one_expression_generates(name: str, form: str) -> None:
    if form == "pickle" and name in UNPICKLED:
        with pytest.raises((AttributeError, pickle.PicklingError)):
            pickle.dumps(MODELS[name]())
        return
    expected = MODELS[name]().generate(PROMPT, **CALL)
    output = FORMS[form](MODELS[name])(PROMPT, **CALL, spec_method="prompt_lookup", return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert output.spec_stats.method == "prompt_lookup"


@pytest.mark.parametrize("name", MODELS)
def test_the_class_shows_as_the_model_s_own(name: str) -> None:
    model = MODELS[name]()
    ours, shown = type(model), str(type(model))
    subclasses = list(getattr(ours, "subclasses", ()))
    hf_specdec.enable(model)
    assert model.__class__ is ours
    assert (type(model).__name__, type(model).__qualname__, type(model).__module__) == (
        ours.__name__,
        ours.__qualname__,
        ours.__module__,
    )
    assert str(type(model)) == shown
    assert type(model).__doc__ == ours.__doc__
    assert isinstance(model, ours)
    assert type(model).can_generate()
    assert inspect.getfile(type(model)) == inspect.getfile(ours)
    assert list(getattr(ours, "subclasses", ())) == subclasses
    assert type(hf_specdec.disable(model)) is ours


def test_all_models_of_a_class_get_one_enabled_class() -> None:
    """Threads that enable at once too."""
    models, ready = [llama() for _ in range(4)], threading.Barrier(4)

    def enable(model: Any) -> None:
        ready.wait()
        hf_specdec.enable(model)

    threads = [threading.Thread(target=enable, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({type(model) for model in models}) == 1


def test_the_arguments_of_the_class_s_own_generate_are_kept() -> None:
    class Own(tf.LlamaForCausalLM):
        def generate(self, inputs: Any = None, flavour: str = "", **kwargs: Any) -> Any:
            """Text with a flavour."""
            return flavour, super().generate(inputs, **kwargs)

    model = hf_specdec.enable(llama(Own))
    assert {"flavour", "spec_method"} <= inspect.signature(model.generate).parameters.keys()
    flavour, text = model.generate(PROMPT, "plain", **CALL, spec_method="prompt_lookup")
    assert flavour == "plain"
    assert torch.equal(text, llama().generate(PROMPT, **CALL))


def test_a_method_kept_from_the_model_outlives_disable() -> None:
    model = hf_specdec.enable(llama())
    generate = model.generate
    hf_specdec.disable(model)
    assert torch.equal(generate(PROMPT, **CALL), model.generate(PROMPT, **CALL))


@pytest.mark.wide
def test_another_process_unpickles_an_enabled_model(tmp_path: Path) -> None:
    model = hf_specdec.enable(llama())
    torch.save(model, tmp_path / "model")
    code = f"""
import torch
model = torch.load({str(tmp_path / "model")!r}, weights_only=False)
ids = torch.tensor({PROMPT.tolist()})
print(model.generate(ids, max_new_tokens=8, do_sample=False, spec_method="prompt_lookup").tolist())
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(model.generate(PROMPT, **CALL).tolist())


def test_a_class_of_one_s_own_is_saved_with_its_code(tmp_path: Path) -> None:
    Importable.register_for_auto_class("AutoModelForCausalLM")
    try:
        hf_specdec.enable(llama(Importable)).save_pretrained(tmp_path)
    finally:
        del Importable._auto_class
    saved = tf.LlamaConfig.from_pretrained(tmp_path)
    assert saved.auto_map == {"AutoModelForCausalLM": "test_enabled_class.Importable"}
    assert (tmp_path / "test_enabled_class.py").exists()


def test_accelerate_s_hooks_come_and_go() -> None:
    model = llama()
    expected = model.generate(PROMPT, **CALL)
    add_hook_to_module(model, ModelHook())
    hf_specdec.enable(model)
    assert torch.equal(model.generate(PROMPT, **CALL, spec_method="prompt_lookup"), expected)
    remove_hook_from_module(model)
    assert torch.equal(model.generate(PROMPT, **CALL, spec_method="prompt_lookup"), expected)


def test_a_class_made_of_the_model_s_stays_enabled() -> None:
    """`fully_shard` of torch gives a module a class made of `module.__class__`."""
    model = hf_specdec.enable(llama())
    sharded = type("FSDPLlamaForCausalLM", (type("FSDPModule", (), {}), model.__class__), {})
    model.__class__ = sharded
    assert model.__class__ is sharded
    output = model.generate(PROMPT, **CALL, spec_method="prompt_lookup", return_dict_in_generate=True)
    assert output.spec_stats.method == "prompt_lookup"
    assert type(hf_specdec.disable(model)) is sharded


def test_a_class_that_refuses_subclasses_says_so() -> None:
    class Final(type):
        def __new__(cls, name: str, bases: Any, body: Any) -> Any:
            if any(isinstance(base, Final) for base in bases):
                raise TypeError("it is final")
            return super().__new__(cls, name, bases, body)

    class Sealed(tf.LlamaForCausalLM, metaclass=Final):
        pass

    with pytest.raises(hf_specdec.UnsupportedModelError, match="custom_generate"):
        hf_specdec.enable(llama(Sealed))
