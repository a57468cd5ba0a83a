"""Aliases and LoRA adapters: teachers that share the replicas of another. One real service with one engine."""

import json
import shutil
import time

import httpx
import numpy as np
import pytest
from ray import serve

from deployments import record
from deployments.client import ScoringClient
from scoring import LabelRead, MatrixRead
from scoring.adapters import check_adapter
from scoring.errors import InvalidAdapter, InvalidRead, UnknownTeacher
from scoring.http_client import HttpScoringClient
from tests.lora import make_adapter, merged
from tests.oracle import hf_logprobs
from tests.serve_process import ServeProcess

LIMIT = 3e-5
PROMPT, RESPONSE = list(range(5, 75)), [9, 10, 11, 12, 13]  # of the prompt, 64 tokens come from the prefix cache
CANDIDATES = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12], [13, 14, 15]]


@pytest.fixture(scope="module")
def folders(tiny_model, tmp_path_factory):
    """Adapters by name."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        "polite": make_adapter(root / "polite", tiny_model, ("q_proj", "v_proj")),
        "strict": make_adapter(root / "strict", tiny_model, ("o_proj", "down_proj", "gate_proj"), seed=1),
        "polite-2": make_adapter(root / "polite-2", tiny_model, ("q_proj", "v_proj"), seed=2),
        "wide": make_adapter(root / "wide", tiny_model, ("q_proj",), rank=32),
        "head": make_adapter(root / "head", tiny_model, ("q_proj", "lm_head")),
    }


@pytest.fixture(scope="module")
def service(engines, tiny_path, folders, tmp_path_factory):
    engines.close()
    teacher = {
        "model": str(tiny_path),
        "dtype": "float32",
        "engine_args": {
            "max_model_len": 512,
            "kv_cache_memory_bytes": 64 << 20,
            "enable_lora": True,
            "max_lora_rank": 8,
            "max_loras": 2,
        },
    }
    args = {
        "teachers": {"default": teacher},
        "aliases": {"judge": "default"},
        "adapters": {"polite": {"base": "default", "path": str(folders["polite"])}},
    }
    service = ServeProcess(tmp_path_factory.mktemp("service"), args)
    with service.connected():
        yield service


@pytest.fixture(scope="module")
def client(service):
    with ScoringClient() as client:
        yield client


def read_of(teacher):
    return MatrixRead(PROMPT, RESPONSE, CANDIDATES, teacher=teacher)


def right(model):
    rows = hf_logprobs(model, PROMPT + RESPONSE).numpy()[len(PROMPT) - 1 : -1]
    return np.take_along_axis(rows, np.array(CANDIDATES), 1)


def test_an_alias_is_its_teacher_under_another_name(client, tiny_model):
    alias, itself = client.read_matrix([read_of("judge"), read_of(None)])
    np.testing.assert_allclose(alias.logprobs, right(tiny_model), atol=LIMIT, rtol=0)
    np.testing.assert_array_equal(alias.logprobs, itself.logprobs)
    assert (alias.meta.teacher, itself.meta.teacher) == ("judge", "default")
    teachers = client.teachers()
    assert teachers["judge"]["model"] == teachers["default"]["model"]
    assert teachers["polite"]["base"] == "default"
    assert teachers["polite"]["checkpoint"] == client.read_matrix([read_of("polite")])[0].meta.checkpoint
    assert teachers["polite"]["checkpoint"] != teachers["default"]["checkpoint"]


def test_adapters_and_their_base_are_mixed_in_one_batch(client, service, folders, tiny_model):
    client.add_adapter("strict", "default", str(folders["strict"]))
    names = ["polite", None, "strict", "judge"] * 6
    models = {name: merged(tiny_model, folders[name]) for name in ("polite", "strict")}
    truth = {name: right(models.get(name, tiny_model)) for name in set(names)}
    assert np.abs(truth["polite"] - truth[None]).max() > 0.1 < np.abs(truth["strict"] - truth["polite"]).max()
    for by in (client, HttpScoringClient(service.url)):
        scores = by.read_matrix([read_of(name) for name in names])
        for name, score in zip(names, scores, strict=True):
            np.testing.assert_allclose(score.logprobs, truth[name], atol=LIMIT, rtol=0)
            assert score.meta.teacher == (name or "default")
        assert len({score.meta.checkpoint for score in scores}) == 3
        assert max(score.meta.cached_tokens for score in scores) == 64
        label = by.read_labels([LabelRead(PROMPT, CANDIDATES[0], teacher="strict")])[0]
        np.testing.assert_allclose(label.logprobs, truth["strict"][0], atol=LIMIT, rtol=0)


def test_an_adapter_added_anew_is_the_new_one(client, folders, tiny_model):
    client.add_adapter("tone", "default", str(folders["strict"]))
    client.read_matrix([read_of("tone")])
    client.add_adapter("tone", "default", str(folders["polite-2"]))
    score = client.read_matrix([read_of("tone")])[0]
    np.testing.assert_allclose(score.logprobs, right(merged(tiny_model, folders["polite-2"])), atol=LIMIT, rtol=0)
    client.remove_adapter("tone")
    with pytest.raises(UnknownTeacher, match="is 'tone'; the teachers are default, judge, polite"):
        client.read_matrix([read_of("tone")])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("head", "changes lm_head"),
        ("wide", r"has rank 32; at most 8 is taken \(engine_args.max_lora_rank"),
        ("none", "no LoRA"),
    ],
)
def test_an_adapter_that_would_not_be_exact_is_refused_and_the_others_are_served(
    client, folders, tiny_model, name, said
):
    path = folders.get(name, folders["wide"].parent / name)
    with pytest.raises(InvalidAdapter, match=said):
        client.add_adapter("new", "default", str(path))
    with pytest.raises(UnknownTeacher):
        client.read_matrix([read_of("new")])
    np.testing.assert_allclose(client.read_matrix([read_of(None)])[0].logprobs, right(tiny_model), atol=LIMIT, rtol=0)


def test_an_adapter_that_was_changed_in_its_place_is_refused_until_it_is_added_anew(client, folders, tiny_model):
    place = folders["polite"].parent / "moving"
    shutil.copytree(folders["polite"], place)
    client.add_adapter("moving", "default", str(place))
    shutil.copy(folders["polite-2"] / "adapter_model.safetensors", place / "adapter_model.safetensors")
    with pytest.raises(InvalidAdapter, match="has changed since it was loaded"):
        client.read_matrix([read_of("moving")])
    client.add_adapter("moving", "default", str(place))
    score = client.read_matrix([read_of("moving")])[0]
    np.testing.assert_allclose(score.logprobs, right(merged(tiny_model, folders["polite-2"])), atol=LIMIT, rtol=0)
    (place / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidAdapter, match="must stay as it is"):
        client.read_matrix([read_of("moving")])
    client.remove_adapter("moving")


def test_adapters_stay_over_weights_that_change(
    client, service, folders, tiny_model, tiny_path, other_tiny_model, other_tiny_path
):
    client.add_adapter("strict", "default", str(folders["strict"]))
    names = ["polite", None, "strict"]
    before = {score.meta.teacher: score.meta.checkpoint for score in client.read_matrix([read_of(n) for n in names])}
    assert client.teachers()["polite"]["checkpoint"] == before["polite"]
    with pytest.raises(UnknownTeacher, match="is 'polite'; the weights of default, judge can be changed"):
        client.update_weights("polite", other_tiny_path)
    version = client.update_weights("judge", other_tiny_path)
    for by in (client, HttpScoringClient(service.url)):
        scores = by.read_matrix([read_of(name) for name in names * 3])
        for name, score in zip(names * 3, scores, strict=True):
            model = merged(other_tiny_model, folders[name]) if name else other_tiny_model
            np.testing.assert_allclose(score.logprobs, right(model), atol=LIMIT, rtol=0)
            assert score.meta.weight_version == version
            old, new = before[score.meta.teacher].split("+"), score.meta.checkpoint.split("+")
            assert old[0] != new[0] and old[1:] == new[1:]
            assert client.teachers()[score.meta.teacher]["checkpoint"] == score.meta.checkpoint
    assert client.update_weights("default", tiny_path) == version + 1
    score = client.read_matrix([read_of("polite")])[0]
    np.testing.assert_allclose(score.logprobs, right(merged(tiny_model, folders["polite"])), atol=LIMIT, rtol=0)
    client.remove_adapter("strict")


def test_names_lead_somewhere(client, folders):
    with pytest.raises(UnknownTeacher, match="is 'polite'; an adapter goes over one of default, judge"):
        client.add_adapter("new", "polite", str(folders["strict"]))
    with pytest.raises(InvalidAdapter, match="'judge' is the name of a teacher"):
        client.add_adapter("judge", "default", str(folders["strict"]))
    with pytest.raises(UnknownTeacher, match="is 'nobody'; the adapters are polite"):
        client.remove_adapter("nobody")
    with pytest.raises(InvalidRead, match="is 'nobody'"):
        client.read_matrix([read_of("nobody")])


def test_what_was_added_outlives_the_ingress(client, service, folders, tiny_model):
    client.add_adapter("lasting", "default", str(folders["strict"]))
    assert record.load("teacher-scoring")["adapters"]["lasting"]["path"] == str(folders["strict"])
    (ingress,) = service.processes("ray::ServeReplica:teacher-scoring:Ingress")
    ingress.kill()
    deadline = time.monotonic() + 60
    while True:
        try:
            if "lasting" in httpx.get(f"{service.url}/v1/teachers", timeout=10).json().get("teachers", {}):
                break
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, service.end_of_log()
        time.sleep(0.5)
    with ScoringClient() as fresh:
        scores = fresh.read_matrix([read_of("lasting"), read_of("polite")])
    for score, name in zip(scores, ("strict", "polite"), strict=True):
        np.testing.assert_allclose(score.logprobs, right(merged(tiny_model, folders[name])), atol=LIMIT, rtol=0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"modules_to_save": ["score"]}, "changes score"),
        ({"use_dora": True}, "DoRA"),
        ({"rank_pattern": {"v_proj": 64}}, "has rank 64"),
        ({"lora_alpha": float("inf")}, "lora_alpha inf"),
    ],
)
def test_what_vllm_would_not_apply_is_refused(folders, tmp_path, change, said):
    check_adapter(folders["polite"], 8)
    config = json.loads((folders["polite"] / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
    (tmp_path / "adapter_model.safetensors").write_bytes((folders["polite"] / "adapter_model.safetensors").read_bytes())
    with pytest.raises(InvalidAdapter, match=said):
        check_adapter(tmp_path, 8)


def test_what_was_added_is_forgotten_with_the_application(client, service, folders):
    """The last one: the service is gone after it."""
    client.add_adapter("lasting", "default", str(folders["strict"]))
    client.update_weights("default", client.teachers()["default"]["weights"])
    before = record.load("teacher-scoring")
    assert "lasting" in before["adapters"]
    assert record.load_weights("teacher-scoring", "Teacher-default") is not None
    serve.delete("teacher-scoring")
    assert record.load("teacher-scoring") == before | {"adapters": {}}
    assert record.load_weights("teacher-scoring", "Teacher-default") is None
