"""Where replicas go, how many there are, and what is said when there is no room: sums on paper, then a real Ray cluster
whose GPUs are pretended, with the real application and a stand-in for the engine."""

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from deployments.autoscaling import OutstandingTokens, autoscaling_options
from deployments.config import AutoscalingConfig, TeacherConfig
from deployments.placement import deployment_options, engine_args, without_room
from tests import pretend_cluster

EIGHT = {"GPU": 8.0, "CPU": 64.0}
HEAD = {"CPU": 4.0}


def teacher(**fields) -> TeacherConfig:
    """Of a tensor parallel size that fits num_gpus, unless engine_args are given."""
    gpus = fields.get("num_gpus", 0)
    fields.setdefault("engine_args", {"tensor_parallel_size": int(gpus)} if gpus > 1 else {})
    return TeacherConfig(model="m", **fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_gpus": 4, "engine_args": {}}, r"num_gpus is 4, and engine_args ask for 1 \(tensor_parallel_size 1 x"),
        ({"num_gpus": 1, "engine_args": {"tensor_parallel_size": 2}}, "num_gpus is 1, and engine_args ask for 2"),
        ({"engine_args": {"pipeline_parallel_size": 2}}, "num_gpus is 0, and engine_args ask for 2"),
        ({"num_gpus": 0.5, "engine_args": {"tensor_parallel_size": 2}}, "num_gpus is 0.5, and engine_args ask for 2"),
        ({"num_gpus": 3, "nodes": 2}, "num_gpus is 3 and nodes 2: each node must hold the same number of GPUs"),
        ({"nodes": 2}, "num_gpus is 0 and nodes 2"),
        ({"num_gpus": 4, "nodes": 2, "max_replicas_per_node": 1}, "is for replicas on one node, and nodes is 2"),
        (
            {"engine_args": {"distributed_executor_backend": "ray"}},
            "backend is 'ray'; it follows from nodes, which is 1",
        ),
        (
            {
                "num_gpus": 2,
                "nodes": 2,
                "engine_args": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
            },
            "backend is 'mp'; it follows from nodes, which is 2",
        ),
        (
            {"num_replicas": 1, "autoscaling": {"max_replicas": 2, "target_outstanding_tokens": 1}},
            "num_replicas and autoscaling are both given",
        ),
        (
            {"autoscaling": {"min_replicas": 3, "max_replicas": 2, "target_outstanding_tokens": 1}},
            "max_replicas is 2, below min_replicas, which is 3",
        ),
    ],
)
def test_a_shape_that_contradicts_itself_is_refused(fields, said):
    with pytest.raises(ValidationError, match=said):
        teacher(**fields)


def test_all_gpus_of_a_replica_on_one_node_are_its_own_and_its_workers_are_processes():
    config = teacher(num_gpus=4, num_replicas=2, num_cpus=1.5, max_replicas_per_node=1)
    assert deployment_options(config) == {
        "num_replicas": 2,
        "ray_actor_options": {"num_cpus": 1.5, "num_gpus": 4},
        "max_replicas_per_node": 1,
    }
    assert engine_args(config) == {"tensor_parallel_size": 4, "distributed_executor_backend": "mp"}


def test_over_two_nodes_every_worker_of_rays_has_a_bundle_and_the_replica_none_of_the_gpus():
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    config = teacher(num_gpus=4, nodes=2, num_cpus=1, engine_args=sizes)
    assert deployment_options(config) == {
        "num_replicas": 1,
        "ray_actor_options": {"num_cpus": 1, "num_gpus": 0},
        "placement_group_bundles": [{"GPU": 1, "CPU": 1}, {"GPU": 1}, {"GPU": 1}, {"GPU": 1}],
        "placement_group_strategy": "PACK",
    }
    assert engine_args(config) == {**sizes, "distributed_executor_backend": "ray"}


@pytest.mark.parametrize("num_gpus", [0, 0.25, 1])
def test_one_worker_is_left_to_vllm(num_gpus):
    assert engine_args(teacher(num_gpus=num_gpus, engine_args={"max_model_len": 9})) == {"max_model_len": 9}


