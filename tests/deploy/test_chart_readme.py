"""The chart's README has every value, as values.yaml says it; needs no helm."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml

import gen_chart_readme as generator
import gen_values_schema as schema

ROOT = schema.CHART.parents[2]
TEXT = generator.README.read_text()
VALUES: dict[str, Any] = yaml.safe_load((schema.CHART / "values.yaml").read_text())


def test_the_readme_is_what_the_script_makes() -> None:
    assert generator.make(TEXT) == TEXT


def test_text_by_hand_stays_and_a_file_without_the_mark_is_refused() -> None:
    made = generator.make(f"mine\n{generator.MARK}of yesterday")
    assert made.startswith(f"mine\n{generator.MARK}") and "of yesterday" not in made
    with pytest.raises(ValueError, match="has no line"):
        generator.make("mine\n")


def test_every_key_is_there_once() -> None:
    keys = re.findall(r"^\| `([\w.]+)` \|", TEXT, re.M)
    assert len(set(keys)) == len(keys)
    for key in ("image.registry", "router.service.spec", "decode.config", "test.enabled"):
        assert key in keys
    for key in keys:
        here: Any = VALUES
        for part in key.split("."):
            here = here[part]


def test_what_the_head_names_is_a_value_or_a_file() -> None:
    head = TEXT.partition(generator.MARK)[0]
    for name in re.findall(r"`(values-[\w-]+\.yaml)`", head):
        assert (schema.CHART / name).exists()
    said = re.findall(r"--set ([\w.]+)=|`([a-z]+\.[\w.]+)`", head)
    keys = {first or second for first, second in said if not second.endswith((".yaml", ".md"))}
    assert len(keys) > 5
    for key in keys:
        here: Any = VALUES
        for part in key.split("."):
            here = here[part]


def test_the_charts_versions_are_the_projects() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((schema.CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == version
    images = yaml.safe_load(chart["annotations"]["artifacthub.io/images"])
    assert {image["image"].rpartition(":")[2] for image in images} == {version}
