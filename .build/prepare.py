"""Sources as mypyc wants them. Pure; nothing but the standard library."""

from __future__ import annotations

import ast


def native_dataclasses(source: str) -> str:
    """The source with dataclasses as mypyc wants them; every line stays where it was, for tracebacks' sake.

    mypyc compiles no `slots=True` (its classes have no __dict__ anyway), and leaves a dataclass's generated __init__
    interpreted, which makes an object six times as costly as one with an __init__ in the source: such an __init__ goes
    into the empty line after the fields. It can't assign in a frozen class: that `frozen` holds, mypy has checked.
    """
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        for decorator in node.decorator_list:
            options = _options(decorator)
            if options is None:
                continue
            initialiser, free = _initialiser(node, options), _line_after_fields(node)
            if free >= len(lines) or lines[free].strip():
                initialiser = ""
            options.pop("slots", None)
            if initialiser:
                lines[free] = f"{' ' * node.body[0].col_offset}{initialiser}\n"
                if options.pop("frozen", False) and options.get("eq", True):
                    options["unsafe_hash"] = "True"  # what frozen with eq means
            text = "dataclass(" + ", ".join(f"{name}={value}" for name, value in options.items()) + ")"
            line = decorator.lineno - 1
            lines[line] = lines[line][: decorator.col_offset] + text + lines[line][decorator.end_col_offset :]
    return "".join(lines)


def _options(decorator: ast.expr) -> dict[str, str] | None:
    """The arguments of a dataclass decorator as source text; None for another decorator."""
    call = decorator if isinstance(decorator, ast.Call) else None
    name = call.func if call else decorator
    if not isinstance(name, ast.Name) or name.id != "dataclass" or decorator.lineno != decorator.end_lineno:
        return None
    return {word.arg: ast.unparse(word.value) for word in call.keywords if word.arg} if call else {}


def _initialiser(node: ast.ClassDef, options: dict[str, str]) -> str:
    """The __init__ that the decorator would make, on one line; "" where it is not that simple."""
    defined = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    inherits = any(ast.unparse(base).split("[")[0] != "Generic" for base in node.bases)
    if inherits or defined & {"__init__", "__post_init__"} or options.keys() & {"init", "kw_only"}:
        return ""
    parameters, assignments = ["self"], []
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        kind, name = ast.unparse(item.annotation), item.target.id
        if kind.startswith("ClassVar"):
            continue
        default = _default(item.value)
        if default is None or kind.startswith("InitVar") or kind == "KW_ONLY":
            return ""
        parameters.append(f"{name}: {kind}{default}")
        assignments.append(f"self.{name} = {name}")
    return f"def __init__({', '.join(parameters)}) -> None: {'; '.join(assignments)}" if assignments else ""


def _default(value: ast.expr | None) -> str | None:
    """ " = …" of a parameter, "" without one; None where each object gets a default of its own."""
    if value is None:
        return ""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field":
        words = {word.arg: word.value for word in value.keywords}
        if words.keys() & {"default_factory", "init", "kw_only"}:
            return None
        return f" = {ast.unparse(words['default'])}" if "default" in words else ""
    return f" = {ast.unparse(value)}"


def _line_after_fields(node: ast.ClassDef) -> int:
    """Index of the line after the class's last field and the text that describes it."""
    fields = [index for index, item in enumerate(node.body) if isinstance(item, ast.AnnAssign)] or [0]
    last = node.body[fields[-1]]
    following = node.body[fields[-1] + 1 :][:1]
    if following and isinstance(following[0], ast.Expr):
        last = following[0]
    assert last.end_lineno is not None
    return last.end_lineno
