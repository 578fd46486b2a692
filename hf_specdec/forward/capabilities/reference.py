"""What plain generation computes, and how far from it another way of computing may be: the measure of the probes."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate.utils.memory import should_reduce_batch_size
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec import compat
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.forward.target.inputs import rows_of
from hf_specdec.kernels.cpu_kernels import CpuKernels

Result = TypeVar("Result")
logger = logging.getLogger("hf_specdec")
PROMPT_LENGTH, LONGEST_PROMPT = 9, 1024
PERIOD = 6
RECENT = 5  # tokens that a convolution's state may hold
ATTEMPTS = 2
EXACT, MOST_INEXACT, NOISE_FACTOR = 1e-4, 0.1, 3.0  # tolerances, relative to the largest logit
TF32 = 1e-3  # relative rounding of fp32 products at less than the highest precision
LEAST_INEXACT = 4e-3  # some roundings to ten bits; CPUs without half-precision instructions round oftener than others
OWN_WINDOWS = ("window", "local", "chunk", "block", "index_topk")
MASKED_WINDOWS = ("sliding_window", "attention_chunk_size")  # read by transformers' mask functions


class Mismatch(Exception):
    """A forward gave other logits than the reference."""


class ProbeFailed(Exception):
    """A probe met a fault that may pass, such as a full memory: nothing is known of the model."""


# What forwards raise where a model does not allow for what is tried.
REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, Mismatch, RuntimeError, TypeError, ValueError)


def tried(trial: Callable[[int], Result]) -> Result:
    """The result of `trial(attempt)`. What a model cannot do fails each time, an expert's near tie does not.

    Raises:
        REFUSALS: of the last attempt.
        ProbeFailed: what was raised says nothing of the model.
    """
    for attempt in range(ATTEMPTS):
        try:
            return trial(attempt)
        except ProbeFailed:
            raise
        except REFUSALS as error:
            if _may_pass(error):
                raise ProbeFailed(f"{type(error).__name__}: {error}") from error
            if attempt == ATTEMPTS - 1 or isinstance(error, UnsupportedModelError):
                raise
        except Exception as error:
            raise ProbeFailed(f"{type(error).__name__}: {error}") from error
    raise AssertionError


def _may_pass(error: Exception) -> bool:
    """Whether an error is the machine's: its memory is full, or the device has failed."""
    return isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError) or should_reduce_batch_size(error)


