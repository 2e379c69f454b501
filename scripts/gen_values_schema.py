"""Makes the chart's values.schema.json of values.yaml and of options; renders nothing.

A value's type is that of its default, its description the comment above it. A line "# @schema
{...}" in that comment adds to it; on a mapping it also means that the keys below are not these
alone. What is said of a key of one component holds for the same key of the components below it.
`config` takes the options of the process's own dataclass, without those that are the chart's to
say. `--check` writes nothing and fails when the file differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from batonlm.detokenizer.config import DetokenizerConfig
from batonlm.encode.config import EncodeConfig
from batonlm.router.config import RouterConfig
from batonlm.rpc.config import Option, options_of
from batonlm.tokenizer.config import TokenizerConfig
from batonlm.worker.options import DecodeConfig, PrefillConfig

CHART = Path(__file__).resolve().parent.parent / "deploy/helm/baton"
SCHEMA = CHART / "values.schema.json"

CONFIGS: dict[str, type] = {
    "router": RouterConfig,
    "tokenizer": TokenizerConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "detokenizer": DetokenizerConfig,
    "encode": EncodeConfig,
}

OWNED = frozenset(
    (
        *("listen", "grpc_listen", "http_listen", "metrics_listen", "health_listen", "advertise"),
        *("allow_anonymous", "keys", "tls_cert", "tls_key", "tls_ca", "peer_token"),
        "tls_terminated",
        *("public_tls_cert", "public_tls_key", "public_tls_ca", "kv_network"),
        *("tokenizers", "prefills", "decodes", "detokenizers", "encodes", "routers"),
        *("model", "model_name", "vllm_tokenizer"),
        *("machines", "ranks_listen", "ranks_token", "ray_address"),
    )
)
"""Options that the chart sets from other values, or that have no use in a pod."""

MARK = "@schema "
Schema = dict[str, Any]

QUANTITY = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)?$"
"""As Kubernetes writes quantities, without a sign."""
_QUANTITIES: Schema = {
    "type": "object",
    "additionalProperties": {"$ref": "#/definitions/quantity"},
}


def _probe(*numbers: str) -> Schema:
    properties = {name: {"type": "integer", "minimum": 1} for name in numbers}
    return {"type": "object", "additionalProperties": False, "properties": properties}


_DEFINITIONS: Schema = {
    "quantity": {"type": ["string", "number"], "pattern": QUANTITY, "minimum": 0},
    "quantityOrEmpty": {"type": ["string", "number"], "pattern": f"^$|{QUANTITY}", "minimum": 0},
    "resources": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "limits": _QUANTITIES,
            "requests": _QUANTITIES,
            "claims": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["name"],
                    "additionalProperties": False,
                    "properties": {"name": {"type": "string"}, "request": {"type": "string"}},
                },
            },
        },
    },
    "startupProbe": _probe("periodSeconds", "timeoutSeconds"),
    "probe": _probe("periodSeconds", "timeoutSeconds", "failureThreshold"),
}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def make(text: str) -> Schema:
    """The schema of a values.yaml of this text."""
    said = Comments(text)
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(node, yaml.MappingNode)
    schema = said.mapping(node, ())
    schema["properties"]["global"] = {"type": "object"}
    options = {name: _config(cls) for name, cls in CONFIGS.items()}
    common = set.intersection(*(set(each["properties"]) for each in options.values()))
    shared = {name: options["router"]["properties"][name] for name in sorted(common)}
    configs = {f"config-{name}": each for name, each in options.items()}
    configs["config-common"] = {
        "type": "object",
        "additionalProperties": False,
        "properties": shared,
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of Baton's chart",
        **schema,
        "definitions": _DEFINITIONS | configs,
    }


class Comments:
    """What a values.yaml says of its keys, besides their defaults."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._of_components: dict[tuple[str, ...], tuple[str, Schema | None]] = {}

    def mapping(self, node: yaml.MappingNode, path: tuple[str, ...]) -> Schema:
        """No key but these."""
        properties = {
            key.value: self._value(key, value, (*path, key.value)) for key, value in node.value
        }
        return {"type": "object", "additionalProperties": False, "properties": properties}

    def _value(self, key: yaml.Node, node: yaml.Node, path: tuple[str, ...]) -> Schema:
        description, extra = self._said(key, path)
        schema: Schema = {"description": description} if description else {}
        if extra is not None and "$ref" in extra:
            # Beside a $ref nothing counts, in this draft.
            target = extra["$ref"].replace("<component>", path[0])
            return schema | {"allOf": [{"$ref": target}]}
        if isinstance(node, yaml.MappingNode):
            made = {"type": "object"} if extra is not None else self.mapping(node, path)
        elif isinstance(node, yaml.SequenceNode):
            made = {"type": "array"}
        else:
            made = {"type": _TYPES[type(yaml.safe_load(yaml.serialize(node)))]}
        return schema | made | (extra or {})

    def _said(self, key: yaml.Node, path: tuple[str, ...]) -> tuple[str, Schema | None]:
        """The comment above a key, and what it adds to its schema."""
        words, extra = [], None
        for line in reversed(list(self._above(key))):
            if line.startswith(MARK):
                extra = yaml.safe_load(line.removeprefix(MARK))
            else:
                words.append(line)
        found = " ".join(words), extra
        if path[0] not in CONFIGS or len(path) == 1:
            return found
        if words or extra is not None:
            self._of_components[path[1:]] = found
        return self._of_components.get(path[1:], found)

    def _above(self, key: yaml.Node) -> Iterator[str]:
        """Lines of the comment, without its marks, the last one first."""
        indent = " " * key.start_mark.column + "#"
        for line in reversed(self._lines[: key.start_mark.line]):
            if not line.startswith(indent):
                return
            yield line.strip().removeprefix("#").strip()


def _config(cls: type) -> Schema:
    properties = {n: _option(o) for n, o in options_of(cls).items() if n not in OWNED}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _option(option: Option) -> Schema:
    unit = f" ({option.unit})" if option.unit else ""
    schema = option.schema
    return {"description": schema.pop("description") + unit} | schema


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the schema is out of date")
    check = parser.parse_args().check
    fresh = json.dumps(make((CHART / "values.yaml").read_text()), indent=1) + "\n"
    if not check:
        SCHEMA.write_text(fresh)
    elif not SCHEMA.exists() or SCHEMA.read_text() != fresh:
        sys.exit(f"out of date: {SCHEMA.relative_to(CHART.parents[2])}; run 'make chart-schema'")


if __name__ == "__main__":
    main()
