"""API keys: what is kept of them, whose they are, and documents that are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.admission.api_keys import KeyBook, KeyIndex, TenantLimits, parse, render
from batonlm.core.admission.tenants import ANY_ADAPTER, ANYONE, AdapterLimits, Tenant
from batonlm.core.errors import InvalidArgument
from batonlm.core.request.request import Request, TextPrompt

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", fullmatch=True)
counts = st.none() | st.integers(1, 2**40)
limits = st.builds(
    TenantLimits,
    weight=st.floats(min_value=1e-3, max_value=1e6),
    most_urgent=st.none() | st.integers(-100, 100),
    requests_per_minute=counts,
    tokens_per_minute=counts,
    max_requests=counts,
    max_tokens=counts,
    cache_group=st.just("") | names,
    adapters=st.dictionaries(
        st.just(ANY_ADAPTER)
        | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/@+-]{0,199}", fullmatch=True),
        st.builds(AdapterLimits, requests_per_minute=counts, tokens_per_minute=counts),
        max_size=3,
    ),
)


def book_of(*tenants: str) -> tuple[KeyBook, list[str]]:
    book, keys = KeyBook(), []
    for tenant in tenants:
        book, key = book.with_key(tenant, TenantLimits(), "now")
        keys.append(key)
    return book, keys


@given(st.dictionaries(names, limits, max_size=4))
def test_a_document_comes_back_as_it_was_and_has_no_key_in_it(
    tenants: dict[str, TenantLimits],
) -> None:
    book, keys = KeyBook(), []
    for name, limit in tenants.items():
        book, key = book.with_key(name, limit, "2026-01-01")
        keys.append(key)
    text = render(book)
    assert parse(text) == book
    index = KeyIndex(parse(text))
    for key, (name, limit) in zip(keys, tenants.items(), strict=True):
        assert key.startswith("baton-") and len(key) > 40
        assert key not in text and key.removeprefix("baton-") not in text
        found = index.find(key)
        assert found is not None and found.name == name
        assert found.tokens_per_minute == limit.tokens_per_minute
        assert found.most_urgent == limit.most_urgent and found.weight == limit.weight
        assert found.adapters == limit.adapters


def test_only_the_very_key_is_known() -> None:
    book, (key, other) = book_of("a", "b")
    index = KeyIndex(book)
    for wrong in ("", "baton-", key[:-1], key + "x", key.upper(), key + "é", "x" * 10_000, "\0"):
        assert index.find(wrong) is None
    removed = book.without(book.keys[0].id)
    assert KeyIndex(removed).find(key) is None
    found = KeyIndex(removed).find(other)
    assert found is not None and found.name == "b"
    # The same key in a document with another salt is another hash.
    assert KeyIndex(replace(book, salt=bytes(32))).find(key) is None


def test_tenants_share_kv_only_when_the_document_says_so() -> None:
    book = KeyBook(
        tenants={
            "a": TenantLimits(),
            "b": TenantLimits(),
            "c": TenantLimits(cache_group="team"),
            "d": TenantLimits(cache_group="team"),
            # A group of a tenant's name is not that tenant.
            "e": TenantLimits(cache_group="a"),
        }
    )
    salts = {name: book.tenant(name).cache_salt for name in book.tenants}
    assert salts["c"] == salts["d"]
    assert len(set(salts.values())) == 4
    assert b"" not in salts.values()
    assert KeyBook(tenants=book.tenants).tenant("a").cache_salt != salts["a"]


@given(st.binary(max_size=64), st.binary(max_size=64), st.binary(min_size=1, max_size=64))
def test_no_client_can_name_a_salt_of_another_tenant(a: bytes, b: bytes, wish: bytes) -> None:
    one, other = Tenant("one", cache_salt=b"1" * 32), Tenant("other", cache_salt=b"2" * 32)
    assert one.salted(a) != other.salted(b)
    assert one.salted(wish) not in (wish, one.cache_salt, one.salted(b""))
    assert (one.salted(a) == one.salted(b)) == (a == b)
    assert ANYONE.salted(wish) == wish


def test_a_request_has_its_tenant_and_salt_from_the_edge() -> None:
    asked = Request(TextPrompt("x"), cache_salt=b"mine")
    tenant = Tenant("one", cache_salt=b"1" * 32, max_tokens=7)
    found = asked.of(tenant)
    assert found.tenant is tenant
    assert found.cache_salt == tenant.salted(b"mine")
    assert asked.of(ANYONE) == asked


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"salt": "12"}, "salt"),
        ({"salt": None}, "salt"),
        ({"extra": 1}, "the document"),
        ({"keys": {}}, "keys"),
        ({"keys": [{"id": "k", "hash": "00", "tenant": "a"}]}, "keys[0].hash"),
        ({"keys": [{"id": "k", "hash": "00" * 32, "tenant": "b"}]}, "keys[0].tenant"),
        (
            {"keys": [{"id": "k", "hash": "00" * 32, "tenant": "a", "operator": "yes"}]},
            "keys[0].operator",
        ),
        ({"keys": [{"id": "", "hash": "00" * 32, "tenant": "a"}]}, "keys[0].id"),
        ({"keys": [{"id": "k", "hash": "00" * 32, "tenant": "a"}] * 2}, "keys"),
        ({"tenants": []}, "tenants"),
        ({"tenants": {"a b": {}}}, "tenant"),
        ({"tenants": {"a": {"weight": 0}}}, "tenants.a.weight"),
        ({"tenants": {"a": {"weight": True}}}, "tenants.a.weight"),
        ({"tenants": {"a": {"max_tokens": 0}}}, "tenants.a.max_tokens"),
        ({"tenants": {"a": {"max_tokens": 1.5}}}, "tenants.a.max_tokens"),
        ({"tenants": {"a": {"quota": 1}}}, "tenants.a"),
        ({"tenants": {"a": {"cache_group": 7}}}, "tenants.a.cache_group"),
        ({"tenants": {"a": {"adapters": []}}}, "tenants.a.adapters"),
        ({"tenants": {"a": {"adapters": {"b c": {}}}}}, "tenants.a.adapters.b c"),
        ({"tenants": {"a": {"adapters": {"b": {"weight": 1}}}}}, "tenants.a.adapters.b"),
        (
            {"tenants": {"a": {"adapters": {"*": {"tokens_per_minute": 0}}}}},
            "tenants.a.adapters.*.tokens_per_minute",
        ),
    ],
)
def test_a_fault_is_named(change: dict[str, object], field: str) -> None:
    document = {"salt": "00" * 32, "tenants": {"a": {}}, "keys": []} | change
    with pytest.raises(InvalidArgument) as caught:
        parse(json.dumps(document))
    assert caught.value.field == field


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"salt": "a", "salt": "b"}',
        '{"tenants": {"a": {"weight": NaN}}}',
        "[" * 100_000,
    ],
)
def test_what_is_no_document_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse(text)


@given(st.text(max_size=200))
def test_nothing_but_a_refusal_comes_of_any_text(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse(text)
