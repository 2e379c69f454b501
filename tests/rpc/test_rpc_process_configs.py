"""The configuration of each of the five processes: every default is a value that may be given."""

from __future__ import annotations

import pytest

from batonlm.detokenizer.config import DetokenizerConfig
from batonlm.encode.config import EncodeConfig
from batonlm.router.config import RouterConfig
from batonlm.rpc.config import describe, load, options_of, parse
from batonlm.tokenizer.config import TokenizerConfig
from batonlm.worker.options import DecodeConfig, PrefillConfig

CONFIGS = (
    RouterConfig,
    TokenizerConfig,
    PrefillConfig,
    DecodeConfig,
    DetokenizerConfig,
    EncodeConfig,
)


@pytest.mark.parametrize("config", CONFIGS)
def test_defaults_are_allowed_and_explained(config: type) -> None:
    for option in options_of(config).values():
        assert option.schema["description"]
        as_given = list(option.default) if isinstance(option.default, tuple) else option.default
        assert parse(option, as_given, "default") == option.default


@pytest.mark.parametrize("config", CONFIGS)
def test_a_former_option_is_none_any_more(config: type) -> None:
    assert not config.REMOVED & options_of(config).keys()  # type: ignore[attr-defined]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_process_needs_no_more_than_what_is_required(config: type) -> None:
    required = [name for name, option in options_of(config).items() if option.required]
    environ = {f"BATON_{name.upper()}": "x" for name in required}
    assert "listen" in describe(load(config, [], environ, prog="test"))
