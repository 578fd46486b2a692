"""Arguments under names that transformers is giving up."""

import pytest
from transformers import DynamicCache

from hf_specdec import compat
from tests.helpers.support import PROMPT, plain

METHODS = {"without a method": {}, "prompt_lookup": {"spec_method": "prompt_lookup"}}


@pytest.mark.skipif(compat.CACHE != "cache", reason="transformers before 5.24 knows one name")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", compat.GIVEN_CACHES[1:])
def test_an_old_name_of_the_cache_is_warned_of_at_the_callers_line(model, name, method):
    """The warning that transformers gives to a plain call comes once, and names no line of this package."""
    with pytest.warns(FutureWarning, match=f"`{name}` is deprecated"):
        reference = plain(model, PROMPT, **{name: DynamicCache(config=model.config)}, max_new_tokens=4)
    with pytest.warns(FutureWarning, match=f"`{name}` is deprecated") as warned:
        ours = model.generate(PROMPT, **{name: DynamicCache(config=model.config)}, max_new_tokens=4, **METHODS[method])
    assert ours.tolist() == reference.tolist()
    assert [one.filename for one in warned] == [__file__]
