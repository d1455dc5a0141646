"""The recipes for Kubernetes fit together: labels, ports, pools. None ever ran on a real one."""

from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "templates" / "kubernetes"
# the fields of the operator's documentation, "FlinkDeployment Reference"
FLINK_DEPLOYMENT = {
    *("image", "imagePullPolicy", "flinkVersion", "flinkConfiguration", "serviceAccount"),
    *("jobManager", "taskManager", "podTemplate", "job", "ingress", "mode", "logConfiguration"),
    *("restartNonce",),
}
OF_MANAGERS = {"resource", "replicas", "podTemplate"}


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


@pytest.fixture
def session():
    """The parts of the session cluster, by kind and name."""
    return {
        (each["kind"], each["metadata"]["name"]): each for each in documents("flink-session.yaml")
    }


def pod_of(deployment):
    return deployment["spec"]["template"]


def containers_of(pod):
    return {each["name"]: each for each in pod["spec"]["containers"]}


def test_selectors_find_their_pods(session):
    pods = []
    for (kind, _), each in session.items():
        if kind == "Deployment":
            labels = pod_of(each)["metadata"]["labels"]
            assert each["spec"]["selector"]["matchLabels"] == labels
            pods.append(labels)
    assert session["Service", "flink-jobmanager"]["spec"]["selector"] in pods


def test_task_managers_find_the_job_manager_and_its_settings(session):
    settings = yaml.safe_load(session["ConfigMap", "flink-settings"]["data"]["FLINK_PROPERTIES"])
    assert ("Service", settings["jobmanager.rpc.address"]) in session
    assert settings["restart-strategy.type"] == "fixed-delay"
    assert settings["slot.request.timeout"] >= 600_000
    for name in ("flink-jobmanager", "flink-taskmanager"):
        (flink, *_) = pod_of(session["Deployment", name])["spec"]["containers"]
        assert flink["envFrom"] == [{"configMapRef": {"name": "flink-settings"}}]
    service = session["Service", "flink-jobmanager"]["spec"]["ports"]
    ports = containers_of(pod_of(session["Deployment", "flink-jobmanager"]))["jobmanager"]["ports"]
    assert [p["port"] for p in service] == [p["containerPort"] for p in ports]


def check_pool(pool, text):
    """A pool listens where the command in the recipe's head looks for it."""
    assert pool["args"] == ["--worker_pool"]
    (port,) = pool["ports"]
    assert f"localhost:{port['containerPort']}" in text


def test_each_task_manager_has_a_pool_of_its_own(session):
    text = (FOLDER / "flink-session.yaml").read_text()
    pod = pod_of(session["Deployment", "flink-taskmanager"])
    check_pool(containers_of(pod)["worker-pool"], text)
    (operated,) = documents("flink-deployment.yaml")
    manager = operated["spec"]["taskManager"]["podTemplate"]
    assert "flink-main-container" in containers_of(manager)
    check_pool(containers_of(manager)["worker-pool"], text)


def test_the_patch_for_gpus_changes_the_pool(session):
    (patch,) = documents("gpu-patch.yaml")
    (changed,) = patch["spec"]["template"]["spec"]["containers"]
    assert changed["name"] in containers_of(pod_of(session["Deployment", "flink-taskmanager"]))


def test_the_operators_kind_has_fields_that_it_documents():
    (operated,) = documents("flink-deployment.yaml")
    assert (operated["apiVersion"], operated["kind"]) == (
        "flink.apache.org/v1beta1",
        "FlinkDeployment",
    )
    spec = operated["spec"]
    assert set(spec) <= FLINK_DEPLOYMENT
    assert spec["flinkVersion"] == "v1_19"
    assert spec["image"].startswith("flink:1.19")
    assert set(spec["jobManager"]) <= OF_MANAGERS
    assert set(spec["taskManager"]) <= OF_MANAGERS
    assert all(isinstance(value, str) for value in spec["flinkConfiguration"].values())
