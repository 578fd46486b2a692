"""Calls of `generate` with a speculative method, each compared with a plain call from the same state."""

import contextlib
import copy
import functools
import re
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from compare import copied, difference
from transformers import GenerationMixin

import hf_specdec
from hf_specdec import ConfigError, SpecStats, UnsupportedModelError

PLAIN = "plain"
OTHERS = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "custom_generate")
CONFIGS = {"auto": {"num_nodes": 8}, "draft_model": {"confidence_threshold": 0.0}}  # draft at each step
TOLERANCE = 1e-4  # of values, relative to the largest; in half precision four times the distance of two numbers
NOISE = 0.05  # of a parameter's mean magnitude, added to it in the draft model


class Watch:
    """Watches the calls of one test.

    Args:
        method: a `spec_method`, or `"plain"` to count the calls alone.

    Attributes:
        calls: for each call its `kind`: `"drafted"`, `"undrafted"` (nothing was proposed), `"plain"`, `"refused"`,
            `"raises"` (as plain `generate` does) or `"left"` (the test asks for another way to decode); with the
            `reason` of plain decoding or of the refusal, and counts. Sampled batches draw from random streams of their
            own and are not compared.
        differences: from plain calls.
    """

    def __init__(self, method: str) -> None:
        self.method = method
        self.calls: list[dict[str, Any]] = []
        self.differences: list[str] = []
        self._is_inside = False
        self._drafts: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block, `generate` of every class of transformers and of the tests is watched."""
        replaced = {cls: vars(cls)["generate"] for cls in {*_classes(GenerationMixin)} if "generate" in vars(cls)}
        for cls, generate in replaced.items():
            cls.generate = self._watched(generate)
        try:
            yield
        finally:
            for cls, generate in replaced.items():
                cls.generate = generate

    def _watched(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(generate)
        def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return generate(model, *args, **kwargs)
            self._is_inside = True
            try:
                if self.method != PLAIN and not _asks_other_way(model, kwargs):
                    return self._compared(model, generate, args, kwargs)
                self.calls.append({"kind": "left"})
                return generate(model, *args, **kwargs)
            finally:
                self._is_inside = False

        return watched

    def _compared(self, model: Any, generate: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        own = {"spec_method": self.method, "spec_config": CONFIGS.get(self.method)}
        own |= {"assistant_model": self._draft(model)} if self.method == "draft_model" else {}
        given = {name: value for name, value in kwargs.items() if name != "streamer"}
        twin_args, twin_kwargs, start = copied(args), copied(given), torch.get_rng_state()
        parts = list(model.modules())
        with _recorded_stats() as stats:
            ours = _Outcome(lambda: hf_specdec.enable(model).generate(*args, **kwargs, **own), start)
        if isinstance(ours.error, ConfigError | UnsupportedModelError):
            self.calls.append({"kind": "refused", "reason": _pattern(ours.error)})
            return self._by_default(model, args, kwargs, start)
        kept = vars(model).pop("_cache", None)  # a static cache, in which the twin would write
        twin = _Outcome(lambda: generate(model, *twin_args, **twin_kwargs), start)
        vars(model).update({} if kept is None else {"_cache": kept})
        torch.set_rng_state(ours.random_state)
        if (error := ours.error or twin.error) is not None:
            self.calls.append({"kind": "raises", "reason": type(error).__name__})
            if ours.error is None or twin.error is None:
                self.differences.append(f"{'raises' if twin.error is None else 'does not raise'} {_traced(error)}")
            raise error
        self.calls.append(_counts(ours.output, stats))
        if parts != list(
            model.modules()
        ):  # BigBird gets other attention for a short text, so no call repeats its first
            self.calls[-1]["is_compared"] = False
        if self.calls[-1]["is_compared"]:
            plain = {"output": twin.output, "arguments": [twin_args, twin_kwargs], "numbers": twin.next_numbers()}
            other = {"output": ours.output, "arguments": [args, given], "numbers": ours.next_numbers()}
            tolerance = max(TOLERANCE, 4 * torch.finfo(model.dtype).eps)
            self.differences += filter(None, [difference(plain, other, self.method, tolerance)])
        return ours.output

    def _by_default(self, model: Any, args: Any, kwargs: dict[str, Any], state: torch.Tensor) -> Any:
        """The refused call with the method as the model's default, which decodes plainly where it is not possible."""
        torch.set_rng_state(state)
        model.generation_config.spec_method = self.method
        try:
            return model.generate(*args, **kwargs)
        except (ConfigError, UnsupportedModelError) as error:
            self.differences.append(f"as a default raises {error!s:.300}")
            raise
        finally:
            del model.generation_config.spec_method

    def _draft(self, model: Any) -> Any:
        """A copy that mostly agrees with the model."""
        if model not in self._drafts:
            generator = torch.Generator().manual_seed(0)
            self._drafts[model] = draft = copy.deepcopy(model).eval()
            for parameter in draft.parameters():
                if parameter.is_floating_point():
                    noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                    parameter.data += noise * parameter.data.abs().mean() * NOISE
        return self._drafts[model]