@pytest.mark.parametrize(
    ("fields", "nodes"),
    [
        ({"num_gpus": 8}, [HEAD, EIGHT]),
        ({"num_gpus": 4, "num_replicas": 4}, [EIGHT, EIGHT]),
        ({"num_gpus": 16, "nodes": 2}, [EIGHT, EIGHT]),
        ({"num_gpus": 0.1, "num_replicas": 10}, [{"GPU": 1.0}]),
        ({"num_gpus": 1, "num_replicas": 2, "max_replicas_per_node": 1}, [EIGHT, EIGHT]),
        ({"num_replicas": 9}, [HEAD]),
        ({"num_replicas": 2, "num_cpus": 2}, [HEAD]),
        ({"num_gpus": 1, "autoscaling": {"max_replicas": 99, "target_outstanding_tokens": 1}}, [EIGHT]),
    ],
)
def test_of_what_has_room_nothing_is_said(fields, nodes):
    assert without_room({"default": teacher(**fields)}, nodes) == {}


@pytest.mark.parametrize(
    ("fields", "nodes", "said"),
    [
        (
            {"num_gpus": 8},
            [{"GPU": 4.0}, {"GPU": 4.0}],
            "1 replica of 8 GPUs on one node, and on 2 nodes there is room for 0",
        ),
        ({"num_gpus": 8}, [HEAD], "there is room for 0; the largest has 0 GPUs"),
        ({"num_gpus": 8}, [], "there is room for 0; the largest has 0 GPUs"),
        (
            {"num_gpus": 3, "num_replicas": 3},
            [EIGHT],
            "3 replicas of 3 GPUs on one node, and on 1 node there is room for 2",
        ),
        ({"num_gpus": 16, "nodes": 2}, [HEAD, EIGHT], "1 replica of 8 GPUs on each of 2 nodes, and on 2 nodes"),
        (
            {"num_gpus": 1, "num_replicas": 3, "max_replicas_per_node": 1},
            [EIGHT, EIGHT],
            "3 replicas of 1 GPU on one node, at most 1 of them on the same node, and on 2 nodes there is room for 2",
        ),
        (
            {"num_replicas": 2, "max_replicas_per_node": 1},
            [HEAD],
            "asks for 2 replicas, at most 1 of them on the same node, and on 1 node there is room for 1 (settings",
        ),
        (
            {"num_replicas": 3, "num_cpus": 2},
            [HEAD],
            "3 replicas of 2 CPUs on one node, and on 1 node there is room for 2",
        ),
        ({"num_gpus": 1, "num_cpus": 5}, [{**EIGHT, "CPU": 4.0}], "the largest has 8 GPUs and 4 CPUs"),
    ],
)
def test_what_has_no_room_is_said_with_what_is_asked_and_what_is_there(fields, nodes, said):
    (sentence,) = without_room({"default": teacher(**fields)}, nodes).values()
    assert said in sentence
    assert sentence.startswith("teacher 'default' waits for a larger cluster") and "settings: num_gpus" in sentence


def test_teachers_that_have_room_alone_may_have_none_together():
    teachers = {name: teacher(num_gpus=gpus) for name, gpus in (("general", 4), ("math", 4), ("code", 1), ("cpu", 0))}
    assert without_room(teachers, [EIGHT, {"GPU": 1.0}]) == {}
    said = without_room(teachers, [EIGHT])
    assert said.keys() == {"general", "math", "code"}
    assert "teachers general, math, code together ask for 9 GPUs, and on 1 node there are 8" in said["math"]


def test_a_teacher_that_fits_nowhere_takes_no_room_from_the_others():
    teachers = {"huge": teacher(num_gpus=16), "small": teacher(num_gpus=1)}
    assert without_room(teachers, [EIGHT]).keys() == {"huge"}


@pytest.mark.parametrize(
    ("reported", "replicas"),
    [({"a": 250.0}, 3), ({"a": 100.0, "b": 100.0}, 2), ({"a": 0.0, "b": 0.0}, 1), ({"a": 101.0, "b": 0.0}, 2)],
)
def test_the_policy_wants_replicas_for_all_outstanding_tokens_together(reported, replicas):
    context = SimpleNamespace(aggregated_metrics={"outstanding_tokens": reported}, target_num_replicas=7)
    assert OutstandingTokens(target=100)(context) == (replicas, {})


@pytest.mark.parametrize("metrics", [None, {}, {"outstanding_tokens": {}}])
def test_the_policy_changes_nothing_while_no_replica_has_reported(metrics):
    assert OutstandingTokens(100)(SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=7)) == (7, {})


