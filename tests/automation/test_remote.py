"""Checking an address: header and markers by ranges from a local server, well-behaved and otherwise."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import sys
import threading
import time
from pathlib import Path

import pytest
from quant_loader.automation import transport
from quant_loader.automation.errors import RequestError
from quant_loader.automation.remote import UNREAD, check_address, resolve
from quant_loader.automation.transport import RemoteBytes, join

LAYER = "blocks.0.attn.qkv_proj"
SECRET = "hf_s3cret"


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves one folder. The server's ``behaviour`` says what is wrong with it."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        path, _, query = self.path.partition("?")
        server.seen.append((path, query, dict(self.headers)))
        answer = (
            server.behaviour.pop(0) if isinstance(server.behaviour, list) and server.behaviour else server.behaviour
        )
        if callable(answer):
            answer(self)
            return
        if isinstance(answer, int):
            self.plain(answer)
            return
        file = Path(server.folder, path.lstrip("/"))
        if not file.is_file():
            self.plain(404)
            return
        data = file.read_bytes()
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        assert match is not None, "a request without a range"
        first, last = int(match[1]), min(int(match[2]), len(data) - 1)
        if first >= len(data):
            self.plain(416)
            return
        part = data[first : last + 1]
        if answer == "no ranges":
            self.send_response(200)
            self.send_header("Content-Length", str(1 << 40))
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    server.sent += self.wfile.write(bytes(1 << 16))
        elif answer == "cut":
            self.part(part, first, last, len(data), body=part[: len(part) // 2])
            self.close_connection = True
        elif answer == "another part":
            self.part(part, first + 1, last + 1, len(data))
        elif answer == "no content range":
            self.send_response(206)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part)
        elif answer == "grows":
            self.part(part, first, last, len(data) + (len(server.seen) > 1))
        elif answer == "gzip":
            self.part(part, first, last, len(data), encoding="gzip")
        elif answer == "drip":
            self.part(part, first, last, len(data), body=b"")
            with contextlib.suppress(OSError):
                for byte in part:
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.05)
        elif answer == "silent":
            time.sleep(2)
        else:
            self.part(part, first, last, len(data))

    def plain(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def part(
        self, part: bytes, first: int, last: int, size: int, body: bytes | None = None, encoding: str = ""
    ) -> None:
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Content-Length", str(len(part)))
        if encoding:
            self.send_header("Content-Encoding", encoding)
        self.end_headers()
        self.server.sent += self.wfile.write(part if body is None else body)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.behaviour: object = None
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.sent = 0

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"

    def handle_error(self, *_: object) -> None:
        """A client that leaves early is expected here."""


@pytest.fixture
def server(kit, monkeypatch):
    monkeypatch.setattr(transport, "PAUSE", 0.01)
    server = Server(kit.folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def big(kit):
    """Layers whose markers lie between weights of 200 KB each, and one broken marker."""
    tensors = {}
    for i in range(12):
        tensors.update(kit.int8(f"blocks.{i}.w", b"\0" * 9 if i == 7 else kit.convrot, N=800, K=256))
    return kit.file("big.safetensors", tensors)


def test_same_verdict_as_the_local_file_for_a_fraction_of_the_bytes(server, big):
    from quant_loader.checkpoint import check

    remote, local = check_address(server.url("big.safetensors")), check([big])
    assert (
        [(f.rule, f.layer) for f in remote.errors]
        == [(f.rule, f.layer) for f in local.errors]
        == [("marker.json", "blocks.7.w")]
    )
    assert remote.formats == local.formats == {"int8_tensorwise": 11}
    assert server.sent < big.stat().st_size / 4
    assert 2 <= len(server.seen) <= 13


def test_scales_are_not_read_and_the_report_says_so(kit, server):
    nan = kit.T("F32", (256, 1), b"\0\0\xc0\x7f" * 256)
    kit.file("a.safetensors", kit.int8(LAYER, weight_scale=nan))
    report = check_address(server.url("a.safetensors"))
    assert report.verdict == "ok"
    (notice,) = [fault for fault in report.faults if fault.rule == UNREAD]
    assert notice.severity == "notice"
    assert "Scales were not read" in notice.message


def test_dtypes_and_shapes_of_scales_are_checked(kit, server):
    kit.file("a.safetensors", kit.int8(LAYER, weight_scale=kit.scale("BF16", 256, 1)))
    assert check_address(server.url("a.safetensors")).errors[0].rule == "int8.dtype"
    assert check_address(server.url("a.safetensors"), "compatible").verdict == "ok"


def test_header_larger_than_the_first_request(kit, server):
    tensors = {f"pad.{i:05d}.{'x' * 200}": kit.noise("BF16", 1) for i in range(1500)}
    kit.file("a.safetensors", {**tensors, **kit.int8(LAYER)})
    assert check_address(server.url("a.safetensors")).formats == {"int8_tensorwise": 1}


def test_command(server, big, command):
    ran = command("check", server.url("big.safetensors") + "?token=" + SECRET)
    assert ran.code == 1
    assert "blocks.7.w" in ran.out
    assert "Scales were not read" in " ".join(ran.out.split())
    assert SECRET not in ran.out + ran.err
    document = json.loads(command("check", "--json", server.url("big.safetensors")).out)
    assert document["verdict"] == "refused"
    assert command("check", "--deep", server.url("big.safetensors")).code == 2


# -- servers that misbehave ------------------------------------------------------------------------------------------


def failure(server, **options):
    with pytest.raises(RequestError) as error:
        check_address(server.url("big.safetensors"), **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_server_without_ranges_is_refused_and_nothing_is_downloaded(server, big):
    server.behaviour = "no ranges"
    started = time.monotonic()
    assert "no range requests" in failure(server)
    assert time.monotonic() - started < 5
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("cut", "the connection was cut"),
        ("another part", "another part than was asked for"),
        ("no content range", "did not say which part"),
        ("grows", "changed while it was being read"),
        ("gzip", "compresses its answers"),
        (404, "There is no file"),
        (401, "set HF_TOKEN"),
        (403, "set HF_TOKEN"),
        (416, "is empty"),
        (418, "answered 418"),
        (503, "answered 503, 4 times in a row"),
    ],
)
def test_misbehaviour_is_one_sentence(server, big, behaviour, words):
    server.behaviour = behaviour
    assert words in failure(server)


def test_passing_trouble_is_retried(server, big):
    server.behaviour = ["cut", 503, "another part"]
    assert check_address(server.url("big.safetensors")).formats == {"int8_tensorwise": 11}


def test_no_server_at_all(server, big):
    url = server.url("big.safetensors")
    server.shutdown()
    server.server_close()
    with pytest.raises(RequestError, match="refused"):
        check_address(url)


@pytest.mark.parametrize(
    "address",
    [
        "http://[::1/x.safetensors",
        "http://127.0.0.1:99999/x.safetensors",
        "http://me:hf_secret@127.0.0.1:port/x.safetensors",
        f"http://{'a' * 300}/x.safetensors",
        "http://",
        "hf://",
        "hf://[/b/c",
        "ftp://host/x.safetensors",
    ],
)
def test_what_is_no_address_is_one_sentence(command, address):
    for name in ("check", "plan"):
        ran = command(name, address)
        assert (ran.code, ran.out) == (2, "")
        assert len(ran.err.strip().splitlines()) == 1
        assert "hf_secret" not in ran.err


@pytest.mark.parametrize("behaviour", ["drip", "silent"])
def test_slow_servers_end_in_time(server, big, behaviour):
    server.behaviour = behaviour
    started = time.monotonic()
    message = failure(server, timeout=0.3, deadline=1.5)
    assert time.monotonic() - started < 4
    assert "slow" in message or "no answer in time" in message or "did not answer" in message


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"short",
        b"GGUF" + bytes(100),
        (1 << 60).to_bytes(8, "little") + bytes(50),
        (40).to_bytes(8, "little") + b"{" * 40,
    ],
)
def test_hostile_files(kit, server, command, raw):
    (kit.folder / "a.safetensors").write_bytes(raw)
    ran = command("check", server.url("a.safetensors"))
    assert ran.code == (2 if raw == b"" else 1)


def test_pickles_are_refused_by_name_without_a_request(server, command):
    ran = command("check", server.url("model.ckpt"))
    assert ran.code == 1
    assert "pickle" in ran.out
    assert server.seen == []


# -- redirects and tokens --------------------------------------------------------------------------------------------


def redirect(to):
    def answer(handler):
        handler.send_response(302)
        handler.send_header("Location", to)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def test_redirects_are_followed_once_and_the_token_stays_at_home(kit, server, big):
    elsewhere = Server(kit.folder)
    threading.Thread(target=elsewhere.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    server.behaviour = redirect(elsewhere.url("big.safetensors") + "?signature=x")
    source = RemoteBytes(server.url("resolve/main/big.safetensors"), SECRET)
    source.start(100)
    source.fetch([(1000, 1010), (900_000, 900_010)])
    elsewhere.shutdown()
    elsewhere.server_close()
    assert [headers.get("Authorization") for _, _, headers in server.seen] == [f"Bearer {SECRET}"]
    assert len(elsewhere.seen) == 3
    assert all("Authorization" not in headers for _, _, headers in elsewhere.seen)


def test_signed_address_that_runs_out_is_asked_for_again(server, big):
    asked = []

    def home(handler):
        asked.append(handler.path)
        redirect(server.url(f"big.safetensors?try={len(asked)}"))(handler)

    server.behaviour = [home, None, 403, home]
    source = RemoteBytes(server.url("start"))
    source.start(100)
    assert len(source.fetch([(5000, 5010)])[5000, 5010]) == 10
    assert len(asked) == 2


def test_endless_redirects_end(server, big):
    server.behaviour = redirect(server.url("big.safetensors"))
    assert "answered 302" in failure(server)


def test_redirect_to_a_file_is_not_followed(server, big):
    server.behaviour = redirect("file:///etc/passwd")
    assert "not followed" in failure(server) or "answered 302" in failure(server)


def test_token_never_shows(server, big, command, monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url("").rstrip("/"))
    for behaviour in (None, 401, 503, "cut", "no ranges"):
        server.behaviour = behaviour
        ran = command("check", server.url("big.safetensors"))
        assert SECRET not in ran.out + ran.err
    assert all(headers.get("Authorization") == f"Bearer {SECRET}" for _, _, headers in server.seen)


def test_token_is_for_the_hub_alone(server, big, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    check_address(server.url("big.safetensors"))
    assert all("Authorization" not in headers for _, _, headers in server.seen)


# -- the hub ---------------------------------------------------------------------------------------------------------


def test_hub_addresses(monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    from huggingface_hub import constants

    assert resolve("hf://owner/repo/sub/a b.safetensors") == (
        f"{constants.ENDPOINT}/owner/repo/resolve/main/sub/a%20b.safetensors",
        SECRET,
    )
    assert resolve("hf://owner/repo@v1/a.safetensors")[0] == f"{constants.ENDPOINT}/owner/repo/resolve/v1/a.safetensors"
    page = f"{constants.ENDPOINT}/owner/repo/blob/main/a.safetensors"
    assert resolve(page) == (page.replace("/blob/", "/resolve/"), SECRET)
    for bad in ("hf://owner/repo", "hf://", "hf://owner//a.safetensors", "hf://ow ner!/repo/a.safetensors"):
        with pytest.raises(RequestError):
            resolve(bad)


def test_hub_without_its_package_is_one_sentence(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    ran = command("check", "hf://owner/repo/a.safetensors")
    assert ran.code == 2
    assert "quant-loader[remote]" in ran.err


# -- shards ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def shards(kit):
    names = [f"m-{n:05d}-of-00002.safetensors" for n in (1, 2)]
    places = {}
    for name, layer in zip(names, ("a", "b"), strict=True):
        tensors = kit.int8(layer)
        kit.file(name, tensors)
        places.update(dict.fromkeys(tensors, name))
    (kit.folder / "m.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return names


@pytest.mark.parametrize("name", ["m.safetensors.index.json", "m-00002-of-00002.safetensors"])
def test_shard_sets(server, shards, name):
    assert check_address(server.url(name)).formats == {"int8_tensorwise": 2}


def test_missing_shard_is_named(kit, server, shards, command):
    (kit.folder / shards[1]).unlink()
    ran = command("check", server.url(shards[0]))
    assert ran.code == 2
    assert shards[1] in ran.err


@pytest.mark.parametrize(
    "index",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"weight_map": {"a": "../b"}}',
        b'{"weight_map": {"a": 3}}',
        b'{"weight_map": {"a": "b?c"}}',
    ],
)
def test_bad_index(kit, server, command, index):
    (kit.folder / "m.safetensors.index.json").write_bytes(index)
    assert command("check", server.url("m.safetensors.index.json")).code == 2


# -- ranges ----------------------------------------------------------------------------------------------------------


def test_close_ranges_are_joined():
    assert join([(100, 200), (0, 10), (300_000, 300_010), (150, 160)]) == [(0, 200), (300_000, 300_010)]
    assert join([]) == []


def test_requests_are_bounded(server, big):
    source = RemoteBytes(server.url("big.safetensors"))
    with pytest.raises(RequestError, match="download it"):
        source.fetch((i * 1_000_000, i * 1_000_000 + 1) for i in range(5000))
    assert server.seen == []