class _Outcome:
    """Output or error of a call that begins with the random state `start`."""

    def __init__(self, call: Callable[[], Any], start: torch.Tensor) -> None:
        torch.set_rng_state(start)
        self.output: Any = None
        self.error: Exception | None = None
        try:
            self.output = call()
        except Exception as error:
            self.error = error
        self.random_state = torch.get_rng_state()

    def next_numbers(self) -> list[float]:
        """Random numbers that come next: the bytes of a state have gaps of any content."""
        generator = torch.Generator()
        generator.set_state(self.random_state)
        return [*torch.randn(1, generator=generator).tolist(), *torch.rand(3, generator=generator).tolist()]


def _classes(cls: type) -> Iterator[Any]:
    """The class and all below it, this package's left out."""
    yield cls
    for below in cls.__subclasses__():
        if not below.__module__.startswith("hf_specdec"):
            yield from _classes(below)


def _asks_other_way(model: Any, kwargs: dict[str, Any]) -> bool:
    configs = [vars(one) for one in (kwargs.get("generation_config"), model.generation_config) if one is not None]
    return any(settings.get(name) for settings in (kwargs, *configs) for name in OTHERS)


def _counts(output: Any, stats: list[SpecStats]) -> dict[str, Any]:
    drafted = max((one.num_draft_tokens for one in stats), default=0)
    reason = next(
        (one.plain_reason for one in stats if one.plain_reason), "" if stats else "no call reached the engine"
    )
    return {
        "kind": "drafted" if drafted else "plain" if reason else "undrafted",
        "reason": "" if drafted else _pattern(reason),
        "num_rows": len(output if isinstance(output, torch.Tensor) else getattr(output, "sequences", [0])),
        "num_accepted": max((one.num_accepted_tokens for one in stats), default=0),
        "is_compared": not any(one.seeds for one in stats),
    }


def _traced(error: Exception) -> str:
    """The error and the last places of this package on its way."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f"{frame.filename}:{frame.lineno}" for frame in frames if "/hf_specdec/" in frame.filename]
    return f"{error!r:.200} {' '.join(own[-4:])}"


def _pattern(reason: Any) -> str:
    """The reason or the rule of a refusal, without its numbers and class names."""
    text = f"{reason.field} {reason.rule}" if isinstance(reason, ConfigError) else str(reason)
    return re.sub(r"\b[A-Z]\w+(?:For|Model|Cache|LM)\w*", "CLASS", re.sub(r"\d+", "N", text))


@contextlib.contextmanager
def _recorded_stats() -> Iterator[list[SpecStats]]:
    """Within the block, the list gets every `SpecStats` that is made."""
    made: list[SpecStats] = []
    init = SpecStats.__init__

    @functools.wraps(init)
    def recorded(stats: SpecStats, *args: Any, **kwargs: Any) -> None:
        init(stats, *args, **kwargs)
        made.append(stats)

    SpecStats.__init__ = recorded
    try:
        yield made
    finally:
        SpecStats.__init__ = init
