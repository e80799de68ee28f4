"""Notices of clouds, read from servers that answer as theirs do."""

import importlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from autoshard.train.run import loop
from autoshard.train.run.cloud import maintenance, metadata
from autoshard.train.run.cloud.maintenance import (
    MaintenanceNotices,
    amazon_notice,
    azure_notice,
    find_notices,
    google_notice,
)
from autoshard.train.run.environment import is_in_cluster
from autoshard.train.run.interrupt import Interrupts
from autoshard.train.run.loop import train

Answer = Callable[[str, str, Mapping[str, str]], str | None]


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    """Start a server; `answer(method, path, headers)` returns a text, or None for 404."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                text = answer(self.command, self.path, {name.lower(): value for name, value in self.headers.items()})
                self.send_response(404 if text is None else 200)
                self.end_headers()
                self.wfile.write((text or "").encode())

            do_PUT = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing."""

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("entries", "notice"),
    [
        ({"/preempted": "FALSE", "/maintenance-event": "NONE"}, None),
        ({"/preempted": "FALSE", "/maintenance-event": "MIGRATE_ON_HOST_MAINTENANCE"}, None),
        (
            {"/preempted": "FALSE", "/maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"},
            "notice of maintenance (TERMINATE_ON_HOST_MAINTENANCE)",
        ),
        ({"/preempted": "TRUE", "/maintenance-event": "NONE"}, "notice of a preemption"),
        ({}, None),
    ],
)
def test_google(
    serve: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch, entries: Mapping[str, str], notice: str | None
) -> None:
    server = serve(lambda _, path, headers: entries.get(path) if headers["metadata-flavor"] == "Google" else None)
    monkeypatch.setattr(metadata, "GOOGLE", server)
    assert google_notice() == notice


def test_no_proxy_is_used(serve: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy knows nothing of this machine."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    importlib.reload(metadata)  # which reads the environment
    monkeypatch.setattr(metadata, "GOOGLE", serve(lambda *_: "TRUE"))
    assert google_notice() == "notice of a preemption"


@pytest.mark.parametrize(("action", "notice"), [(None, None), ('{"action": "stop"}', "notice of a spot interruption")])
def test_amazon(
    serve: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch, action: str | None, notice: str | None
) -> None:
    def answer(method: str, path: str, headers: Mapping[str, str]) -> str | None:
        if (method, path) == ("PUT", "/api/token"):
            return "secret" if "x-aws-ec2-metadata-token-ttl-seconds" in headers else None
        known = path == "/meta-data/spot/instance-action" and headers.get("x-aws-ec2-metadata-token") == "secret"
        return action if known else None

    monkeypatch.setattr(metadata, "AMAZON", serve(answer))
    assert amazon_notice() == notice


@pytest.mark.parametrize(
    ("events", "notice"),
    [
        ('{"Events": []}', None),
        ('{"Events": [{"EventType": "Preempt", "Resources": ["pod_3"]}]}', "notice of a spot interruption"),
        ('{"Events": [{"EventType": "Preempt", "Resources": ["pod_4"]}]}', None),
        ('{"Events": [{"EventType": "Freeze", "Resources": ["pod_3"]}]}', None),
        (
            '{"Events": [{"EventType": "Freeze", "Resources": ["pod_3"]}, '
            '{"EventType": "Reboot", "Resources": ["pod_4", "pod_3"]}]}',
            "notice of a reboot",
        ),
        ("", None),
        ("<html>not found</html>", None),
        ("[]", None),
        (None, None),
    ],
)
def test_azure(
    serve: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch, events: str | None, notice: str | None
) -> None:
    def answer(_: str, path: str, headers: Mapping[str, str]) -> str | None:
        entries = {
            "/scheduledevents?api-version=2020-07-01": events,
            "/instance/compute/name?api-version=2020-07-01&format=text": "pod_3",
        }
        return entries.get(path) if headers.get("metadata") == "true" else None

    monkeypatch.setattr(metadata, "AZURE", serve(answer))
    assert azure_notice() == notice


def test_a_server_that_is_not_there_sends_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "GOOGLE", "http://127.0.0.1:9/")
    monkeypatch.setattr(metadata, "AMAZON", "http://127.0.0.1:9/")
    monkeypatch.setattr(metadata, "AZURE", "http://127.0.0.1:9/")
    assert google_notice() is None and amazon_notice() is None and azure_notice() is None


def test_an_answer_that_breaks_off_is_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that asks must not end with it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(metadata, "GOOGLE", f"http://127.0.0.1:{server.getsockname()[1]}/")

        def answer() -> None:
            for _ in range(2):
                connection, _ = server.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nTR")

        threading.Thread(target=answer, daemon=True).start()
        assert google_notice() is None


def test_the_cloud_is_read_from_the_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "HARDWARE", tmp_path)
    assert find_notices() is None
    (tmp_path / "product_name").write_text("Google Compute Engine\n")
    assert find_notices() is google_notice
    (tmp_path / "product_name").write_text("p5.48xlarge\n")
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    assert find_notices() is amazon_notice
    (tmp_path / "sys_vendor").write_text("Microsoft Corporation\n")
    assert find_notices() is None  # a virtual machine on someone's Hyper-V
    (tmp_path / "chassis_asset_tag").write_text("7783-7084-3265-9085-8269-3286-77\n")
    assert find_notices() is azure_notice


@pytest.mark.parametrize(
    ("entries", "several"),
    [
        ({}, False),
        ({"/attributes/worker-network-endpoints": "10.0.0.1"}, False),
        ({"/attributes/worker-network-endpoints": "10.0.0.1,10.0.0.2"}, True),
        ({"/attributes/tpu-env": "ZONE: 'z'\nMEGASCALE_NUM_SLICES: '2'\n"}, True),
        ({"/attributes/tpu-env": "MEGASCALE_NUM_SLICES: '1'\n"}, False),
    ],
)
def test_a_tpu_vm_knows_whether_it_has_other_hosts(
    serve: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch, entries: Mapping[str, str], several: bool
) -> None:
    monkeypatch.setattr(metadata, "GOOGLE", serve(lambda _, path, headers: entries.get(path)))
    monkeypatch.setattr(metadata, "find_cloud", lambda: "google")
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not is_in_cluster()
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    assert is_in_cluster() == several


def test_the_first_notice_is_reported_once() -> None:
    answers, reported, read = iter([None, None, "notice of a preemption"]), [], threading.Event()

    def report(text: str) -> None:
        reported.append(text)
        read.set()

    with MaintenanceNotices(report, lambda: next(answers), poll_s=0.01):
        assert read.wait(30)
    assert reported == ["notice of a preemption"]


def test_a_signal_counts_more_than_a_later_notice() -> None:
    interrupts = Interrupts()
    interrupts.notice("notice of a preemption")
    assert (interrupts.received, interrupts.number) == ("notice of a preemption", 15)
    interrupts = Interrupts()
    interrupts._remember(2, None)  # pyright: ignore[reportArgumentType]
    interrupts.notice("notice of a preemption")
    assert (interrupts.received, interrupts.number) == ("SIGINT", 2)


@pytest.mark.whole
def test_a_notice_ends_a_run_with_a_saved_step(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "find_notices", lambda: lambda: "notice of a preemption")
    result = train(make_config(steps=1000))
    assert result.interrupted_by == "notice of a preemption"
    assert (result.run_dir / "checkpoints" / f"step_{result.step:08d}").is_dir() and result.step < 1000
    assert maintenance.NOTICE in (result.run_dir / "attempts.jsonl").read_text()