def plain_logits(
    model: PreTrainedModel, kwargs: dict[str, Any], prompt: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """As plain generation computes them: a forward of `(rows, n)` prompts, then one for each token of `rows`.

    By the kernels that speculative forwards have, lest their rounding be taken for what several tokens do.
    """
    ids = torch.cat([prompt, rows], dim=1)
    logits, kernels = [], CpuKernels(model)
    with kernels.of_prompts:
        outputs = compat.prefill(model, prompt, GenerationConfig(), kwargs)
    for length in range(prompt.shape[1] + 1, ids.shape[1] + 1):
        kwargs = compat.updated_kwargs(model, outputs, kwargs)
        inputs = model.prepare_inputs_for_generation(ids[:, :length], next_sequence_length=1, **kwargs)
        with kernels:
            outputs = model(**inputs, return_dict=True)
        logits.append(outputs.logits[:, -1].float())
    return torch.stack(logits, dim=1)


def reference(
    model: PreTrainedModel, encoder_kwargs: dict[str, Any], prompt: list[int], rows: list[list[int]]
) -> torch.Tensor:
    """`(rows, length, vocab_size)`: the logits after each token of `rows`, computed one by one after the prompt."""
    ids = torch.tensor([prompt] * len(rows), device=compat.input_device(model))
    kwargs = arguments(model, ids, rows_of(encoder_kwargs, [0] * len(rows), 1))
    return plain_logits(model, kwargs, ids, torch.tensor(rows, device=ids.device))


def arguments(model: PreTrainedModel, ids: torch.Tensor, encoder_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What `generate` hands to a decoding method for this prompt."""
    kwargs = {"use_cache": True, **encoder_kwargs, **compat.fresh_cache(model, len(ids))}
    if not model.config.is_encoder_decoder and compat.takes_position_ids(model):
        kwargs["position_ids"] = compat.own_positions(model, ids, kwargs)
    return kwargs


def encoded(model: PreTrainedModel) -> dict[str, Any]:
    """What an encoder makes of a few tokens; of sound or an image, which is not there, something of the right shape."""
    encoder = model.get_encoder()
    if model.main_input_name == "input_ids":
        prompt, _ = tokens_of(model, 0)
        ids = torch.tensor([prompt], device=compat.input_device(model))
        return {"encoder_outputs": encoder(input_ids=ids, return_dict=True)}
    config = getattr(encoder, "config", model.config)
    size = getattr(config, "hidden_size", None) or config.d_model
    states = torch.arange(PROMPT_LENGTH * size, device=compat.input_device(model)).sin().view(1, PROMPT_LENGTH, size)
    return {"encoder_outputs": compat.Encoded(last_hidden_state=states.to(model.dtype))}


def tokens_of(model: PreTrainedModel, attempt: int) -> tuple[list[int], list[int]]:
    """A prompt that repeats itself and eight more tokens, spread over the vocabulary, no two neighbours alike."""
    vocab_size: int = compat.text_config(model.config).vocab_size
    step = max(vocab_size // 19, 1)
    length = _prompt_length(model)
    known = [(7 + attempt + step * i) % vocab_size for i in range(PERIOD + 8)]
    return [known[i % PERIOD] for i in range(length)], known[PERIOD:]


def _prompt_length(model: PreTrainedModel) -> int:
    """Long enough to reach beyond a window that a model applies by itself."""
    positions = compat.max_positions(model.config) or LONGEST_PROMPT
    return max(PROMPT_LENGTH, min(max(_own_windows(model), default=0) + 4, positions - 8))


def _own_windows(model: PreTrainedModel) -> list[int]:
    """Sizes in the configuration that may be windows unseen by transformers' mask functions."""
    known = MASKED_WINDOWS if compat.attends_only(model) else ()
    return [
        value
        for name, value in vars(compat.text_config(model.config)).items()
        if isinstance(value, int)
        and any(word in name for word in OWN_WINDOWS)
        and name not in known
        and value <= LONGEST_PROMPT
    ]


def tolerance_of(model: PreTrainedModel, encoder_kwargs: dict[str, Any], prompt: list[int], t: list[int]) -> float:
    """What rounding can explain: in half precision, some times what another split of the text does to it.

    It stays below what another prompt would do to the logits, lest a forward that forgets the prompt pass for exact.
    """
    if _rounds_exactly(model):
        return EXACT
    by_token = reference(model, encoder_kwargs, prompt, [t[:6]])
    at_once = [reference(model, encoder_kwargs, prompt + t[:count], [t[count : count + 1]]) for count in (1, 3, 5)]
    noise = _relative_error(torch.cat(at_once, dim=1), by_token[:, 1::2])
    other = [t[-1]] * (len(prompt) - RECENT) + prompt[-RECENT:]
    influence = _relative_error(reference(model, encoder_kwargs, other, [t[:2]]), by_token[:, :2])
    return _allowed_error(model, noise=noise, influence=influence)


def _rounds_exactly(model: PreTrainedModel) -> bool:
    """Whether rounding changes logits by no more than `EXACT`."""
    is_wide = model.dtype in (torch.float32, torch.float64)
    return is_wide and torch.get_float32_matmul_precision() == "highest"


def _allowed_error(model: PreTrainedModel, *, noise: float, influence: float) -> float:
    """The tolerance in half precision.

    Args:
        noise: what another split of the text does to the logits, relative to the largest.
        influence: what another text does to them.
    """
    rounding = max(torch.finfo(model.dtype).eps, TF32)
    least = min(max(2 * rounding, LEAST_INEXACT), max(influence / NOISE_FACTOR, rounding / 2))
    return min(max(NOISE_FACTOR * noise, least), MOST_INEXACT)


def _relative_error(rows: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the largest logit."""
    return ((rows - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6)).item()


def compare(rows: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> float:
    """The error; raises where rounding cannot explain it.

    Raises:
        Mismatch: the logits differ, or are of another shape.
        ProbeFailed: there is nothing to compare with.
    """
    if bool(wanted.isnan().any()):
        raise ProbeFailed("its logits are NaN")
    if rows.shape != wanted.shape:
        raise Mismatch(f"{tuple(rows.shape)} logits instead of {tuple(wanted.shape)}")
    error = _relative_error(rows, wanted)
    if not error <= tolerance:
        raise Mismatch(f"logits differ by {error:.1g} of the largest")
    return error


def sentence(exception: Exception) -> str:
    """What went wrong, for people who have not read the model's code."""
    if isinstance(exception, (Mismatch, UnsupportedModelError)):
        return str(exception).split(". ")[0].removesuffix(".")
    logger.debug("a forward that tries the model fails", exc_info=exception)
    return f"its forward does not allow for it ({type(exception).__name__})"
