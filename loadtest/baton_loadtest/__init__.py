"""Benchmarks, chaos, the load generator, the simulator and the planner.

In: a running Baton, or a description of one. Out: figures, as tables and JSON files. This package
uses all of `baton`, which never imports it. `baton bench`, `chaos`, `loadtest`, `simulate` and
`plan` use it if it is installed.
"""

from pathlib import Path

_BUNDLED = Path(__file__).parent / "bundled"

TRACE = _BUNDLED / "trace.jsonl"
"""Two minutes of chats, drawn at random, in Mooncake's format."""
SPEED = _BUNDLED / "speed.json"
"""What a prefill and a decode worker of the bundled model measured, each on one core of a laptop's
class."""


def scenario_file(text: str) -> Path:
    """Returns the file of a scenario: `text` is its path, or the name of a bundled one."""
    path, named = Path(text), _BUNDLED / f"{text}.toml"
    return named if not path.exists() and named.is_file() else path


def scenarios() -> list[str]:
    """Returns the names of the bundled scenarios."""
    return sorted(path.stem for path in _BUNDLED.glob("*.toml"))
