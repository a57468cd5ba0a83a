"""What this project uses of vLLM, and what a version of vLLM offers in those places, from sources alone.

    python -m tests.vllm_symbols WHEEL_OR_SITE_PACKAGES > tests/vllm_symbols_VERSION.json

writes the list of one version: a wheel as `pip download --no-deps vllm==VERSION` leaves it, or the folder that vLLM
is installed in. Nothing of vLLM is imported, so the list of a GPU build can be made on any machine. A symbol stands
there with its parameters (`...` for a default), a class that is not called with its bases, a symbol that the version
lacks as null.

Uses are found in `scoring/engine.py` and `scoring/vllm_extension/`: imports, members of what is imported, of
parameters annotated with it, of what `YIELDS` says it gives and of the `super()` of a class derived from it, and every
call of these.

Exempt are the kernels that `scoring.vllm_extension.kernels` replaces. They are named by strings and belong to one
version on purpose: `scoring.vllm_extension.version` refuses every other one before a kernel is replaced, and
`test_vllm_extension.py` compares their arguments. Types and values are not compared.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SUPER = "super()"

# What a call or a member of vLLM gives, where members of that are used in turn: nothing in our sources says it.
YIELDS = {
    "vllm.AsyncEngineArgs.create_engine_config": "vllm.config.VllmConfig",
    "vllm.v1.engine.async_llm.AsyncLLM.from_vllm_config": "vllm.v1.engine.async_llm.AsyncLLM",
    "vllm.v1.engine.async_llm.AsyncLLM.generate": "vllm.outputs.RequestOutput",
    "vllm.v1.engine.async_llm.AsyncLLM.vllm_config": "vllm.config.VllmConfig",
    "vllm.config.VllmConfig.cache_config": "vllm.config.CacheConfig",
    "vllm.config.VllmConfig.model_config": "vllm.config.ModelConfig",
    "vllm.config.VllmConfig.parallel_config": "vllm.config.ParallelConfig",
    "vllm.config.VllmConfig.scheduler_config": "vllm.config.SchedulerConfig",
    "vllm.entrypoints.generate.label_reads.next_token_label_reads": "vllm.entrypoints.generate.label_reads.LabelRead",
    "vllm.entrypoints.generate.label_reads.LabelRead.result": "vllm.outputs.RequestOutput",
}

# Functions of ours that hand their keyword arguments on to vLLM's.
HANDED_ON = {"self._scoring_params": "vllm.sampling_params.SamplingParams"}

# What the gather adds to a class of vLLM's, and finds there again.
ADDED = {"vllm.v1.worker.gpu.sample.prompt_logprob.PromptLogprobsWorker.teacher_scoring"}


@dataclass(frozen=True)
class Arguments:
    """Of one call: how many go by position, which by name, and whether more may hide behind `*` or `**`."""

    positional: int = 0
    keywords: tuple[str, ...] = ()
    more: bool = False


@dataclass(frozen=True)
class Use:
    """One place where a symbol of vLLM is used; `call` when it is called there."""

    symbol: str
    where: str
    call: Arguments | None = None


def project_uses() -> list[Use]:
    """Every use in the files of this project that may import vLLM."""
    files = [ROOT / "scoring/engine.py", *sorted((ROOT / "scoring/vllm_extension").rglob("*.py"))]
    return [use for file in files for use in find_uses(file.read_text(), f"{file.relative_to(ROOT)}")]


def find_uses(source: str, file: str) -> list[Use]:
    """The uses in the text of one file; `file` is what `where` calls it."""
    tree = ast.parse(source)
    ours: dict[str, str] = {}  # "self.name" -> the symbol that this attribute, or what this method returns, is one of
    size = -1
    while size != len(ours):  # an attribute may be set after the method that uses it
        size = len(ours)
        uses = list(_uses_in(tree, file, {}, ours))
    return uses


def _uses_in(scope: ast.AST, file: str, outer: dict[str, str], ours: dict[str, str]) -> Iterator[Use]:
    """The uses in a module or function. `outer` has the names it sees, and the symbol that each is or is one of."""
    known = dict(outer)

    def named(node: ast.AST) -> str | None:
        """The symbol that an expression names."""
        if isinstance(node, ast.Attribute) and (owner := held(node.value)):
            return f"{owner}.{node.attr}"
        return known.get(node.id) if isinstance(node, ast.Name) else None

    def held(node: ast.AST) -> str | None:
        """The symbol whose members an expression has."""
        if isinstance(node, ast.Await):
            return held(node.value)
        if isinstance(node, ast.Call):
            symbol = known.get(SUPER) if ast.unparse(node) == SUPER else named(node.func)
            return symbol if _is_class(symbol) else YIELDS.get(symbol) or ours.get(ast.unparse(node.func))
        symbol = named(node)
        return ours.get(ast.unparse(node)) or YIELDS.get(symbol, symbol)

    def learn(target: ast.AST, symbol: str | None) -> None:
        if isinstance(target, ast.Tuple) and len(target.elts) == 1:
            target = target.elts[0]
        if _is_class(symbol) and isinstance(target, ast.Name | ast.Attribute):
            (known if isinstance(target, ast.Name) else ours)[ast.unparse(target)] = symbol

    def annotated(node: ast.AST | None) -> str | None:
        return known.get(node.value if isinstance(node, ast.Constant) else node and ast.unparse(node))

    if isinstance(scope, FUNCTIONS):
        for argument in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs):
            known[argument.arg] = annotated(argument.annotation)
    for node in _own_nodes(scope):
        where = f"{file}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, FUNCTIONS):
            if returned := annotated(node.returns):
                ours[f"self.{node.name}"] = returned
            yield from _uses_in(node, file, known, ours)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                path = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
                if path.split(".")[0] == "vllm":
                    whole = isinstance(node, ast.Import) and not alias.asname
                    known[alias.asname or alias.name.split(".")[0]] = "vllm" if whole else path
                    yield Use(path, where)
        elif isinstance(node, ast.ClassDef):
            known[SUPER] = next((symbol for base in node.bases if (symbol := named(base))), None)
        elif isinstance(node, ast.For | ast.AsyncFor):
            learn(node.target, held(node.iter))
        elif isinstance(node, ast.Assign):
            learn(node.targets[0], held(node.value))
        elif isinstance(node, ast.Call):
            positional = sum(not isinstance(a, ast.Starred) for a in node.args)
            keywords = tuple(k.arg for k in node.keywords if k.arg)
            more = (positional, len(keywords)) != (len(node.args), len(node.keywords))
            if symbol := named(node.func):
                yield Use(symbol, where, Arguments(positional, keywords, more))
            elif symbol := HANDED_ON.get(ast.unparse(node.func)):
                yield Use(symbol, where, Arguments(0, keywords, True))
        elif isinstance(node, ast.Attribute) and (symbol := named(node)) and symbol not in ADDED:
            yield Use(symbol, where)


def _is_class(symbol: str | None) -> bool:
    """By its name: a call of it gives an instance."""
    name = (symbol or "").rpartition(".")[2]
    return name[:1].isupper() and not name.isupper()


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module or function in the order of its text, without what is inside the functions it defines."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, FUNCTIONS):
            yield from _own_nodes(node)


@dataclass(frozen=True)
class Definition:
    """A node of vLLM's sources: where it stands, and the class that it is a member of."""

    module: str
    node: ast.AST
    owner: ast.ClassDef | None = None


