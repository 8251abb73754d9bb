"""The compiled build: which modules it may hold, how their sources are prepared, and which build runs.

All other tests are also run against it (.ci/run), with KV_ROUTER_EXPECT=compiled.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from router import build
from router.prompt import turns

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "router" / "core.py"
HOOKS = ROOT / ".build"
EXPECTED = os.environ.get("KV_ROUTER_EXPECT", "pure Python")
MODULES: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["hooks"]["custom"][
    "modules"
]
of_the_checkout = pytest.mark.skipif(not SOURCES.is_file(), reason="needs the sources")


def test_the_build_that_runs_is_the_expected_one() -> None:
    shown = subprocess.run([sys.executable, "-m", "router", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.strip().endswith(f"({EXPECTED})")
    assert build.kind() == EXPECTED


@pytest.mark.parametrize("module", MODULES)
def test_every_module_of_the_list_is_compiled_or_none(module: str) -> None:
    found = importlib.util.find_spec(module.removesuffix(".py").replace("/", "."))
    assert found is not None
    assert found.origin is not None
    ending = sysconfig.get_config_var("EXT_SUFFIX") if EXPECTED == "compiled" else ".py"
    assert found.origin.endswith(ending)


def test_what_lets_other_threads_in_is_never_compiled() -> None:
    assert Path(turns.__file__).suffix == ".py"


@of_the_checkout
@pytest.mark.parametrize("module", MODULES)
def test_nothing_waits_while_an_exception_is_handled(module: str) -> None:
    """Compiled, the exception would be the current one of the whole event loop until the wait is over: whatever fails
    meanwhile gets it as its context, and chains of contexts grow without end."""
    assert not list(_waits_in_handlers(ast.parse((ROOT / module).read_text())))


def _waits_in_handlers(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            for part in (*node.handlers, *node.finalbody):
                yield from (it.lineno for it in ast.walk(part) if isinstance(it, ast.Await | ast.Yield | ast.YieldFrom))


@of_the_checkout
@pytest.mark.parametrize("module", MODULES)
def test_what_an_exception_says_by_default_belongs_to_its_class(module: str) -> None:
    """Compiled exceptions lack attributes that the class's body gives each instance: they must be ClassVar."""
    for node in _classes((ROOT / module).read_text()):
        if any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases):
            assert not [item.lineno for item in node.body if isinstance(item, ast.Assign)]
            stated = [item for item in node.body if isinstance(item, ast.AnnAssign) and item.value is not None]
            assert all(ast.unparse(item.annotation).startswith("ClassVar") for item in stated)


FIELDS = '''
from dataclasses import dataclass, field

@dataclass(frozen=True, slots=True)
class Frozen:
    """Text."""

    a: int
    """What a is."""
    b: str = "x"

    def both(self) -> str:
        return f"{self.a}{self.b}"


@dataclass(slots=True, eq=False)
class Plain:
    a: int
    b: int | None = field(default=None, compare=False)


@dataclass(slots=True)
class Made:
    a: list[int] = field(default_factory=list)

'''


@of_the_checkout
def test_dataclasses_prepared_for_the_compiler_behave_as_before() -> None:
    changed = _prepare().native_dataclasses(FIELDS)
    assert changed.count("\n") == FIELDS.count("\n")
    assert [node.lineno for node in _classes(changed)] == [node.lineno for node in _classes(FIELDS)]
    before, after = ({}, {})  # type: tuple[dict[str, type], dict[str, type]]
    exec(FIELDS, before)
    exec(changed, after)
    assert "slots" not in changed
    assert changed.count("def __init__") == 2  # not of the one with a default made for each object
    for made in (before, after):
        frozen, plain = made["Frozen"], made["Plain"]
        assert frozen(1) == frozen(1, "x") != frozen(2)
        assert hash(frozen(1)) == hash(frozen(1))
        assert repr(frozen(a=1)) == "Frozen(a=1, b='x')"
        assert frozen(1, "y").both() == "1y"
        assert plain(1) != plain(1)
        assert plain(1).b is None
        assert made["Made"]().a == []


def _classes(source: str) -> list[ast.ClassDef]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


@of_the_checkout
@pytest.mark.parametrize("module", MODULES)
def test_prepared_sources_keep_their_lines(module: str) -> None:
    source = (ROOT / module).read_text()
    assert _prepare().native_dataclasses(source).count("\n") == source.count("\n")


def _prepare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kv_router_prepare", HOOKS / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
