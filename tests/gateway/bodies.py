"""Bodies in which one array that a client can send has as many elements as one likes, for each array of the three forms."""

from __future__ import annotations

from typing import NamedTuple

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"

USER = '{"role":"user","content":"a"}'
SAID = '{"role":"assistant","content":"b"}'
TEXT = '{"type":"text","text":""}'
NUMBER = '{"type":"text","text":"#"}'
IMAGE = '{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}'
FUNCTION = '{"id":"c#","type":"function","function":{"name":"f","arguments":"{}"}}'
SOURCE = '{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AAAA"}}'
USE = '{"type":"tool_use","id":"c#","name":"f","input":{}}'
DATA = '{"type":"document","source":{"type":"text","media_type":"text/plain","data":"d"}}'
CALLED = (
    '{"role":"assistant","content":null,"tool_calls":[{"id":"x","type":"function","function":{"name":"f","arguments":"{}"}}]}'
)
USED = '{"role":"assistant","content":[{"type":"tool_use","id":"x","name":"f","input":{}}]}'
ITEM = '{"type":"function_call","call_id":"x","name":"f","arguments":"{}"}'


class Body(NamedTuple):
    """An array in a body: `item` stands in it n times, each `#` with its number."""

    path: str
    head: str
    item: str
    tail: str

    def of(self, number: int) -> bytes:
        """The body with so many elements."""
        items = ",".join(self.item.replace("#", str(at)) for at in range(number))
        return (self.head + items + self.tail).encode()

    def sized(self, size: int) -> bytes:
        """A body of about so many bytes."""
        each = (len(self.of(2000)) - len(self.of(1000))) / 1000
        return self.of(max(1, int(size / each)))


def _history(path: str, start: str, *, items: dict[str, str]) -> dict[str, Body]:
    return {f"{path[4:]}, {name}": Body(path, start, item, "]}") for name, item in items.items()}


def _inside(path: str, start: str, end: str, items: dict[str, tuple[str, str, str]]) -> dict[str, Body]:
    return {f"{path[4:]}, {name}": Body(path, start + head, item, tail + end) for name, (head, item, tail) in items.items()}


_C, _M, _R = '{"model":"m","messages":[', '{"model":"m","max_tokens":9,"messages":[', '{"model":"m","input":['

