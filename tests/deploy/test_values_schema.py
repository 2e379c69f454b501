"""The chart's schema and the processes' options say the same; renders nothing, needs no helm."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

import gen_values_schema as generator
from batonlm.rpc.config import options_of, parse

CHART = generator.CHART
SCHEMA: dict[str, Any] = json.loads(generator.SCHEMA.read_text())
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
FILES = sorted([*CHART.glob("values*.yaml"), *CHART.glob("ci/*.yaml")])


def test_the_schema_is_what_the_script_makes() -> None:
    assert generator.make((CHART / "values.yaml").read_text()) == SCHEMA


@pytest.mark.parametrize("component", generator.CONFIGS)
def test_config_offers_every_option_but_the_charts_own(component: str) -> None:
    named = {field.name for field in fields(generator.CONFIGS[component])}
    offered = set(SCHEMA["definitions"][f"config-{component}"]["properties"])
    assert offered == named - generator.OWNED


def test_what_the_chart_keeps_for_itself_are_options() -> None:
    options = {f.name for cls in generator.CONFIGS.values() for f in fields(cls)}
    assert not generator.OWNED - options


@pytest.mark.parametrize("component", generator.CONFIGS)
def test_defaults_are_values_that_the_process_takes(component: str) -> None:
    options = options_of(generator.CONFIGS[component])
    for name, value in (VALUES["config"] | VALUES[component]["config"]).items():
        parse(options[name], value, "values.yaml")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_values_file_fits(path: Path) -> None:
    errors = list(Draft7Validator(SCHEMA).iter_errors(yaml.safe_load(path.read_text())))
    assert not errors, errors[0].message
