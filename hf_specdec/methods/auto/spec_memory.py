"""Memory of `auto` from call to call: texts, recycled logits, and what was learned about the sources while decoding.

Bounded, safe to share between threads, and between models of one tokenizer: it can be saved and loaded. Holds token
ids of texts, so treat a saved file as you treat the texts.

    memory = SpecMemory(max_tokens=1_000_000, max_entries=262_144)
    hf_specdec.enable(model, spec_memory=memory)
    memory.save("memory.safetensors")
    memory = SpecMemory.load("memory.safetensors")
"""

import os
from array import array
from collections.abc import Mapping
from itertools import chain
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from hf_specdec.common.files import check_path, replacing
from hf_specdec.errors import ConfigError, first_line
from hf_specdec.methods.auto.recycled_logits import MAX_KEY, RecycledLogits, Rows
from hf_specdec.methods.common.config import MAX_KEPT, check_positive
from hf_specdec.methods.common.ngrams import BOUNDARY, NgramPool

NUM_MATCH_KINDS = 6  # of a context by its longest match: of 0 to 3 tokens, of 4 or 5, and longer
WIDTH = MAX_KEY + 6  # of a kind's weights: the bias, then one for each source
NUM_BINS = 20  # of probability, each with a factor: accepted tokens over those expected
PRIOR = 6.0  # accepted tokens as which being right from the start counts
MAX_EXPECTED = 100.0  # where a bin has expected so many accepted tokens, its counts are halved: old ones fade
MOST = 0.93  # probability of any token: long copies, held for nearly certain, end at one token of fifteen
INITIAL_GAIN = 1.0
GAIN_RATE = 0.05  # weight of a forward in what such forwards gain; of the first ones more, their mean
SETTLED = 10  # forwards that gains read from a file count as
FORMAT = "hf_specdec memory 3"
REMEDY = "Give a file that SpecMemory.save wrote, or begin with SpecMemory()."
KINDS = ("greedy", "sampled")  # of texts, with what was learned of each
TEXTS = ("texts.old", "texts.young")
LEARNED = ("weights", "seen", "expected", "accepted")  # arrays of `AdaptiveWeights`
MOST_IN_FILE = 1000.0  # of a file's weights, log odds, gains and counts; what is learned stays far below


class Prior(NamedTuple):
    """Weights to start with: as they came out on prompts of eight tasks, rounded.

    Attributes:
        lone_matches: of what followed in this text where no logits are recycled, by the kind of match.
        matches: the same where some are.
        pooled: of what followed in earlier texts.
        recycled: of the logits under the longest to the shortest key, by the longest key that was found.
        common: of the text's commonest tokens; where a draft was asked.
        siblings: of what was likely in the place of the last token, by the longest key.
        bias: by the longest key; where a draft was asked.
        draft: of the draft, by the longest key.
        drafted_share: of the weights of matches and logits, where a draft was asked.
    """

    lone_matches: tuple[float, ...]
    matches: tuple[float, ...]
    pooled: float
    recycled: tuple[tuple[float, float, float], ...]
    common: tuple[float, float]
    siblings: tuple[float, ...]
    bias: tuple[tuple[float, ...], tuple[float, ...]]
    draft: tuple[float, ...]
    drafted_share: float

    def weights(self) -> list[tuple[float, ...]]:
        """Bias and weights of each kind of context: drafted or not, the kind of its longest match, its longest key."""
        kinds: list[tuple[float, ...]] = []
        for is_drafted in (False, True):
            share = self.drafted_share if is_drafted else 1.0
            for match in range(NUM_MATCH_KINDS):
                for level in range(MAX_KEY + 1):
                    of_match = (self.matches if level else self.lone_matches)[match]
                    of_draft = self.draft[level] if is_drafted else 0.0
                    shared = [share * weight for weight in (of_match, self.pooled, *self.recycled[level])]
                    siblings = share * self.siblings[level]
                    bias, common = self.bias[is_drafted][level], self.common[is_drafted]
                    kinds.append((bias, *shared, common, of_draft, siblings))
        return kinds


