"""What docs/kubernetes.md tells people to set are values that the chart has; runs nothing of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

import gen_values_schema as generator

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/kubernetes.md").read_text()
SCHEMA: dict[str, Any] = yaml.safe_load(generator.SCHEMA.read_text())
VALUES: dict[str, Any] = yaml.safe_load((generator.CHART / "values.yaml").read_text())
TOPS = "|".join(VALUES)

SAID = sorted(
    {
        *re.findall(r"--set ([\w.]+)=", TEXT),
        *re.findall(rf"`((?:{TOPS})\.[\w.]+)(?:=[^`]*)?`", TEXT),
    }
)
BLOCKS = re.findall(r"^```yaml\n# values\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def known(key: str) -> bool:
    """A key of values.yaml, or an option of the process."""
    *path, last = key.split(".")
    if path[0] == "models":
        # A model of `models`, of any key, has the release's own keys.
        path = path[2:]
    if len(path) == 2 and path[1] == "config":
        return last in SCHEMA["definitions"][f"config-{path[0]}"]["properties"]
    here: Any = VALUES
    for part in (*path, last):
        if not isinstance(here, dict) or part not in here:
            return False
        here = here[part]
    return True


def test_something_is_said() -> None:
    assert len(SAID) > 20
    assert len(BLOCKS) == 6


@pytest.mark.parametrize("key", SAID)
def test_a_key_is_one_of_the_chart(key: str) -> None:
    assert known(key)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_values_fits(block: str) -> None:
    errors = list(Draft7Validator(SCHEMA).iter_errors(yaml.safe_load(block)))
    assert not errors, errors[0].message


def test_a_metric_is_one_of_a_process() -> None:
    sources = (ROOT / "services/batonlm").rglob("*.py")
    code = "\n".join(path.read_text() for path in sources)
    said = set(re.findall(r"\b(?:baton_\w+|vllm:\w+)", TEXT))
    assert said
    assert {name for name in said if f'"{name}"' not in code} == set()


def test_what_it_links_to_is_there() -> None:
    links = set(re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", TEXT))
    assert {link for link in links if not (ROOT / "docs" / link).exists()} == set()
