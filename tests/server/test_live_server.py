"""``paceline serve`` for real: two processes, a socket, the official client. The weights are random, the rest
is not."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from support.server_cases import envelope, events_in
from support.text_cases import build_backend, write_checkpoint

MAX_MODEL_LEN = 512
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 448,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
    "eos_token_id": 439,
    "torch_dtype": "float32",
}

PROGRAM = ["-m", "paceline.cli.main"]
IMPATIENT = [
    "-c",
    "from paceline.server import run; run.GRACE_S = run.GRACE_TO_SEND_S = 0.3; "
    "from paceline.cli.main import main; main()",
]
EAGER = [
    "-c",
    "import socket; from paceline.server import run; say = run._announce; "
    "run._announce = lambda *args: (socket.create_connection(args[2].getsockname(), 5).close(), say(*args)); "
    "from paceline.cli.main import main; main()",
]
FLAGS = ["--load-format", "dummy", "--port", "0", "--threads", "1", "--served-model-name", "mini"]


class LiveServer:
    """A server process and what it printed."""

    def __init__(self, folder: Path, *flags: str, program: Sequence[str] = PROGRAM) -> None:
        self.log = folder / f"serve-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, "serve", str(folder), *FLAGS, *flags],
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # as supervisors do: the server leads a process group
            )
        self.url = self._wait()
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def _wait(self) -> str:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            found = re.search(r"at (http://\S+)/v1", self.log.read_text())
            if found:
                return found[1]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(f"the server did not start: {self.log.read_text()}")

    def metric(self, name: str) -> float:
        found = re.search(rf"^paceline:{name}{{[^}}]*}} (\S+)", self.http.get("/metrics").text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def wait_for(self, name: str, value: float) -> None:
        deadline = time.monotonic() + 60
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.02)

    def children(self) -> list[int]:
        """Ids of the processes the server started."""
        pid = self.process.pid
        return [int(i) for i in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def stop(self) -> int:
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def _folder(path: Path) -> Path:
    folder = write_checkpoint(path, build_backend())
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    live = LiveServer(_folder(tmp_path_factory.mktemp("live")))
    yield live
    children = live.children()
    assert live.stop() == 0, live.log.read_text()
    assert children and not any(Path(f"/proc/{child}").exists() for child in children)


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


HI: list[Any] = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"model": "mini", "temperature": 0}


def test_chat_with_the_official_client(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        messages=HI,
        max_completion_tokens=12,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True},
        **GREEDY,
    )
    (choice,) = whole.choices
    assert choice.finish_reason == "length" and whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [len(item.top_logprobs) for item in choice.logprobs.content] == [3] * 12
    # greedy: the chosen token is the most likely one
    assert all(item.logprob == item.top_logprobs[0].logprob for item in choice.logprobs.content)

    text, usage, reasons = "", None, []
    for chunk in client.chat.completions.create(
        messages=HI,
        max_completion_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
        **GREEDY,
    ):
        for part in chunk.choices:
            text += part.delta.content or ""
            reasons.append(part.finish_reason)
        usage = chunk.usage or usage
    assert text == choice.message.content
    assert reasons[-1] == "length"
    assert usage is not None and usage.total_tokens == whole.usage.total_tokens


def test_completions_with_the_official_client(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {**GREEDY, "prompt": ["a", "b c", "ab"], "max_tokens": 6, "logprobs": 2}
    whole = client.completions.create(**arguments)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = ["", "", ""]
    for chunk in client.completions.create(stream=True, **arguments):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert [model.id for model in client.models.list()] == ["mini"]
    assert client.models.retrieve("mini").id == "mini"


def test_same_seed_same_text_with_neighbours(client: openai.OpenAI) -> None:
    def sample(seed: int) -> list[str]:
        response = client.completions.create(
            model="mini", prompt="once", max_tokens=16, temperature=1, seed=seed, n=2
        )
        return [choice.text for choice in response.choices]

    alone = sample(7)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(sample, (7, 8, 7, 9)))
    assert together[0] == together[2] == alone
    assert alone[0] != alone[1] and together[1] != alone


def test_prefix_cache_is_reported(client: openai.OpenAI) -> None:
    prompt = [70 + i % 50 for i in range(100)]
    counts = []
    for _ in range(2):
        usage = client.completions.create(**GREEDY, prompt=prompt, max_tokens=2).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        counts.append(usage.prompt_tokens_details.cached_tokens)
    assert counts == [0, 96]


def test_errors_raise_in_the_official_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens") as caught:
        client.completions.create(**GREEDY, prompt=[64] * 500, max_tokens=13)
    assert caught.value.code == "context_length_exceeded"
    assert client.completions.create(**GREEDY, prompt=[64] * 500, max_tokens=12).usage is not None
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    refused: list[tuple[str, Any]] = [("nonsense", 1), ("suffix", "x"), ("top_k", -7)]
    for param, value in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**GREEDY, prompt="x", extra_body={param: value})
        assert caught.value.param == param
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="token id 448"):
            client.completions.create(**GREEDY, prompt=[448], stream=stream)


def test_stop_string_agrees_in_text_tokens_and_usage(server: LiveServer) -> None:
    body = {
        **GREEDY,
        "prompt": "The",
        "max_tokens": 40,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    whole = server.http.post("/v1/completions", json=body).json()["choices"][0]
    text = whole["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = server.http.post("/v1/completions", json={**body, "stop": stop}).json()
    choice = cut["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    count = cut["usage"]["completion_tokens"]
    assert count == len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) <= 40
    assert choice["token_ids"] == whole["token_ids"][:count]


def test_requests_as_benchmark_clients_send_them(server: LiveServer) -> None:
    body = {
        "model": "mini",
        "prompt": "hello " * 20,
        "repetition_penalty": 1.0,
        "max_tokens": 8,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    }
    chunks = events_in(server.http.post("/v1/completions", json=body).content)
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    chat = {
        "model": "mini",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "max_completion_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    chunks = events_in(server.http.post("/v1/chat/completions", json=chat).content)
    assert chunks[-1]["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(server: LiveServer, stream: bool) -> None:
    server.wait_for("num_requests_running", 0)
    before = server.metric("kv_cache_usage_perc")
    body = json.dumps(
        {"model": "mini", "prompt": "x", "n": 3, "max_tokens": 500, "ignore_eos": True, "stream": stream}
    ).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        server.wait_for("num_requests_running", 3)
    server.wait_for("num_requests_running", 0)
    assert server.metric("num_requests_waiting") == 0
    assert server.metric("kv_cache_usage_perc") == before


def test_many_at_once_answer_as_one_by_one(client: openai.OpenAI, server: LiveServer) -> None:
    def ask(i: int) -> str:
        response = client.completions.create(**GREEDY, prompt=f"number {i}", max_tokens=10)
        return str(response.choices[0].text)

    alone = [ask(i) for i in range(6)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, [i % 6 for i in range(48)]))
    assert together == alone * 8
    server.wait_for("num_requests_running", 0)


def test_a_dead_engine_is_seen_reported_and_replaced(tmp_path: Path) -> None:
    live = LiveServer(_folder(tmp_path), "--api-key", "sk-test")
    try:
        live.http.headers["authorization"] = "Bearer sk-test"
        body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 4}
        with live.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            next(lines)
            (engine,) = live.children()
            os.kill(engine, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
        statuses: list[int] = []
        deadline = time.monotonic() + 90
        while not statuses or statuses[-1] != 200:
            assert time.monotonic() < deadline, live.log.read_text()
            statuses.append(live.http.get("/health").status_code)
            time.sleep(0.02)
        assert 503 in statuses
        short = {"prompt": "x", "max_tokens": 2}
        assert live.http.post("/v1/completions", json=short).status_code == 200
        response = httpx.get(f"{live.url}/v1/models")
        assert response.status_code == 401 and envelope(response)
    finally:
        live.stop()


def test_a_second_signal_ends_what_is_in_flight_in_words(tmp_path: Path) -> None:
    live = LiveServer(_folder(tmp_path))
    try:
        _signal_twice(live)
    finally:
        live.process.kill()
    assert live.process.wait() == 0
    assert "Traceback" not in live.log.read_text(), live.log.read_text()


def test_a_signal_to_the_process_group_leaves_requests_their_grace(tmp_path: Path) -> None:
    """As systemd, ``timeout`` and ``kill -- -PGID`` send it: to the engine's process as well."""
    live = LiveServer(_folder(tmp_path))
    try:
        children = live.children()
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with live.http as http, http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.killpg(live.process.pid, signal.SIGTERM)
            rest = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
        assert live.process.wait(30) == 0
        assert children and not any(Path(f"/proc/{child}").exists() for child in children)
    finally:
        live.process.kill()
        live.process.wait()


