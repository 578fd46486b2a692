"""A text as plain generation computes it, the reference of the probes: a prompt's forward, then one for each token; the
difference from it that rounding can explain; and attempts that are retried once, with their errors in a sentence.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from accelerate.utils.memory import should_reduce_batch_size
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.compat.caches import cache_name, contents
from hf_specdec.compat.devices import input_device
from hf_specdec.compat.generation import Encoded, attends_only, fresh_cache, own_positions, prefill, updated_kwargs
from hf_specdec.compat.models import max_positions, takes_position_ids, text_config
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.kernels.cpu_kernels import CpuKernels
from hf_specdec.kernels.layers import counted

Result = TypeVar("Result")
logger = logging.getLogger("hf_specdec")
ATTEMPTS = 2
PROMPT_LENGTH, LONGEST_PROMPT = 7, 1024
PERIOD = 6
NUM_COMING = 8
OWN_WINDOWS = ("window", "local", "chunk", "block", "index_topk")
MASKED_WINDOWS = ("sliding_window", "attention_chunk_size")  # read by transformers' mask functions
RECENT = 5  # tokens that a convolution's state may hold
EXACT, MOST_INEXACT, NOISE_FACTOR = 1e-4, 0.1, 3.0  # relative to the largest logit, or to a state's norm
TF32 = 1e-3  # relative rounding of fp32 products at less than the highest precision
SMALLEST = torch.finfo(torch.float32).tiny  # divisor in the place of 0; a state of small numbers is a state
LEAST_INEXACT = 4e-3  # some roundings to ten bits; CPUs without half-precision instructions round oftener than others


class Mismatch(Exception):
    """A forward gave other logits or states than the reference."""


class ProbeFailed(Exception):
    """A probe met a fault that may pass, such as a full memory: nothing is known of the model."""


# What forwards raise where a model does not allow for what is tried.
REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, Mismatch, RuntimeError, TypeError, ValueError)


def tried(attempt: Callable[[int], Result]) -> Result:
    """The result of `attempt(number)`. What a model cannot do fails each time, an expert's near tie does not.

    Raises:
        REFUSALS: of the last attempt.
        ProbeFailed: what was raised says nothing of the model.
    """
    for number in range(ATTEMPTS):
        try:
            return attempt(number)
        except ProbeFailed:
            raise
        except REFUSALS as error:
            if _may_pass(error):
                raise ProbeFailed(f"{type(error).__name__}: {error}") from error
            if number == ATTEMPTS - 1 or isinstance(error, UnsupportedModelError):
                raise
        except Exception as error:
            raise ProbeFailed(f"{type(error).__name__}: {error}") from error
    raise AssertionError


def _may_pass(error: Exception) -> bool:
    """Returns whether an error is the machine's: its memory is full, or the device has failed."""
    return isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError) or should_reduce_batch_size(error)


def sentence(exception: Exception) -> str:
    """An exception in one line, for people who have not read the model's code."""
    if isinstance(exception, (Mismatch, UnsupportedModelError)):
        return str(exception).split(". ")[0].removesuffix(".")
    logger.debug("a forward that tries the model fails", exc_info=exception)
    return f"its forward does not allow for it ({type(exception).__name__})"


@dataclass(frozen=True, slots=True)
class Reference:
    """A text and what plain generation computes of it.

    Attributes:
        prompt: `(rows, length)`.
        coming: `(rows, n)`: the tokens that were computed one by one after it.
        logits: `(rows, n, vocab_size)` after each of `coming`; `(rows, 1, vocab_size)` after the prompt without any.
        cache: what the model has cached after the last of them.
        kept: copies of `module_tensors` then.
        outputs: of the last forward.
    """

    prompt: torch.Tensor
    coming: torch.Tensor
    logits: torch.Tensor
    cache: Any
    kept: list[torch.Tensor]
    outputs: Any


