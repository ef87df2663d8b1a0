"""What holds for the whole project: its layout, its wheel, its names."""

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# passes/ is reached under its own name: rglob follows the link fxpipe/passes only in some versions
SOURCES = sorted({*ROOT.glob("fxpipe/**/*.py"), *ROOT.glob("passes/**/*.py")})
TEXTS = sorted(
    path
    for pattern in (
        "*.md",
        "*.cfg",
        "*.toml",
        "fxpipe/**/*",
        "passes/**/*",
        "examples/**/*",
        "tests/**/*",
    )
    for path in ROOT.glob(pattern)
    if path.suffix in {".md", ".cfg", ".toml", ".py", ".jinja"}
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )


def test_the_passes_cannot_be_imported_under_a_second_name():
    result = python("import passes", ROOT)
    assert result.returncode != 0
    assert "ImportError: import fxpipe.passes, not passes" in result.stderr


@pytest.fixture(scope="session")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names in a wheel built from a copy, so that no build folder is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("fxpipe", "passes"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    build = "import setuptools.build_meta as m; print('built', m.build_wheel('dist'))"
    result = python(build, folder)
    assert result.returncode == 0, result.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_the_wheel_holds_every_source_file_the_passes_under_fxpipe(wheel_names: list[str]):
    wanted = {re.sub(r"^passes/", "fxpipe/passes/", name_of(path)) for path in SOURCES}
    assert {name for name in wheel_names if name.endswith(".py")} == wanted


def test_the_wheel_takes_no_name_but_fxpipe(wheel_names: list[str]):
    folders = {name.split("/")[0] for name in wheel_names}
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == {"fxpipe"}


def test_the_wheel_holds_the_typing_marker_and_the_templates(wheel_names: list[str]):
    templates = {name_of(path) for path in ROOT.glob("fxpipe/emit/templates/*.jinja")}
    assert {"fxpipe/py.typed", *templates} <= set(wheel_names)


def private_torch_names(tree: ast.Module) -> Iterator[str]:
    """Names that start at torch, or at something imported from it, and have a private part."""
    roots = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.asname) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(f"{node.module}.{a.name}", a.asname or a.name) for a in node.names]
        else:
            continue
        for full, bound in names:
            if full.split(".")[0] == "torch":
                roots[bound or "torch"] = full if bound else "torch"
                yield from is_private(full)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts, base = [node.attr], node.value
            while isinstance(base, ast.Attribute):
                parts, base = [base.attr, *parts], base.value
            if isinstance(base, ast.Name) and base.id in roots:
                yield from is_private(".".join([roots[base.id], *parts]))


def is_private(name: str) -> Iterator[str]:
    if re.search(r"\._(?!_)", name):
        yield name


def test_the_search_for_private_names_finds_every_spelling():
    code = """
import torch, torch.utils._pytree as pytree
from torch import fx
from torch._subclasses import FakeTensorMode
torch.utils._pytree.tree_map
fx._symbolic_trace.Tracer
torch.__version__, torch.nn.Linear
"""
    assert sorted(set(private_torch_names(ast.parse(code)))) == [
        "torch._subclasses.FakeTensorMode",
        "torch.fx._symbolic_trace",
        "torch.fx._symbolic_trace.Tracer",
        "torch.utils._pytree",
        "torch.utils._pytree.tree_map",
    ]


def test_private_torch_names_stand_in_compat_alone():
    found = {
        f"{name_of(path)}: {name}"
        for path in SOURCES
        if path != ROOT / "fxpipe" / "compat.py"
        for name in private_torch_names(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert not found


# spelled so that this file does not hold them
UNFINISHED = re.compile(r"\b(TO[D]O|FIX[M]E|X{3}|NotImplemente[d]Error)\b")


def test_nothing_is_left_unfinished():
    found = {
        f"{name_of(path)}: {match[0]}"
        for path in TEXTS
        for match in UNFINISHED.finditer(path.read_text(encoding="utf-8"))
    }
    assert not found


def test_every_file_has_a_name_that_says_what_is_in_it():
    homeless = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py", "base.py"}
    assert not [name_of(path) for path in SOURCES if path.name in homeless]


def test_each_pass_file_has_a_test_file():
    missing = [
        name_of(path)
        for path in ROOT.glob("passes/*.py")
        if path.name != "__init__.py" and not (ROOT / "tests/passes" / f"test_{path.name}").exists()
    ]
    assert not missing