def _signal_twice(live: LiveServer) -> None:
    """With a stream under way and a whole answer in the queue; both must end with an error."""
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "n": 128}  # some seconds of work each
    with ThreadPoolExecutor(1) as pool, live.http as http:
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            whole = pool.submit(http.post, "/v1/completions", json=body)
            deadline = time.monotonic() + 60
            while live.metric("num_requests_waiting") < 128:  # 96 before the second request has come
                assert time.monotonic() < deadline
            live.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            live.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert whole.result().status_code == 503 and envelope(whole.result())["code"] == "engine_dead"
    live.process.wait(30)


def test_a_client_that_stops_reading_is_hung_up_on(tmp_path: Path) -> None:
    live = LiveServer(_folder(tmp_path), program=IMPATIENT)
    try:
        body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "n": 8, "logprobs": 20, "stream": True}
        address = ("127.0.0.1", int(live.url.rpartition(":")[2]))
        with socket.socket() as client, live.http:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(address)
            content = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
            client.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + content)
            assert client.recv(12) == b"HTTP/1.1 200"
            live.wait_for("generation_tokens_total", 8 * 500)  # most of them have nowhere to go
            live.process.send_signal(signal.SIGTERM)
            assert live.process.wait(30) == 0
    finally:
        live.process.kill()
    log = live.log.read_text()
    assert "connections cut off: 1" in log and "Traceback" not in log, log


def test_the_address_is_announced_when_it_is_listened_on(tmp_path: Path) -> None:
    live = LiveServer(_folder(tmp_path), program=EAGER)
    assert live.http.get("/health").status_code == 200
    assert live.stop() == 0


def test_a_port_in_use_is_one_line(tmp_path: Path, server: LiveServer) -> None:
    port = server.url.rpartition(":")[2]
    result = subprocess.run(
        [sys.executable, "-m", "paceline.cli.main", "serve", str(tmp_path), "--port", port],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert f"Cannot listen on 127.0.0.1:{port}" in result.stderr and "Traceback" not in result.stderr