def reference(model: PreTrainedModel, kwargs: dict[str, Any], prompt: torch.Tensor, coming: torch.Tensor) -> Reference:
    """Compute a text plainly, by the kernels that speculative forwards have, which round alike.

    Args:
        kwargs: what `generate` hands to a decoding method.
        prompt: `(rows, length)`.
        coming: `(rows, n)`.
    """
    ids, kernels = torch.cat([prompt, coming], dim=1), CpuKernels(model)
    with kernels.of_prompts:
        outputs = prefill(model, prompt, GenerationConfig(), kwargs)
    kwargs = updated_kwargs(model, outputs, kwargs)
    logits = []
    for length in range(prompt.shape[1] + 1, ids.shape[1] + 1):
        inputs = model.prepare_inputs_for_generation(ids[:, :length], next_sequence_length=1, **kwargs)
        with counted(), kernels:  # one token at a time says nothing about several
            outputs = model(**inputs, return_dict=True)
        logits.append(outputs.logits[:, -1].float())
        kwargs = updated_kwargs(model, outputs, kwargs)
    all_logits = torch.stack(logits, dim=1) if logits else outputs.logits[:, -1:].float()
    kept = [tensor.clone() for _, _, tensor in module_tensors(model)]
    return Reference(prompt, coming, all_logits, kwargs.get(cache_name(kwargs)), kept, outputs)


def module_tensors(model: PreTrainedModel) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
    """Tensors that are plain attributes: neither weights nor buffers, but what forwards leave to the next ones."""
    return [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]


