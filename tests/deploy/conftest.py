from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
MONITORING = "monitoring.coreos.com/v1"


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document is not None]


def pick(objects: list[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    """The only object of that kind (and name)."""
    found = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} of {kind} {name}: {[(o['kind'], o['metadata']['name']) for o in objects]}"
    return found[0]


# The custom resources' own schemas, as far as the chart uses them; anything else is refused.
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_DURATION = {"type": "string", "pattern": "^(0|(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$"}
_RELABEL = {
    "type": "array",
    "items": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "action": {"type": "string"},
            "modulus": {"type": "integer"},
            "regex": {"type": "string"},
            "replacement": {"type": "string"},
            "separator": {"type": "string"},
            "sourceLabels": {"type": "array", "items": {"type": "string"}},
            "targetLabel": {"type": "string"},
        },
    },
}
_SPECS: dict[str, dict[str, Any]] = {
    "ServiceMonitor": {
        "type": "object",
        "required": ["endpoints", "selector"],
        "additionalProperties": False,
        "properties": {
            "jobLabel": {"type": "string"},
            "selector": {"type": "object", "additionalProperties": False, "properties": {"matchLabels": _TEXTS}},
            "endpoints": {
                "type": "array",
                "items": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "port": {"type": "string"},
                        "path": {"type": "string"},
                        "scheme": {"enum": ["http", "https", "HTTP", "HTTPS"]},
                        "interval": _DURATION,
                        "scrapeTimeout": _DURATION,
                        "relabelings": _RELABEL,
                        "metricRelabelings": _RELABEL,
                    },
                },
            },
        },
    },
    "PrometheusRule": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "groups": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["name"],
                    "additionalProperties": False,
                    "properties": {
                        "name": {"type": "string", "minLength": 1},
                        "interval": _DURATION,
                        "rules": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "required": ["expr"],
                                "additionalProperties": False,
                                "properties": {
                                    "alert": {"type": "string"},
                                    "record": {"type": "string"},
                                    "expr": {"type": ["string", "integer"]},
                                    "for": _DURATION,
                                    "keep_firing_for": _DURATION,
                                    "labels": _TEXTS,
                                    "annotations": _TEXTS,
                                },
                            },
                        },
                    },
                },
            }
        },
    },
}


def check_objects(objects: list[dict[str, Any]], version: str = "1.37") -> None:
    """Every object against Kubernetes' own schema, strictly: an unknown field is an error."""
    validate = pytest.importorskip("kubernetes_validate")
    jsonschema = pytest.importorskip("jsonschema")
    assert objects
    for each in objects:
        if each["apiVersion"] == MONITORING:
            jsonschema.validate(each["spec"], _SPECS[each["kind"]])
            assert each.keys() == {"apiVersion", "kind", "metadata", "spec"}
        else:
            validate.validate(each, version, strict=True)
