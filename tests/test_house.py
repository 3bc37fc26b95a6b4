"""Rules of the whole repository that no linter has, read from the source itself.

Each is a function of files that returns what breaks the rule, so that its tests can show both that the repository keeps
it and that a file which does not is found.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("vocab_tools", "convert", "runtime")
Function = ast.FunctionDef | ast.AsyncFunctionDef

# Words that no docstring begins with; articles and the like, by which a function's does not begin with a verb.
QUESTIONS = ("what", "where", "how", "which")
NO_VERBS = re.compile(
    r"an?|the|th(is|ese|ose)|its?|one|every|each|both|all|no|whether|why|as|in|of|for|from|by|to|per|along|rows?|numbers?"
    r"|(larg|small|long|short|near|high|low)est|.*[^a-z].*",
    re.IGNORECASE,
)
# Functions that a decorator makes an attribute are described as attributes are, by a noun.
ATTRIBUTES = ("property", "cached_property", "abstractproperty")

MOST_PARAMETERS, MOST_BODY_LINES, MOST_STEP_LINES, MOST_SKIPS = 10, 60, 400, 60
# What users know from transformers, and the signature of SafeAILab's own function.
SIGNATURES = {
    "runtime/model.py: SpeculativeModel.from_pretrained": 14,
    "runtime/safeailab/step.py: StepPatch.update_inference_inputs": 12,
}

# Import name of a distribution, where it is not the distribution's own in lower case with underscores.
IMPORT_NAMES = {"pyyaml": "yaml"}

# What begins with an underscore and is documented for all: named tuples' methods, and a process's end without clean-up.
DOCUMENTED = {"_replace", "_fields", "_asdict", "_make", "_field_defaults", "_exit"}
# Keys of a configuration's file, which are data.
CONFIG_KEYS = {"_name_or_path"}
COMPAT = "vocab_tools/compat.py"

Source = dict[str, str]
"""Text of each file, by its path from the root."""


@cache
def parse(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def nodes(text: str) -> list[ast.AST]:
    return list(ast.walk(parse(text)))


def read(*folders: str) -> Source:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


def decorators(node: Function | ast.ClassDef) -> set[str]:
    """Last parts of a definition's decorators: `jit` of `@triton.jit`, `command` of `@cli.command(…)`."""
    plain = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
    return {ast.unparse(each).rpartition(".")[2] for each in plain}


def definitions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Every class and function, with its dotted name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{inside}{node.name}", node
            yield from definitions(node, f"{inside}{node.name}.")
        else:
            yield from definitions(node, inside)


def host_functions(source: Source) -> Iterator[tuple[str, Function]]:
    """Every function but kernels and click commands, named by file and dotted name."""
    for path, text in source.items():
        for name, node in definitions(parse(text)):
            if not isinstance(node, ast.ClassDef) and decorators(node).isdisjoint({"jit", "command", "group"}):
                yield f"{path}: {name}", node


def refuse(found: list[str], advice: str) -> None:
    """Fail with every line of what breaks a rule, and what to do."""
    if found:
        pytest.fail("\n".join([advice, *found]), pytrace=False)


# --- class names


def names_taken_twice(source: Source) -> list[str]:
    """Top-level class names that two files define."""
    homes = defaultdict(list)
    for path, text in source.items():
        for node in parse(text).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path)
    return [f"{name}: {' and '.join(paths)}" for name, paths in sorted(homes.items()) if len(paths) > 1]


def test_no_class_name_is_taken_twice() -> None:
    refuse(names_taken_twice(read(*PACKAGES)), "Two classes of one name: give each the name of what it alone is.")


def test_a_class_name_taken_twice_is_found() -> None:
    source = {"a.py": "class Row: ...", "b.py": "class Row: ...\nclass Column: ...", "c.py": "def Column(): ..."}
    assert names_taken_twice(source) == ["Row: a.py and b.py"]


# --- docstrings


def first_word(text: str) -> str:
    return re.sub(r"\W+$", "", text.split()[0]) if text.strip() else ""


def docstrings(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, kind, first word) of the docstrings of a module, its classes, its functions, and its attributes.

    A string below an assignment is the attribute's.
    """
    for node in nodes(text):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
            if not isinstance(node, ast.Module) and not decorators(node).isdisjoint(ATTRIBUTES):
                kind = "attribute"
            if written := ast.get_docstring(node):
                yield getattr(node, "lineno", 1), kind, first_word(written)
            for assigned, string in zip(node.body, node.body[1:], strict=False):
                if isinstance(assigned, (ast.Assign, ast.AnnAssign)) and isinstance(string, ast.Expr):
                    written = string.value.value if isinstance(string.value, ast.Constant) else None
                    if isinstance(written, str):
                        yield string.lineno, "attribute", first_word(written)


def wrong_first_words(source: Source) -> list[str]:
    """Docstrings that begin with a question word, and functions' that begin with no verb."""
    found = []
    for path, text in source.items():
        for line, kind, word in docstrings(text):
            if word.lower() in QUESTIONS or (kind == "function" and NO_VERBS.fullmatch(word)):
                found.append(f"{path}:{line}: the docstring of this {kind} begins with {word}")
    return found


