"""A tool is a typed function: its schema, its checked arguments, its failures as sentences."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import pytest

from kilburn.agents.tool import Tool
from kilburn.errors import SpecError, ToolError


class Mode(Enum):
    READ = "read"
    WRITE = "write"


@dataclass
class Place:
    path: str
    line: int = 1


def read(path: str, start: int = 1, *, mode: Literal["text", "bytes"] = "text", tags: list[str] = ["a"]) -> str:  # noqa: B006
    """Read a text file from line `start` on.

    The second paragraph belongs to it.
    """
    tags.append("touched")
    return f"{path}:{start}:{mode}:{len(tags)}"


def test_the_signature_is_the_schema() -> None:
    spec = Tool(read).spec
    assert spec.name == "read"
    assert spec.description == "Read a text file from line `start` on.\n\nThe second paragraph belongs to it."
    schema = spec.parameters
    assert schema["type"] == "object"
    assert schema["required"] == ["path"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["path"] == {"type": "string"}
    assert schema["properties"]["start"]["type"] == "integer"
    assert schema["properties"]["start"]["default"] == 1
    assert sorted(schema["properties"]["mode"]["enum"]) == ["bytes", "text"]
    json.dumps(schema)


def test_nested_types_enums_and_none() -> None:
    def go(place: Place, mode: Mode, extra: dict[str, int] | None = None) -> list[Any]:
        return [place.path, place.line, mode.value, extra]

    tool = Tool(go, name="walk")
    assert tool.spec.name == "walk"
    assert set(tool.spec.parameters["required"]) == {"place", "mode"}
    referred = json.dumps(tool.spec.parameters)
    for name in tool.spec.parameters.get("$defs", {}):
        assert f"#/$defs/{name}" in referred
    assert json.loads(tool.call('{"place": {"path": "a"}, "mode": "write"}')) == ["a", 1, "write", None]
    with pytest.raises(ToolError):
        tool.call('{"place": {"path": 7}, "mode": "write"}')
    with pytest.raises(ToolError):
        tool.call('{"place": {"path": "a"}, "mode": "erase"}')


def test_defaults_are_not_shared_between_calls() -> None:
    tool = Tool(read)
    assert tool.call('{"path": "a"}') == "a:1:text:2"
    assert tool.call('{"path": "a"}') == "a:1:text:2"
    assert tool.call('{"path": "a", "start": "7"}') == "a:7:text:2", "numbers in quotes are taken"


def test_a_tool_without_parameters() -> None:
    def now() -> str:
        return "noon"

    tool = Tool(now)
    assert tool.spec.parameters["type"] == "object"
    assert tool.spec.parameters["properties"] == {}
    for arguments in ("", "{}", " {} "):
        assert tool.call(arguments) == "noon"


@pytest.mark.parametrize(
    "arguments",
    [
        "{",
        "[]",
        "null",
        "7",
        '{"start": 1}',
        '{"path": 3}',
        '{"path": "a", "nope": 1}',
        '{"path": "a", "start": "x"}',
        '{"path": null}',
        "\ud800",
    ],
)
def test_arguments_that_do_not_fit(arguments: str) -> None:
    with pytest.raises(ToolError) as caught:
        Tool(read).call(arguments)
    assert str(caught.value).startswith("tool: read: ")


def test_functions_that_cannot_be_tools() -> None:
    def untyped(path) -> str:  # type: ignore[no-untyped-def]
        return path

    def variadic(*paths: str) -> str:
        return ""

    def keywords(**options: str) -> str:
        return ""

    def odd(path: complex) -> str:
        return ""

    for function in (untyped, variadic, keywords, odd):
        with pytest.raises(SpecError) as caught:
            Tool(function)
        assert function.__name__ in str(caught.value)


def test_what_it_raises_is_told() -> None:
    def fail(path: str) -> str:
        raise FileNotFoundError(2, "No such file", path)

    with pytest.raises(ToolError, match=r"fail: FileNotFoundError: .*a\.py") as caught:
        Tool(fail).call('{"path": "a.py"}')
    assert isinstance(caught.value.__cause__, FileNotFoundError)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        (None, "null"),
        (7, "7"),
        ([1, "a"], '[1,"a"]'),
        ({"a": None}, '{"a":null}'),
        (Place("x"), '{"path":"x","line":1}'),
        ("lone \ud800", "lone \\ud800"),
        (b"bytes", '"Ynl0ZXM="'),
        (1j, '"1j"'),
        ({3: "x"}, '{"3":"x"}'),
    ],
)
def test_results_become_text(result: Any, text: str) -> None:
    def give() -> Any:
        return result

    assert Tool(give).call("{}") == text


def test_a_result_that_no_json_can_carry_is_an_error_of_the_tool() -> None:
    circle: list[Any] = []
    circle.append(circle)

    def give() -> Any:
        return circle

    with pytest.raises(ToolError):
        Tool(give).call("{}")


def test_async_tools_without_and_with_a_loop() -> None:
    async def wait(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return f"{id(asyncio.get_running_loop())}"

    assert Tool(wait).call('{"seconds": 0}')

    async def main() -> tuple[str, str]:
        loop = asyncio.get_running_loop()
        return await asyncio.to_thread(Tool(wait).call, '{"seconds": 0.001}', loop), f"{id(loop)}"

    ran_on, own = asyncio.run(main())
    assert ran_on == own
