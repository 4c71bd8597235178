"""A gcloud that records its calls and has one TPU, whose hosts are folders.

`ssh` runs the command in the home directory that stands for a host, and `scp` and `storage` copy
files. So tests detect wrong quoting. All state is in files under $CLOUD:

    calls.jsonl      the arguments of each call
    vm, request      their states; without the file, the VM or the request does not exist
    num_hosts        of a new TPU
    coming_states    the next states of a queued request, one per describe
    refuse           the error of every describe
    fail_once        the error of the next describe
    hosts/0/         a home directory
    buckets/NAME/    gs://NAME/
"""

import glob
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

CLOUD = Path(os.environ["CLOUD"])
VM, REQUEST, HOSTS = CLOUD / "vm", CLOUD / "request", CLOUD / "hosts"


def main(argv: list[str]) -> int:
    with open(CLOUD / "calls.jsonl", "a") as calls:
        calls.write(json.dumps(argv) + "\n")
    if argv[:2] == ["storage", "cp"]:
        return storage_copy(argv[2], argv[3])
    if argv[:2] == ["storage", "ls"]:
        print(*(argv[2] + path.name for path in storage_path(argv[2]).iterdir()), sep="\n")
        return 0
    kind, action, *rest = argv[2:]
    file = VM if kind == "tpu-vm" else REQUEST
    match action:
        case "create":
            return create(kind)
        case "describe":
            return describe(file)
        case "delete":
            return delete(file)
        case "ssh":
            return ssh(value_of("--worker", rest), value_of("--command", rest))
        case "scp":
            paths = [a for a in rest[: rest.index("--project")] if not a.startswith("--")]
            return scp(value_of("--worker", rest), paths)
    raise AssertionError(argv)


def value_of(flag: str, argv: list[str]) -> str:
    (value,) = (a.partition("=")[2] for a in argv if a.startswith(flag + "="))
    return value


def create(kind: str) -> int:
    if kind == "tpu-vm":
        start_vm()
    else:
        REQUEST.write_text("WAITING_FOR_RESOURCES")
        (CLOUD / "coming_states").write_text("PROVISIONING ACTIVE")
    return 0


def start_vm() -> None:
    VM.write_text("READY")
    for number in range(int((CLOUD / "num_hosts").read_text())):
        (HOSTS / str(number)).mkdir(parents=True)


def describe(file: Path) -> int:
    if (CLOUD / "refuse").exists():
        print((CLOUD / "refuse").read_text(), file=sys.stderr)
        return 1
    if (CLOUD / "fail_once").exists():
        print((CLOUD / "fail_once").read_text(), file=sys.stderr)
        (CLOUD / "fail_once").unlink()
        return 1
    if not file.exists():
        print("ERROR: (gcloud) NOT_FOUND: Resource was not found", file=sys.stderr)
        return 1
    print("a notice that is no part of the answer", file=sys.stderr)
    print(file.read_text())
    coming = CLOUD / "coming_states"
    if file == REQUEST and coming.exists():
        state, _, later = coming.read_text().partition(" ")
        REQUEST.write_text(state)
        coming.write_text(later)
        if state == "ACTIVE":
            coming.unlink()
            start_vm()
    return 0


def delete(file: Path) -> int:
    assert file.exists(), f"{file.name} does not exist"
    REQUEST.unlink(missing_ok=True)
    VM.unlink(missing_ok=True)
    shutil.rmtree(HOSTS, ignore_errors=True)
    return 0


def hosts(worker: str) -> list[Path]:
    return sorted(HOSTS.iterdir()) if worker == "all" else [HOSTS / worker]


def ssh(worker: str, command: str) -> int:
    if VM.read_text() != "READY":
        print(f"ERROR: the TPU VM is {VM.read_text()}", file=sys.stderr)
        return 1
    shells = [
        subprocess.Popen(["bash", "-c", command], cwd=home, env={**os.environ, "HOME": str(home)})
        for home in hosts(worker)
    ]
    statuses = [shell.wait() for shell in shells]
    if VM.read_text() != "READY":
        return 255  # the connection broke
    return next((status for status in statuses if status), 0)


def scp(worker: str, paths: list[str]) -> int:
    *sources, target = paths
    for home in hosts(worker):
        found = [p for s in sources for p in glob.glob(on(home, s) if ":" in s else glob.escape(s))]
        if not found:
            print("scp: No such file or directory", file=sys.stderr)
            return 1
        subprocess.run(["cp", "-r", "--preserve=mode", *found, on(home, target)], check=True)
    return 0


def on(home: Path, path: str) -> str:
    _, colon, remote = path.partition(":")
    return str(home / remote) + ("/" if path.endswith("/") else "") if colon else path


def storage_path(url: str) -> Path:
    return CLOUD / "buckets" / url.removeprefix("gs://") if url.startswith("gs://") else Path(url)


def storage_copy(source: str, target: str) -> int:
    path = storage_path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Copy to a temporary name first, so that files in a bucket are complete.
    part = path.with_name(f"{path.name}.part{os.getpid()}")
    shutil.copy(storage_path(source), part)
    part.rename(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
