from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import RouterError
from router.proxy.plan import UNMATCHED
from router.proxy.routes import OWN, PROXIED, MethodNotAllowed, check, origin_form, route_of


@pytest.mark.parametrize(
    ("target", "route"),
    [
        ("/v1/completions", "/v1/completions"),
        ("/v1/completions?q=%25s3&x=a+b", "/v1/completions"),
        ("//v1//completions", "/v1/completions"),
        ("/v1/./completions", "/v1/completions"),
        ("/v1/x/../completions", "/v1/completions"),
        ("/v1/%63ompletions", "/v1/completions"),
        ("/v1/%2e%2e/generate", "/generate"),
        ("/../../generate", "/generate"),
        ("/v1/models/a%2Fb", UNMATCHED),
        ("/v1/completions/", UNMATCHED),
        ("/V1/Completions", UNMATCHED),
        ("/v1/%2563ompletions", UNMATCHED),
        ("/flush_cache%2f..%2fgenerate", UNMATCHED),
        ("/generate%00", UNMATCHED),
        ("/v1/../flush_cache", UNMATCHED),
        ("/v1/%2e%2e/flush_cache", UNMATCHED),
        ("//flush_cache", UNMATCHED),
        ("/", UNMATCHED),
        ("/%ff", UNMATCHED),
    ],
)
def test_targets_decide_by_their_normalised_path(target: str, route: str) -> None:
    """Cases 81 and 101."""
    assert route_of(target) == route


@settings(deadline=None)
@given(st.text(max_size=40))
def test_every_path_has_a_route_of_the_closed_set(noise: str) -> None:
    """Case 97."""
    assert route_of("/" + noise) in {*PROXIED, *OWN, UNMATCHED}


@pytest.mark.parametrize(
    ("target", "form"),
    [("/a?b", "/a?b"), ("http://h:1/a?b", "/a?b"), ("HTTPS://h", "/"), ("http://h/a//b", "/a//b")],
)
def test_the_absolute_form_loses_its_authority(target: str, form: str) -> None:
    assert origin_form(target) == form


@pytest.mark.parametrize("target", ["*", "h:80", "ftp://h/a", "/a#b", "", "a/b"])
def test_other_forms_are_refused(target: str) -> None:
    with pytest.raises(RouterError) as refused:
        origin_form(target)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("method", "route", "status", "allow"),
    [
        ("GET", "/v1/completions", 405, "POST"),
        ("HEAD", "/generate", 405, "POST"),
        ("OPTIONS", "/v1/completions", 405, "POST"),
        ("OPTIONS", "/v1/models", 405, "GET, HEAD"),
        ("POST", "/health", 405, "GET, HEAD"),
        ("POST", UNMATCHED, 404, None),
    ],
)
def test_wrong_methods_are_told_the_right_ones(method: str, route: str, status: int, allow: str | None) -> None:
    """Case 83."""
    with pytest.raises(RouterError) as refused:
        check(method, route)
    assert refused.value.status == status
    if allow is not None:
        assert isinstance(refused.value, MethodNotAllowed)
        assert refused.value.allow.value == allow


def test_the_documented_methods_pass() -> None:
    for route in PROXIED:
        check("POST", route)
    for route in OWN:
        check("GET", route)
        check("HEAD", route)