GREEDY = Prior(
    lone_matches=(0.0, 0.35, 0.5, 0.6, 0.65, 0.7),  # by recorded answers of a model of 7B parameters
    matches=(0.0, 0.15, 0.22, 0.3, 0.3, 0.25),
    pooled=0.27,
    recycled=((0.0, 0.0, 0.0), (0.0, 0.0, 0.5), (0.0, 0.45, 0.25), (0.5, 0.15, 0.1)),
    common=(0.5, 0.12),
    siblings=(0.5, 0.25, 0.12, 0.06),
    bias=((-6.2, -3.7, -3.3, -3.1), (-6.5, -5.0, -3.4, -3.0)),
    draft=(1.6, 1.1, 0.95, 0.8),
    drafted_share=0.6,
)
SAMPLED = Prior(
    lone_matches=(0.0, 0.15, 0.2, 0.2, 0.33, 0.6),
    matches=(0.0, 0.15, 0.2, 0.2, 0.33, 0.6),
    pooled=0.14,
    recycled=((0.0, 0.0, 0.0), (0.0, 0.0, 0.7), (0.0, 0.55, 0.35), (0.55, 0.2, 0.2)),
    common=(0.45, 0.0),
    siblings=(0.5, 0.25, 0.12, 0.06),
    bias=((-6.6, -5.7, -5.5, -5.5), (-6.4, -6.1, -5.8, -4.9)),
    draft=(0.94, 0.81, 0.76, 0.66),
    drafted_share=0.3,
)


class AdaptiveWeights:
    """State learned about the sources, apart for greedy and for sampled texts.

    Attributes:
        weights (`array`): `(kinds, WIDTH)`, the bias and the weight of each source.
        seen (`array`): tokens that each kind of context has learned from.
        expected, accepted, factors (`array`): by bin of probability, tokens expected and accepted, and their ratio.
        gains (`list[float]`): tokens that a draft model's first, second, ... forward of a step and those after it add,
            less the cost of those after it.
        num_gains (`list[int]`): forwards that each of `gains` was learned from, where it was not read from a file.
        retry_credit (`float`): tokens that forwards which do not pay may lose.
    """

    def __init__(self, prior: Prior = GREEDY) -> None:
        kinds = prior.weights()
        self.weights, self.seen = array("d", chain.from_iterable(kinds)), array("q", [0] * len(kinds))
        self.expected, self.accepted = array("d", [0.0] * NUM_BINS), array("d", [0.0] * NUM_BINS)
        self.factors = array("d", [1.0] * NUM_BINS)
        self.gains: list[float] = []
        self.num_gains: list[int] = []
        self.retry_credit = 0.0

    @property
    def arrays(self) -> "tuple[array[float], array[int], array[float], array[float], array[float]]":
        """The arrays as the compiled core takes them."""
        return self.weights, self.seen, self.expected, self.accepted, self.factors

    def correct(self, place: int) -> None:
        """Compute the factor of a bin anew."""
        self.factors[place] = (self.accepted[place] + PRIOR) / (self.expected[place] + PRIOR)

    def gain(self, number: int) -> float:
        """Get what the draft model's forward `number`, counted from 0, may add; high for the first untried one."""
        if number > len(self.gains):
            return 0.0
        return self.gains[number] if number < len(self.gains) else INITIAL_GAIN

    def gained(self, number: int, tokens: float) -> None:
        """Learn that the forward `number` and those after it added so many tokens, less the cost of those after it."""
        if number == len(self.gains):
            self.gains.append(INITIAL_GAIN)
            self.num_gains.append(0)
        while len(self.num_gains) < len(self.gains):
            self.num_gains.append(SETTLED)
        self.num_gains[number] += 1
        rate = max(GAIN_RATE, 1.0 / (self.num_gains[number] + 1))
        self.gains[number] += rate * (tokens - self.gains[number])

    def may_retry(self, credit: float, cost: float) -> bool:
        """Tell whether a forward that does not pay is made all the same; each that is not adds `credit` tokens."""
        self.retry_credit = min(self.retry_credit + credit, cost)
        if self.retry_credit < cost:
            return False
        self.retry_credit = 0.0
        return True


