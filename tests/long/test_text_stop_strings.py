"""Stop strings: the same result however the text is cut, nothing withheld without need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.stop_strings import StopMatcher

stop_sets = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def expected(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """What is shown and what matched: the first end of any stop string, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        if matches := [stop for stop in stops if text[:end].endswith(stop)]:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def may_become_a_stop(text: str, stops: Sequence[str]) -> str:
    """The longest end of ``text`` that begins a stop string without being one."""
    ends = (text[start:] for start in range(len(text)))
    return next((end for end in ends if any(stop.startswith(end) and stop != end for stop in stops)), "")


def all_cuts(text: str) -> Iterator[list[str]]:
    for mask in range(1 << max(0, len(text) - 1)):
        parts, start = [], 0
        for index in range(1, len(text)):
            if mask >> (index - 1) & 1:
                parts.append(text[start:index])
                start = index
        yield [*parts, text[start:]]


def run(parts: Sequence[str], stops: Sequence[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown, fed = "", ""
    for part in parts:
        shown += matcher.feed(part)
        fed += part
        if matcher.matched is None:
            assert shown + may_become_a_stop(fed, stops) == fed
    rest = matcher.finish()
    assert rest == "" or matcher.matched is None
    return shown + rest, matcher.matched


@given(text=st.text("abc", max_size=8), stops=stop_sets)
def test_every_cut_of_a_text_gives_what_the_whole_gives(text: str, stops: list[str]) -> None:
    for parts in all_cuts(text):
        assert run(parts, stops) == expected(text, stops)


@given(data=st.data(), stops=st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=5))
def test_long_texts_with_real_stops_inside(data: st.DataObject, stops: list[str]) -> None:
    pieces = st.one_of(st.text(max_size=6), st.sampled_from([stop[:cut] for stop in stops for cut in (1, 3, None)]))
    parts = data.draw(st.lists(pieces, max_size=20))
    assert run(parts, stops) == expected("".join(parts), stops)


@pytest.mark.parametrize(
    ("stops", "parts", "shown", "matched"),
    [
        pytest.param(["\n\n"], ["one\n", "\ntwo"], "one", "\n\n", id="across pieces"),
        pytest.param(["</s>"], ["a </", "p> b <", "/s>"], "a </p> b ", "</s>", id="false start"),
        pytest.param(["aab"], ["aa", "aab"], "aa", "aab", id="a start inside a start"),
        pytest.param(["abcd", "bc"], ["xabcd"], "xa", "bc", id="complete first wins"),
        pytest.param(["bc", "abc"], ["xab", "c"], "x", "abc", id="longest of those complete at once"),
        pytest.param(["END"], ["the EN"], "the EN", None, id="unfinished at the end"),
        pytest.param(["🙂"], ["a", "🙂", "b"], "a", "🙂", id="one character"),
        pytest.param([], ["a", "b"], "ab", None, id="none"),
        pytest.param(["a", "a"], ["ba"], "b", "a", id="twice the same"),
    ],
)
def test_cases(stops: list[str], parts: list[str], shown: str, matched: str | None) -> None:
    assert run(parts, stops) == (shown, matched)


def test_nothing_is_shown_after_a_match() -> None:
    matcher = StopMatcher(["."])
    assert (matcher.feed("a.b"), matcher.feed("c"), matcher.finish(), matcher.matched) == ("a", "", "", ".")


def test_a_long_stop_string_that_almost_comes() -> None:
    stop = "a" * 5000 + "b"
    matcher = StopMatcher([stop])
    assert all(matcher.feed("a") == "" for _ in range(5000))
    assert matcher.feed("a") == "a"
    assert matcher.feed("c") == "a" * 5000 + "c"
    assert matcher.feed(stop) == ""
    assert matcher.matched == stop
