"""Tool definitions as SGLang's request model prints them again for the template (SGLang 0.5.23; captures facts 1–3)."""

from __future__ import annotations

from typing import Any

from router.prompt.turns import in_turns

_STANDARD_TYPES = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})
_TYPE_ALIASES = {
    alias: standard
    for standard, aliases in {
        "string": "str text varchar char enum uuid date datetime time timestamp binary blob bytea bytes varbinary",
        "boolean": "bool",
        "integer": "bigint smallint tinyint",
        "number": "double decimal real numeric",
        "array": "arr tuple set",
        "object": "map",
    }.items()
    for alias in aliases.split()
}
_TYPE_PREFIXES = (
    ("int", "integer"),
    ("uint", "integer"),
    ("long", "integer"),
    ("short", "integer"),
    ("unsigned", "integer"),
    ("num", "number"),
    ("float", "number"),
    ("list", "array"),
    ("dict", "object"),
)
_PREFIX_ENDS = "0123456789[<( \t"  # what may follow a prefix: "int32", "list[str]", not "internal"

_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = (
    *("anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalProperties", "not", "if", "then", "else"),
    *("contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)


class Refused(Exception):
    """The engine answers 400 (or 500) to this body: there is no prompt to reproduce. The text is a short reason."""


def render_tools(tools: object) -> list[dict[str, Any]] | None:
    """The request's `tools` as the template sees them; None for absent or null. Raises Refused for an invalid list."""
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise Refused("tools is not a list")
    return [_tool(tool) for tool in in_turns(tools)]


def _tool(tool: object) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        raise Refused("a tool is not an object with a function")
    kind = tool.get("type", "function")
    deferred = tool.get("defer_loading")
    if not isinstance(kind, str) or not isinstance(deferred, bool | None):
        raise Refused("a tool's type or defer_loading has the wrong type")
    return {"type": kind, "function": _function(tool["function"], deferred), "defer_loading": deferred}


def _function(sent: dict[str, Any], deferred: bool | None) -> dict[str, Any]:
    """The client's key order stays; what it left out is appended as null; unknown keys go."""
    own_deferred = sent.get("defer_loading")
    fields = {
        "description": sent.get("description"),
        "name": sent.get("name"),
        "parameters": sent.get("parameters"),
        "strict": sent.get("strict"),
        "defer_loading": deferred if own_deferred is None else own_deferred,
    }
    if not isinstance(fields["name"], str) or not isinstance(fields["description"], str | None):
        raise Refused("a function's name or description is not text")
    if not isinstance(fields["strict"], bool | None) or not isinstance(own_deferred, bool | None):
        raise Refused("a function's strict or defer_loading is not a boolean")
    for optional in ("strict", "defer_loading"):
        if fields[optional] is None:
            del fields[optional]
    normalise_types(fields["parameters"])
    ordered = [key for key in sent if key in fields]
    return {key: fields[key] for key in (*ordered, *(key for key in fields if key not in sent))}


def normalise_types(schema: object) -> None:
    """Rewrite database and programming-language type names to JSON-schema's, in place, through nested schemas."""
    if isinstance(schema, list):
        for item in in_turns(schema):
            normalise_types(item)
        return
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    if isinstance(kind, str):
        schema["type"] = _standard_type(kind)
    elif isinstance(kind, list):
        merged: list[object] = []
        for item in kind:
            item = _standard_type(item) if isinstance(item, str) else item
            if item not in merged:
                merged.append(item)
        schema["type"] = merged
    for key in _MAPS_OF_SCHEMAS:
        nested = schema.get(key)
        if isinstance(nested, dict):
            for value in in_turns(nested.values()):
                normalise_types(value)
    for key in _SCHEMAS:
        normalise_types(schema.get(key))


def _standard_type(name: str) -> str:
    if name in _STANDARD_TYPES:
        return name
    base = name.split("(", 1)[0].strip().lower()
    if base in _STANDARD_TYPES:
        return base
    if base in _TYPE_ALIASES:
        return _TYPE_ALIASES[base]
    for prefix, standard in _TYPE_PREFIXES:
        if base == prefix or (base.startswith(prefix) and base[len(prefix)] in _PREFIX_ENDS):
            return standard
    return name


def choose_tools(
    tools: list[dict[str, Any]] | None, choice: object, message_tools: bool
) -> list[dict[str, Any]] | None:
    """`tool_choice` applied. `message_tools`: a system or developer message brings tools of its own.

    Raises Refused for a choice that cannot be met.
    """
    if choice is None:
        choice = "auto" if tools is not None or message_tools else "none"
    if isinstance(choice, str):
        if choice not in ("auto", "required", "none"):
            raise Refused("tool_choice is unknown")
        if choice == "required" and not tools and not message_tools:
            raise Refused("tool_choice is required and there are no tools")
        return tools or None if choice != "none" else None
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused("tool_choice is not a named function")
    named = [tool for tool in tools or [] if tool["function"]["name"] == function["name"]]
    if not named and not message_tools:
        raise Refused("tool_choice names a tool that is not there")
    return named or None
