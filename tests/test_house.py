"""Rules of the whole repository that no linter has, read from the source itself.

A rule is a function of files, by their paths, that names what breaks it. Each is shown to find what does, too.
"""

import ast
import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("vocab_tools", "convert", "runtime")
# What begins no docstring; what begins no function's, as it is no verb.
QUESTIONS = re.compile("what|where|how|which", re.IGNORECASE)
NO_VERBS = re.compile(
    r"an?|the|th(is|ese|ose)|its?|one|every|each|both|all|no|whether|why|as|in|of|for|from|by|to|per|along|rows?|numbers?"
    r"|(larg|small|long|short|near|high|low)est|.*[^a-z].*",
    re.IGNORECASE,
)
# Names that users know from transformers, and the signature of SafeAILab's own function.
PARAMETERS = {
    "runtime/model.py: SpeculativeModel.from_pretrained": 15,
    "runtime/safeailab/step.py: StepPatch.update_inference_inputs": 12,
}
IMPORT_NAMES = {"pyyaml": "yaml"}
# Documented for all: named tuples' methods, the end of a process without clean-up.
DOCUMENTED = {"_replace", "_fields", "_asdict", "_make", "_field_defaults", "_exit"}
COMPAT = "vocab_tools/compat.py"
Source = dict[str, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def read(*folders: str) -> Source:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


@cache
def nodes(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


def decorators(node: Function) -> set[str]:
    """Last parts of a function's decorators: `jit` of `@triton.jit`, `command` of `@cli.command(…)`."""
    plain = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
    return {ast.unparse(each).rpartition(".")[2] for each in plain}


def host_functions(source: Source) -> Iterator[tuple[str, Function]]:
    """Every function but kernels and click commands, named by its file and its classes."""
    for path, text in source.items():
        for parent in nodes(text):
            inside = f"{parent.name}." if isinstance(parent, ast.ClassDef) else ""
            for node in ast.iter_child_nodes(parent):
                if isinstance(node, Function) and decorators(node).isdisjoint({"jit", "command", "group"}):
                    yield f"{path}: {inside}{node.name}", node


def names_taken_twice(source: Source) -> list[str]:
    homes = defaultdict(list)
    for path, text in source.items():
        for node in nodes(text)[0].body:  # type: ignore[attr-defined]
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path)
    return [f"{name}: {' and '.join(paths)}" for name, paths in sorted(homes.items()) if len(paths) > 1]


def docstrings(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, kind, text) of docstrings; a string below an assignment is an attribute's, as is a property's."""
    for node in nodes(text):
        if not isinstance(node, (ast.Module, ast.ClassDef, Function)):
            continue
        kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
        if isinstance(node, Function) and not decorators(node).isdisjoint({"property", "cached_property"}):
            kind = "attribute"
        before: ast.AST = node
        for statement in node.body:
            string = getattr(statement.value, "value", None) if isinstance(statement, ast.Expr) else None
            if isinstance(string, str) and (before is node or isinstance(before, (ast.Assign, ast.AnnAssign))):
                yield statement.lineno, kind if before is node else "attribute", string
            before = statement


def wrong_first_words(source: Source) -> list[str]:
    found = []
    for path, text in source.items():
        for line, kind, docstring in docstrings(text):
            word = docstring.split()[0].rstrip(".,:;")
            if QUESTIONS.fullmatch(word) or (kind == "function" and NO_VERBS.fullmatch(word)):
                found.append(f"{path}:{line}: the docstring of this {kind} begins with {word}")
    return found


def skips_of_the_formatter(source: Source) -> list[str]:
    skip = re.compile("# fmt: " + "(skip|off)")
    lines = ((path, at, line) for path, text in source.items() for at, line in enumerate(text.splitlines(), 1))
    return [f"{path}:{at}" for path, at, line in lines if skip.search(line)]


def imports(node: ast.AST, is_inside: bool = False) -> Iterator[tuple[int, list[str], bool]]:
    """(line, parts of the name, whether inside a function) of every import of another library."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.Import):
            yield from ((each.lineno, alias.name.split("."), is_inside) for alias in each.names)
        elif isinstance(each, ast.ImportFrom) and each.module and not each.level:
            yield from ((each.lineno, [*each.module.split("."), alias.name], is_inside) for alias in each.names)
        yield from imports(each, is_inside or isinstance(each, Function))


def undeclared_imports(source: Source, project: str = (ROOT / "pyproject.toml").read_text("utf-8")) -> list[str]:
    """Imports of libraries that pyproject.toml lacks; those of an extra are imported inside functions alone."""
    table = tomllib.loads(project)["project"]
    extras = [each for name, those in table["optional-dependencies"].items() if name != "dev" for each in those]
    always, optional = (
        {re.split(r"[^\w-]", each)[0].lower().replace("-", "_") for each in those}
        for those in (table["dependencies"], extras)
    )
    known = {IMPORT_NAMES.get(name, name) for name in always} | sys.stdlib_module_names | {"eagle_slim"}
    return [
        f"{path}:{line} imports {library}"
        for path, text in source.items()
        for line, (library, *_), is_inside in imports(nodes(text)[0])
        if library not in known and not (is_inside and library in optional)
    ]


def is_private(name: str | None) -> bool:
    return bool(name and re.match("_[^_]", name)) and name not in DOCUMENTED


def names_of_others() -> set[str]:
    """Private attributes of modules, tensors, models and configurations, which strings might name."""
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    named = {*dir(torch.nn.Module()), *dir(torch.Tensor), *dir(PreTrainedModel), *dir(PreTrainedConfig())}
    # A key of configurations' files, which are data.
    return {*filter(is_private, named)} - {"_name_or_path"}


def private_names(source: Source) -> list[str]:
    """Private names of other libraries, but in `COMPAT`: imported, as attributes, keyword arguments and strings.

    An attribute or a keyword is another's if no file of ours gives that name to a function, a class, a variable or an
    attribute of `self`. A class that is found by its place among `__bases__` is private, too; other names with two
    underscores are Python's own.
    """
    everything = [node for text in source.values() for node in nodes(text)]
    ours = {node.name for node in everything if isinstance(node, (ast.ClassDef, Function))}
    for node in everything:
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            is_own = isinstance(node, ast.Name) or ast.unparse(node.value) in ("self", "cls")
            ours |= {getattr(node, "id", None) or getattr(node, "attr", "")} if is_own else set()
    others, found = names_of_others(), []
    for path, text in source.items():
        of_others = [(line, parts) for line, parts, _ in imports(nodes(text)[0]) if parts[0] != "eagle_slim"]
        named = [(line, name) for line, parts in of_others for name in parts if is_private(name)]
        for node in nodes(text):
            is_named = isinstance(node, (ast.Attribute, ast.keyword))
            name = getattr(node, "attr", getattr(node, "arg", None)) if is_named else None
            if (is_private(name) and name not in ours) or name == "__bases__":
                named.append((node.lineno, str(name)))  # type: ignore[attr-defined]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in others:
                named.append((node.lineno, node.value))
        found += [f"{path}:{line} uses {name}" for line, name in named if path != COMPAT]
    return found


def many_parameters(source: Source) -> list[str]:
    """Host functions with more than ten parameters, `self` and `cls` apart."""
    counts = {}
    for name, node in host_functions(source):
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        counts[name] = len([each for each in given if each is not None and each.arg not in ("self", "cls")])
    return [f"{name}: {count} parameters" for name, count in counts.items() if count > PARAMETERS.get(name, 10)]


def long_bodies(source: Source) -> list[str]:
    """Host functions of more than 60 lines below the docstring."""
    counts = {}
    for name, node in host_functions(source):
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        counts[name] = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
    return [f"{name}: {count} lines" for name, count in counts.items() if count > 60]


def long_files_of_a_step(source: Source) -> list[str]:
    lines = {path: len(text.splitlines()) for path, text in source.items() if path.startswith("runtime/step/")}
    return [f"{path}: {count} lines" for path, count in lines.items() if count > 400]


RULES: dict[Callable[[Source], list[str]], str] = {
    names_taken_twice: "Give each class the name of what it alone is.",
    wrong_first_words: "Begin a function's docstring with a verb ('Return …', 'Report whether …'), others with a noun.",
    undeclared_imports: "Declare these libraries in pyproject.toml.",
    private_names: f"Put a function in {COMPAT} that does this, with a test of it.",
    many_parameters: "At most ten: group what belongs together in a dataclass.",
    long_bodies: "At most 60 lines: give each part a function and a name.",
    long_files_of_a_step: "At most 400 lines: a file has one job.",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_packages_keep_a_rule(rule: Callable[[Source], list[str]]) -> None:
    if found := rule(read(*PACKAGES)):
        pytest.fail("\n".join([RULES[rule], *found]), pytrace=False)


@pytest.mark.parametrize("rule", [wrong_first_words, many_parameters, long_bodies], ids=lambda rule: rule.__name__)
def test_benchmarks_and_examples_keep_a_rule(rule: Callable[[Source], list[str]]) -> None:
    assert rule(read("benchmarks", "examples")) == []


def test_few_lines_are_kept_from_the_formatter() -> None:
    """Lines are counted as the formatter writes them: for tables alone it is told to leave them."""
    assert len(skips_of_the_formatter(read(*PACKAGES, "benchmarks", "examples", "tests"))) <= 60
    command = [sys.executable, "-m", "ruff", "format", "--check", *PACKAGES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


TWELVE = ", ".join("abcdefghijkl")
DOCSTRINGS = '''
    """What this is."""
    class Row:
        """How a row stands."""
        size: int
        """Which size."""
        @property
        def width(self):
            """The width."""
    def read():
        """The row."""
    def write():
        """Write the row, which may not be there."""
    def rank():
        """int64[rows]."""
'''
PRIVATE = """
    from transformers.utils import _compile
    import torch._dynamo
    from . import _ours
    class A:
        def _mine(self): self._kept = other._kept
    a._mine()._replace(b=1)
    a._version
    load(_quiet=True)
    getattr(module, "_buffers", config.get("_name_or_path"))
    Error.__bases__[0]
"""
IMPORTS = """
    import os
    from torch import nn
    from . import ray
    import yaml
    import lxml.etree
    import ray
    def f():
        import ray, eagle_slim.convert
"""
SIGNATURES = f"""
    class A:
        def ten(self, a, b, c, d, e, f, g, h, *, key, **more): ...
        def eleven(self, a, b, c, d, e, f, g, h, i, *, key, **more): ...
    @triton.jit
    def kernel({TWELVE}): ...
    @cli.command(name="x")
    def command({TWELVE}): ...
"""


def function(name: str, lines: int) -> str:
    docstring = ['    """Return much.', "", '    More."""', ""]
    return "\n".join([f"def {name}():", *docstring, "    a = (", *["1,"] * (lines - 2), ")\n"])


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        (names_taken_twice, "class A: ...\nclass B: ...\nclass A: ...", ["A: a.py and a.py"]),
        (wrong_first_words, DOCSTRINGS, ["2: module", "4: class", "6: attribute", "11: function", "15: function"]),
        (skips_of_the_formatter, "a = 1\nb = [1,  2]  # fmt: " + "skip", ["a.py:2"]),
        (undeclared_imports, IMPORTS, ["6 imports lxml", "7 imports ray"]),
        (private_names, PRIVATE, ["_compile", "_dynamo", "8 uses _version", "_quiet", "_buffers", "__bases__"]),
        (many_parameters, SIGNATURES, ["a.py: A.eleven: 11 parameters"]),
        (long_bodies, function("a", 60) + function("b", 61) + "@jit\n" + function("c", 61), ["a.py: b: 61 lines"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_breaks_a_rule_is_found(rule: Callable[[Source], list[str]], text: str, expected: list[str]) -> None:
    found = rule({"a.py": textwrap.dedent(text)})
    assert len(found) == len(expected), found
    for line, part in zip(found, expected, strict=True):
        assert part.replace(": ", ": the docstring of this ") in line or part in line
