"""The file of a `SpecMemory`: safetensors, with its bounds as metadata.

Every tensor is checked before it is believed: a damaged file is an error, never a memory that drafts nonsense.
"""

import contextlib
import os
from collections.abc import Iterator

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from hf_specdec.common.files import check_path, replacing
from hf_specdec.errors import ConfigError
from hf_specdec.methods.auto.adaptive_weights import AdaptiveWeights
from hf_specdec.methods.auto.recycled_logits import NOTHING, NUM_KEPT, RecycledLogits, filled
from hf_specdec.methods.common.ngram.pool import BOUNDARY, NgramPool

FORMAT = "hf_specdec memory 4"
EIGHT_KEPT = "hf_specdec memory 3"  # entries of 8 tokens
OTHER_BLEND = "hf_specdec memory 2"  # these too, and weights of another blend
FIELD, REMEDY = "spec_memory", "Give a file that SpecMemory.save wrote, or begin with SpecMemory()."
GENERATIONS = ("old", "young")
MOST_WEIGHT = 1000.0  # of weights, log odds, gains and counts; what is learned stays far below


class MemoryFile:
    """The tensors of one file.

    Args:
        metadata: format and bounds.
        path: where it was read, for errors.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], metadata: dict[str, str], path: str = "") -> None:
        self.tensors, self.metadata, self.path = tensors, metadata, path

    @classmethod
    def of_bounds(cls, max_tokens: int, max_entries: int) -> "MemoryFile":
        """An empty one."""
        return cls({}, {"format": FORMAT, "max_tokens": str(max_tokens), "max_entries": str(max_entries)})

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "MemoryFile":
        """What `write` wrote.

        Raises:
            ConfigError: `path` is none, there is no such file, or it is of another format.
        """
        check_path("path", path, "a file that SpecMemory.save wrote")
        shown = os.fspath(path)
        try:
            with safe_open(shown, framework="pt") as opened:
                metadata = opened.metadata() or {}
                if metadata.get("format") not in (FORMAT, EIGHT_KEPT, OTHER_BLEND):
                    raise ConfigError(FIELD, f"must be of format {FORMAT!r}", shown, REMEDY)
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        except OSError as error:
            raise ConfigError(FIELD, "must be a file that can be read", shown, REMEDY) from error
        except SafetensorError as error:
            raise ConfigError(FIELD, "must be a whole safetensors file", shown, REMEDY) from error
        return cls(tensors, metadata, shown)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write all tensors beside `path`, then put the file in its place.

        Raises:
            ConfigError: `path` is none.
        """
        check_path("path", path, "a file to write")
        content = save({name: tensor.contiguous() for name, tensor in self.tensors.items()}, self.metadata)
        with replacing(path) as beside:
            beside.write_bytes(content)

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Turn what is found wrong in here into one error for the user."""
        try:
            yield
        except ConfigError:
            raise
        except (KeyError, ValueError, IndexError, TypeError, ArithmeticError) as error:
            reason = f"tensor {error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(FIELD, f"must be undamaged ({reason})", self.path, REMEDY) from error

    @property
    def bounds(self) -> tuple[int, int]:
        """Most tokens of text and most recycled entries."""
        return int(self.metadata["max_tokens"]), int(self.metadata["max_entries"])

    @property
    def holds_weights(self) -> bool:
        """Whether what was learned about the sources is that of the blend as it is."""
        return self.metadata["format"] != OTHER_BLEND

    def put_texts(self, pool: NgramPool) -> None:
        """Take over the texts."""
        for name, tokens in zip(GENERATIONS, pool.generations(), strict=True):
            self.tensors[f"texts.{name}"] = torch.tensor(tokens, dtype=torch.int32)

    def fill_texts(self, pool: NgramPool) -> None:
        """Hand the texts out."""
        found = []
        for name in GENERATIONS:
            tokens = self._tensor(f"texts.{name}", torch.int32, (None,))
            _check(bool((tokens >= BOUNDARY).all()), f"texts.{name} holds what is no token")
            _check(not len(tokens) or int(tokens[-1]) == BOUNDARY, f"texts.{name} ends within a text")
            _check(len(tokens) <= max(pool.max_tokens // 2, 0), f"texts.{name} exceeds its bound")
            found.append(tokens.tolist())
        pool.restore(*found)

    def put_recycled(self, recycled: RecycledLogits) -> None:
        """Take over the recycled logits."""
        for name, rows in recycled.export().items():
            self.tensors[f"recycled.{name}"] = torch.from_numpy(rows)

    def fill_recycled(self, recycled: RecycledLogits) -> None:
        """Hand the recycled logits out."""
        keys = self._tensor("recycled.keys", torch.int64, (None,))
        count = len(keys)
        places = self._tensor("recycled.places", torch.int64, (count,))
        stamps = self._tensor("recycled.stamps", torch.int32, (count,))
        width = NUM_KEPT if self.metadata["format"] == FORMAT else 8
        tokens = self._tensor("recycled.tokens", torch.int32, (count, width))
        evidence = self._tensor("recycled.evidence", torch.float32, (count, width))
        _check(bool((keys > 0).all()), "recycled.keys holds what is no key")
        _check(
            bool((places >= 0).all()) and len(set(places.tolist())) == count, "recycled.places holds what is no place"
        )
        _check(bool((stamps > 0).all()), "recycled.stamps holds what is no time")
        _check(bool((tokens >= NOTHING).all()), "recycled.tokens holds what is no token")
        _check(bool(((evidence >= 0.0) & (evidence <= MOST_WEIGHT)).all()), "recycled.evidence is out of range")
        found = {"places": places.numpy(), "stamps": stamps.numpy(), "keys": keys.numpy()}
        rows = filled(tokens.numpy(), evidence.numpy())
        recycled.restore({**found, "tokens": rows[0], "evidence": rows[1]})

    def put_weights(self, name: str, adaptive_weights: AdaptiveWeights) -> None:
        """Take over what was learned from one kind of text."""
        expected, accepted = adaptive_weights.calibration.counts()
        learned = {
            "weights": list(adaptive_weights.mixer.weights),
            "expected": expected,
            "accepted": accepted,
            "gains": list(adaptive_weights.gains),
            "window_gain": [adaptive_weights.window_gain],
        }
        for key, values in learned.items():
            self.tensors[f"{name}.{key}"] = torch.tensor(values, dtype=torch.float64)
        self.tensors[f"{name}.seen"] = torch.tensor(list(adaptive_weights.mixer.seen), dtype=torch.int64)

    def fill_weights(self, name: str, adaptive_weights: AdaptiveWeights) -> None:
        """Hand what was learned out."""
        mixer, calibration = adaptive_weights.mixer, adaptive_weights.calibration
        num_kinds, num_bins = len(mixer.weights), len(calibration.factors)
        weights = self._tensor(f"{name}.weights", torch.float64, (num_kinds, len(mixer.weights[0])))
        seen = self._tensor(f"{name}.seen", torch.int64, (num_kinds,))
        counts = [self._tensor(f"{name}.{key}", torch.float64, (num_bins,)) for key in ("expected", "accepted")]
        gains = self._tensor(f"{name}.gains", torch.float64, (None,))
        window_gain = self._tensor(f"{name}.window_gain", torch.float64, (1,))
        for tensor in (weights, gains, window_gain, *counts):
            _check(bool((tensor.abs() <= MOST_WEIGHT).all()), f"{name} holds what no text has taught")
        _check(all(bool((tensor >= 0).all()) for tensor in (seen, *counts)), f"{name} holds negative counts")
        mixer.restore(weights.tolist(), seen.tolist())
        calibration.restore(counts[0].tolist(), counts[1].tolist())
        adaptive_weights.gains, adaptive_weights.window_gain = gains.tolist(), float(window_gain)

    def _tensor(self, name: str, dtype: torch.dtype, shape: tuple[int | None, ...]) -> torch.Tensor:
        """The tensor `name`, if it is of this type and shape; a size of `None` is any."""
        tensor = self.tensors[name]
        fits = tensor.dim() == len(shape) and all(
            wanted is None or wanted == size for wanted, size in zip(shape, tensor.shape, strict=True)
        )
        _check(fits and tensor.dtype == dtype, f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}")
        return tensor


def _check(holds: bool, reason: str) -> None:
    if not holds:
        raise ValueError(reason)
