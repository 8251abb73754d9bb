"""Does a chat template take a message's content as text ("string") or as a list of parts ("openai")? By engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from jinja2 import nodes

ContentFormat = Literal["string", "openai"]

MEDIA_WORDS = ("image", "audio", "video", "vision")


def sglang_format(source: str, tree: nodes.Template) -> ContentFormat:
    """SGLang 0.5.23: a template that names media, or loops over the content of a variable called message, msg or m."""
    if any(word in source for word in MEDIA_WORDS):
        return "openai"
    loops = tree.find_all(nodes.For)
    names = ("message", "msg", "m")
    return "openai" if any(_is_content(loop.iter, names) for loop in loops) else "string"


def vllm_format(tree: nodes.Template) -> ContentFormat:
    """vLLM 0.32.0: a loop over the content of whatever runs over `messages`, also through a macro's parameter, or over
    a plain `content` outside macros."""
    sources = _aliases(tree, "messages")
    messages = [
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_is_name(loop.iter, name) for name in sources)
    ]
    in_macros: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        carriers = _content_parameters(tree, macro, messages)
        for loop in macro.find_all(nodes.For):
            in_macros[id(loop)] = carriers or in_macros.get(id(loop), set())
    for loop in tree.find_all(nodes.For):
        if _is_content(loop.iter, messages):
            return "openai"
        if isinstance(loop.iter, nodes.Name):
            names = in_macros.get(id(loop), {"content"})
            if loop.iter.name in names:
                return "openai"
    return "string"


def _aliases(tree: nodes.Template, name: str) -> list[str]:
    """`name` and every variable assigned from it or a slice of it."""
    found = [name]
    for known in found:  # grows while it is walked
        for assign in tree.find_all(nodes.Assign):
            target = assign.target
            if isinstance(target, nodes.Name) and _is_name(assign.node, known) and target.name not in found:
                found.append(target.name)
    return found


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, messages: Iterable[str]) -> set[str]:
    """Parameters of `macro` that some call gives a message's content."""
    parameters = [argument.name for argument in macro.args]
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        given = [*zip(parameters, call.args, strict=False), *((k.key, k.value) for k in call.kwargs)]
        found |= {name for name, value in given if name in parameters and _is_content(value, messages)}
    return found


def _bare(node: nodes.Node | None) -> nodes.Node | None:
    """The expression behind filters, tests and slices."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node


def _is_name(node: nodes.Node | None, name: str) -> bool:
    bare = _bare(node)
    return isinstance(bare, nodes.Name) and bare.ctx == "load" and bare.name == name


def _is_content(node: nodes.Node | None, names: Iterable[str]) -> bool:
    """`message.content` or `message["content"]` for a variable of `names`."""
    bare = _bare(node)
    if isinstance(bare, nodes.Getattr):
        key: object = bare.attr
    elif isinstance(bare, nodes.Getitem) and isinstance(bare.arg, nodes.Const):
        key = bare.arg.value
    else:
        return False
    return key == "content" and isinstance(bare.node, nodes.Name) and bare.node.name in names
