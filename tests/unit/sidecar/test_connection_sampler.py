"""What the kernel reports of the ranks' connections: real sockets, its own answers, and answers that it might give."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pacekeeper.launcher.network.sockets import SocketFile
from pacekeeper.runtime_folder import RuntimeFolder, read_json, write_json, write_text
from pacekeeper.sidecar import connection_sampler
from pacekeeper.sidecar.connection_sampler import (
    EARLY_CONNECTION_SAMPLES,
    LINK_WINDOW_COUNT,
    MAX_LINK_WINDOWS,
    SAMPLES_PER_LINK_WINDOW,
    ConnectionSampler,
)
from pacekeeper_analysis.protocol.reports import Evidence, LinkWindow
from pacekeeper_rank.watching import process_files
from pacekeeper_rank.watching.process_files import SOCKET_SCAN_INTERVAL_SECONDS, list_socket_inodes

MB = 1_000_000
SAMPLES = LINK_WINDOW_COUNT * SAMPLES_PER_LINK_WINDOW + 1
END = bytes([socket.AF_INET]) + bytes.fromhex("13891388") + bytes(44)
"""The kernel's name for a connection between two ports 5001."""

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def runtime(tmp_path: Path) -> RuntimeFolder:
    return RuntimeFolder(tmp_path / "runtime").create()


