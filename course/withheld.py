"""The package as submissions find it: what an assignment asks for is not in it.

The functions are taken out of the source before it is imported. So no import, reload, search in
memory or reading of source brings them back: in the process that runs submissions they never were.
"""

import ast
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

PACKAGE = "lowgrad_utils"
#: What stays above a function, since it decides how the name is used.
_KEPT_DECORATORS = {"property", "staticmethod", "classmethod", "cached_property"}


def without(source: str, names: Sequence[str]) -> str:
    r"""Return the source of a module in which functions or classes say that they are switched off.

    Args:
        source: The source.
        names: Names in it, such as "decompose" or "Activation.mu".

    Raises:
        LookupError: There is no function or class of one of these names.

    Example:
        >>> print(without("def f(x):\n    return 2 * x", ["f"]))
        def f(x):
            raise RuntimeError('f of lowgrad_utils is switched off here: write it yourself')
    """
    tree = ast.parse(source)
    for name in names:
        _switch_off(_find(tree, name), name.rpartition(".")[2])
    return ast.unparse(tree)


def _find(tree: ast.Module, name: str) -> ast.FunctionDef | ast.ClassDef:
    found: ast.AST = tree
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        inside = [n for n in found.body if isinstance(n, kinds) and n.name == part]
        if len(inside) != 1:
            raise LookupError(f"'{name}' is no function or class there, so it cannot be withheld")
        (found,) = inside
    return found


def _switch_off(node: ast.FunctionDef | ast.ClassDef, name: str) -> None:
    says = f"{name} of {PACKAGE} is switched off here: write it yourself"
    failing = ast.parse(f"raise RuntimeError({says!r})").body
    if isinstance(node, ast.ClassDef):
        node.bases, node.keywords, node.decorator_list = [], [], []
        start = ast.parse("def __init__(self, *args, **kwargs):\n    pass").body[0]
        start.body, node.body = failing, [start]
        return
    named = [each for each in node.decorator_list if isinstance(each, ast.Name | ast.Attribute)]
    node.decorator_list = [d for d in named if ast.unparse(d).split(".")[-1] in _KEPT_DECORATORS]
    node.body = failing


def sources_without(package: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Return the sources of the package by path, without what is withheld.

    Args:
        package: Its folder.
        names: Full names, such as "lowgrad_utils.networks.Activation.mu".

    Raises:
        LookupError: There is no such module, function or class.
    """
    paths = {_module(package, path): path for path in sorted(package.rglob("*.py"))}
    inside: dict[str, list[str]] = {module: [] for module in paths}
    for name in names:
        module, rest = name, ""
        while module and module not in paths:
            module, _, last = module.rpartition(".")
            rest = f"{last}.{rest}" if rest else last
        if not rest or not module:
            raise LookupError(f"'{name}' is no function or class of {PACKAGE}")
        inside[module].append(rest)
    return {
        str(path): without(path.read_text(encoding="utf8"), inside[module]).encode("utf8")
        for module, path in paths.items()
    }


def _module(package: Path, path: Path) -> str:
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def readable_files(package: Path) -> list[str]:
    """Return the files of the package that are no code, which submissions may read."""
    return [
        str(path)
        for path in sorted(package.rglob("*"))
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]


def install(package: Path, names: Sequence[str]) -> None:
    """Let this process import the package without what is withheld; nothing of it is loaded yet.

    Args:
        package: Its folder.
        names: What is withheld.

    Raises:
        LookupError: One of these names is none of the package.
    """
    sys.meta_path.insert(0, _Finder(package, sources_without(package, names)))


class _Finder:
    """Finds the package's modules among the sources it was given, and no other module."""

    def __init__(self, package: Path, sources: dict[str, bytes]):
        self.sources = sources
        self.paths = {_module(package, Path(path)): path for path in sources}

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return where a module of the package comes from, None for any other."""
        if name not in self.paths:
            return None
        place = self.paths[name]
        inside = [str(Path(place).parent)] if place.endswith("__init__.py") else None
        return importlib.util.spec_from_file_location(
            name,
            place,
            loader=_Loader(name, place, self.sources),
            submodule_search_locations=inside,
        )


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, sources: dict[str, bytes]):
        super().__init__(name, path)
        self.sources = sources

    def get_data(self, path: str) -> bytes:
        return self.sources[path] if path in self.sources else super().get_data(path)

    def path_stats(self, path: str) -> dict:
        # So that no bytecode is looked for: that on the disk is of the whole source.
        raise OSError(f"no bytecode of {path}")