class SpecMemory:
    """Memory of earlier calls.

    Args:
        max_tokens (`int`, *optional*, defaults to 1,000,000): bound of the texts, in tokens; the oldest leave first.
        max_entries (`int`, *optional*, defaults to 262,144): bound of the recycled logits, in entries of 140
            bytes; the oldest leave first.

    Raises:
        ConfigError: a bound below 1.
    """

    def __init__(self, max_tokens: int = 1_000_000, max_entries: int = 262_144) -> None:
        check_positive("max_tokens", max_tokens, "The default is 1000000.", most=MAX_KEPT)
        check_positive("max_entries", max_entries, "The default is 262144.", most=MAX_KEPT)
        self.pool = NgramPool(max_tokens)
        self.recycled = RecycledLogits(max_entries)
        self.greedy, self.sampled = AdaptiveWeights(GREEDY), AdaptiveWeights(SAMPLED)

    @property
    def bounds(self) -> tuple[int, int]:
        """Most tokens of text and most recycled entries."""
        return self.pool.max_tokens, self.recycled.max_entries

    def adaptive_weights(self, is_sampled: bool) -> AdaptiveWeights:
        """State learned from greedy, or from sampled texts."""
        return self.sampled if is_sampled else self.greedy

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one safetensors file; calls that use the memory meanwhile go on.

        The file is written next to `path` and then put in its place, so an older file is whole until then.

        Raises:
            OSError: the folder is missing, or cannot be written to.
        """
        check_path("path", path, "a file to write")
        max_tokens, max_entries = map(str, self.bounds)
        content = save(self._tensors(), {"format": FORMAT, "max_tokens": max_tokens, "max_entries": max_entries})
        with replacing(path) as temporary:
            temporary.write_bytes(content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "SpecMemory":
        """Read the memory that `save` wrote: with its bounds, and it drafts what that one would have drafted.

        The texts are indexed anew: one million tokens take about two seconds.

        Raises:
            ConfigError: the file is missing or damaged, or is another kind of file.
        """
        check_path("path", path, "a file that SpecMemory.save wrote")
        try:
            with safe_open(os.fspath(path), framework="numpy") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            if metadata.get("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT!r}")
            memory = cls(int(metadata["max_tokens"]), int(metadata["max_entries"]))
            memory._restore(tensors)
        except (OSError, SafetensorError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else first_line(error)
            rule = f"must be a whole file of a memory ({reason})"
            raise ConfigError("spec_memory", rule, os.fspath(path), REMEDY) from error
        return memory

    def _tensors(self) -> dict[str, Rows]:
        """All contents by their names in a file."""
        tensors = {
            name: np.array(tokens, dtype=np.int32) for name, tokens in zip(TEXTS, self.pool.generations(), strict=True)
        }
        tensors |= {f"recycled.{name}": rows for name, rows in self.recycled.export().items()}
        for kind in KINDS:
            weights: AdaptiveWeights = getattr(self, kind)
            tensors |= {f"{kind}.{name}": np.array(getattr(weights, name)) for name in LEARNED}
            tensors[f"{kind}.gains"] = np.array(weights.gains, dtype=np.float64)
        return tensors

    def _restore(self, tensors: Mapping[str, Rows]) -> None:
        """Fill this empty memory; a `ValueError` says what is wrong with the tensors of a file."""
        for name, empty in self._tensors().items():
            _check_tensor(name, tensors[name], empty)
        self.pool.restore(*(tensors[name].tolist() for name in TEXTS))
        self.recycled.restore({name: tensors[f"recycled.{name}"] for name in self.recycled.export()})
        for kind in KINDS:
            weights: AdaptiveWeights = getattr(self, kind)
            for name in LEARNED:
                values: array[float] = getattr(weights, name)
                values[:] = array(values.typecode, tensors[f"{kind}.{name}"].tolist())
            weights.gains = tensors[f"{kind}.gains"].tolist()
            for place in range(len(weights.factors)):
                weights.correct(place)


def _check_tensor(name: str, rows: Rows, empty: Rows) -> None:
    """Raise unless a tensor has the type and sizes that an empty memory's has, but for a length, and likely values."""
    length = (empty if name.rpartition(".")[2] in LEARNED else rows).shape[:1]
    if rows.dtype != empty.dtype or rows.ndim != empty.ndim or rows.shape != (*length, *empty.shape[1:]):
        raise ValueError(f"{name} is {rows.dtype} of shape {rows.shape}")
    least, most = (-MOST_IN_FILE, MOST_IN_FILE) if rows.dtype.kind == "f" else (BOUNDARY, np.inf)
    if not ((rows >= least) & (rows <= most)).all():
        raise ValueError(f"{name} has values out of range")
