"""The manifests say what the commands, the server and Kubernetes understand."""

import json
import math
import re
import shlex
import tomllib
from importlib import import_module, resources
from pathlib import Path

import jsonschema
import pytest
import yaml

from jaxllm.cli.arguments import CommandParser, engine_options_from, options_from
from jaxllm.cli.main import COMMANDS, EXIT_ERROR
from jaxllm.cli.run_batch import EXIT_STOPPED
from jaxllm.config import EngineConfig
from jaxllm.ending import patience_s
from jaxllm.server.endpoint import Access
from jaxllm.server.endpoints import ENDPOINTS
from jaxllm.server.options import ServerOptions
from jaxllm.server.run import _LAST_WORDS_S

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tpu_scripts" / "kubernetes"
SERVERS = ("tpu", "gpu", "tpu-hosts", "gpu-hosts")
# What the controller of LeaderWorkerSet puts into every container of a group of two.
OF_GROUP = {
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
    "LWS_LEADER_ADDRESS": "jaxllm-hosts-0.jaxllm-hosts.jaxllm",
}
PROBES = {one.path for one in ENDPOINTS if one.access is Access.ANYBODY and "GET" in one.methods}


def read(path):
    return list(yaml.safe_load_all(path.read_text()))


MANIFESTS = {
    f"{path.relative_to(FOLDER)}: {one['kind']} {one.get('metadata', {}).get('name')}": one
    for path in sorted(FOLDER.rglob("*.yaml"))
    for one in read(path)
}
OBJECTS = {name: one for name, one in MANIFESTS.items() if one["kind"] != "Kustomization"}


def templates(manifest):
    """The templates of its pods."""
    spec = manifest.get("spec", {})
    group = spec.get("leaderWorkerTemplate", {})
    found = spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")
    return [one for one in found if one is not None]


def containers(template):
    return [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]


PODS = [(name, one) for name, manifest in OBJECTS.items() for one in templates(manifest)]
CONTAINERS = [
    pytest.param(template, one, id=f"{name} {one['name']}")
    for name, template in PODS
    for one in containers(template)
]


def parsed(container):
    """The command, and its arguments as our own parser reads them."""
    command, *words = container["args"]
    for name, value in OF_GROUP.items():
        words = [word.replace(f"$({name})", value) for word in words]
    assert not [word for word in words if "$(" in word]
    parser = CommandParser(f"jaxllm {command}", "")
    import_module(COMMANDS[command].module).add_arguments(parser)
    return command, parser.parse(words)


def engine_of(container):
    return EngineConfig.create(**engine_options_from(parsed(container)[1]))


def server_of(folder):
    """The pod with the server of a folder, its container, and the options of that server."""
    manifest = read(FOLDER / folder / "server.yaml")[0]
    template = templates(manifest)[0]
    (container,) = template["spec"]["containers"]
    options = ServerOptions(**options_from(parsed(container)[1], ServerOptions))
    options.validate()
    return template, container, options


def seconds_of_preparation(container):
    sleep, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    return float(seconds)


@pytest.mark.parametrize(("template", "container"), CONTAINERS)
def test_arguments_are_those_of_our_commands(template, container):
    assert container["image"] == "jaxllm" and "command" not in container
    engine_of(container)


@pytest.mark.parametrize("folder", SERVERS)
def test_a_server_listens_where_it_is_asked(folder):
    template, container, options = server_of(folder)
    assert options.host == "0.0.0.0"  # the pod's own address is what probes and clients use
    assert container["ports"] == [{"name": "http", "containerPort": options.port}]
    asked = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert [one["path"] for one in asked] == ["/ready", "/ready", "/health"]
    assert {one["path"] for one in asked} <= PROBES
    assert {one["port"] for one in asked} == {"http"}
    (service,) = read(FOLDER / "common" / "service.yaml")
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert [one["targetPort"] for one in service["spec"]["ports"]] == ["http"]


@pytest.mark.parametrize("folder", SERVERS)
def test_requests_under_way_have_the_time_to_finish(folder):
    template, container, options = server_of(folder)
    # uvicorn ends the server a second after the last words.
    needed = seconds_of_preparation(container) + options.shutdown_timeout + _LAST_WORDS_S + 1
    # An engine with files of KV blocks may take the longest.
    files = {"kv_offloading_size": 1, "kv_offloading_path": "/cache/blocks"}
    needed += patience_s(EngineConfig.create("", **files))
    assert template["spec"]["terminationGracePeriodSeconds"] > needed


@pytest.mark.parametrize("folder", ("tpu-hosts", "gpu-hosts"))
def test_other_ranks_stay_until_rank_0_has_ended(folder):
    (group,) = read(FOLDER / folder / "server.yaml")
    leader, worker = templates(group)
    (first,), (other,) = leader["spec"]["containers"], worker["spec"]["containers"]
    assert first["args"] == other["args"]
    assert math.isinf(seconds_of_preparation(other))
    graces = [one["spec"]["terminationGracePeriodSeconds"] for one in (leader, worker)]
    assert graces[0] == graces[1]
    # Who is in no Service has no probe, either.
    assert "metadata" not in worker
    assert not [name for name in other if name.endswith("Probe")]
    claims = [one["metadata"]["name"] for one in group["spec"]["leaderWorkerTemplate"][
        "volumeClaimTemplates"
    ]]  # fmt: skip
    assert claims == ["cache"]
    # Such a container would count as a rank of its own.
    assert not [one for one in (leader, worker) if "initContainers" in one["spec"]]