def arguments(model: PreTrainedModel, ids: torch.Tensor, encoder_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments that `generate` hands to a decoding method for this prompt."""
    kwargs = {"use_cache": True, **encoder_kwargs, **fresh_cache(model, len(ids))}
    if not model.config.is_encoder_decoder and takes_position_ids(model):
        kwargs["position_ids"] = own_positions(model, ids, kwargs)
    return kwargs


def encoded(model: PreTrainedModel) -> dict[str, Any]:
    """Encoder outputs of a few tokens; those of sound or images, which are not there, of the right shape."""
    encoder = model.get_encoder()
    if model.main_input_name == "input_ids":
        prompt, _ = tokens_of(model, 0)
        ids = torch.tensor([prompt], device=input_device(model))
        return {"encoder_outputs": encoder(input_ids=ids, return_dict=True)}
    config = getattr(encoder, "config", model.config)
    size = getattr(config, "hidden_size", None) or config.d_model
    states = torch.arange(PROMPT_LENGTH * size, device=input_device(model)).sin().view(1, PROMPT_LENGTH, size)
    return {"encoder_outputs": Encoded(last_hidden_state=states.to(model.dtype))}


def tokens_of(model: PreTrainedModel, attempt: int) -> tuple[list[int], list[int]]:
    """A prompt that repeats itself and eight more tokens, spread over the vocabulary, no two neighbours alike."""
    vocab_size: int = text_config(model.config).vocab_size
    step = max(vocab_size // 19, 1)
    tokens = [(7 + attempt + step * i) % vocab_size for i in range(PERIOD + NUM_COMING)]
    return [tokens[i % PERIOD] for i in range(_prompt_length(model))], tokens[PERIOD:]


def _prompt_length(model: PreTrainedModel) -> int:
    """Long enough to reach beyond a window that a model applies by itself."""
    positions = max_positions(model.config) or LONGEST_PROMPT
    return max(PROMPT_LENGTH, min(max(_own_windows(model), default=0) + 4, positions - NUM_COMING))


def _own_windows(model: PreTrainedModel) -> list[int]:
    """Sizes in the configuration that may be windows unseen by transformers' mask functions."""
    masked = MASKED_WINDOWS if attends_only(model) else ()
    return [
        value
        for name, value in vars(text_config(model.config)).items()
        if isinstance(value, int)
        and any(word in name for word in OWN_WINDOWS)
        and name not in masked
        and value <= LONGEST_PROMPT
    ]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest differences that rounding can explain.

    Attributes:
        logits (`float`): difference of a logit, over the largest one.
        states (`tuple[float, ...]`): norm of the difference of each tensor in the cache, over the tensor's norm.
        other_states (`float`): the same of tensors that are kept elsewhere, or not listed.
    """

    logits: float = EXACT
    states: tuple[float, ...] = ()
    other_states: float = EXACT

    def check_logits(self, rows: torch.Tensor, wanted: torch.Tensor) -> float:
        """The error of logits; raises where rounding cannot explain it.

        Raises:
            Mismatch: the logits differ, or are of another shape.
            ProbeFailed: there is nothing to compare with.
        """
        if bool(wanted.isnan().any()):
            raise ProbeFailed("its logits are NaN")
        if rows.shape != wanted.shape:
            raise Mismatch(f"{tuple(rows.shape)} logits instead of {tuple(wanted.shape)}")
        error = _logit_error(rows, wanted)
        if not error <= self.logits:
            raise Mismatch(f"logits differ by {error:.1g} of the largest")
        return error

    def check_states(self, cache: Any, wanted: Any, *, kept_by: str = "the cache") -> None:
        """Raise where rounding cannot explain how the tensors in two caches, or lists, of the same text differ.

        Raises:
            Mismatch: tensors differ, or are of other shapes.
        """
        errors = _state_errors(cache, wanted)
        allowed = self.states if len(errors) == len(self.states) else (self.other_states,) * len(errors)
        for error, most in zip(errors, allowed, strict=True):
            if not error <= most:
                raise Mismatch(f"states in {kept_by} differ by {error:.1g} of their norm")


def tolerance_of(model: PreTrainedModel, reference: Reference, read: Callable[[torch.Tensor], Reference]) -> Tolerance:
    """In half precision a multiple of what another split of the text does to logits and to each state, by two forwards.

    It stays below what another prompt does to the logits, lest a forward that forgets the prompt pass for exact.

    Args:
        reference: computed token by token.
        read: computes a text of as many rows at once.
    """
    if _rounds_exactly(model):
        return Tolerance()
    prompt, coming = reference.prompt, reference.coming
    at_once = read(torch.cat([prompt, coming], dim=1))
    other = torch.cat([coming[:, -1:].expand(-1, prompt.shape[1] - RECENT), prompt[:, -RECENT:], coming[:, :1]], dim=1)
    influence = _logit_error(read(other).logits, reference.logits[:, :1])
    rounding = max(torch.finfo(model.dtype).eps, TF32)
    least = max(2 * rounding, LEAST_INEXACT)
    of_logits = min(least, max(influence / NOISE_FACTOR, rounding / 2))
    noise = _logit_error(at_once.logits, reference.logits[:, -1:])
    of_states = [max(NOISE_FACTOR * error, rounding / 2) for error in _state_errors(at_once.cache, reference.cache)]
    return Tolerance(
        min(max(NOISE_FACTOR * noise, of_logits), MOST_INEXACT),
        tuple(min(most, MOST_INEXACT) for most in of_states),
        least,
    )


def _rounds_exactly(model: PreTrainedModel) -> bool:
    """Returns whether rounding changes nothing by more than `EXACT`."""
    is_wide = model.dtype in (torch.float32, torch.float64)
    return is_wide and torch.get_float32_matmul_precision() == "highest"


def _logit_error(rows: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the largest logit; those of tokens that a model hides are infinite in both."""
    hidden = wanted.isinf()
    if not torch.equal(rows[hidden], wanted[hidden]):
        return math.inf
    rows, wanted = rows.masked_fill(hidden, 0.0), wanted.masked_fill(hidden, 0.0)
    return ((rows - wanted).abs().max() / wanted.abs().max().clamp(min=SMALLEST)).item()


def _state_errors(cache: Any, wanted: Any) -> list[float]:
    """Norm of the difference of each two tensors over the norm of the one that is wanted."""
    tensors, others = list(contents(cache)), list(contents(wanted))
    if [tensor.shape for tensor in tensors] != [tensor.shape for tensor in others]:
        return [math.inf]
    return [
        float((state.float() - other.float()).norm() / other.float().norm().clamp(min=SMALLEST))
        for state, other in zip(tensors, others, strict=True)
    ]
