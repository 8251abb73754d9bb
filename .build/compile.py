"""Compiles modules of a copy of the source tree: compile.py TREE OUT MODULE... (MODULE: a path relative to TREE).

A process of its own, since mypyc ends the process on an error. TREE is changed: see prepare.py.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from mypyc.build import mypycify  # brings setuptools' distutils
from prepare import native_dataclasses
from setuptools._distutils.ccompiler import CCompiler, new_compiler
from setuptools._distutils.sysconfig import customize_compiler

# Types of other packages are not looked at: what is compiled must not depend on what happens to be installed.
# So a class with a base from one can't be judged and must not be compiled (mypyc would, and it would crash).
MYPY_OPTIONS = [
    "--no-site-packages",
    "--ignore-missing-imports",
    "--follow-imports=silent",
    "--explicit-package-bases",
    "--disallow-subclassing-any",
    "--config-file=",
]
STRIP = ["-s"] if sys.platform == "linux" else []
LIBRARY = "kv_router"  # all modules share one library, kv_router__mypyc, beside router/ in site-packages


def main(tree: Path, out: Path, modules: list[str]) -> None:
    os.chdir(tree)
    for module in modules:
        path = Path(module)
        path.write_text(native_dataclasses(path.read_text()))
    extensions = mypycify(
        [*MYPY_OPTIONS, *modules], opt_level="2", debug_level="0", multi_file=True, group_name=LIBRARY, target_dir="c"
    )
    compiler = new_compiler()
    customize_compiler(compiler)
    include = [sysconfig.get_path("include"), sysconfig.get_path("platinclude")]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for extension in extensions:
            one = partial(_objects, compiler, [*extension.include_dirs, *include], extension.extra_compile_args)
            objects = [name for names in pool.map(one, extension.sources) for name in names]
            target = out.joinpath(*extension.name.split("."))
            compiler.link_shared_object(
                objects, f"{target}{suffix}", extra_postargs=[*extension.extra_link_args, *STRIP]
            )


def _objects(compiler: CCompiler, include: list[str], options: list[str], source: str) -> list[str]:
    return compiler.compile([source], "o", include_dirs=include, extra_postargs=options)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), sys.argv[3:])
