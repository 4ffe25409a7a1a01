"""Conversations are checked where all of them pass: on their way to the template."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import RequestError
from support.server_cases import Api, ScriptedEngine


@pytest.mark.parametrize("role", ["robot", "User", "", None, 5, ["user"]])
def test_unknown_roles_are_refused_everywhere(api: Api, scripted: ScriptedEngine, role: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": role, "content": "hi"}]
    with pytest.raises(RequestError) as caught:
        scripted.frontend.render_chat(messages)
    assert caught.value.param == "messages[1].role"
    assert "one of system, developer, user, assistant, tool, got " in str(caught.value)
    assert repr(role) in str(caught.value)
    error = api.refused("/v1/chat/completions", {"messages": messages})
    assert error["param"] == "messages[1].role"
    assert not isinstance(role, str) or error["message"] == str(caught.value)


def test_known_roles_are_rendered_and_developers_are_the_system(scripted: ScriptedEngine) -> None:
    def render(role: str) -> list[int]:
        return scripted.frontend.render_chat([{"role": role, "content": "hi"}])

    for role in ("system", "user", "assistant", "tool"):
        assert render(role)
    assert render("developer") == render("system") != render("user")


def test_a_text_part_without_text_is_called_that(api: Api, scripted: ScriptedEngine) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text"}]}]
    with pytest.raises(RequestError, match="is a text part without text") as caught:
        scripted.frontend.render_chat(messages)
    assert caught.value.param == "messages[0].content[1]"
    assert api.refused("/v1/chat/completions", {"messages": messages})["message"] == str(caught.value)
