"""The rules that keep the code readable, checked: sizes, words, names, docstrings and who may import whom.

Every rule lists its offenders as ``file:line what``. An exemption is one entry in the tables below, with its
reason; an entry that no longer exempts anything fails too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine", "serve_app")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50

# "path": "reason"
LONG_FILES: dict[str, str] = {}
# "path::qualified.name": "reason"
LONG_FUNCTIONS: dict[str, str] = {}
SLEEPING_TESTS: dict[str, str] = {}

RULER = re.compile(r"\s*#\s*[-=#*]{3,}")
FORBIDDEN_TEXT = re.compile(r"\b(?:TODO|FIXME|XXX|HACK|NotImplementedError)\b|pragma: no cover")
UNITLESS_NAME = re.compile(r"(?:.*_)?(?:timeout|delay|duration|interval)|size")
NUMBER_TYPE = re.compile(r"\b(?:int|float)\b")

# Imported when a process starts, these load MLX: only the process that runs the engine may.
MLX_PACKAGES = ("mlx", "mlx_lm")
MLX_ROOMS = ("engine.mlx_backend", "engine.build")
# Rooms whose code a virtual clock can drive: time, threads and machines come in as arguments.
PURE_ROOMS = (
    "engine.scheduler",
    "engine.memory",
    "serve_app.latency",
    *(
        f"serve_app.routing.{name}"
        for name in (
            "cost",
            "decision",
            "keys",
            "local_map",
            "policy",
            "prefix_index",
            "prefix_memory",
            "rendezvous",
            "report",
            "table",
            "simulation.experiments",
            "simulation.machine",
            "simulation.rules",
            "simulation.run",
            "simulation.traffic",
        )
    ),
    "serve_app.autoscaling.policy",
    "serve_app.capacity.workload",
    "serve_app.capacity.perf_model",
    "serve_app.capacity.simulator",
    "serve_app.capacity.planner",
)
IMPURE_PACKAGES = ("mlx", "mlx_lm", "ray", "asyncio", "threading", "time")
FLEET_PACKAGES = ("ray", "fastapi", "starlette", "uvicorn")
UNIT_TIER = ("tests.unit", "tests.long", "tests.fakes", "tests.builders")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def qualified(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.ClassDef | Function]]:
    """Every class and function below ``node`` with its dotted name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | Function):
            name = f"{prefix}{child.name}"
            yield name, child
            yield from qualified(child, f"{name}.")
        else:
            yield from qualified(child, prefix)


def require_none(offenders: Iterable[str], rule: str) -> None:
    if found := sorted(offenders):
        pytest.fail(rule + "\n  " + "\n  ".join(found), pytrace=False)


def require_exempted(offenders: dict[str, str], exemptions: dict[str, str], rule: str) -> None:
    """``offenders`` maps an exemption key to what is said about it."""
    require_none((text for key, text in offenders.items() if key not in exemptions), rule)
    require_none((key for key in exemptions if key not in offenders), "exemptions that exempt nothing")


def test_files_are_short() -> None:
    offenders = {}
    for path in python_files(*PACKAGES, "tests"):
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > MAX_FILE_LINES:
            offenders[relative(path)] = f"{relative(path)}: {num_lines} lines"
    require_exempted(offenders, LONG_FILES, f"files longer than {MAX_FILE_LINES} lines")


def test_functions_are_short() -> None:
    offenders = {}
    for path in python_files(*PACKAGES, "tests"):
        for name, node in qualified(parsed(path)):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if isinstance(node, Function) and num_lines > MAX_FUNCTION_LINES:
                key = f"{relative(path)}::{name}"
                offenders[key] = f"{relative(path)}:{node.lineno} {name}: {num_lines} lines"
    require_exempted(offenders, LONG_FUNCTIONS, f"functions longer than {MAX_FUNCTION_LINES} lines")


def test_modules_and_public_classes_say_what_they_are() -> None:
    offenders = []
    for path in python_files(*PACKAGES):
        tree = parsed(path)
        if path.name != "__init__.py" and not ast.get_docstring(tree):
            offenders.append(f"{relative(path)}:1 module")
        offenders += [
            f"{relative(path)}:{node.lineno} class {name}"
            for name, node in qualified(tree)
            if isinstance(node, ast.ClassDef) and "_" not in {part[0] for part in name.split(".")}
            if not ast.get_docstring(node)
        ]
    require_none(offenders, "without a docstring")


def test_no_loose_ends_in_the_text() -> None:
    offenders = [
        f"{relative(path)}:{number} {match.group()}"
        for path in python_files(*PACKAGES, "tests")
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in FORBIDDEN_TEXT.finditer(line)
    ]
    require_none(offenders, "finish it, or leave it out")


def test_no_rulers_between_parts_of_a_file() -> None:
    offenders = [
        f"{relative(path)}:{number}"
        for path in python_files(*PACKAGES, "tests")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if RULER.match(line)
    ]
    require_none(offenders, "a file that needs parts is two files; else its names say it")


