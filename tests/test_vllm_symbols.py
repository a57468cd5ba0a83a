"""Both vLLM versions that the package installs have every symbol that this project uses, as it uses it.

One of the two, the GPU build, cannot be imported here: `vllm_symbols.py` says how its list is made.
"""

import importlib.util
import inspect
import json
import tomllib
import zipfile
from pathlib import Path

import pytest

from scoring import engine
from scoring.vllm_extension import guard
from tests.vllm_symbols import ROOT, Arguments, Sources, Use, find_uses, list_symbols, project_uses

LISTS = {file.stem.rpartition("_")[2]: json.loads(file.read_text()) for file in ROOT.glob("tests/vllm_symbols_*.json")}
RENEW = (
    "\nRenew the list of each version: python -m tests.vllm_symbols WHEEL_OR_SITE_PACKAGES > "
    "tests/vllm_symbols_VERSION.json (for the wheel: pip download --no-deps vllm==VERSION)"
)

both_versions = pytest.mark.parametrize("version", sorted(LISTS))


def parameters(text: str) -> inspect.Signature:
    """What a list says of something that is called, as a signature."""
    assert text.startswith("("), f"is called, and stands in the list as {text!r}"
    return inspect.signature(eval(f"lambda {text[1:-1]}: None"))


def bind(signature: inspect.Signature, call: Arguments) -> None:
    """Raise TypeError when a parameter is unknown, given twice, or required and not given."""
    way = signature.bind_partial if call.more else signature.bind
    way(*[None] * call.positional, **dict.fromkeys(call.keywords))


def test_there_is_a_list_for_each_version_that_the_package_installs():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pins = [requirement for extra in ("cpu", "gpu") for requirement in extras[extra] if requirement.startswith("vllm")]
    assert {pin.rpartition("==")[2] for pin in pins} == set(LISTS), RENEW
    assert {version: found["vllm"] for version, found in LISTS.items()} == {version: version for version in LISTS}


def test_the_list_of_the_installed_version_is_what_its_sources_say():
    site_packages = Path(importlib.util.find_spec("vllm").origin).parent.parent
    found = list_symbols(site_packages)
    assert found == LISTS[found["vllm"]], RENEW


@both_versions
def test_a_list_has_the_symbols_that_are_used_and_no_other(version):
    used = {use.symbol: use.where for use in project_uses()}
    new = {symbol: where for symbol, where in used.items() if symbol not in LISTS[version]["symbols"]}
    assert not new, f"used, and not in the list of vLLM {version}: {new}{RENEW}"
    assert set(LISTS[version]["symbols"]) == set(used), RENEW


@both_versions
def test_vllm_has_every_symbol_of_the_list(version):
    lacking = {symbol for symbol, described in LISTS[version]["symbols"].items() if described is None}
    assert not lacking, {use.symbol: use.where for use in project_uses() if use.symbol in lacking}


@both_versions
@pytest.mark.parametrize("use", [pytest.param(use, id=use.where) for use in project_uses() if use.call])
def test_every_call_has_the_arguments_that_vllm_asks_for(use, version):
    bind(parameters(LISTS[version]["symbols"][use.symbol]), use.call)


@both_versions
def test_the_settings_made_and_refused_for_an_engine_are_vllms(version):
    known = parameters(LISTS[version]["symbols"]["vllm.AsyncEngineArgs"]).parameters
    made = engine.engine_arguments(engine.EngineSettings("model", head_dtype="float32"))
    assert {*made, *engine._REFUSED} <= set(known)


@both_versions
def test_the_sampling_parameters_that_the_cpu_refuses_are_vllms(version):
    known = parameters(LISTS[version]["symbols"]["vllm.sampling_params.SamplingParams"]).parameters
    assert set(guard._LAUNCHES_A_KERNEL) <= set(known)


# --- how uses are found


def found(source: str) -> set[tuple]:
    return {(use.symbol, use.where, use.call) for use in find_uses(source, "f")}


def test_imports_are_uses():
    source = "import json\nimport vllm.envs\nfrom vllm.a import B as C\ndef f():\n    from vllm import d\n"
    assert found(source) == {("vllm.envs", "f:2", None), ("vllm.a.B", "f:3", None), ("vllm.d", "f:5", None)}


def test_calls_are_uses_with_their_arguments():
    source = "from vllm import f\nf(1, 2, a=3)\nf(*x, a=3)\nf(1, **y)\n"
    calls = {where: call for _, where, call in found(source) if call}
    assert calls == {
        "f:2": Arguments(2, ("a",), False),
        "f:3": Arguments(0, ("a",), True),
        "f:4": Arguments(1, (), True),
    }


ENGINE = """
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
class Engine:
    def info(self, other): return self._llm.vllm_config.model_config.dtype, other.request_id
    def __init__(self): self._llm = AsyncLLM.from_vllm_config(1)
    async def read(self):
        output = await self.last()
        return output.finished
    async def last(self) -> RequestOutput:
        async for one in self._llm.generate(1): other = one
        return one.metrics, other.outputs
def of(other: "RequestOutput"): return other.prompt
"""


