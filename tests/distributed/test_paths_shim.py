"""The shim in a process of its own, with the kernel's sockets: which ports its connections have, and that nothing else
changes. Each also with the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pacekeeper.launcher.network.path_shim import SHIM_PATH, explain_unusable_shim, preload_shim
from testing.network import paths
from testing.network.paths import PathShim, build_python_command

LOOPBACK = "127.0.0.1"
CONNECT = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
def connect():
    client = socket.socket(family)
    client.connect((sys.argv[1], int(sys.argv[2])))
    return client
def port(of):
    return of.getsockname()[1]
"""

Run = Callable[..., str]


@pytest.fixture(params=[False, True], ids=["plain", "sanitized"], scope="module")
def shim(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PathShim:
    return paths.build_shim(tmp_path_factory.mktemp("shim"), sanitized=request.param)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(paths.build_shim(tmp_path_factory.mktemp("plain")).libraries[-1])


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server((LOOPBACK, 0), backlog=32) as listener:
        yield listener


@pytest.fixture
def entries(tmp_path: Path) -> Path:
    return tmp_path / "0"


@pytest.fixture
def run(shim: PathShim, server: socket.socket, entries: Path) -> Run:
    """Runs a program with the shim; what it prints. Its arguments: the server's address and port."""

    def run(program: str, *more: str) -> str:
        address, port = server.getsockname()[:2]
        command = [*build_python_command(CONNECT + program), address, str(port), *more]
        environment = {**os.environ, **shim.build_environment(entries)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "ERROR: AddressSanitizer" not in done.stderr
        return done.stdout

    return run


def get_port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def find_free_ports(count: int) -> list[int]:
    """Unused ports, outside of the range from which the kernel takes them."""
    found = []
    for port in range(20011, 29999, 7):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            break
    return found


class TestConnect:
    def test_a_connection_to_a_known_peer_comes_from_its_port(
        self, run: Run, server: socket.socket, entries: Path
    ) -> None:
        (wanted,) = find_free_ports(1)
        entries.write_text(f"connect {LOOPBACK} {get_port(server)} {wanted}\n")
        assert run("print(port(connect()))").split() == [str(wanted)]

    def test_the_file_is_read_at_each_connection(self, run: Run, server: socket.socket, entries: Path) -> None:
        first, second = find_free_ports(2)
        entries.write_text(f"connect {LOOPBACK} {get_port(server)} {first}\n")
        again = f"connect {LOOPBACK} {get_port(server)} {second}\\n"
        program = f"a = connect(); open({str(entries)!r}, 'w').write('{again}'); b = connect(); print(port(a), port(b))"
        assert run(program).split() == [str(first), str(second)]

    def test_the_next_port_is_used_if_the_connection_exists(
        self, run: Run, server: socket.socket, entries: Path
    ) -> None:
        first, second = find_free_ports(2)
        entries.write_text(f"connect {LOOPBACK} {get_port(server)} {first} {second}\n")
        assert run("a, b = connect(), connect(); print(port(a), port(b))").split() == [str(first), str(second)]

    def test_the_next_port_is_used_if_the_port_has_a_listener(
        self, run: Run, server: socket.socket, entries: Path
    ) -> None:
        first, second = find_free_ports(2)
        entries.write_text(f"connect {LOOPBACK} {get_port(server)} {first} {second}\n")
        with socket.create_server(("", first)):
            assert run("print(port(connect()))").split() == [str(second)]

    def test_one_port_serves_connections_to_two_peers(self, run: Run, server: socket.socket, entries: Path) -> None:
        (wanted,) = find_free_ports(1)
        with socket.create_server((LOOPBACK, 0)) as other:
            lines = [f"connect {LOOPBACK} {get_port(each)} {wanted}\n" for each in (server, other)]
            entries.write_text("".join(lines))
            program = "a = connect(); sys.argv[2] = sys.argv[3]; b = connect(); print(port(a), port(b))"
            assert run(program, str(get_port(other))).split() == [str(wanted)] * 2

    def test_a_connection_is_plain_and_its_socket_unchanged_if_all_ports_are_taken(
        self, run: Run, server: socket.socket, entries: Path
    ) -> None:
        (taken,) = find_free_ports(1)
        entries.write_text(f"connect {LOOPBACK} {get_port(server)} {taken}\n")
        program = "a = connect(); print(port(a), a.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR), a.send(b'x'))"
        with socket.create_server(("", taken)):
            port, reuse, sent = map(int, run(program).split())
        assert (port != taken, reuse, sent) == (True, 0, 1)

    @pytest.mark.parametrize(
        "content",
        [
            None,
            b"",
            b"\n\n",
            b"connect 127.0.0.1 PORT",
            b"connect 127.0.0.1 PORT \n",
            b"connect 127.0.0.1 PORT words\n",
            b"connect 127.0.0.1 PORT -1 99999999999999999999\n",
            b"connect 127.0.0.1 PORT0 20001\n",
            b"connect 127.0.0.2 PORT 20001\n",
            b"Connect 127.0.0.1 PORT 20001\n",
            b"\x00connect 127.0.0.1 PORT 20001\n",
            b"connect 127.0.0.1 PORT \n20001\n",
            bytes(range(256)) * 40,
            b"connect 127.0.0.1 PORT 20001\n" * 2000,
        ],
        ids=lambda content: "missing" if content is None else ascii(content[:44]),
    )
    def test_an_invalid_file_is_a_plain_connection(
        self, run: Run, server: socket.socket, entries: Path, content: bytes | None
    ) -> None:
        if content is not None:
            entries.write_bytes(content.replace(b"PORT", str(get_port(server)).encode()))
        assert int(run("print(port(connect()))")) not in (0, 20001)

    def test_a_folder_instead_of_the_file_is_a_plain_connection(self, run: Run, entries: Path) -> None:
        entries.mkdir()
        assert int(run("print(port(connect()))")) > 0

    def test_a_socket_that_is_bound_keeps_its_port(self, run: Run, server: socket.socket, entries: Path) -> None:
        wanted, own = find_free_ports(2)
        entries.write_text(f"connect {LOOPBACK} {get_port(server)} {wanted}\n")
        program = f"""
a = socket.socket(); a.bind(("", {own})); a.connect((sys.argv[1], int(sys.argv[2]))); print(port(a))"""
        assert run(program).split() == [str(own)]

    def test_datagrams_and_local_sockets_are_not_changed(
        self, run: Run, server: socket.socket, entries: Path, tmp_path: Path
    ) -> None:
        (wanted,) = find_free_ports(1)
        entries.write_text(f"connect {LOOPBACK} {get_port(server)} {wanted}\n")
        program = f"""
a = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); a.connect((sys.argv[1], int(sys.argv[2]))); print(port(a))
b = socket.socket(socket.AF_UNIX)
try:
    b.connect({str(tmp_path / "missing")!r})
except FileNotFoundError:
    print("missing")"""
        port, output = run(program).split()
        assert (port != str(wanted), output) == (True, "missing")

    def test_a_refusal_and_a_pending_connection_are_reported_as_before(self, run: Run, entries: Path) -> None:
        wanted, closed = find_free_ports(2)
        entries.write_text(f"connect {LOOPBACK} {closed} {wanted}\n")
        program = f"""
import errno
a = socket.socket(); print(errno.errorcode[a.connect_ex((sys.argv[1], {closed}))])
b = socket.socket(); b.setblocking(False); print(errno.errorcode[b.connect_ex((sys.argv[1], {closed}))], port(b))"""
        assert run(program).split() == ["ECONNREFUSED", "EINPROGRESS", str(wanted)]

    def test_ipv6_is_supported(self, shim: PathShim, entries: Path) -> None:
        (wanted,) = find_free_ports(1)
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
            entries.write_text(f"connect ::1 {get_port(listener)} {wanted}\n")
            command = [*build_python_command(CONNECT + "print(port(connect()))"), "::1", str(get_port(listener))]
            environment = {**os.environ, **shim.build_environment(entries)}
            output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        assert output.stdout.split() == [str(wanted)]

    def test_a_process_without_a_file_is_not_changed(self, shim: PathShim, server: socket.socket) -> None:
        command = [*build_python_command(CONNECT + "print(port(connect()))"), LOOPBACK, str(get_port(server))]
        environment = {**os.environ, **shim.build_environment(None)}
        output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        assert int(output.stdout) > 0


class TestListen:
    LISTEN = """
def listen(address="127.0.0.1", number=0, kind=socket.SOCK_STREAM):
    server = socket.socket(socket.AF_INET, kind)
    server.bind((address, number))
    if kind == socket.SOCK_STREAM:
        server.listen()
    return server
"""

    def test_the_first_listener_gets_the_port_and_the_next_another(self, run: Run, entries: Path) -> None:
        (wanted,) = find_free_ports(1)
        entries.write_text(f"listen {LOOPBACK} 0 {wanted}\n")
        first, second = map(int, run(f"{self.LISTEN}\na, b = listen(), listen(); print(port(a), port(b))").split())
        assert (first, second != wanted) == (wanted, True)

    def test_a_taken_port_is_the_next_one_or_any(self, run: Run, entries: Path) -> None:
        taken, free = find_free_ports(2)
        with socket.create_server((LOOPBACK, taken)):
            entries.write_text(f"listen {LOOPBACK} 0 {taken} {free}\n")
            assert run(f"{self.LISTEN}\nprint(port(listen()))").split() == [str(free)]
            entries.write_text(f"listen {LOOPBACK} 0 {taken}\n")
            assert int(run(f"{self.LISTEN}\nprint(port(listen()))")) not in (0, taken)

    def test_other_addresses_requested_ports_and_datagrams_are_not_changed(self, run: Run, entries: Path) -> None:
        wanted, requested = find_free_ports(2)
        entries.write_text(f"listen {LOOPBACK} 0 {wanted}\n")
        program = f"""{self.LISTEN}
print(port(listen("0.0.0.0")), port(listen(number={requested})), port(listen(kind=socket.SOCK_DGRAM)))"""
        everywhere, given, datagrams = map(int, run(program).split())
        assert wanted not in (everywhere, datagrams)
        assert given == requested


class TestRoce:
    """Unproven: a stand-in replaces libibverbs, by the layout of its header. No network card was used."""

    @pytest.fixture
    def driver(self, shim: PathShim, tmp_path: Path) -> Path:
        folder = Path(paths.__file__).parents[1]
        common = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror"]
        script = ["-shared", "-fPIC", "-Wl,--version-script=/dev/stdin"]
        verbs = [*common, *script, "-o", f"{tmp_path}/libverbs.so", f"{folder}/verbs_double.c"]
        subprocess.run(verbs, input="IBVERBS_1.1 { global: *; };", text=True, check=True, timeout=60)
        renamed = [paths.RENAME_DLVSYM, shim.libraries[-1], "-Wl,--allow-shlib-undefined"] if shim.is_sanitized else []
        command = [*common, "-o", f"{tmp_path}/driver", f"{folder}/verbs_driver.c", *renamed, "-ldl"]
        subprocess.run(command, check=True, timeout=60)
        return tmp_path

    def labels(self, shim: PathShim, driver: Path, content: str, *peers: str) -> list[str]:
        (driver / "0").write_text(content)
        command = [str(driver / "driver"), str(driver / "libverbs.so"), *peers]
        environment = {**os.environ, **shim.build_environment(driver / "0")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.split()

    def test_queue_pairs_to_a_known_peer_get_its_label(self, shim: PathShim, driver: Path) -> None:
        content = "label 10.0.0.7 1234\nlabel fd00::7 99\n"
        labels = self.labels(shim, driver, content, "::ffff:10.0.0.7", "fd00::7", "::ffff:10.0.0.8")
        assert labels == ["1234:0", "99:0", "0:0"], "the label that the card sees, and the caller's own afterwards"

    def test_a_refused_label_is_followed_by_a_call_without_it(self, shim: PathShim, driver: Path) -> None:
        assert self.labels(shim, driver, "label 10.0.0.7 4095\n", "::ffff:10.0.0.7") == ["0:0"]


EXPLAIN = "from pacekeeper.launcher.network.path_shim import explain_missing_shim; print(not explain_missing_shim())"
"""Whether a process has the shim."""


class TestPreload:
    def test_the_shim_is_usable_on_this_machine(self, plain: Path) -> None:
        assert explain_unusable_shim(plain) == ""

    def test_a_library_that_cannot_be_loaded_is_left_out_with_a_reason(self, tmp_path: Path) -> None:
        """As a shim for another architecture, or another libc, is: the process would not start with some of them."""
        broken = tmp_path / "paths.so"
        assert "no shim" in explain_unusable_shim(broken)
        broken.write_bytes(b"\x7fELF of another machine")
        assert "cannot be loaded" in explain_unusable_shim(broken)
        other = tmp_path / "other.so"
        subprocess.run(["cc", "-shared", "-o", other, "-x", "c", "/dev/null"], check=True, timeout=60)
        assert "is no shim" in explain_unusable_shim(other)
        environment = {"LD_PRELOAD": "theirs.so"}
        preload_shim(environment, broken)
        assert environment == {"LD_PRELOAD": "theirs.so"}

    def test_it_starts_the_process_again_once_and_leaves_nothing_to_children(self, plain: Path, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(f"""
import os, subprocess, sys
from pathlib import Path
from pacekeeper.launcher.network.path_shim import explain_missing_shim, preload_shim
print("start", not explain_missing_shim(), flush=True)
preload_shim(shim=Path({str(plain)!r}))
print(not explain_missing_shim(), os.environ.get("LD_PRELOAD"), sys.argv[1:], flush=True)
if os.fork() == 0:
    print("fork", not explain_missing_shim(), flush=True)
    os._exit(0)
os.wait()
subprocess.run([sys.executable, "-c", {EXPLAIN!r}])
""")
        done = subprocess.run([sys.executable, script, "a", "b"], capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines() == [
            "start False", "start True", "True None ['a', 'b']", "fork True", "False",
        ], done.stderr  # fmt: skip

    def test_ranks_of_pacekeeper_run_load_the_shim_and_their_children_do_not(self, plain: Path, tmp_path: Path) -> None:
        """As installed: the library lies next to its source."""
        package = SHIM_PATH.parents[1]
        installed = tmp_path / package.name
        shutil.copytree(package, installed, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        shutil.copy(plain, installed / SHIM_PATH.relative_to(package))
        script = tmp_path / "script.py"
        script.write_text(f"import subprocess, sys\n{EXPLAIN}\nsubprocess.run([sys.executable, '-c', {EXPLAIN!r}])\n")
        command = [sys.executable, "-m", "pacekeeper.cli", "run", "--local", "1", str(script)]
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.stdout.split() == ["True", "False"], done.stderr