def test_the_bounds_and_delays_are_serves():
    config = AutoscalingConfig(min_replicas=2, max_replicas=5, target_outstanding_tokens=70, downscale_delay_s=60)
    options = autoscaling_options(config)
    assert (options.min_replicas, options.max_replicas) == (2, 5)
    assert (options.upscale_delay_s, options.downscale_delay_s, options.look_back_period_s) == (30, 60, 30)
    assert options.policy.get_policy()(**options.policy.policy_kwargs)._target == 70
    shape = deployment_options(teacher(num_gpus=1, autoscaling=config.model_dump()))
    assert shape["autoscaling_config"] == options and "num_replicas" not in shape


@pytest.fixture(scope="module")
def cluster() -> dict:
    """What was seen on the pretend cluster."""
    return pretend_cluster.run()


def gpus_of(replicas: list[dict]) -> list[tuple[str, str]]:
    """Node and GPU of every GPU that the replicas hold."""
    for replica in replicas:
        assert replica["visible"] == ",".join(replica["gpus"])  # what CUDA sees is what Ray gave
    return [(replica["node"], gpu) for replica in replicas for gpu in replica["gpus"]]


def test_every_configuration_was_placed(cluster):
    names = {path.stem for path in (pretend_cluster.ROOT / "configs").glob("*.yaml")}
    assert names <= cluster.keys()
    for name in names:
        teachers = pretend_cluster.config_args(name)["teachers"]
        assert {t: len(replicas) for t, replicas in cluster[name].items()} == {
            t: config.get("num_replicas", 1) for t, config in teachers.items()
        }


@pytest.mark.parametrize("name", ["one-gpu", "eight-gpus", "three-teachers", "autoscaling", "tensor-parallel"])
def test_a_replica_has_the_gpus_it_asked_for_and_shares_them_with_nobody(cluster, name):
    for teacher_name, config in pretend_cluster.config_args(name)["teachers"].items():
        for replica in cluster[name][teacher_name]:
            assert len(replica["gpus"]) == config["num_gpus"]
            wanted = "mp" if config["num_gpus"] > 1 else None
            assert replica["engine_args"].get("distributed_executor_backend") == wanted
            assert replica["bundles"] == {}
    held = [gpu for replicas in cluster[name].values() for gpu in gpus_of(replicas)]
    assert len(held) == len(set(held))


def test_eight_small_teachers_fill_a_node(cluster):
    assert sorted(gpus_of(cluster["eight-gpus"]["default"])) == [(cluster["nodes"][0], str(i)) for i in range(8)]


def test_an_engine_over_two_nodes_has_eight_gpus_on_each(cluster):
    (replica,) = cluster["two-nodes"]["default"]
    assert replica["engine_args"]["distributed_executor_backend"] == "ray"
    assert replica["gpus"] == []
    nodes = [node for node, bundle in replica["bundles"].values() if bundle == {"GPU": 1}]
    assert sorted(nodes) == sorted(cluster["nodes"] * 8)
    assert replica["node"] == replica["bundles"]["0"][0]
    (first, at_first), (last, at_last) = replica["workers"]
    assert {first, last} == set(cluster["nodes"]) and len(at_first) == len(at_last) == 1


def test_no_node_holds_more_replicas_than_allowed(cluster):
    assert sorted(replica["node"] for replica in cluster["alone"]["alone"]) == sorted(cluster["nodes"])
    assert cluster["alone_later"] == 2
    assert "at most 1 of them on the same node, and on 3 nodes there is room for 2" in cluster["log"]


def test_replicas_follow_the_outstanding_tokens(cluster):
    assert cluster["scaled"] == [1, 3, 1]


def test_callers_are_told_at_once_what_the_cluster_has_no_room_for(cluster):
    said = "teacher 'default' waits for a larger cluster: it asks for 1 replica of 8 GPUs on each of 2 nodes, and on 2 "
    said += "nodes there is room for 0; the largest has 8 GPUs"
    seconds = cluster["waiting"].pop("seconds")
    assert cluster["waiting"].keys() == {"read", "teachers", "/ready"} and seconds < 60
    for place in (*cluster["waiting"].values(), cluster["log"]):
        assert said in place