ARRAYS: dict[str, Body] = {
    **_history(CHAT, _C, items={"numbers for messages": "1", "lists for messages": "[]"}),
    **_history(
        CHAT,
        _C + USER + ",",
        items={
            "messages of the user": USER,
            "messages of the assistant": SAID,
            "messages of the system": '{"role":"system","content":"c"}',
            "turns": f"{USER},{SAID}",
            "different messages": '{"role":"user","content":"#"}',
            "results without calls": '{"role":"tool","tool_call_id":"x","content":""}',
            "results of old functions": '{"role":"function","name":"f","content":""}',
            "calls with results": '{"role":"assistant","content":null,"tool_calls":['
            + FUNCTION
            + ']},{"role":"tool","tool_call_id":"c#","content":""}',
        },
    ),
    **_inside(
        CHAT,
        _C + USER + ",",
        "]}",
        {
            **{
                f"parts of the {role}": (f'{{"role":"{role}","content":[', NUMBER, "]}")
                for role in ("user", "assistant", "system", "developer")
            },
            "blank parts": ('{"role":"user","content":[', TEXT, "]}"),
            "images": ('{"role":"user","content":[', IMAGE, "]}"),
            "audio": ('{"role":"user","content":[', '{"type":"input_audio","input_audio":{"data":"AA","format":"wav"}}', "]}"),
            "files": ('{"role":"user","content":[', '{"type":"file","file":{"file_id":"f#"}}', "]}"),
            "refusals": ('{"role":"assistant","content":[', '{"type":"refusal","refusal":""}', "]}"),
            "parts of a result": (CALLED + ',{"role":"tool","tool_call_id":"x","content":[', TEXT, "]}"),
            "images of a result": (CALLED + ',{"role":"tool","tool_call_id":"x","content":[', IMAGE, "]}"),
            "open calls": ('{"role":"assistant","content":null,"tool_calls":[', FUNCTION, "]}"),
            "custom calls": (
                '{"role":"assistant","content":null,"tool_calls":[',
                '{"id":"c#","type":"custom","custom":{"name":"f","input":""}}',
                "]}",
            ),
            "numbers in a call": (
                '{"role":"assistant","content":null,"tool_calls":[{"id":"x","type":"function",'
                '"function":{"name":"f","arguments":"{}"},"more":[',
                "1",
                "]}]}",
            ),
            "arguments": (
                '{"role":"assistant","content":null,"tool_calls":[{"id":"x","type":"function","function":{"name":"f","arguments":"{\\"a\\":[',
                "{}",
                ']}"}}]}',
            ),
            "numbers in a message": ('{"role":"user","content":"a","more":[', "1", "]}"),
            "keys of a message": ('{"role":"user","content":"a",', '"k#":1', "}"),
            "annotations": ('{"role":"assistant","content":"b","annotations":[', '{"type":"url_citation"}', "]}"),
            "numbers in a block": ('{"role":"user","content":[{"type":"x","more":[', "1", "]}]}"),
            "empty objects in a block": ('{"role":"user","content":[{"type":"x","more":[', "{}", "]}]}"),
        },
    ),
    **_inside(
        CHAT,
        _C + USER + "],",
        "}",
        {
            "tools": ('"tools":[', '{"type":"function","function":{"name":"f#"}}', "]"),
            "empty tools": ('"tools":[', "{}", "]"),
            "schema of a tool": ('"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":[', "1", "]}}}]"),
            "functions": ('"functions":[', '{"name":"f#"}', "]"),
            "stop": ('"stop":[', '""', "]"),
            "metadata": ('"metadata":{', '"k#":""', "}"),
            "user": ('"user":[', "1", "]"),
            "safety_identifier": ('"safety_identifier":[', "{}", "]"),
            "logit_bias": ('"logit_bias":{', '"#":1', "}"),
            "modalities": ('"modalities":[', '"text"', "]"),
            "response_format": ('"response_format":{"json_schema":{"schema":{"enum":[', '"#"', "]}}}"),
            "prediction": ('"prediction":{"type":"content","content":[', TEXT, "]}"),
            "what nobody knows": ('"whatever":[', "{}", "]"),
            "keys": ("", '"k#":1', ""),
            "one key again and again": ("", '"messages":[]', ',"messages":[' + USER + "]"),
        },
    ),
    **_history(MESSAGES, _M, items={"numbers for messages": "1"}),
    **_history(
        MESSAGES,
        _M + USER + ",",
        items={
            "messages of the user": USER,
            "turns": f"{USER},{SAID}",
            "messages of the system": '{"role":"system","content":"c"}',
            "calls with results": '{"role":"assistant","content":['
            + USE
            + ']},{"role":"user","content":[{"type":"tool_result","tool_use_id":"c#","content":""}]}',
        },
    ),
    **_inside(
        MESSAGES,
        _M + USER + ",",
        "," + USER + "]}",
        {
            "parts": ('{"role":"user","content":[', NUMBER, "]}"),
            "marks": ('{"role":"user","content":[', '{"type":"text","text":"","cache_control":{"type":"ephemeral"}}', "]}"),
            "images": ('{"role":"user","content":[', SOURCE, "]}"),
            "documents": ('{"role":"user","content":[', DATA, "]}"),
            "parts of a document": (
                '{"role":"user","content":[{"type":"document","source":{"type":"content","content":[',
                TEXT,
                "]}}]}",
            ),
            "search results": (
                '{"role":"user","content":[',
                '{"type":"search_result","source":"s","title":"t","content":[{"type":"text","text":"x"}]}',
                "]}",
            ),
            "parts of the assistant": ('{"role":"assistant","content":[', NUMBER, "]}"),
            "citations": ('{"role":"assistant","content":[{"type":"text","text":"x","citations":[', '{"type":"c"}', "]}]}"),
            "thinking": ('{"role":"assistant","content":[', '{"type":"thinking","thinking":"","signature":"s"}', "]}"),
            "redacted thinking": ('{"role":"assistant","content":[', '{"type":"redacted_thinking","data":"s"}', "]}"),
            "calls": ('{"role":"assistant","content":[', USE, "]}"),
            "calls of the provider": (
                '{"role":"assistant","content":[',
                '{"type":"server_tool_use","id":"s#","name":"web_search","input":{}},'
                '{"type":"web_search_tool_result","tool_use_id":"s#","content":[]}',
                "]}",
            ),
            "input of a call": (
                '{"role":"assistant","content":[{"type":"tool_use","id":"x","name":"f","input":{"a":[',
                "1",
                "]}}]}",
            ),
            "parts of a result": (
                USED + ',{"role":"user","content":[{"type":"tool_result","tool_use_id":"x","content":[',
                TEXT,
                "]}]}",
            ),
            "images of a result": (
                USED + ',{"role":"user","content":[{"type":"tool_result","tool_use_id":"x","content":[',
                SOURCE,
                "]}]}",
            ),
            "documents of a result": (
                USED + ',{"role":"user","content":[{"type":"tool_result","tool_use_id":"x","content":[',
                DATA,
                "]}]}",
            ),
            "references of a result": (
                USED + ',{"role":"user","content":[{"type":"tool_result","tool_use_id":"x","content":[',
                '{"type":"tool_reference","tool_name":"x"}',
                "]}]}",
            ),
        },
    ),
    **_inside(
        MESSAGES,
        _M + USER + "],",
        "}",
        {
            "system": ('"system":[', NUMBER, "]"),
            "tools": ('"tools":[', '{"name":"f#","input_schema":{}}', "]"),
            "stop_sequences": ('"stop_sequences":[', '""', "]"),
            "user_id": ('"metadata":{"user_id":[', "{}", "]}"),
            "user_id as a text": ('"metadata":{"user_id":"{', r"\"#\":\"\"", '}"}'),
            "mcp_servers": ('"mcp_servers":[', '{"type":"url","url":"u","name":"n"}', "]"),
            "edits": ('"context_management":{"edits":[', '{"type":"clear_tool_uses_20250919"}', "]}"),
            "skills": ('"container":{"skills":[', '{"type":"anthropic","skill_id":"x"}', "]}"),
        },
    ),
    **_history(RESPONSES, _R, items={"numbers for items": "1"}),
    **_inside(
        RESPONSES,
        _R + USER + ",",
        "," + USER + "]}",
        {
            "items of the user": ("", USER, ""),
            "turns": ("", f"{USER},{SAID}", ""),
            "items of the assistant": (
                "",
                '{"type":"message","role":"assistant","content":[{"type":"output_text","text":"a"}]}',
                "",
            ),
            "items of the system": ("", '{"role":"system","content":"c"}', ""),
            "calls": ("", '{"type":"function_call","call_id":"c#","name":"f","arguments":"{}"}', ""),
            "calls with results": (
                "",
                '{"type":"function_call","call_id":"c#","name":"f","arguments":"{}"},'
                '{"type":"function_call_output","call_id":"c#","output":""}',
                "",
            ),
            "reasoning": ("", '{"type":"reasoning","id":"r#","summary":[],"encrypted_content":"x"}', ""),
            "summaries": ('{"type":"reasoning","id":"r","summary":[', '{"type":"summary_text","text":""}', "]}"),
            "searches": ("", '{"type":"web_search_call","id":"w#","status":"completed"}', ""),
            "references": ("", '{"type":"item_reference","id":"i#"}', ""),
            "compactions": ("", '{"type":"compaction","id":"i#","encrypted_content":"x"}', ""),
            "compactions between": ("", '{"type":"compaction","id":"i#","encrypted_content":"x"},' + USER, ""),
            "items that nobody knows": ("", '{"type":"x","id":"#"}', ""),
            "parts": ('{"role":"user","content":[', '{"type":"input_text","text":"#"}', "]}"),
            "images": ('{"role":"user","content":[', '{"type":"input_image","image_url":"data:image/png;base64,AAAA"}', "]}"),
            "files": ('{"role":"user","content":[', '{"type":"input_file","file_id":"f"}', "]}"),
            "parts of the assistant": (
                '{"type":"message","role":"assistant","content":[',
                '{"type":"output_text","text":"#"}',
                "]}",
            ),
            "parts of a result": (
                ITEM + ',{"type":"function_call_output","call_id":"x","output":[',
                '{"type":"input_text","text":""}',
                "]}",
            ),
            "images of a result": (
                ITEM + ',{"type":"function_call_output","call_id":"x","output":[',
                '{"type":"input_image","image_url":"data:image/png;base64,AAAA"}',
                "]}",
            ),
        },
    ),
    **_inside(
        RESPONSES,
        '{"model":"m","input":"a",',
        "}",
        {
            "include": ('"include":[', '"x"', "]"),
            "tools": ('"tools":[', '{"type":"function","name":"f#"}', "]"),
            "metadata": ('"metadata":{', '"k#":""', "}"),
            "instructions": ('"instructions":[', USER, "]"),
            "schema of the text": ('"text":{"format":{"schema":{"enum":[', "1", "]}}}"),
            "variables": ('"prompt":{"id":"p","variables":{', '"k#":""', "}}"),
            "previous_response_id": ('"previous_response_id":[', "{}", "]"),
            "conversation": ('"conversation":{"id":[', "{}", "]}"),
        },
    ),
    "embeddings, tokens": Body("/v1/embeddings", '{"model":"m","input":[', "1", "]}"),
    "embeddings, user": Body("/v1/embeddings", '{"model":"m","input":"a","user":[', "{}", "]}"),
    "count_tokens, messages": Body("/v1/messages/count_tokens", _M, USER, "]}"),
    "responses/compact, items": Body("/v1/responses/compact", _R, USER, "]}"),
}