def test_members_are_found_through_annotations_assignments_and_what_vllm_yields():
    llm, output = "vllm.v1.engine.async_llm.AsyncLLM", "vllm.outputs.RequestOutput"
    expected = {llm, f"{llm}.from_vllm_config", f"{llm}.generate", f"{llm}.vllm_config"}
    expected |= {"vllm.config.VllmConfig.model_config", "vllm.config.ModelConfig.dtype"}
    expected |= {output, *(f"{output}.{name}" for name in ("finished", "metrics", "outputs", "prompt"))}
    assert {symbol for symbol, _, _ in found(ENGINE)} == expected


def test_members_of_super_are_those_of_the_class_that_vllm_gives():
    method = " def f(self): super().f(1)\n"
    source = f"from vllm.a import Base\nclass C(Base):\n{method}class D:\n{method}"
    calls = {("vllm.a.Base.f", "f:3", call) for call in (None, Arguments(1))}
    assert found(source) == {("vllm.a.Base", "f:1", None), *calls}


def test_arguments_that_a_function_of_ours_hands_on_are_vllms():
    (use,) = find_uses("self._scoring_params(columns, start, skip_reading_prefix_cache=True)", "f")
    assert use == Use(
        "vllm.sampling_params.SamplingParams", "f:1", Arguments(0, ("skip_reading_prefix_cache",), more=True)
    )


# --- how sources are read

PACKAGE = {
    "vllm/__init__.py": "MODULE_ATTRS = {}\nif TYPE_CHECKING:\n    from .parts.args import Args\n",
    "vllm/_version.py": "__version__: str\n__version__ = version = '9.8.7+cpu'\n",
    "vllm/parts/__init__.py": "from .args import Args as Renamed\nfrom . import args\nthing: 'Base'\n",
    "vllm/parts/args.py": """
@dataclass
class Base:
    model: str = "m"
    kind: ClassVar[int] = 1
    hidden: int = field(init=False)
    def method(self, a, /, b, *rest, c: int = 3, d, **more) -> int: ...
@dataclass
class Args(Base):
    later: list = field(default_factory=list)
class Struct(msgspec.Struct, kw_only=True):
    needed: int
    free: int = 0
class Built:
    def __init__(self, x, y=2):
        self.inside: int = x
    @property
    def size(self): ...
    @classmethod
    def make(cls, z): ...
class Failure(ValueError): ...
""",
}


@pytest.fixture(params=["folder", "wheel"])
def sources(request, tmp_path) -> Sources:
    if request.param == "wheel":
        with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as wheel:
            for name, text in PACKAGE.items():
                wheel.writestr(name, text)
        return Sources(tmp_path / "vllm.whl")
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Sources(tmp_path)


@pytest.mark.parametrize(
    ("symbol", "called", "expected"),
    [
        ("vllm", False, "module"),
        ("vllm.Args", True, "(model=..., later=...)"),
        ("vllm.Args", False, "class (Base)"),
        ("vllm.parts.Renamed.method", True, "(a, /, b, *rest, c=..., d, **more)"),
        ("vllm.parts.args.Struct", True, "(*, needed, free=...)"),
        ("vllm.parts.args.Built", True, "(x, y=...)"),
        ("vllm.parts.args.Built.inside", False, "value"),
        ("vllm.parts.args.Built.size", False, "property"),
        ("vllm.parts.args.Built.make", True, "(z)"),
        ("vllm.parts.args.Failure", True, "class (ValueError)"),
        ("vllm.parts.args.Args.kind", False, "value"),
        ("vllm.parts.args.Args.absent", False, None),
        ("vllm.nowhere", False, None),
    ],
)
def test_a_symbol_is_described_from_its_sources(sources, symbol, called, expected):
    assert sources.describe(symbol, called) == expected


def test_the_version_is_read_without_what_a_build_adds(sources):
    assert sources.version == "9.8.7"


@pytest.mark.parametrize(
    ("call", "fits"),
    [
        (Arguments(1, ("b",)), True),
        (Arguments(2), True),
        (Arguments(1), False),
        (Arguments(1, ("b", "z")), False),
        (Arguments(1, ("a",)), False),
        (Arguments(3, ("b",)), False),
        (Arguments(0, ("c",), more=True), True),
        (Arguments(0, ("z",), more=True), False),
    ],
)
def test_a_call_binds_when_every_parameter_is_known_and_none_is_missing(call, fits):
    signature = parameters("(a, b, *, c=...)")
    if fits:
        bind(signature, call)
    else:
        with pytest.raises(TypeError):
            bind(signature, call)


def test_the_sources_agree_with_the_imported_package():
    """The reader's word against Python's own, where vLLM can be imported."""
    listed = LISTS[engine.vllm.__version__.split("+")[0]]["symbols"]
    for symbol, thing in {
        "vllm.v1.engine.async_llm.AsyncLLM.generate": engine.AsyncLLM.generate,
        "vllm.sampling_params.SamplingParams": engine.SamplingParams,
        "vllm.AsyncEngineArgs": engine.AsyncEngineArgs,
        "vllm.inputs.tokens_input": engine.tokens_input,
        "vllm.entrypoints.generate.label_reads.next_token_label_reads": engine.next_token_label_reads,
    }.items():
        theirs = [p for p in inspect.signature(thing).parameters.values() if p.name != "self"]
        ours = parameters(listed[symbol]).parameters.values()
        assert [(p.name, p.kind, p.default is p.empty) for p in ours] == [
            (p.name, p.kind, p.default is p.empty) for p in theirs
        ], symbol