@pytest.mark.parametrize("folder", ("tpu-hosts", "gpu-hosts"))
def test_the_service_of_a_group_is_not_taken(folder):
    (group,) = read(FOLDER / folder / "server.yaml")
    (service,) = read(FOLDER / "common" / "service.yaml")
    # The controller makes one of the group's name, unless it is there, and ranks meet by it.
    assert group["metadata"]["name"] != service["metadata"]["name"]
    assert OF_GROUP["LWS_LEADER_ADDRESS"].split(".")[1] == group["metadata"]["name"]


@pytest.mark.parametrize("folder", ("tpu", "gpu"))
def test_the_engine_that_is_warmed_up_is_the_one_that_serves(folder):
    warmup, server = containers(server_of(folder)[0])
    assert parsed(warmup)[0] == "warmup" and parsed(server)[0] == "serve"
    assert engine_of(warmup) == engine_of(server)
    for field in ("env", "resources", "securityContext"):
        assert warmup[field] == server[field]
    mounts = {one["name"]: one["mountPath"] for one in server["volumeMounts"]}
    assert {
        one["name"]: one["mountPath"] for one in warmup["volumeMounts"]
    }.items() <= mounts.items()


@pytest.mark.parametrize(("name", "template"), PODS)
def test_the_model_takes_the_chips_that_there_are(name, template):
    manifest = OBJECTS[name]
    hosts = manifest["spec"].get("leaderWorkerTemplate", {}).get("size", 1)
    nodes = template["spec"]["nodeSelector"]
    for container in containers(template):
        ((resource, chips),) = container["resources"]["limits"].items()
        if resource == "google.com/tpu":
            topology = nodes["cloud.google.com/gke-tpu-topology"]
            assert math.prod(map(int, topology.split("x"))) == hosts * chips
        else:
            assert resource == "nvidia.com/gpu"
        assert engine_of(container).parallel.tensor_parallel_size == hosts * chips
        nnodes = engine_of(container).parallel.nnodes
        assert (nnodes == 1) == (hosts == 1)