@pytest.fixture(params=["127.0.0.1", "::1"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Yield both ends of a connection."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.create_server((request.param, 0), family=family) as listener:
        one = socket.create_connection(listener.getsockname()[:2])
        other, _ = listener.accept()
        with one, other:
            yield one, other


def get_inode(of: socket.socket) -> int:
    return os.fstat(of.fileno()).st_ino


def build_sampler(runtime: RuntimeFolder, ranks: dict[int, socket.socket]) -> ConnectionSampler:
    """With the launcher's record of which rank holds which socket."""
    write_json(runtime.sockets, {str(get_inode(end)): rank for rank, end in ranks.items()})
    return ConnectionSampler(runtime)


def send_bytes(pair: Pair, size: int) -> None:
    one, other = pair
    for start in range(0, size, MB // 10):
        one.sendall(bytes(min(MB // 10, size - start)))
        left = min(MB // 10, size - start)
        while left:
            left -= len(other.recv(left))


def fill_connection(runtime: RuntimeFolder, pair: Pair) -> ConnectionSampler:
    """Rank 0 has sent all that fits, and no process reads it."""
    one, _ = pair
    one.setblocking(False)
    try:
        while True:
            one.send(bytes(MB))
    except BlockingIOError:
        return build_sampler(runtime, {0: one})


class TestWindows:
    def test_each_window_holds_the_bytes_that_each_rank_sent(self, runtime: RuntimeFolder, pair: Pair) -> None:
        seen = build_sampler(runtime, {3: pair[0], 4: pair[1]})
        for sample in range(SAMPLES):
            seen.sample(float(sample))
            if sample == 2:
                send_bytes(pair, 5 * MB)  # in the oldest window
            if sample == SAMPLES - 2:
                send_bytes(pair, 2 * MB)  # in the newest
        windows = seen.windows()
        sent = {window.age: window for window in windows if window.rank == 3}
        assert {age: window.acked_bytes for age, window in sent.items()} == {0: 2 * MB, 1: 0, 2: 5 * MB}
        assert all(window.seconds == SAMPLES_PER_LINK_WINDOW for window in windows)
        assert 0 <= sent[2].busy_seconds < 5
        assert sent[0].min_round_trip_seconds < 0.1
        received = [window for window in windows if window.rank == 4]
        assert len(received) == LINK_WINDOW_COUNT, "the end that only receives shows which rank has the connection"
        assert {(w.local, w.remote) for w in received} == {(sent[0].remote, sent[0].local)}
        host = "[::1]" if pair[0].family == socket.AF_INET6 else "127.0.0.1"
        assert sent[0].local == f"{host}:{pair[0].getsockname()[1]}"
        Evidence.from_json(Evidence("why", "w", 1, links=windows).to_json())

    def test_a_reader_that_does_not_read_leaves_something_unsent(self, runtime: RuntimeFolder, pair: Pair) -> None:
        """As in a hang: what was acknowledged stands still, with something waiting at the end."""
        seen = fill_connection(runtime, pair)
        for sample in range(SAMPLES):
            seen.sample(float(sample))
            time.sleep(0.02)
        newest = next(window for window in seen.windows() if window.age == 0)
        assert (newest.acked_bytes, newest.unsent_bytes > 0) == (0, True)
        assert newest.busy_seconds > 0.05, "it has had something to send all the time"

    def test_an_end_that_does_not_read_blocks_no_link(self, runtime: RuntimeFolder, pair: Pair) -> None:
        seen = fill_connection(runtime, pair)
        for _ in range(5):
            seen.sample(time.monotonic())
            time.sleep(0.1)
        assert seen.find_blocked(time.monotonic()) == ()

    @pytest.mark.parametrize(
        ("acked", "busy", "closed", "seconds"),
        [(0, 1.0, 0.0, 4.0), (0, 0.5, 0.0, 0.0), (0, 1.0, 0.9, 0.0), (1, 1.0, 0.0, 0.0)],
        ids=["nothing comes through", "mostly nothing to send", "the receiver's window is closed", "slowly, it moves"],
    )
    def test_a_link_without_progress_is_blocked(
        self,
        runtime: RuntimeFolder,
        monkeypatch: pytest.MonkeyPatch,
        acked: int,
        busy: float,
        closed: float,
        seconds: float,
    ) -> None:
        """By the kernel's counters of each second, after three seconds in which all went well."""
        write_json(runtime.sockets, {"7": 5})
        seen = ConnectionSampler(runtime)

        def build_answer(sample: int) -> list[tuple[bytes, tuple[int, bytes]]]:
            since = max(0, sample - 3)
            counters = (min(sample, 3) * MB + acked * since, 0, 0, 1, busy * since * MB, closed * since * MB, 0, 0)
            return [(END, (7, connection_sampler._TCP_INFO_STRUCT.pack(*(int(each) for each in counters))))]

        for sample in range(7):
            monkeypatch.setattr(connection_sampler, "_dump_connections", lambda sample=sample: build_answer(sample))
            seen.sample(float(sample))
        monkeypatch.setattr(connection_sampler, "_dump_connections", lambda: build_answer(7))
        found = seen.find_blocked(7.0)
        assert [(end.rank, end.remote, end.seconds) for end in found] == (
            [(5, "0.0.0.0:5000", seconds)] if seconds else []
        )

    def test_a_fast_window_among_the_first_remains_known(self, runtime: RuntimeFolder, pair: Pair) -> None:
        seen = build_sampler(runtime, {3: pair[0]})
        for sample in range(2 * EARLY_CONNECTION_SAMPLES):
            seen.sample(float(sample))
            if sample % SAMPLES_PER_LINK_WINDOW == 2:
                send_bytes(pair, 4 * MB if sample < EARLY_CONNECTION_SAMPLES else 8 * MB)
        early = {(window.early_bytes, window.early_busy_seconds) for window in seen.windows()}
        assert [acked for acked, _ in early] == [4 * MB]
        assert all(window.acked_bytes == 8 * MB for window in seen.windows())

    @pytest.mark.parametrize(("quick_windows", "usual"), [(4, 1.5), (6, 0.3)])
    def test_a_speed_of_one_moment_is_not_the_usual_speed(
        self, runtime: RuntimeFolder, monkeypatch: pytest.MonkeyPatch, quick_windows: int, usual: float
    ) -> None:
        """Six windows are half a minute, after which a fault may have begun."""
        write_json(runtime.sockets, {"7": 5})
        seen, acked, busy = ConnectionSampler(runtime), 0, 0.0
        for sample in range(EARLY_CONNECTION_SAMPLES + 1):
            counters = (acked, 0, 0, 1, round(busy * MB), 0, 0, 0)
            info = connection_sampler._TCP_INFO_STRUCT.pack(*counters)
            monkeypatch.setattr(connection_sampler, "_dump_connections", lambda info=info: [(END, (7, info))])
            seen.sample(float(sample))
            acked += 2 * MB
            busy += (0.3 if sample < quick_windows * SAMPLES_PER_LINK_WINDOW else 1.5) / SAMPLES_PER_LINK_WINDOW
        assert {round(window.early_busy_seconds or 0.0, 6) for window in seen.windows()} == {usual}

    def test_other_processes_connections_and_quiet_ones_are_left_out(self, runtime: RuntimeFolder, pair: Pair) -> None:
        strangers = build_sampler(runtime, {})
        quiet = build_sampler(runtime, {0: pair[0]})
        for seen in (strangers, quiet):
            for sample in range(SAMPLES):
                seen.sample(float(sample))
                send_bytes(pair, 1000)
            assert seen.windows() == ()

    def test_nothing_is_stored_of_connections_that_no_rank_holds(self, runtime: RuntimeFolder, pair: Pair) -> None:
        """A node's own network has many thousands."""
        seen = build_sampler(runtime, {0: pair[0]})
        seen.sample(0.0)
        assert [held for held, _ in seen._samples[-1].ends.values()] == [get_inode(pair[0])]
        assert len(seen._early) == 1

    def test_a_time_that_goes_back_counts_as_zero(
        self, runtime: RuntimeFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The operator accepts no negative seconds, even if the kernel reports some."""
        write_json(runtime.sockets, {"7": 0})
        seen = ConnectionSampler(runtime)
        for sample in range(SAMPLES):
            back = SAMPLES - sample
            info = connection_sampler._TCP_INFO_STRUCT.pack(MB * sample, 0, 0, 1, back, back * MB, back * MB, 0)
            row = (bytes([2]) + bytes(48), (7, info))
            monkeypatch.setattr(connection_sampler, "_dump_connections", lambda row=row: [row])
            seen.sample(float(sample))
        windows = seen.windows()
        assert {(w.busy_seconds, w.receiver_limited_seconds, w.sender_limited_seconds) for w in windows} == {(0, 0, 0)}
        Evidence.from_json(Evidence("why", "w", 1, links=windows).to_json())

    def test_before_the_first_window_is_whole_there_is_none(self, runtime: RuntimeFolder, pair: Pair) -> None:
        seen = build_sampler(runtime, {0: pair[0]})
        for sample in range(SAMPLES_PER_LINK_WINDOW):
            seen.sample(float(sample))
            send_bytes(pair, MB)
        assert seen.windows() == ()
        seen.sample(float(SAMPLES_PER_LINK_WINDOW))
        assert [window.age for window in seen.windows()] == [0]

    def test_sums_of_a_rank(self, runtime: RuntimeFolder, pair: Pair) -> None:
        seen = build_sampler(runtime, {7: pair[0]})
        assert seen.sum_by_rank() == {}
        send_bytes(pair, 3 * MB)
        seen.sample(0.0)
        acked, busy = seen.sum_by_rank()[7]
        assert acked == pytest.approx(3 * MB, abs=1)
        assert busy < 5

    @pytest.mark.parametrize("written", ["", "[]", '{"x": 1}', '{"1": []}', "{"])
    def test_an_invalid_list_of_sockets_counts_as_unknown(
        self, runtime: RuntimeFolder, pair: Pair, written: str
    ) -> None:
        seen = ConnectionSampler(runtime)
        write_text(runtime.sockets, written)
        for sample in range(SAMPLES):
            seen.sample(float(sample))
            send_bytes(pair, MB)
        assert seen.windows() == ()


class TestKernel:
    def test_sampling_needs_no_privileges(self, pair: Pair) -> None:
        there, back = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setgid(65534)
            os.setuid(65534)
            found = {held for _, (held, _) in connection_sampler._dump_connections()}
            os.write(back, b"1" if get_inode(pair[0]) in found else b"0")
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(there, 1) == b"1"
        os.close(there)
        os.close(back)

    def test_a_thousand_connections_cost_milliseconds(self, runtime: RuntimeFolder) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
        held: list[socket.socket] = []
        try:
            with socket.create_server(("127.0.0.1", 0), backlog=1100) as listener:
                for _ in range(1000):
                    held += [socket.create_connection(listener.getsockname()), listener.accept()[0]]
            seen = build_sampler(runtime, dict(enumerate(held)))
            began = time.process_time()
            for sample in range(SAMPLES):
                seen.sample(float(sample))
                held[0].sendall(bytes(MB // 10))
                held[1].recv(MB // 10)
            assert (time.process_time() - began) / SAMPLES < 0.05
            assert {window.rank for window in seen.windows()} == {0, 1}
            assert len({id(end) for sample in seen._samples for end in sample.ends.values()}) < 4 * len(held), (
                "kept once"
            )
        finally:
            for one in held:
                one.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_an_answer_holds_the_busiest(self, runtime: RuntimeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        count = MAX_LINK_WINDOWS  # more than an answer takes of three windows each
        write_json(runtime.sockets, {str(i): 0 for i in range(count)})
        seen, at = ConnectionSampler(runtime), iter(range(SAMPLES))

        def dump_connections() -> Iterator[tuple[bytes, tuple[int, bytes]]]:
            sample = next(at)
            for i in range(count):
                name = bytes([socket.AF_INET]) + i.to_bytes(4, "big") + bytes(44)
                yield name, (i, connection_sampler._TCP_INFO_STRUCT.pack(sample * MB * (1 + i), 0, 0, 0, 0, 0, 0, 0))

        monkeypatch.setattr(connection_sampler, "_dump_connections", dump_connections)
        for sample in range(SAMPLES):
            seen.sample(float(sample))
        windows = seen.windows()
        assert len(windows) == MAX_LINK_WINDOWS // LINK_WINDOW_COUNT * LINK_WINDOW_COUNT
        assert max(w.acked_bytes for w in windows) == SAMPLES_PER_LINK_WINDOW * MB * count
        Evidence.from_json(Evidence("why", "w", 1, links=windows).to_json())

    def test_a_process_that_creates_an_empty_file_receives_all_windows_in_it(
        self, runtime: RuntimeFolder, pair: Pair
    ) -> None:
        seen = build_sampler(runtime, {3: pair[0], 4: pair[1]})
        for sample in range(SAMPLES):
            seen.sample(float(sample))
            send_bytes(pair, MB)
        requested, old = runtime.links / "requested", runtime.links / "old"
        requested.touch()
        write_text(old, "{}")
        os.utime(old, (0, 0))
        seen.answer_link_queries("w", 2)
        evidence = Evidence.from_json(read_json(requested) or {})
        assert (evidence.worker, evidence.round, evidence.links) == ("w", 2, seen.windows())
        assert {link.rank for link in evidence.links} == {3, 4}
        assert not old.exists(), "the requester has exited"
        before = requested.stat().st_ino
        seen.answer_link_queries("w", 2)
        assert requested.stat().st_ino == before, "once"

    def test_nothing_is_reported_where_the_kernel_cannot_be_queried(self, runtime: RuntimeFolder) -> None:
        runtime.links.rmdir()
        ConnectionSampler(runtime).answer_link_queries("w", 1)
        runtime.links.write_text("no folder")
        ConnectionSampler(runtime).answer_link_queries("w", 1)

    def test_a_kernel_with_fewer_counters_leaves_links_unknown(
        self, runtime: RuntimeFolder, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its tcp_info ends after min_rtt, as Linux 4.9's."""
        whole = connection_sampler._dump_connections

        def dump_shortened() -> Iterator[tuple[bytes, tuple[int, bytes]]]:
            return ((name, (held, info[:32])) for name, (held, info) in whole())

        monkeypatch.setattr(connection_sampler, "_dump_connections", dump_shortened)
        seen = build_sampler(runtime, {0: pair[0]})
        for sample in range(SAMPLES):
            seen.sample(float(sample))
            send_bytes(pair, MB)
        assert (seen.windows(), seen.sum_by_rank()) == ((), {})

    def test_a_kernel_that_does_not_answer_is_reported_once(
        self, runtime: RuntimeFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def forbid_socket(*_: object) -> socket.socket:
            raise PermissionError("not in this sandbox")

        monkeypatch.setattr("pacekeeper.sidecar.connection_sampler.socket.socket", forbid_socket)
        seen = ConnectionSampler(runtime)
        for sample in range(SAMPLES):
            seen.sample(float(sample))
        assert seen.windows() == ()
        assert [record.getMessage().count("not in this sandbox") for record in caplog.records] == [1]

    def test_an_error_in_the_answer_is_raised(self) -> None:
        error = connection_sampler._NETLINK_HEADER.pack(20, connection_sampler._NLMSG_ERROR, 0, 0, 0) + (-2).to_bytes(
            4, "little", signed=True
        )
        with pytest.raises(FileNotFoundError):
            connection_sampler._parse_datagram(error)

    @pytest.mark.parametrize("length", range(0, 200, 7))
    def test_a_truncated_answer_ends(self, length: int) -> None:
        message = connection_sampler._NETLINK_HEADER.pack(0, connection_sampler._SOCK_DIAG_BY_FAMILY, 0, 0, 0) + bytes(
            200
        )
        connection_sampler._parse_datagram(message[:length])


class TestSockets:
    def test_the_launcher_writes_the_sockets_of_its_ranks_when_they_change(
        self, runtime: RuntimeFolder, pair: Pair
    ) -> None:
        file = SocketFile(runtime.sockets)
        file.refresh({5: os.getpid()}, now=10.0)
        written = read_json(runtime.sockets)
        assert written is not None
        assert written[str(get_inode(pair[0]))] == 5
        runtime.sockets.unlink()
        file.refresh({}, now=10.0 + SOCKET_SCAN_INTERVAL_SECONDS / 2)
        assert not runtime.sockets.exists(), "not yet"
        file.refresh({}, now=10.0 + SOCKET_SCAN_INTERVAL_SECONDS)
        assert read_json(runtime.sockets) == {}
        runtime.sockets.unlink()
        file.refresh({}, now=10.0 + 2 * SOCKET_SCAN_INTERVAL_SECONDS)
        assert not runtime.sockets.exists(), "nothing has changed"

    def test_a_limited_number_of_open_files_is_read(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        assert get_inode(pair[0]) in list_socket_inodes(os.getpid())
        monkeypatch.setattr(process_files, "MAX_OPEN_FILES_SCANNED", 0)
        assert list_socket_inodes(os.getpid()) == set()

    def test_a_process_that_has_exited_holds_none(self) -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        assert list_socket_inodes(pid) == set()


def test_the_bytes_that_a_connection_costs_on_the_wire() -> None:
    """Connections are queried every 5 s at most, in the first minute of an incident. Over ten minutes this is
    below 50 B/s, and nothing while nothing is slow."""
    window = LinkWindow("10.244.100.100:50000", "10.244.200.200:50001", 1023, 2, 5.001, 10**10, 4.998, 0.1, 0.1, 9, 9)
    size = len(str(Evidence("why", "w", 1, links=(window,) * LINK_WINDOW_COUNT).to_json()))
    assert size * 12 / 600 < 50