@dataclass(frozen=True, eq=False)
class Sources:
    """The Python sources of one vLLM: of a wheel, or of the folder that holds the package `vllm`."""

    path: Path
    _trees: dict[str, ast.Module | None] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """Without the local part (`+cpu`) that a build may add."""
        return re.search(r"^__version__ = .*'([\d.]+)", self._text("vllm/_version.py"), re.MULTILINE)[1]

    def describe(self, symbol: str, called: bool) -> str | None:
        """What a list says of a symbol; None when these sources do not have it."""
        found = self.find(symbol)
        if found is None:
            return None
        node = found.node
        if isinstance(node, FUNCTIONS):
            marks = {ast.unparse(decorator) for decorator in node.decorator_list}
            if marks & {"property", "cached_property"}:
                return "property"
            return _parameters(node.args, bound=found.owner is not None and "staticmethod" not in marks)
        if isinstance(node, ast.ClassDef):
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            return (called and self._constructor(found)) or f"class ({bases})"
        return "module" if isinstance(node, ast.Module) else "value"

    def find(self, symbol: str) -> Definition | None:
        """Where a symbol is defined, through re-exports and base classes."""
        parts = symbol.split(".")
        for cut in range(len(parts), 0, -1):
            module = ".".join(parts[:cut])
            if tree := self._tree(module):
                found: Definition | None = Definition(module, tree)
                for name in parts[cut:]:
                    found = found and self._member(found, name)
                return found
        return None

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            texts = (self._text(f"{module.replace('.', '/')}{end}") for end in ("/__init__.py", ".py"))
            self._trees[module] = next((ast.parse(text) for text in texts if text is not None), None)
        return self._trees[module]

    def _text(self, name: str) -> str | None:
        if self.path.is_dir():
            return file.read_text() if (file := self.path / name).is_file() else None
        wheel = _open_wheel(self.path)
        return wheel.read(name).decode() if name in wheel.namelist() else None

    def _member(self, of: Definition, name: str) -> Definition | None:
        if isinstance(of.node, ast.AnnAssign):  # an annotated variable has the members of its class
            owner = self._named(of.module, of.node.annotation)
            return owner and self._member(owner, name)
        if not isinstance(of.node, ast.Module | ast.ClassDef):
            return None
        owner = of.node if isinstance(of.node, ast.ClassDef) else None
        statements = list(_statements(of.node.body))
        for node in reversed(statements):  # of an overloaded function the last one counts
            if getattr(node, "name", None) == name:
                return Definition(of.module, node, owner)
        for node in statements:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(f"{self._absolute(of.module, node)}.{alias.name}")
            elif name in _assigned(node):
                return Definition(of.module, node, owner)
        if owner is None:
            return None
        for method in statements:
            for node in ast.walk(method) if isinstance(method, ast.FunctionDef) else ():
                if f"self.{name}" in _assigned(node):
                    return Definition(of.module, node, owner)
        bases = (self._named(of.module, base) for base in owner.bases)
        return next((found for base in bases if base and (found := self._member(base, name))), None)

    def _named(self, module: str, node: ast.AST) -> Definition | None:
        """What a base class or an annotation in a module names, if it is vLLM's."""
        return self.find(f"{module}.{ast.unparse(node.value if isinstance(node, ast.Subscript) else node)}")

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module
        package = self._text(f"{module.replace('.', '/')}/__init__.py") is not None
        parents = module.split(".")[: len(module.split(".")) - node.level + package]
        return ".".join([*parents, *([node.module] if node.module else [])])

    def _constructor(self, of: Definition) -> str | None:
        if init := self._member(of, "__init__"):
            return _parameters(init.node.args, bound=True)
        fields = self._fields(of)
        if not fields:
            return None
        arguments = ast.arguments([], [], None, [], [], None, [])
        for name, (optional, keyword_only) in fields.items():
            if keyword_only:
                arguments.kwonlyargs.append(ast.arg(name))
                arguments.kw_defaults.append(ast.Constant(...) if optional else None)
            else:
                arguments.args.append(ast.arg(name))
                arguments.defaults += [ast.Constant(...)] * optional
        return _parameters(arguments, bound=False)

    def _fields(self, of: Definition) -> dict[str, tuple[bool, bool]]:
        """The fields of a dataclass or msgspec struct, inherited ones first: has it a default, is it keyword-only."""
        fields: dict[str, tuple[bool, bool]] = {}
        for base in reversed(of.node.bases):
            if found := self._named(of.module, base):
                fields |= self._fields(found)
        options = [k for d in of.node.decorator_list if isinstance(d, ast.Call) for k in d.keywords] + of.node.keywords
        keyword_only = any(k.arg == "kw_only" and ast.unparse(k.value) == "True" for k in options)
        for node in of.node.body:
            if not isinstance(node, ast.AnnAssign) or "ClassVar" in ast.unparse(node.annotation):
                continue
            optional = node.value is not None
            if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in ("field", "msgspec.field"):
                given = {k.arg: ast.unparse(k.value) for k in node.value.keywords}
                if given.get("init") == "False":
                    continue
                optional = "default" in given or "default_factory" in given
            fields[node.target.id] = (optional, keyword_only)
        return fields


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class, those under `if` and `try` among them."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse, *getattr(node, "finalbody", ())])


def _assigned(node: ast.AST) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [ast.unparse(target) for target in targets]


def _parameters(arguments: ast.arguments, bound: bool) -> str:
    """The parameters as Python text without annotations and with `...` for every default; `bound` drops the first."""
    arguments = deepcopy(arguments)
    if bound:
        (arguments.posonlyargs or arguments.args).pop(0)
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(...) for default in arguments.kw_defaults]
    return f"({ast.unparse(arguments)})"


@cache
def _open_wheel(path: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)


def list_symbols(path: Path) -> dict:
    """What `vllm_symbols_VERSION.json` holds: every symbol this project uses, as the sources at `path` have it."""
    sources, uses = Sources(path), project_uses()
    called = {use.symbol for use in uses if use.call}
    symbols = {symbol: sources.describe(symbol, symbol in called) for symbol in sorted({use.symbol for use in uses})}
    return {"vllm": sources.version, "symbols": symbols}


if __name__ == "__main__":
    print(json.dumps(list_symbols(Path(sys.argv[1])), indent=2))