@pytest.mark.parametrize(("template", "container"), CONTAINERS)
def test_what_is_written_is_on_volumes_and_nobody_is_root(template, container):
    spec = template["spec"]
    user = re.search(r"^USER (\d+):(\d+)$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    security = spec["securityContext"]
    assert security["runAsNonRoot"] is True
    ids = [security[name] for name in ("runAsUser", "runAsGroup", "fsGroup")]
    assert [*map(int, user.groups()), int(user[2])] == ids
    # Without this, Kubernetes makes the folder of programs writable for a group, and they are not
    # loaded.
    assert security["fsGroupChangePolicy"] == "OnRootMismatch"
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    home = re.search(r"^WORKDIR (/home/\S+)$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    cache = engine_of(container).compilation.compilation_cache_dir
    assert mounts[cache.replace("~", home[1]).rsplit("/", 2)[0]] == "cache"
    assert mounts["/tmp"] == "tmp"


@pytest.mark.parametrize("name", ("gke", "prometheus-operator"))
def test_metrics_are_scraped_where_they_are_exposed(name):
    (monitor,) = read(FOLDER / "monitoring" / f"{name}.yaml")
    spec = monitor["spec"]
    ((endpoint,),) = [spec[key] for key in spec if key.lower().endswith("endpoints")]
    assert endpoint["path"] in {one.path for one in ENDPOINTS}
    for folder in SERVERS:
        template, container, options = server_of(folder)
        labels = template["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        assert endpoint["port"] in {one["name"] for one in container["ports"]}
        assert options.metrics_without_key  # neither of them brings a key


def test_a_batch_is_tried_again_as_its_exit_status_says():
    (job,) = read(FOLDER / "batch" / "job.yaml")
    rules = {
        rule["onExitCodes"]["values"][0]: rule["action"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert rules == {EXIT_STOPPED: "Ignore", EXIT_ERROR: "FailJob"}
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    command, args = parsed(container)
    assert command == "run-batch"
    assert spec["terminationGracePeriodSeconds"] >= args.grace_period + 15
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    assert mounts[str(Path(args.journal_dir).parent)] == "journal"
    (account,) = read(FOLDER / "batch" / "account.yaml")
    assert spec["serviceAccountName"] == account["metadata"]["name"]


@pytest.mark.parametrize("folder", (*SERVERS, "batch"))
def test_a_folder_is_complete(folder):
    (kustomization,) = read(FOLDER / folder / "kustomization.yaml")
    listed = set(kustomization["resources"])
    here = {path.name for path in (FOLDER / folder).glob("*.yaml")} - {"kustomization.yaml"}
    assert listed - {"../common"} == here
    assert ("../common" in listed) == (folder != "batch")
    objects = [one for name in here for one in read(FOLDER / folder / name)]
    claims = {one["metadata"]["name"] for one in objects if one["kind"] == "PersistentVolumeClaim"}
    classes = {one["metadata"]["name"] for one in objects if one["kind"] == "StorageClass"}
    used = set()
    for template in (one for manifest in objects for one in templates(manifest)):
        volumes = {one["name"]: one for one in template["spec"]["volumes"]}
        mounted = {one["name"] for each in containers(template) for one in each["volumeMounts"]}
        assert mounted - {"cache"} <= set(volumes)
        used |= {
            one["persistentVolumeClaim"]["claimName"]
            for one in volumes.values()
            if "persistentVolumeClaim" in one
        }
    assert used == claims
    asked = re.findall(r"storageClassName: (\S+)", "".join(map(str, objects)).replace("'", ""))
    assert {one.rstrip(",}") for one in asked} == classes


# Of the parts that we use of what is not Kubernetes' own, as their references describe them.
SELECTOR = {
    "type": "object",
    "properties": {"matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}},
    "additionalProperties": False,
}


def scraped(list_name, **more):
    endpoint = {
        "type": "object",
        "required": ["port", *more.pop("required", ())],
        "properties": {
            "port": {"type": "string"},
            "path": {"type": "string", "pattern": "^/"},
            "interval": {"type": "string", "pattern": r"^(\d+(ms|s|m|h))+$"},
        },
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "required": ["selector", list_name],
        "properties": {"selector": SELECTOR, list_name: {"type": "array", "items": endpoint}},
        "additionalProperties": False,
    }


OTHERS = {
    ("monitoring.googleapis.com/v1", "PodMonitoring"): scraped("endpoints", required=["interval"]),
    ("monitoring.coreos.com/v1", "PodMonitor"): scraped("podMetricsEndpoints"),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): {
        "type": "object",
        "required": ["leaderWorkerTemplate"],
        "properties": {
            "replicas": {"type": "integer", "minimum": 0},
            "leaderWorkerTemplate": {
                "type": "object",
                "required": ["workerTemplate"],
                "properties": {
                    "size": {"type": "integer", "minimum": 1},
                    "restartPolicy": {
                        "enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
                    },
                    # Both are checked as Kubernetes' own.
                    "leaderTemplate": {"type": "object"},
                    "workerTemplate": {"type": "object"},
                    "volumeClaimTemplates": {"type": "array", "items": {"type": "object"}},
                },
                "additionalProperties": False,
            },
        },
        "additionalProperties": False,
    },
}


def of_kubernetes(manifest):
    """The parts of a manifest that Kubernetes' own schemas describe, each as an object."""
    if manifest["kind"] != "LeaderWorkerSet":
        return [manifest]
    group = manifest["spec"]["leaderWorkerTemplate"]
    pods = [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": one}
        for one in templates(manifest)
    ]
    claims = [
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim"} | one
        for one in group["volumeClaimTemplates"]
    ]
    return pods + claims


@pytest.mark.parametrize("name", OBJECTS)
def test_manifests_follow_the_published_schemas(name):
    manifest = OBJECTS[name]
    other = OTHERS.get((manifest["apiVersion"], manifest["kind"]))
    if other is not None:
        jsonschema.validate(manifest["spec"], other)
        assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
        if manifest["kind"] != "LeaderWorkerSet":
            return
    schemas = pytest.importorskip("kubernetes_validate")
    # The oldest that is still supported, and the newest that is known.
    for version in ("1.34", schemas.latest_version()):
        for one in of_kubernetes(manifest):
            schemas.validate(one, version, strict=True)


def test_the_image_has_what_exists():
    text = (FOLDER / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    chosen = re.findall(r"EXTRAS=([\w,]+)", text + (FOLDER / "README.md").read_text())
    assert len(chosen) >= 4
    for one in chosen:
        assert set(one.split(",")) <= extras and "server" in one
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert set(copied) == set(
        re.findall(r"^!(.+)$", (FOLDER / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    )
    assert all((ROOT / source).exists() for source in copied)
    minor = project["requires-python"].removeprefix(">=")
    assert f"python:{minor}-slim" in text
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", text, re.MULTILINE)
    assert json.loads(entry)[0] in project["scripts"]


def test_the_page_names_what_is_there():
    text = (FOLDER / "README.md").read_text()
    for path in re.findall(r"tpu_scripts/kubernetes/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (FOLDER / path).exists(), path
    board = resources.files("jaxllm.server") / "grafana.json"
    assert str(Path(str(board)).relative_to(ROOT)) in text
    secrets = {
        one.get("secretName") or one["name"]
        for _, template in PODS
        for one in [
            *(volume["secret"] for volume in template["spec"]["volumes"] if "secret" in volume),
            *(
                variable["valueFrom"]["secretKeyRef"]
                for container in containers(template)
                for variable in container["env"]
            ),
        ]
    }
    made = {
        words[words.index("generic") + 1]
        for words in (
            shlex.split(line)
            for line in text.replace("\\\n", " ").splitlines()
            if "create secret generic" in line
        )
    }
    assert made == secrets
