"""Wheel build: with `KV_ROUTER_COMPILE=1` the modules of the hot path (listed in pyproject.toml) are compiled by mypyc,
or the build fails; without it the wheel is pure Python. Both kinds hold the same sources and behave the same.

Editable installs are never compiled, so that an edit counts at once.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SWITCH = "KV_ROUTER_COMPILE"
TOOLS = ["mypy==2.4.*", "setuptools>=77"]  # a compiler's release is tested, not assumed: mypyc's output is what runs


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the extension modules to a wheel and its platform to the wheel's tag."""

    def dependencies(self) -> list[str]:
        """What the build has to install beforehand: nothing where nothing will be compiled."""
        return TOOLS if self._wanted() and not _hindrance() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not self._wanted() or version == "editable":
            return
        reason = _hindrance() or self._compile(build_data)
        if reason:
            raise RuntimeError(f"{SWITCH}=1, but {reason}")

    def _wanted(self) -> bool:
        return self.target_name == "wheel" and os.environ.get(SWITCH) == "1"

    def _compile(self, build_data: dict[str, Any]) -> str:
        """Returns what went wrong, "" if nothing did."""
        self._work = TemporaryDirectory(prefix="kv-router-build-")  # until the process ends: the wheel is made from it
        root, tree = Path(self.root), Path(self._work.name)
        out = tree / "out"
        modules = self.config["modules"]
        shutil.copytree(root / "router", tree / "router", ignore=shutil.ignore_patterns("__pycache__"))
        command = [sys.executable, str(root / ".build" / "compile.py"), str(tree), str(out), *modules]
        self.app.display_info(f"compiling {len(modules)} modules with mypyc: a minute or two of CPU time")
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            told = done.stdout.splitlines()
            return "\n".join(["compiling failed:", *[line for line in told if "error:" in line][:20], *told[-5:]])
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for path in out.rglob("*" + sysconfig.get_config_var("EXT_SUFFIX")):
            build_data["force_include"][str(path)] = path.relative_to(out).as_posix()
        return ""


def _hindrance() -> str:
    """Why this machine cannot compile; "" when it seems able to."""
    if sys.implementation.name != "cpython":
        return "not CPython"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "no Python.h (a package like python3-dev has it)"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cl")[0]
    return "" if shutil.which(compiler) else f"no C compiler ({compiler})"
