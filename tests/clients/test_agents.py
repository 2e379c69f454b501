"""Agents of other people's libraries finish on the bundled model: call, result, last answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import Served

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

SCRIPTS = Path(__file__).parent / "scripts"
APIS = ("chat", "responses")
CALLS = [["get_weather", {"city": "Paris"}], ["multiply", {"a": 213, "b": 47}]]


def last_line(text: str) -> Any:
    return json.loads(text.splitlines()[-1])


def check_answers(got: Any) -> None:
    assert got["called"] == CALLS
    weather, product = got["answers"]
    assert "sunny" in weather and "21" in weather
    assert str(213 * 47) in product


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("library", ["langchain", "openai-agents", "pydantic-ai"])
def test_an_agent_answers_from_results(
    served: Served, agent_clients: Path, library: str, api: str
) -> None:
    script = SCRIPTS / "with_agents.py"
    check_answers(last_line(served.run(agent_clients / "python", script, library, api)))


@pytest.mark.parametrize("api", APIS)
def test_instructor_gets_a_corrected_record(served: Served, agent_clients: Path, api: str) -> None:
    """The validator refuses the first record and says the value that it wants."""
    script = SCRIPTS / "with_agents.py"
    got = last_line(served.run(agent_clients / "python", script, "instructor", api))
    assert got["called"] == [["Person", {"age": 36}], ["Person", {"age": 40}]]
    assert got["answers"] == ["Ada", 40]


@pytest.mark.parametrize("api", APIS)
def test_the_ai_sdk_answers_from_results(served: Served, node_agents: Path, api: str) -> None:
    script = shutil.copy(SCRIPTS / "with_ai_sdk.mjs", node_agents)
    check_answers(last_line(served.run("node", script, api)))
