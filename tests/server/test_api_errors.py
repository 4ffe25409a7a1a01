"""Everything refused is refused in OpenAI's envelope, by name, small, and without a look inside."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.engine.frontend import Frontend
from paceline.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    RequestError,
    RequestFailedError,
)
from paceline.server.options import ServeOptions, read_keys
from support.server_cases import MAX_MODEL_LEN, Api, ScriptedEngine, envelope, events_in

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("guided_json", {}),
        ("structured_outputs", {"regex": "a"}),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("functions", [{}]),
        ("logits_processors", ["x"]),
        ("use_beam_search", True),
        ("reasoning_effort", "high"),
        ("continue_final_message", True),
        ("chat_template", "{{ 1 }}"),
        ("truncate_prompt_tokens", 1),
        ("echo", True),
        ("add_special_tokens", True),
    ],
)
def test_unsupported_chat_fields_are_refused_by_name(api: Api, field: str, value: Any) -> None:
    error = api.refused(CHAT, {"messages": HI, field: value})
    assert error["param"] == field
    assert error["code"] == "unsupported_parameter"
    assert field in error["message"]


@pytest.mark.parametrize(
    ("field", "value"), [("suffix", "x"), ("prompt_embeds", ["x"]), ("use_beam_search", 1)]
)
def test_unsupported_completion_fields_are_refused_by_name(api: Api, field: str, value: Any) -> None:
    assert api.refused(COMPLETIONS, {"prompt": "x", field: value})["param"] == field


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"no_such_field": 1}, "no_such_field"),
        ({"temprature": 1}, "temprature"),
        ({"stream_options": {"include_use": True}, "stream": True}, "stream_options.include_use"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
    ],
)
def test_unknown_fields_are_named(api: Api, body: dict[str, Any], param: str) -> None:
    error = api.refused(CHAT, {"messages": HI, **body})
    assert error["param"] == param and error["code"] == "unknown_field"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e9}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 10**30}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {str(2**63): 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"seed": 2**64}, "seed"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 6}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"priority": 2**40}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"request_id": "a b"}, "request_id"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [*HI, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_bad_chat_values_are_named(
    api: Api, scripted: ScriptedEngine, body: dict[str, Any], param: str
) -> None:
    error = api.refused(CHAT, {"messages": HI, **body})
    assert error["param"] == param
    assert scripted.requests == []


@pytest.mark.parametrize(
    ("given", "reasons"),
    [
        ({"allowed_token_ids": [439], "min_tokens": 2}, ["min_tokens (2)"]),
        ({"allowed_token_ids": [439, 7], "stop_token_ids": [7], "min_tokens": 1}, ["min_tokens (1)"]),
        ({"allowed_token_ids": [439], "min_tokens": 1, "ignore_eos": True}, ["min_tokens (1)"]),
        ({"allowed_token_ids": [64], "bad_words": ["a"]}, ["bad_words"]),
        (
            {"allowed_token_ids": [64, 439], "bad_words": ["a"], "min_tokens": 3},
            ["min_tokens (3)", "bad_words"],
        ),
    ],
    ids=str,
)
def test_candidates_that_are_all_masked_are_refused(
    api: Api, scripted: ScriptedEngine, given: dict[str, Any], reasons: list[str]
) -> None:
    error = api.refused(CHAT, {"messages": HI, **given})
    assert error["param"] == "allowed_token_ids"
    assert str(given["allowed_token_ids"]) in error["message"]
    for name in ("min_tokens (", "bad_words"):
        assert (name in error["message"]) == any(reason.startswith(name) for reason in reasons)
    assert scripted.requests == []
    api.chat(**{**given, "allowed_token_ids": [*given["allowed_token_ids"], 65]})
    api.chat(**{**given, "min_tokens": 0, "bad_words": ["ab xyz"]})
    del given["allowed_token_ids"]
    api.chat(**given)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": [2**64]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "x", "logprobs": 6}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": ["x"] * 9, "n": 128}, "n"),
        ({"prompt": ["x"] * 9, "n": 10**18}, "n"),
    ],
)
def test_bad_completion_values_named(api: Api, scripted: ScriptedEngine, body: Any, param: str) -> None:
    assert api.refused(COMPLETIONS, body)["param"] == param
    assert scripted.requests == []


def test_context_overflow(api: Api) -> None:
    error = api.refused(COMPLETIONS, {"prompt": [64] * 250, "max_tokens": 7})
    assert error["code"] == "context_length_exceeded"
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in error["message"]
    assert "257 tokens (250 in the prompt, 7 for the output)" in error["message"]
    error = api.refused(CHAT, {"messages": [{"role": "user", "content": "x " * 400}]})
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    api.complete(prompt=[64] * 250, max_tokens=6)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("logit_bias", {"x": 1}, "logit_bias maps token ids to numbers, got the key 'x'"),
        ("logit_bias", {"5": 1, "6.0": 1}, "got the key '6.0'"),
        ("logit_bias", {"-1": 1}, "from 0 to 511, got -1"),
        ("stop_token_ids", [5, -1], "from 0 to 511, got -1"),
        ("allowed_token_ids", [2**70], f"from 0 to 511, got {2**70}"),
        ("priority", 2**40, f"from {-(2**31)} to {2**31 - 1}, got {2**40}"),
        ("cache_salt", "s" * 300, "1 to 256 characters, got 300"),
        ("request_id", "a b", "of the characters A-Z a-z 0-9 . _ : -, got 'a b'"),
    ],
)
def test_messages_say_what_was_given_and_what_is_allowed(
    api: Api, field: str, value: Any, message: str
) -> None:
    for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "x"})):
        error = api.refused(path, {**body, field: value})
        assert message in error["message"] and error["param"] == field


@pytest.mark.parametrize("path", [COMPLETIONS, "/detokenize"])
@pytest.mark.parametrize("token", [-1, 512, 2**70])
def test_token_ids_out_of_range_are_shown(api: Api, path: str, token: int) -> None:
    field = "tokens" if path == "/detokenize" else "prompt"
    error = api.refused(path, {field: [5, token]})
    assert error["param"] == field
    assert str(token) in error["message"] and "0..511" in error["message"]


@pytest.mark.parametrize(("field", "value"), [("temperature", "1e999"), ("max_tokens", "9" * 5000)])
def test_numbers_beyond_all_ranges_are_named(api: Api, field: str, value: str) -> None:
    error = refusal_of(api, f'{{"messages": [], "{field}": {value}}}'.encode())
    assert error["param"] == field and error["message"].startswith(f"{field}: ")
    assert "out of range; numbers are at most 1.8e+308, integers have at most 4300 digits" in error["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "The body is empty"),
        (b" \n", "The body is empty"),
        (b'{"user": "\\ud800"}', "lone surrogate"),
        (b'{"user": "a\\udfffb"}', "lone surrogate"),
        (b'{"user": "\\udc00\\ud800"}', "lone surrogate"),
        (b'{"user": "\\ud83d\\ude42', "truncated"),
    ],
)
def test_bodies_that_are_no_json_say_why(api: Api, body: bytes, message: str) -> None:
    error = refusal_of(api, body)
    assert message in error["message"] and error["code"] == "invalid_json"


def refusal_of(api: Api, body: bytes) -> dict[str, Any]:
    response = api.request("POST", CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    return envelope(response)


def test_what_needs_a_tokenizer_says_how_it_was_left_out(scripted: ScriptedEngine) -> None:
    scripted.frontend = Frontend(scripted.frontend.info, skip_tokenizer_init=True)
    api = Api(scripted)
    for path, body in (
        (CHAT, {"messages": HI}),
        (COMPLETIONS, {"prompt": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [5]}),
    ):
        assert "--skip-tokenizer-init" in api.refused(path, body)["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [False, True])
def test_limits_of_the_output_are_named_as_they_were_given(
    api: Api, scripted: ScriptedEngine, name: str, stream: bool
) -> None:
    body = {"messages": HI, "stream": stream}
    for value, allowed in ((0, f"{name} must be an integer from 1"), (250, f"lower {name}.")):
        error = api.refused(CHAT, {**body, name: value})
        assert error["param"] == name and allowed in error["message"]
    error = api.refused(CHAT, {**body, name: 8, "min_tokens": 9})
    assert error["param"] == "min_tokens" and f"must not exceed {name} (8)" in error["message"]
    scripted.fail_after = 0
    scripted.failure = ContextLengthError("It needs 9 blocks. Lower max_tokens.", param="max_tokens")
    error = api.refused(CHAT, {**body, name: 8})
    assert error["param"] == name and error["message"] == f"It needs 9 blocks. Lower {name}."
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"a": 1}}', b"[" * 100_000]
)
def test_bodies_that_are_no_objects(api: Api, body: bytes) -> None:
    response = api.request("POST", CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    envelope(response)


def test_deep_and_long_input_gives_a_small_answer(api: Api) -> None:
    deep: Any = "x"
    for _ in range(500):
        deep = {"a": deep}
    api.refused(CHAT, {"messages": HI, "chat_template_kwargs": {"d": deep}})
    api.refused(CHAT, {"messages": HI, "x" * 100_000: 1})
    api.refused(CHAT, {"messages": HI, "stop": ["y" * 100_000]})
    api.refused(CHAT, {"messages": HI, "model": "z" * 100_000}, status=404)
    envelope(api.get("/" + "w" * 10_000))


def test_lone_surrogates(api: Api) -> None:
    for text in ("\ud800", "a\udfffb", "\ud83d\ud83d", "\udc00\ud800"):
        body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
        response = api.request("POST", CHAT, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        envelope(response)


def test_unknown_model_route_and_method(api: Api) -> None:
    error = api.refused(CHAT, {"messages": HI, "model": "gpt-5"}, status=404)
    assert error["code"] == "model_not_found" and error["param"] == "model" and "mini" in error["message"]
    assert api.get("/v1/models/gpt-5").status_code == 404
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/health", 405),
        ("GET", "/docs", 404),
        ("GET", "/v1/models/", 404),
    ):
        response = api.request(method, path)
        assert response.status_code == status, path
        envelope(response)
    assert api.request("GET", CHAT).headers["allow"] == "POST"


def test_body_limits(scripted: ScriptedEngine) -> None:
    api = Api(scripted, ServeOptions(max_body_bytes=1000))
    assert api.refused(CHAT, {"messages": [{"role": "user", "content": "x" * 2000}]}, 413)["code"] == (
        "request_too_large"
    )

    async def chunks() -> Any:
        for _ in range(100):
            yield b"x" * 100

    response = api.request("POST", CHAT, content=chunks())  # no content-length
    assert response.status_code == 413
    response = api.request("POST", CHAT, content=b"a=b", headers={"content-type": "text/plain"})
    assert response.status_code == 415
    assert envelope(response)["param"] is None


def test_dead_engine_is_503(api: Api, scripted: ScriptedEngine) -> None:
    scripted.dead = True
    for body in ({"messages": HI}, {"messages": HI, "stream": True}):
        error = api.refused(CHAT, body, status=503)
        assert error["type"] == "server_error" and error["code"] == "engine_dead"
    assert b"paceline:engine_up" in api.get("/metrics").content


@pytest.mark.parametrize("stream", [False, True])
def test_failures_before_the_first_token_have_their_status(
    api: Api, scripted: ScriptedEngine, stream: bool
) -> None:
    scripted.fail_after = 0
    cases = (
        (EngineDeadError("secret: AttributeError"), 503),
        (RequestError("too big for the pool", param="prompt"), 400),
        (ZeroDivisionError("secret /path 0x7f00"), 500),
    )
    for failure, status in cases:
        scripted.failure = failure
        error = api.refused(CHAT, {"messages": HI, "stream": stream}, status=status)
        assert "secret" not in error["message"]


def test_failures_in_a_stream_are_events(
    api: Api, scripted: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.fail_after = 3
    response = api.post(CHAT, {"messages": HI, "stream": True})
    *_, last = events_in(response.content)
    assert response.status_code == 200
    assert last["error"]["code"] == "engine_dead"
    scripted.failure = ZeroDivisionError("secret")
    with caplog.at_level(logging.ERROR):
        *_, last = events_in(api.post(CHAT, {"messages": HI, "stream": True}).content)
    assert last["error"]["code"] == "internal_error"
    assert "secret" not in last["error"]["message"] and "secret" in caplog.text


def test_one_failing_prompt_ends_the_others(api: Api, scripted: ScriptedEngine) -> None:
    calls = 0

    async def hold(step: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RequestError("no room")

    scripted.hold = hold
    api.refused(COMPLETIONS, {"prompt": ["a", "b", "c"], "max_tokens": 64})
    assert len(scripted.aborted) == 3


def test_keys_guard_everything_but_health(scripted: ScriptedEngine) -> None:
    foreign = b"sk-\xe9"  # not UTF-8, as the environment may hold it
    api = Api(scripted, ServeOptions(api_keys=("sk-one", "sk-two", os.fsdecode(foreign))))
    assert api.get("/health").status_code == 200
    for path in ("/v1/models", "/metrics", "/version", "/nothing", "/health/", "//health"):
        response = api.get(path)
        assert response.status_code == 401, path
        assert envelope(response)["code"] == "invalid_api_key"
    for header in ("sk-one", "Bearer", "Bearer ", "Bearer sk-", "Basic sk-one", "Bearer sk-one2", "Bearer é"):
        assert api.get("/v1/models", headers={"authorization": header.encode()}).status_code == 401, header
    for key in (b"sk-one", b"sk-two", foreign):
        assert api.get("/v1/models", headers={"authorization": b"Bearer " + key}).status_code == 200


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="API key is empty"):
        ServeOptions(api_keys=("",))
    with pytest.raises(ConfigError, match="model name is empty"):
        ServeOptions(served_model_names=("",))
    with pytest.raises(ConfigError, match="must be positive"):
        ServeOptions(max_body_bytes=0)


def test_keys_come_from_flags_a_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-two\n\n  sk-three \n")
    monkeypatch.delenv("PACELINE_API_KEY", raising=False)
    assert read_keys((), None) == ()
    assert read_keys(["sk-one"], str(file)) == ("sk-one", "sk-two", "sk-three")
    monkeypatch.setenv("PACELINE_API_KEY", "sk-four\n")  # as a secret ends that was written by an editor
    assert read_keys([" sk-one "], None) == ("sk-one", "sk-four")
    file.write_bytes(b"\xef\xbb\xbfsk-five\r\n")  # as some editors begin and end lines
    assert read_keys((), str(file)) == ("sk-five", "sk-four")
    monkeypatch.setenv("PACELINE_API_KEY", "")  # as a script leaves it whose secret is missing
    with pytest.raises(ConfigError, match="API key is empty"):
        ServeOptions(api_keys=read_keys((), None))


@pytest.mark.parametrize(
    ("content", "message"), [(None, "No such file"), (b" \n\n", "holds no key"), (b"\xff", "UTF-8|utf-8")]
)
def test_a_file_without_keys_does_not_open_the_server(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_keys((), str(file))


def test_without_a_chat_template(tmp_path: Path) -> None:
    from support.text_cases import build_backend, write_checkpoint

    engine = ScriptedEngine(write_checkpoint(tmp_path, build_backend(), chat_template=None))
    error = Api(engine).refused(CHAT, {"messages": HI})
    assert "no chat template" in error["message"]


def test_a_failure_inside_the_engine_is_not_the_clients_fault(scripted: ScriptedEngine) -> None:
    scripted.fail_after, scripted.failure = 1, RequestFailedError("RuntimeError: at 0x7f")
    response = Api(scripted).post(COMPLETIONS, {"prompt": "x"})
    assert response.status_code == 500
    assert envelope(response)["type"] == "server_error"
    assert "0x7f" not in response.text


def test_health_answers_probes_without_a_body(scripted: ScriptedEngine) -> None:
    api = Api(scripted)
    assert api.request("HEAD", "/health").status_code == 200
    scripted.dead = True
    assert api.request("HEAD", "/health").status_code == 503


def test_long_texts_do_not_stop_the_loop(scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenising megabytes takes seconds, in which health checks and streams must go on."""
    frontend = scripted.frontend
    main, threads = threading.get_ident(), []
    for owner, name in (
        *((frontend.tokenizer, name) for name in ("encode", "decode")),
        *((frontend, name) for name in ("tokenize", "render_chat")),
    ):
        real = getattr(owner, name)

        def noting(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            threads.append(threading.get_ident())
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)
    api, text = Api(scripted), "<b> " * 6000
    part = {"type": "text", "text": text}
    for path, body in (
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": [{"role": "user", "content": [part]}]}),
        ("/detokenize", {"tokens": [65] * 24_001}),
        (COMPLETIONS, {"prompt": text}),
        (COMPLETIONS, {"prompt": text, "add_special_tokens": False}),
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
        (CHAT, {"messages": [{"role": "user", "content": [part]}]}),
    ):
        threads.clear()
        api.post(path, body)
        assert threads and main not in threads, path


@pytest.mark.parametrize("level", ["nope", "", "WARNING"])
def test_unknown_log_levels_are_refused(level: str) -> None:
    with pytest.raises(ConfigError, match="uvicorn_log_level"):
        ServeOptions(uvicorn_log_level=level)