def test_docstrings_begin_with_a_verb_and_never_with_a_question_word() -> None:
    found = wrong_first_words(read(*PACKAGES, "benchmarks", "examples"))
    refuse(found, "Begin a function's docstring with a verb ('Return the …', 'Report whether …'), others with a noun.")


def test_a_wrong_first_word_is_found() -> None:
    text = '''
        """What this is."""
        class Row:
            """How a row stands."""
            size: int
            """Which size."""
            @property
            def width(self):
                """The width."""
        async def read():
            """The row."""
        def write():
            """Write the row, which may not be there."""
        def rank():
            """int64[rows]."""
    '''
    found = wrong_first_words({"a.py": textwrap.dedent(text)})
    kinds = [(line.split(":")[1], line.split()[-4]) for line in found]
    assert kinds == [("1", "module"), ("3", "class"), ("6", "attribute"), ("10", "function"), ("14", "function")]


# --- skips of the formatter


def places_of_skips(source: Source) -> list[str]:
    skip = "# fmt: " + "skip"
    return [
        f"{path}:{at}" for path, text in source.items() for at, line in enumerate(text.splitlines(), 1) if skip in line
    ]


def test_few_lines_are_kept_from_the_formatter() -> None:
    found = places_of_skips(read(*PACKAGES, "benchmarks", "examples", "tests"))
    refuse(
        found[MOST_SKIPS:],
        f"{len(found)} lines are kept from the formatter, of at most {MOST_SKIPS}, for tables alone.",
    )


def test_a_skip_is_found() -> None:
    assert places_of_skips({"a.py": "a = 1\nb = [1,  2]  # fmt: " + "skip"}) == ["a.py:2"]


# --- dependencies


def declared(project: dict[str, object]) -> tuple[set[str], set[str]]:
    """Import names of what pyproject.toml declares: for everyone, and in extras beside."""

    def names(requirements: Iterable[str]) -> set[str]:
        plain = (re.match(r"[\w.-]+", each)[0].lower().replace("-", "_") for each in requirements)  # type: ignore[index]
        return {IMPORT_NAMES.get(name, name) for name in plain}

    extras = project.get("optional-dependencies", {})
    assert isinstance(extras, dict)
    optional = (each for extra, those in extras.items() if extra != "dev" for each in those)
    return names(project["dependencies"]), names(optional)  # type: ignore[arg-type]


def imports(tree: ast.AST, inside: bool = False) -> Iterator[tuple[int, str, bool]]:
    """(line, library, inside a function) of every absolute import."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0], inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module.partition(".")[0], inside
        yield from imports(node, inside or isinstance(node, Function))


def undeclared(source: Source, always: set[str], optional: set[str]) -> list[str]:
    """Imports of what is not declared; what an extra brings may be imported inside functions."""
    ours = sys.stdlib_module_names | {"eagle_slim"}
    return [
        f"{path}:{line} imports {library}"
        for path, text in source.items()
        for line, library, inside in imports(parse(text))
        if library not in ours | always | (optional if inside else set())
    ]


def test_every_imported_library_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    refuse(undeclared(read(*PACKAGES), *declared(project)), "Declare these libraries in pyproject.toml.")


def test_an_undeclared_import_is_found() -> None:
    source = {
        "a.py": "import os\nfrom torch import nn\nfrom . import ray\nimport yaml\nimport pyarrow.compute\nimport ray",
        "b.py": "def f():\n    import ray, eagle_slim.convert\n    from lxml import etree",
    }
    project = {"dependencies": ["torch>=2.11", "PyYAML>=6"], "optional-dependencies": {"ray": ["ray"], "dev": ["lxml"]}}
    found = ["a.py:5 imports pyarrow", "a.py:6 imports ray", "b.py:3 imports lxml"]
    assert undeclared(source, *declared(project)) == found


# --- private names of other libraries


def is_private(name: str) -> bool:
    return re.match(r"_(?!_)\w", name) is not None and name not in DOCUMENTED


def names_of_ours(source: Source) -> set[str]:
    """Private names that our own files define: functions, classes, fields, and attributes of `self`."""
    found = set()
    for text in source.values():
        for node in nodes(text):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def names_of_others() -> set[str]:
    """Private attributes of a module, a tensor, a model and a configuration, which our code might name as strings."""
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    named = {*dir(torch.nn.Module()), *dir(torch.Tensor), *dir(PreTrainedModel), *dir(PreTrainedConfig())}
    return {name for name in named if is_private(name)} - CONFIG_KEYS


def private_names(source: Source, ours: set[str], others: set[str]) -> list[str]:
    """Uses of other libraries' private names, in five forms.

    Imports of a private name or module; attributes, and keyword arguments, with a private name that no file of ours
    defines; a private attribute of another library as a string; and a class found by its place among `__bases__`.
    Dunder names are Python's own data model, otherwise.
    """
    found = []
    for path, text in source.items():
        for node in nodes(text):
            named: list[str] = []
            if isinstance(node, ast.Import):
                named = [part for alias in node.names for part in alias.name.split(".") if is_private(part)]
            elif (
                isinstance(node, ast.ImportFrom) and not node.level and not (node.module or "").startswith("eagle_slim")
            ):
                parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                named = [part for part in parts if is_private(part)]
            elif isinstance(node, ast.Attribute):
                theirs = is_private(node.attr) and node.attr not in ours
                named = [node.attr] if theirs or node.attr == "__bases__" else []
            elif isinstance(node, ast.keyword):
                named = [node.arg] if node.arg and is_private(node.arg) and node.arg not in ours else []
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = [node.value] if node.value in others else []
            found += [f"{path}:{getattr(node, 'lineno', '?')} uses {name}" for name in named]
    return found


def test_private_names_of_other_libraries_stay_in_one_file() -> None:
    source = read(*PACKAGES)
    ours = names_of_ours(source)
    found = private_names({path: text for path, text in source.items() if path != COMPAT}, ours, names_of_others())
    refuse(found, f"Private names of other libraries: put a function in {COMPAT} that does this, with a test of it.")


def test_a_private_name_is_found() -> None:
    text = """
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
    source = {"a.py": textwrap.dedent(text)}
    found = private_names(source, names_of_ours(source), {"_buffers"})
    names = ["_compile", "_dynamo", "_version", "_quiet", "_buffers", "__bases__"]
    assert sorted(line.split()[-1] for line in found) == sorted(names)


