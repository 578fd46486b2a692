"""The tokenizers of checkpoints: a target's, and that of a draft model where it is another one."""

import os
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_specdec.compat.loading import cached_file
from hf_specdec.errors import CheckpointError, first_line
from hf_specdec.loading.checkpoints.folder import with_gguf_file
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.translation import share_token_ids


def load_tokenizer(path: str | os.PathLike[str], **hub: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint.

    Args:
        path: a folder, a name on the hub, or a GGUF file.
        hub: `revision`, `token`, `trust_remote_code`, ... as in transformers.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    folder, arguments = with_gguf_file(path, hub)
    remedy = "Put the checkpoint's tokenizer files besides its weights."
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **arguments)
    except Exception as error:
        raise CheckpointError(
            f"`tokenizer` must be one that transformers can load, but that of {os.fspath(path)!r} is not: "
            f"{first_line(error)} {remedy}"
        ) from error
    if _is_empty(tokenizer):
        raise CheckpointError(
            f"`tokenizer` must have tokens of text, but that of {os.fspath(path)!r} has none. {remedy}"
        )
    return tokenizer


def _is_empty(tokenizer: Any) -> bool:
    """True for what transformers makes of a checkpoint without tokenizer files: special tokens alone."""
    return isinstance(tokenizer, PreTrainedTokenizerBase) and len(tokenizer) <= len(set(tokenizer.all_special_tokens))


def load_foreign_tokenizer(
    path: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a draft model's checkpoint, where its tokens are others than those of the target's `tokenizer`.

    Returns:
        `None` where nothing has to be translated; a checkpoint without a tokenizer has the target's.

    Raises:
        CheckpointError: it is damaged.
    """
    if "gguf_file" not in with_gguf_file(path, {})[1]:
        try:
            file = cached_file(os.fspath(path), "tokenizer_config.json", _raise_exceptions_for_missing_entries=False)
        except (OSError, ValueError):  # no checkpoint: loading the model says so
            return None
        if file is None:
            return None
    of_draft = load_tokenizer(path)
    return None if share_token_ids(tokenizer, of_draft) else of_draft


def draft_tokenizers(
    draft: Any, path: str | os.PathLike[str] | None, tokenizer: PreTrainedTokenizerBase
) -> dict[str, PreTrainedTokenizerBase]:
    """Arguments of `generate` for a draft model with a tokenizer of its own; none for one with the target's.

    Args:
        draft: the draft model, or a draft head, which drafts the target's tokens.
        path: what it was loaded from; `None` is an embedded one, which has the embedded target's tokenizer.

    Raises:
        CheckpointError: the tokenizer is damaged.
    """
    of_draft = None if path is None or isinstance(draft, DraftHead) else load_foreign_tokenizer(path, tokenizer)
    return {} if of_draft is None else {"tokenizer": tokenizer, "assistant_tokenizer": of_draft}
