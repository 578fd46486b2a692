"""The file of a `SpecMemory`: safetensors, with its bounds as metadata.

Every tensor is checked before it is believed: a damaged file is an error, never a memory that drafts nonsense.
"""

import contextlib
import os
from array import array
from collections.abc import Iterator

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from hf_specdec.common.files import check_path, replacing
from hf_specdec.errors import ConfigError
from hf_specdec.methods.auto.adaptive_weights import AdaptiveWeights
from hf_specdec.methods.auto.recycled_logits import NOTHING, NUM_KEPT, RecycledLogits, Rows
from hf_specdec.methods.common.ngram.pool import BOUNDARY, NgramPool

FORMAT = "hf_specdec memory 2"
FIELD, REMEDY = "spec_memory", "Give a file that SpecMemory.save wrote, or begin with SpecMemory()."
GENERATIONS = ("old", "young")
LEARNED = ("weights", "seen", "expected", "accepted")  # arrays of `AdaptiveWeights`
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
        """Make an empty one."""
        return cls({}, {"format": FORMAT, "max_tokens": str(max_tokens), "max_entries": str(max_entries)})

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "MemoryFile":
        """Read what `write` wrote.

        Raises:
            ConfigError: `path` is none, there is no such file, or it is of another format.
        """
        check_path("path", path, "a file that SpecMemory.save wrote")
        shown = os.fspath(path)
        try:
            with safe_open(shown, framework="pt") as opened:
                metadata = opened.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ConfigError(FIELD, f"must be of format {FORMAT!r}", shown, REMEDY)
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        except OSError as error:
            raise ConfigError(FIELD, "must be a file that can be read", shown, REMEDY) from error
        except SafetensorError as error:
            raise ConfigError(FIELD, "must be a whole safetensors file", shown, REMEDY) from error
        return cls(tensors, metadata, shown)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write all tensors to a new file, then put it in the place of `path`.

        Raises:
            ConfigError: `path` is none.
        """
        check_path("path", path, "a file to write")
        content = save({name: tensor.contiguous() for name, tensor in self.tensors.items()}, self.metadata)
        with replacing(path) as temporary:
            temporary.write_bytes(content)

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

    def put(self, pool: NgramPool, recycled: RecycledLogits, learned: dict[str, AdaptiveWeights]) -> None:
        """Take over texts, recycled logits and what was learned from each kind of text."""
        for name, tokens in zip(GENERATIONS, pool.generations(), strict=True):
            self.tensors[f"texts.{name}"] = torch.tensor(tokens, dtype=torch.int32)
        for name, rows in recycled.export().items():
            self.tensors[f"recycled.{name}"] = torch.from_numpy(rows)
        for kind, weights in learned.items():
            for name in LEARNED:
                self.tensors[f"{kind}.{name}"] = torch.from_numpy(np.array(getattr(weights, name)))
            self.tensors[f"{kind}.gains"] = torch.tensor(weights.gains, dtype=torch.float64)

    def fill(self, pool: NgramPool, recycled: RecycledLogits, learned: dict[str, AdaptiveWeights]) -> None:
        """Hand out what `put` took over."""
        pool.restore(*(self._text(name, pool.max_tokens // 2) for name in GENERATIONS))
        recycled.restore(self._recycled())
        for kind, weights in learned.items():
            self._fill_learned(kind, weights)

    def _text(self, name: str, most: int) -> list[int]:
        tokens = self._tensor(f"texts.{name}", torch.int32, None)
        _check(bool((tokens >= BOUNDARY).all()), f"texts.{name} holds what is no token")
        _check(not len(tokens) or int(tokens[-1]) == BOUNDARY, f"texts.{name} ends within a text")
        _check(len(tokens) <= most, f"texts.{name} exceeds its bound")
        found: list[int] = tokens.tolist()
        return found

    def _recycled(self) -> dict[str, Rows]:
        keys = self._tensor("recycled.keys", torch.int64, None)
        places = self._tensor("recycled.places", torch.int64, len(keys))
        stamps = self._tensor("recycled.stamps", torch.int32, len(keys))
        tokens = self._tensor("recycled.tokens", torch.int32, len(keys), NUM_KEPT)
        evidence = self._tensor("recycled.evidence", torch.float32, len(keys), NUM_KEPT)
        are_places = bool((places >= 0).all()) and len(set(places.tolist())) == len(keys)
        _check(bool((keys > 0).all()), "recycled.keys holds what is no key")
        _check(are_places, "recycled.places holds what is no place")
        _check(bool((stamps > 0).all()), "recycled.stamps holds what is no time")
        _check(bool((tokens >= NOTHING).all()), "recycled.tokens holds what is no token")
        _check(bool(((evidence >= 0.0) & (evidence <= MOST_WEIGHT)).all()), "recycled.evidence is out of range")
        found = {"places": places, "stamps": stamps, "keys": keys, "tokens": tokens, "evidence": evidence}
        return {name: tensor.numpy() for name, tensor in found.items()}

    def _fill_learned(self, kind: str, learned: AdaptiveWeights) -> None:
        for name in LEARNED:
            own: array[float] = getattr(learned, name)
            tensor = self._tensor(f"{kind}.{name}", torch.from_numpy(np.array(own)).dtype, len(own))
            _check(name == "weights" or bool((tensor >= 0).all()), f"{kind}.{name} holds negative counts")
            _check(name == "seen" or bool((tensor.abs() <= MOST_WEIGHT).all()), f"{kind}.{name} is out of range")
            own[:] = array(own.typecode, tensor.tolist())
        gains = self._tensor(f"{kind}.gains", torch.float64, None)
        _check(bool((gains.abs() <= MOST_WEIGHT).all()), f"{kind}.gains are out of range")
        learned.gains = gains.tolist()
        for place in range(len(learned.factors)):
            learned.correct(place)

    def _tensor(self, name: str, dtype: torch.dtype, *shape: int | None) -> torch.Tensor:
        """Get the tensor `name`, if it is of this type and shape; a size of `None` is any."""
        tensor = self.tensors[name]
        sizes = [size if wanted is None else wanted for wanted, size in zip(shape, tensor.shape, strict=False)]
        fits = tensor.dim() == len(shape) and sizes == list(tensor.shape) and tensor.dtype == dtype
        _check(fits, f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}")
        return tensor


def _check(holds: bool, reason: str) -> None:
    if not holds:
        raise ValueError(reason)