# --- sizes


def parameters(node: Function) -> int:
    """How many parameters a function has, `self` and `cls` apart."""
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    several = bool(node.args.vararg) + bool(node.args.kwarg)
    return len(names) - (names[:1] in (["self"], ["cls"])) + len(node.args.kwonlyargs) + several


def body_lines(node: Function) -> int:
    """Lines from the first statement after the docstring to the last."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def too_many_parameters(source: Source) -> list[str]:
    counts = {name: parameters(node) for name, node in host_functions(source)}
    return [f"{name}: {n} parameters" for name, n in counts.items() if n > SIGNATURES.get(name, MOST_PARAMETERS)]


def too_long(source: Source) -> list[str]:
    counts = {name: body_lines(node) for name, node in host_functions(source)}
    return [f"{name}: {lines} lines" for name, lines in counts.items() if lines > MOST_BODY_LINES]


def test_host_functions_have_few_parameters() -> None:
    found = too_many_parameters(read(*PACKAGES, "benchmarks"))
    refuse(found, f"At most {MOST_PARAMETERS}: group what belongs together in a dataclass.")


def test_host_functions_are_short() -> None:
    found = too_long(read(*PACKAGES, "benchmarks"))
    refuse(found, f"At most {MOST_BODY_LINES} lines below the docstring: give each part a function and a name.")


def test_files_of_a_step_are_short() -> None:
    lines = {path: len(text.splitlines()) for path, text in read("runtime/step").items()}
    long = [f"{path}: {count} lines" for path, count in lines.items() if count > MOST_STEP_LINES]
    refuse(long, f"At most {MOST_STEP_LINES} lines: a file has one job.")


def test_the_source_stands_as_the_formatter_writes_it() -> None:
    """Lines are counted as they are written, so that the formatter must have written them."""
    done = subprocess.run([sys.executable, "-m", "ruff", "format", "--check", *PACKAGES], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


@pytest.mark.parametrize(("count", "found"), [(10, []), (11, ["a.py: A.f: 11 parameters"])])
def test_too_many_parameters_are_found(count: int, found: list[str]) -> None:
    names = ", ".join(f"p{at}" for at in range(count - 2))
    twelve = ", ".join("abcdefghijkl")
    text = f"""
        class A:
            def f(self, {names}, *, key, **more): ...
        @triton.jit
        def kernel({twelve}): ...
        @cli.command(name="x")
        def command({twelve}): ...
    """
    assert too_many_parameters({"a.py": textwrap.dedent(text)}) == found


@pytest.mark.parametrize(("count", "found"), [(60, []), (61, ["a.py: A.f: 61 lines"])])
def test_a_long_function_is_found(count: int, found: list[str]) -> None:
    body = "\n".join(["        a = [", *["            1,"] * (count - 3), "        ]", "        return a"])
    text = f'class A:\n    def f():\n        """Return much.\n\n        More.\n        """\n\n{body}\n'
    kernel = "@jit\ndef kernel():\n" + "    a = 1\n" * 61
    assert too_long({"a.py": text + kernel}) == found
