"""Every Serve YAML of the project, against Serve's schema and ours: Serve ignores misspelt options without a word."""

from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from deployments.app import build_app
from deployments.config import AppConfig, TeacherConfig
from scoring.errors import RefusedSettings

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "serve_config.yaml", *sorted((ROOT / "configs").glob("*.yaml"))]


def unknown_fields(given: dict, schema: type[BaseModel], where: str = "") -> list[str]:
    """Fields of a parsed YAML that Serve's schema does not know (it drops them silently)."""
    found = [f"{where}{name}" for name in given if name not in schema.model_fields]
    for name, value in given.items():
        items = value if isinstance(value, list) else [value]
        for nested in _models(schema.model_fields.get(name)):
            for item in items:
                if isinstance(item, dict):
                    found += unknown_fields(item, nested, f"{where}{name}.")
    return found


def _models(field) -> list[type[BaseModel]]:
    """The pydantic models an annotation names, however it nests them."""
    pending, models = [field.annotation] if field else [], []
    while pending:
        annotation = pending.pop()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            models.append(annotation)
        pending += getattr(annotation, "__args__", ())
    return models


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_a_serve_yaml_names_only_options_that_serve_knows(path):
    settings = yaml.safe_load(path.read_text())
    assert unknown_fields(settings, ServeDeploySchema) == []
    for application in ServeDeploySchema.model_validate(settings).applications:
        AppConfig.model_validate(application.args)


@pytest.mark.parametrize("path", FILES[1:], ids=lambda p: p.name)
def test_a_configuration_for_gpus_says_that_none_has_seen_it(path):
    comment = "".join(line for line in path.read_text().splitlines(True) if line.startswith("#"))
    assert "Unproven on a GPU" in comment and f"serve run configs/{path.name}" in comment


def test_a_misspelt_option_is_found():
    settings = {"applications": [{"name": "a", "import_path": "a:b", "deployments": [{"name": "D", "num_replica": 2}]}]}
    assert unknown_fields(settings, ServeDeploySchema) == ["applications.deployments.num_replica"]


def test_the_service_is_bound_to_loopback_since_it_asks_for_no_token():
    for path in FILES:
        assert yaml.safe_load(path.read_text())["http_options"]["host"] == "127.0.0.1"


def test_the_way_in_which_serve_drops_large_answers_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1")
    with pytest.raises(RefusedSettings, match="RAY_SERVE_THROUGHPUT_OPTIMIZED=1 sends handle calls over gRPC"):
        build_app(AppConfig(teachers={"default": {"model": "demo"}}))


def test_an_unknown_setting_of_a_teacher_is_an_error():
    with pytest.raises(ValidationError, match=r"num_replica\s+Extra inputs are not permitted"):
        TeacherConfig(model="m", num_replica=2)


def test_the_default_teacher_is_the_one_called_default_or_the_only_one():
    one, two = {"model": "a"}, {"model": "b"}
    assert AppConfig(teachers={"math": one}).default_teacher == "math"
    assert AppConfig(teachers={"math": one, "default": two}).default_teacher == "default"
    assert AppConfig(teachers={"math": one, "code": two}, default_teacher="code").default_teacher == "code"
    with pytest.raises(ValidationError, match="say which answers reads that name none"):
        AppConfig(teachers={"math": one, "code": two})
    with pytest.raises(ValidationError, match="default_teacher is 'law'; the teachers are math"):
        AppConfig(teachers={"math": one}, default_teacher="law")
