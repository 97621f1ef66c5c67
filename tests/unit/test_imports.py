"""The direction of imports and who may touch the outside, read from the syntax tree of every file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGES = ("pairing", "distill", "eval", "recipes", "scripts", "tests")
ALLOWED = {
    "pairing": {"pairing"},
    "distill": {"distill", "pairing"},
    "eval": {"eval", "pairing"},
    "recipes": {"recipes", "distill", "eval", "pairing"},
    "scripts": {"scripts", "distill", "eval", "pairing"},
}
FILES = sorted(f for package in PACKAGES[:5] for f in (ROOT / package).rglob("*.py"))
USES_ENVIRONMENT = {
    "pairing/vllm_plugin.py",  # vLLM calls it in processes of its own, where no recipe reads the environment for it
    "eval/server.py",  # hands the environment on to the server, with vLLM's settings in it
    "distill/in_vllm.py",  # the same for an engine within the process: vLLM reads its settings nowhere else
}


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Every imported module by its full name, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            yield from ((str(a.value), ast.Expr(node)) for a in node.args[:1] if isinstance(a, ast.Constant))


def at_import_time(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: all but the bodies of functions and of `if TYPE_CHECKING`."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        todo.extend(ast.iter_child_nodes(node))


def dotted(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every dotted name that is used, such as `os.environ`, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)):
            yield ast.unparse(node), node.lineno


def direction_faults(package: str, source: str) -> list[str]:
    roots = {name.split(".")[0] for name, _ in imports(ast.parse(source))}
    return sorted((roots & set(PACKAGES)) - ALLOWED[package])


def outside_faults(source: str) -> list[str]:
    """argv, the environment, and ends of the process."""
    tree = ast.parse(source)
    names = {n for n, _ in dotted(tree)} | {n for n, _ in imports(tree)}
    forbidden = (
        "sys.argv",
        "os.environ",
        "os.getenv",
        "os.putenv",
        "os._exit",
        "sys.exit",
        "exit",
        "quit",
        "SystemExit",
    )
    return [n for n in forbidden if n in names]


def test_there_is_something_to_read() -> None:
    assert {f.parts[len(ROOT.parts)] for f in FILES} >= {"pairing", "distill", "eval", "recipes"}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_go_one_way(file: Path) -> None:
    """pairing imports no sibling; distill and eval only pairing; nothing but recipes (and tests) imports recipes."""
    package = name_of(file).split("/")[0]
    faults = direction_faults(package, file.read_text(encoding="utf-8"))
    assert not faults, f"{name_of(file)} imports {', '.join(faults)}"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_vllm_and_bitsandbytes_are_imported_inside_functions(file: Path) -> None:
    for node in at_import_time(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            roots = {name.split(".")[0] for name, _ in imports(node)}
            assert not roots & {"vllm", "bitsandbytes", "vllm_bnb_plugin", "wandb"}, f"{name_of(file)}:{node.lineno}"


@pytest.mark.parametrize(
    "file", [f for f in FILES if name_of(f).split("/")[0] in ("pairing", "distill", "eval")], ids=name_of
)
def test_only_recipes_read_argv_and_environment_or_exit(file: Path) -> None:
    faults = outside_faults(file.read_text(encoding="utf-8"))
    if name_of(file) in USES_ENVIRONMENT:
        faults.remove("os.environ")  # and fails where the exception is no longer needed
    assert not faults, f"{name_of(file)} uses {', '.join(faults)}"


def test_one_module_starts_a_server_and_one_talks_to_it() -> None:
    """`vllm serve` is started by eval/server.py, the only one to run it; eval/client.py alone talks to it over HTTP, and
    distill/in_servers.py, with its server_http and server_checks, alone to servers that others run."""
    starts, talks = set(), set()
    for file in FILES:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        runs = any(n.startswith(("subprocess.", "os.exec", "os.spawn", "multiprocessing.")) for n, _ in dotted(tree))
        lists = (n for n in ast.walk(tree) if isinstance(n, (ast.List, ast.Tuple)))
        texts = [[e.value for e in n.elts if isinstance(e, ast.Constant)] for n in lists]
        server = any(n.startswith("vllm.entrypoints") for n, _ in imports(tree)) or any(
            ("serve" in t and any(str(x).startswith("vllm") for x in t)) or "vllm.entrypoints.cli.main" in t
            for t in texts
        )
        if runs and server:
            starts.add(name_of(file))
        clients = ("httpx", "requests", "aiohttp", "openai", "urllib", "http", "socket")
        if any(n.split(".")[0] in clients for n, _ in imports(tree)):
            talks.add(name_of(file))
    assert starts == {"eval/server.py"}
    theirs = {"distill/in_servers.py", "distill/server_http.py", "distill/server_checks.py"}
    clients_of_ours = {"eval/client.py", *theirs}
    assert clients_of_ours <= talks
    for file in talks - clients_of_ours:  # a free port is asked for where the server is started
        names = {n for n, _ in imports(ast.parse((ROOT / file).read_text(encoding="utf-8")))}
        assert {n.split(".")[0] for n in names} & {
            "httpx",
            "requests",
            "aiohttp",
            "openai",
            "urllib",
            "http",
        } == set(), file


def test_the_rules_find_what_they_forbid() -> None:
    """Each rule against a line that breaks it: a rule that finds nothing would pass for ever."""
    assert direction_faults("pairing", "def f():\n    from distill.losses import kl") == ["distill"]
    assert direction_faults("distill", "import eval.client") == ["eval"]
    assert direction_faults("eval", "from recipes import run") == ["recipes"]
    assert direction_faults("recipes", "import tests.tiny") == ["tests"]
    assert direction_faults("distill", "import pairing.files") == []
    assert outside_faults("import os\nx = os.environ['A']") == ["os.environ"]
    assert outside_faults("from os import environ") == ["os.environ"]
    assert outside_faults("raise SystemExit(1)") == ["SystemExit"]
    module = ast.parse("try:\n    import vllm\nexcept ImportError:\n    pass\ndef f():\n    import bitsandbytes")
    found = [n.names[0].name for n in at_import_time(module) if isinstance(n, ast.Import)]
    assert found == ["vllm"]
