"""Whatever a configuration or a file holds: a result, or one of this package's errors. Nothing else, and nothing hangs.

A configuration that is accepted changes the speed only, so the text is plain generation's.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hf_specdec
from hf_specdec.errors import SpecError
from hf_specdec.methods.auto.spec_memory import SpecMemory
from hf_specdec.methods.registry import METHODS
from tests.helpers.heads import random_head
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build

NEW_TOKENS = 6
UNTIMED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
OFTEN = settings(max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=UNTIMED)
SELDOM = settings(OFTEN, max_examples=15)
NUMBERS = st.one_of(
    st.integers(-3, 12),
    st.sampled_from([0, 64, 4096, 4097, 10**9, 10**30, -(10**9), 1 << 63]),
    st.floats(),
    st.booleans(),
)
WORDS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["auto", "loop", "assisted", "request", "shared", "cpu", "cuda:256", "[10, 2, [0]]", "\udc80"]),
)
ANYTHING = st.recursive(
    st.one_of(NUMBERS, WORDS, st.none(), st.binary(max_size=4), st.just(torch.tensor([1, 2])), st.just(object())),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(WORDS, st.integers()), inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=6,
)
NAMES = sorted({name for method in METHODS.values() for name in method.config_class.__dataclass_fields__})
ALIASES = sorted({name for method in METHODS.values() for name in method.config_class.aliases})
LIKELY = st.dictionaries(st.sampled_from(NAMES + ALIASES), ANYTHING, max_size=3)
LISTS = st.lists(st.one_of(NUMBERS, st.lists(NUMBERS | WORDS, max_size=2)), max_size=5)
CONFIGS = st.one_of(ANYTHING, LIKELY, LISTS, LIKELY.map(str), LISTS.map(str), st.text(max_size=20))
UNREADABLE = [
    "[" * 100_000 + "]" * 100_000,
    "{'a':" * 5_000,
    "{[1]: 2}",
    "9" * 10_000,
    b"[10, 2]",
    bytearray(b"[1]"),
    {"engine": 10**5000},
]


def refused(error: SpecError) -> bool:
    """Whether the error is one line that says field, value and remedy."""
    return len(str(error).splitlines()) == 1 and len(str(error)) < 1000


@pytest.mark.parametrize("method", METHODS)
@OFTEN
@given(value=CONFIGS)
def test_a_configuration_is_read_or_refused(method: str, value: Any) -> None:
    try:
        METHODS[method].config_class.parse(value)
    except SpecError as error:
        assert refused(error), error


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", UNREADABLE, ids=range(len(UNREADABLE)))
def test_what_python_cannot_read_is_refused(method: str, value: Any) -> None:
    with pytest.raises(SpecError) as error:
        METHODS[method].config_class.parse(value)
    assert refused(error.value)


def sizes(most: int) -> st.SearchStrategy[int]:
    """Sizes that are mostly allowed, the largest ones among them."""
    return st.one_of(st.integers(1, 9), st.sampled_from([40, most]))


DRAFTED = st.fixed_dictionaries(
    {},
    optional={
        "draft_len": sizes(40),
        "num_branches": sizes(64),
        "max_nodes": st.none() | sizes(4096),
        "confidence_threshold": st.none() | st.floats(0.0, 1.0),
        "use_logits": st.booleans(),
    },
)
RUNNABLE = {
    "plain": st.just({}),
    "prompt_lookup": st.fixed_dictionaries(
        {},
        optional={
            "max_draft_len": sizes(4096),
            "max_matching_ngram_size": sizes(128),
            "draft_len_per_match": st.none() | st.just("auto") | sizes(4096),
            "pool": st.sampled_from(["request", "shared"]),
            "engine": st.sampled_from(["loop", "assisted"]),
        },
    ),
    "lookahead": st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(0, 9)).map(list),
    "draft_model": DRAFTED,
    "eagle3": DRAFTED,
    "auto": st.fixed_dictionaries(
        {},
        optional={
            "max_nodes": sizes(4096),
            "num_nodes": st.none() | sizes(300),
        },
    ),
}


@pytest.mark.parametrize("method", RUNNABLE)
@SELDOM
@given(data=st.data())
def test_a_configuration_that_is_accepted_gives_plain_generations_text(model: Any, method: str, data: Any) -> None:
    config = data.draw(RUNNABLE[method])
    kwargs: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = plain(model, PROMPT, **kwargs).tolist()
    if method == "draft_model":
        kwargs["assistant_model"] = build_draft()
    elif method == "eagle3":
        kwargs["assistant_model"] = random_head(model)
    try:
        assert model.generate(PROMPT, **kwargs, spec_method=method, spec_config=config).tolist() == expected
    except SpecError as error:
        assert refused(error), error


DRAFT: list[Any] = []


def build_draft() -> Any:
    """One draft model for all examples."""
    if not DRAFT:
        DRAFT.append(build(FAMILIES["llama"]))
    return DRAFT[0]


@pytest.fixture(scope="session")
def remembered(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a memory that has seen texts."""
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    model.generate(PROMPT, max_new_tokens=8, do_sample=False, spec_method="auto", spec_config={"num_nodes": 4})
    path = tmp_path_factory.mktemp("remembered") / "memory"
    hf_specdec.spec_memory(model).save(path)
    return path.read_bytes()


@SELDOM
@given(data=st.data())
def test_a_damaged_file_of_memory_is_used_or_refused(tmp_path: Path, remembered: bytes, data: Any) -> None:
    """Any byte changed, or the file cut."""
    whole = bytearray(remembered)
    place = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        whole = whole[:place]
    else:
        whole[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "memory.safetensors"
    path.write_bytes(whole)
    try:
        SpecMemory.load(path)
    except SpecError as error:
        assert refused(error), error