def numbers_declared(node: ast.AST) -> Iterator[tuple[str, ast.expr, int]]:
    """Name, annotation and line of each annotated field and parameter."""
    if isinstance(node, ast.ClassDef):
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                yield field.target.id, field.annotation, field.lineno
    if isinstance(node, Function):
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if argument.annotation is not None:
                yield argument.arg, argument.annotation, argument.lineno


def test_numbers_carry_their_unit_in_the_name() -> None:
    offenders = [
        f"{relative(path)}:{line} {name}: {ast.unparse(annotation)}"
        for path in python_files(*PACKAGES)
        for _, node in qualified(parsed(path))
        for name, annotation, line in numbers_declared(node)
        if UNITLESS_NAME.fullmatch(name) and NUMBER_TYPE.search(ast.unparse(annotation))
    ]
    require_none(offenders, "say the unit: _s, _ms, _bytes, _tokens, num_")


def test_no_test_sleeps() -> None:
    offenders = {}
    for path in python_files("tests"):
        for name, node in qualified(parsed(path)):
            if isinstance(node, Function) and re.search(r"\btime\.sleep\(", ast.unparse(node)):
                offenders[f"{relative(path)}::{name}"] = f"{relative(path)}:{node.lineno} {name}"
    require_exempted(offenders, SLEEPING_TESTS, "await an event or poll with a deadline instead of sleeping")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in python_files(*PACKAGES, "tests")}


def inside(module: str, rooms: Iterable[str]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def import_statements(node: ast.AST, at_start_only: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not (at_start_only and (isinstance(child, Function) or is_type_checking(child))):
            yield from import_statements(child, at_start_only)


@cache
def imports(module: str, at_start_only: bool) -> frozenset[str]:
    """Dotted names that ``module`` imports; for ``from a import b`` both ``a`` and ``a.b``."""
    path = modules()[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found: set[str] = set()
    for statement in import_statements(parsed(path), at_start_only):
        if isinstance(statement, ast.Import):
            found.update(alias.name for alias in statement.names)
            continue
        parents = package[: len(package) - statement.level + 1] if statement.level else []
        source = ".".join([*parents, *([statement.module] if statement.module else [])])
        found.update({source, *(f"{source}.{alias.name}" for alias in statement.names)})
    return frozenset(found)


def loaded_by(module: str) -> dict[str, str]:
    """What importing ``module`` loads, each name with its importer. Foreign packages are not looked into."""
    loaded: dict[str, str] = {}
    waiting = [module]
    while waiting:
        current = waiting.pop()
        parents = {current.rsplit(".", depth)[0] for depth in range(1, current.count(".") + 1)}
        for name in parents | imports(current, at_start_only=True):
            if name not in loaded:
                loaded[name] = current
                if name in modules():
                    waiting.append(name)
    return loaded


def test_import_contracts() -> None:
    code = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True)
    assert code == 0, "see the report above"


@pytest.mark.parametrize(
    ("rooms", "banned"),
    [
        pytest.param(PURE_ROOMS, IMPURE_PACKAGES, id="pure rooms know no clock, thread or cluster"),
        pytest.param(("engine",), FLEET_PACKAGES, id="the engine knows one machine"),
    ],
)
def test_banned_imports(rooms: tuple[str, ...], banned: tuple[str, ...]) -> None:
    offenders = [
        f"{module} imports {name}"
        for module in modules()
        if inside(module, rooms)
        for name in imports(module, at_start_only=False)
        if inside(name, banned)
    ]
    require_none(offenders, "not allowed here, not even inside a function")


def test_only_its_own_rooms_import_mlx() -> None:
    offenders = [
        f"{module} imports {name}"
        for module in modules()
        if inside(module, PACKAGES) and not inside(module, MLX_ROOMS)
        for name in imports(module, at_start_only=False)
        if inside(name, MLX_PACKAGES)
    ]
    require_none(offenders, f"only {' and '.join(MLX_ROOMS)} may import MLX")


def test_processes_that_run_no_engine_start_without_mlx() -> None:
    offenders = [
        f"importing {module} loads {name} through {source}"
        for module in modules()
        if inside(module, PACKAGES) and not inside(module, MLX_ROOMS)
        for name, source in loaded_by(module).items()
        if inside(name, MLX_PACKAGES)
    ]
    require_none(offenders, "import the engine's MLX rooms where they are used, not at the top")


def test_unit_tests_need_neither_mlx_nor_ray() -> None:
    offenders = {
        f"{module} needs {name}"
        for module in modules()
        if inside(module, UNIT_TIER)
        for name in {*loaded_by(module), *imports(module, at_start_only=False)}
        if inside(name, (*MLX_PACKAGES, "ray"))
    }
    require_none(offenders, "move it to tests/mlx or tests/serve")


def test_only_the_tier_that_starts_ray_loads_it() -> None:
    # Ray reads its environment when it is first imported, and tests/serve/conftest.py sets it: all tests are collected
    # in one process, those of other tiers first.
    offenders = {
        f"{module} loads {name}"
        for module in modules()
        if inside(module, ("tests.api", "tests.mlx", "tests.gpu"))
        for name in loaded_by(module)
        if inside(name, ("ray",))
    }
    require_none(offenders, "move it to tests/serve")
