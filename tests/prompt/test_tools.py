from __future__ import annotations

from typing import Any

import pytest

from router.prompt.tools import Refused, choose_tools, normalise_types, render_tools


def rendered(function: dict[str, Any], **outer: Any) -> dict[str, Any]:
    tools = render_tools([{"type": "function", "function": function, **outer}])
    assert tools is not None
    return tools[0]


def test_every_tool_gains_a_trailing_defer_loading_and_loses_unknown_keys() -> None:
    """captures fact 1 (SGLang 0.5.23)"""
    tool = rendered({"name": "f", "description": "d", "parameters": {}, "x": 1}, colour="red")
    assert list(tool) == ["type", "function", "defer_loading"]
    assert tool["defer_loading"] is None
    assert tool["function"] == {"name": "f", "description": "d", "parameters": {}}


def test_the_clients_key_order_stays_and_missing_keys_are_appended() -> None:
    assert list(rendered({"parameters": {}, "name": "f"})["function"]) == ["parameters", "name", "description"]
    assert list(rendered({"name": "f"})["function"]) == ["name", "description", "parameters"]


def test_strict_is_printed_only_when_sent() -> None:
    assert rendered({"strict": False, "name": "f"})["function"]["strict"] is False
    assert "strict" not in rendered({"strict": None, "name": "f"})["function"]


def test_a_tools_defer_loading_is_copied_into_its_function() -> None:
    tool = rendered({"name": "f"}, defer_loading=True)
    assert tool["function"]["defer_loading"] is True
    assert list(tool["function"])[-1] == "defer_loading"


@pytest.mark.parametrize(
    ("sent", "standard"),
    [
        ("dict", "object"),
        ("float", "number"),
        ("int32", "integer"),
        ("list[str]", "array"),
        ("varchar(255)", "string"),
        (" Bool ", "boolean"),
        ("STRING", "string"),
        ("internal", "internal"),
        ("list_price", "list_price"),
        ("any", "any"),
        (["str", "string", "null", 3], ["string", "null", 3]),
    ],
)
def test_type_names_become_json_schemas(sent: object, standard: object) -> None:
    """captures fact 2"""
    schema = {"type": sent}
    normalise_types(schema)
    assert schema["type"] == standard


def test_nested_schemas_are_rewritten_and_values_named_type_are_not() -> None:
    schema: dict[str, Any] = {
        "type": "dict",
        "properties": {"type": {"type": "str"}, "a": {"items": {"type": "int"}}},
        "anyOf": [{"type": "float"}],
        "enum": [{"type": "str"}],
    }
    normalise_types(schema)
    assert schema["properties"] == {"type": {"type": "string"}, "a": {"items": {"type": "integer"}}}
    assert schema["anyOf"] == [{"type": "number"}]
    assert schema["enum"] == [{"type": "str"}]


@pytest.mark.parametrize(
    "tools",
    [
        "x",
        [1],
        [{}],
        [{"function": {}}],
        [{"function": {"name": 1}}],
        [{"function": {"name": "f", "description": 1}}],
        [{"function": {"name": "f", "strict": "maybe"}}],
        [{"type": None, "function": {"name": "f"}}],
        [{"defer_loading": 7, "function": {"name": "f"}}],
    ],
)
def test_what_the_engine_refuses_is_refused(tools: object) -> None:
    with pytest.raises(Refused):
        render_tools(tools)


NAMED = [{"type": "function", "function": {"name": name}, "defer_loading": None} for name in ("f", "g")]


@pytest.mark.parametrize(
    ("choice", "kept"),
    [
        (None, NAMED),
        ("auto", NAMED),
        ("required", NAMED),
        ("none", None),
        ({"type": "function", "function": {"name": "g"}}, NAMED[1:]),
    ],
)
def test_tool_choice_decides_which_tools_are_printed(choice: object, kept: object) -> None:
    """captures fact 3"""
    assert choose_tools(NAMED, choice, message_tools=False) == kept


@pytest.mark.parametrize("choice", ["always", 3, {"function": {"name": "h"}}, {"function": 1}])
def test_a_choice_that_cannot_be_met_is_refused(choice: object) -> None:
    with pytest.raises(Refused):
        choose_tools(NAMED, choice, message_tools=False)


def test_required_without_tools_is_refused_and_an_empty_list_is_no_tools() -> None:
    with pytest.raises(Refused):
        choose_tools(None, "required", message_tools=False)
    assert choose_tools([], "auto", message_tools=False) is None
