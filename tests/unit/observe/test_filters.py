"""A filter is a part of a key; globs and regular expressions are explicit; mistakes are errors."""

import re

import pytest

from popsim_torch.errors import UsageTypeError
from popsim_torch.observe.filters import Filters, Glob, near_keys, process_filters

KEYS = ["fc1.weight_grad", "fc1.bias_grad", "fc10.weight_grad", "Dense_128"]


def taken(*filters):
    found = Filters(filters)
    return [key for key in KEYS if found.take(key)]


def test_no_filters_take_every_key():
    assert all(map(Filters(None).take, KEYS))


def test_an_empty_list_takes_none():
    assert taken() == []


def test_a_string_is_looked_for_anywhere_and_case_counts():
    assert taken("fc1") == KEYS[:3]
    assert taken("bias", "128") == ["fc1.bias_grad", "Dense_128"]
    assert taken("dense") == []


def test_a_string_has_no_wildcards():
    assert taken("fc*") == []
    assert taken("fc.*") == []


def test_a_glob_matches_the_whole_key():
    assert taken(Glob("fc?.*_grad")) == KEYS[:2]
    assert taken(Glob("fc1")) == []
    assert taken(Glob("DENSE_*")) == []


def test_a_regular_expression_is_found_anywhere():
    assert taken(re.compile(r"fc\d\.w")) == KEYS[:1]
    assert taken(re.compile(r"^\w+$")) == ["Dense_128"]


def test_filters_are_copied():
    given = ["fc1"]
    found = Filters(given)
    given.append("Dense")
    assert found.given == ("fc1",)


@pytest.mark.parametrize("given", ["fc1", Glob("fc*"), re.compile("fc")])
def test_one_filter_that_is_no_list_is_refused(given):
    with pytest.raises(UsageTypeError, match="has to be a list of filters or None"):
        Filters(given)


@pytest.mark.parametrize("given", [[1], [b"fc"], [re.compile(b"fc")], [None]])
def test_what_is_no_filter_is_refused(given):
    with pytest.raises(UsageTypeError, match="filter 0 is "):
        Filters(given)


def test_no_list_at_all_is_refused():
    with pytest.raises(UsageTypeError, match="got a int"):
        Filters(3)


def test_filters_that_match_nothing_are_found():
    assert Filters(["fc1", "fc2", Glob("Dense_*")]).idle(KEYS) == ["fc2"]


def test_near_keys_of_a_misspelt_filter():
    assert near_keys("Dense_12S", KEYS) == ["Dense_128"]
    assert near_keys(Glob("zzz"), KEYS) != []
    assert near_keys("zzz", []) == []


@pytest.mark.parametrize("word", ["none", "None", "NONE"])
def test_the_word_none_turns_filters_off(word):
    assert process_filters([word]) is None
    assert process_filters(word) is None


def test_other_words_are_filters():
    assert process_filters(["none", "fc1"]) == ["none", "fc1"]
    assert process_filters([]) == []
    assert process_filters(None) is None
