"""Grammars: JSON schemas, regular expressions and Lark grammars as logits processors that drafts follow.

json = hf_specdec.grammar(tokenizer, json_schema=schema)
model.generate(**inputs, logits_processor=[json], spec_method="auto")

llguidance (https://github.com/guidance-ai/llguidance) follows the grammar. One matcher a row goes along the text and
the branches of drafts, and is rolled back to where they part.
"""

import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from hf_specdec.common.transfer import is_host, upload
from hf_specdec.common.tree import DraftTree
from hf_specdec.engine.sampling.per_row import PerRow
from hf_specdec.errors import ConfigError, SpecError, import_extra

Bits = npt.NDArray[np.uint32]  # (rows, ceil(vocab_size / 32)): a bit for each token that is allowed, the least first
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps writes
WORD = 32
MOST_SHOWN = 240  # characters of an error

# Vocabularies in llguidance's form: of a large one it takes a second to make.
_VOCABULARIES: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[int, ...], Any]]
_VOCABULARIES = weakref.WeakKeyDictionary()


def grammar(
    tokenizer: PreTrainedTokenizerBase,
    *,
    json_schema: Mapping[str, Any] | str | type | None = None,
    json_object: bool = False,
    regex: str | None = None,
    lark: str | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> "Grammar":
    """Make a logits processor that lets a model write what a grammar allows, for `generate` and `generate_many`.

    Give one grammar. JSON is written on one line, with a space after each comma and colon, so that keys and brackets
    are forced: they are drafted with probability 1, whatever `spec_method` is. The text is that of plain `generate`
    with the same processor. A prompt that goes on from the last call's text goes on in its grammar too; any other
    begins anew.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's, a fast one.
        json_schema (`dict`, `str` or a pydantic model, *optional*): answers are JSON of this schema. llguidance's
            options may stand in it under `"x-guidance"`, such as `{"whitespace_flexible": True}`.
        json_object (`bool`, *optional*, defaults to `False`): answers are JSON objects.
        regex (`str`, *optional*): answers match this regular expression, in the syntax of Rust's `regex`.
        lark (`str`, *optional*): answers follow this Lark grammar, with llguidance's extensions.
        eos_token_id (`int` or `Sequence[int]`, *optional*): tokens that may end an answer; by default the tokenizer's.

    Raises:
        ConfigError: there is no grammar or more than one, it is invalid, or the tokenizer is not a fast one.
        MissingExtraError: llguidance is not installed.
    """
    grammars = {"json_schema": json_schema, "json_object": json_object or None, "regex": regex, "lark": lark}
    fields = [name for name, value in grammars.items() if value is not None]
    if len(fields) != 1:
        rule = f"must get one of {', '.join(grammars)}"
        raise ConfigError("grammar", rule, " and ".join(fields) or "none", "Pass one grammar a call.")
    (field,) = fields
    library = import_extra("llguidance", "grammar", "hf_specdec.grammar")
    vocabulary, ends = _vocabulary(tokenizer, eos_token_id)
    matcher = library.LLMatcher(vocabulary, _source(library.LLMatcher, field, grammars[field]), log_level=0)
    matcher.compute_bitmask()  # finds that no text matches
    if error := matcher.get_error():
        rule = f"must be a grammar that llguidance can follow ({_on_one_line(error)})"
        raise ConfigError(field, rule, grammars[field], "Correct it, or leave out what is not supported.")
    return Grammar(matcher, ends)


class Grammar(PerRow):
    """A logits processor of one grammar, with a state for each row; made by `grammar`."""

    def __init__(self, matcher: Any, ends: frozenset[int]) -> None:
        super().__init__(lambda row: GrammarRow(matcher.deep_copy(), ends))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Mask `(batch, vocab_size)` scores after `(batch, length)` ids, all rows in one operation."""
        texts = input_ids.tolist()
        self._follow_beams(texts)
        rows: list[Any] = [self.of_row(row) for row in range(len(texts))]
        bits = [row.allowed_after(text) for row, text in zip(rows, texts, strict=True)]
        return _masked(scores, np.stack(bits))

    def _follow_beams(self, texts: Sequence[list[int]]) -> None:
        """Give each row whose text goes on from another row's, as beams' do, a copy of that row's state."""
        rows: list[Any] = [self.of_row(row) for row in range(len(texts))]
        moved = [place for place, row in enumerate(rows) if row.text not in (None, texts[place][:-1])]
        for place in moved:
            if (source := next((row for row in rows if row.text == texts[place][:-1]), None)) is not None:
                self._made[place] = source.copied()


class GrammarRow:
    """The grammar's state in one row: a `Constraint`.

    Attributes:
        text (`list[int]`, *optional*): as it was last shown; before the first call there is none.
    """

    def __init__(self, matcher: Any, ends: frozenset[int]) -> None:
        self._matcher, self._ends = matcher, ends
        self.text: list[int] | None = None
        self._path: list[int] = []  # drafted tokens after it, which the matcher has followed too
        self._has_ended = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Mask `(1, vocab_size)` scores after `(1, length)` ids."""
        return _masked(scores, self.allowed_after(input_ids[0].tolist())[None])

    def allowed_after(self, text: Sequence[int]) -> npt.NDArray[np.uint32]:
        """Bits of the tokens that may follow a text."""
        self.follow(text)
        return self._allowed()

    def follow(self, text: Sequence[int]) -> None:
        """See `Constraint`. A text that does not go on from the last one, as the grammar has it, is a new prompt."""
        self.descend(())
        length = 0 if self.text is None else len(self.text)
        new = text[length:]
        if self.text != text[:length] or not self._goes_on(new):
            self._matcher.reset()
            self._has_ended = False
        self.text, self._path = list(text), []

    def copied(self) -> "GrammarRow":
        """A row of the same state."""
        self.descend(())
        copy = GrammarRow(self._matcher.deep_copy(), self._ends)
        copy.text, copy._has_ended = self.text, self._has_ended
        return copy

    def descend(self, path: Sequence[int]) -> bool:
        """See `Constraint`."""
        same = 0
        while same < min(len(path), len(self._path)) and path[same] == self._path[same]:
            same += 1
        self._matcher.rollback(len(self._path) - same)
        del self._path[same:]
        for place in range(same, len(path)):
            if path[place] in self._ends:
                return place + 1 == len(path) and bool(self._matcher.is_accepting())
            if not self._matcher.try_consume_tokens([path[place]]):
                return False
            self._path.append(path[place])
        return True

    def forced(self) -> list[int]:
        """See `Constraint`: keys, brackets and quotes. The token that ends a text gains nothing as a draft."""
        run: list[int] = self._matcher.compute_ff_tokens()
        return run

    def mask_nodes(self, scores: torch.Tensor, tree: DraftTree, text: Sequence[int]) -> torch.Tensor:
        """See `Constraint`: one fill a node, one masked operation."""
        self.follow(text)
        paths: list[list[int]] = [[]]
        bits = [self._allowed()]
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            paths.append([*paths[parent], token])
            is_allowed = self.descend(paths[-1])
            bits.append(self._allowed() if is_allowed else np.full_like(bits[0], -1))  # of nodes that are never reached
        return _masked(scores, np.stack(bits))

    def _goes_on(self, new: Sequence[int]) -> bool:
        """True if the matcher has followed `new` tokens after the text, or the text has ended before their last."""
        if self.text is None:
            return False
        is_end = len(new) == 1 and new[0] in self._ends and self._matcher.is_accepting()
        if len(new) <= 1 and (self._has_ended or is_end):  # what follows an end is padding, a token at a time
            self._has_ended = True
            return True
        if self._has_ended or not self._ends.isdisjoint(new):
            return False
        if not self.descend(new):
            word, bit = divmod(new[0], WORD)
            if len(new) == 1 and self._allowed()[word] >> bit & 1:
                rule = (
                    "llguidance allows a special token here that it does not follow; a Lark grammar names it by its id"
                )
                raise SpecError(f"the grammar cannot be followed any further: {rule}, <[{new[0]}]>")
            return False
        return True

    def _allowed(self) -> npt.NDArray[np.uint32]:
        """Bits of the tokens that may follow here."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        if error := self._matcher.get_error():
            raise SpecError(f"the grammar cannot be followed any further: {_on_one_line(error)}")
        return bits


def _masked(scores: torch.Tensor, bits: Bits) -> torch.Tensor:
    """The scores `(rows, vocab_size)`, -inf where a token is not allowed."""
    missing = -(-scores.shape[-1] // WORD) - bits.shape[-1]  # words of tokens that the tokenizer does not have
    if missing > 0:
        bits = np.pad(bits, ((0, 0), (0, missing)))
    if is_host(scores.device):
        flags = np.unpackbits(bits.view(np.uint8), axis=-1, count=scores.shape[-1], bitorder="little")
        return scores.masked_fill(torch.from_numpy(flags == 0), -torch.inf)
    words = upload(torch.from_numpy(bits.view(np.int32)), scores.device)  # (rows, words)
    places = torch.arange(WORD, dtype=torch.int32, device=scores.device)
    is_allowed = (words.unsqueeze(-1) >> places & 1).flatten(1)[:, : scores.shape[-1]]  # (rows, vocab_size)
    return scores.masked_fill(is_allowed == 0, -torch.inf)


def _source(kinds: Any, field: str, value: Any) -> str:
    """llguidance's form of a grammar."""
    if field in ("regex", "lark"):
        if not isinstance(value, str):
            raise ConfigError(field, "must be a string", value, "Pass the grammar's text.")
        return str(getattr(kinds, f"grammar_from_{field}")(value))
    schema = {"type": "object"} if field == "json_object" else value
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    try:
        written = schema if isinstance(schema, str) else json.dumps(schema)
        if not isinstance(json.loads(written), dict):
            raise TypeError("no object")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            field, "must be a JSON schema", value, "Pass a dict, its JSON, or a pydantic model."
        ) from error
    return str(kinds.grammar_from_json_schema(written, defaults=COMPACT))


def _vocabulary(tokenizer: Any, eos_token_id: int | Sequence[int] | None) -> tuple[Any, frozenset[int]]:
    """The tokenizer in llguidance's form, and the tokens that end an answer."""
    if not getattr(tokenizer, "is_fast", False):
        remedy = "Load it with AutoTokenizer.from_pretrained(path, use_fast=True)."
        raise ConfigError("tokenizer", "must be a fast tokenizer", tokenizer, remedy)
    ends = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
    ends = (ends,) if isinstance(ends, int) else tuple(ends or ())
    if not ends:
        rule = "must be given where the tokenizer has none"
        raise ConfigError("eos_token_id", rule, eos_token_id, "Pass the token that ends the model's answers.")
    made = _VOCABULARIES.setdefault(tokenizer, {})
    if (key := (len(tokenizer), *ends)) not in made:
        module = import_extra("llguidance.hf", "grammar", "hf_specdec.grammar")
        made[key] = module.from_tokenizer(tokenizer, eos_token=list(ends))
    return made[key], frozenset(ends)


def _on_one_line(error: str) -> str:
    """An error of llguidance's without its state, cut where it is long."""
    reason = error.partition("<state>")[0].replace("NoExtensionBias", "no token may follow")
    return " ".join(reason.split())[:MOST_SHOWN]
