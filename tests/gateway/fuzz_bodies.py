"""Good bodies of every endpoint, rich in members, for the fuzz of requests to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

LINES = (Path(__file__).parents[1] / "data/requests/clients.jsonl").read_bytes().splitlines()
CLIENTS = [orjson.loads(line) for line in LINES]
ANSWER = '{"a": "x", "ok": true}'
KEPT = "(kept response)"
"""Stands for the id of a response that the server keeps."""
KEPT_ITEM = "(kept item)"
"""Stands for the id of an item of it."""
IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGA"
    "WjR9awAAAABJRU5ErkJggg=="
)
#: The same as Messages has it.
IMAGE_SOURCE = {
    "type": "base64",
    "media_type": "image/png",
    "data": IMAGE.partition(",")[2],
}
FILE = "data:text/plain;base64,Rg=="
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^x"}, "n": {"$ref": "#/$defs/n"}},
    "required": ["a"],
    "$defs": {"n": {"enum": [1, 2]}},
}
STRICT = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
_DSML = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="a" string="true">x'
    "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
CALLS = (
    "<｜DSML｜ calls>\n"
    + "".join(
        f'<｜DSML｜ invoke name="{name}">\n<｜DSML｜ parameter name="a" string="true">x'
        '</｜DSML｜ parameter>\n<｜DSML｜ parameter name="n" string="false">1</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n"
        for name in ("f", "g", "tool_1", "bash", "apply_patch", "ns::f1", "tool_search")
    )
    + "</｜DSML｜ calls>"
)
REST = (
    '<｜DSML｜ parameter name="a" string="true">x</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
OUTPUTS = (f"R</think>{ANSWER}", f"R</think>A\n\n{CALLS}", f"{ANSWER}</think>")
"""What the backend writes, by turns."""
# Bodies that hold every field and every kind of part that the readers know.
RICH: list[tuple[str, dict[str, Any]]] = [
    (
        "chat",
        {
            "messages": [
                {"role": "system", "content": "S", "name": "n"},
                {"role": "developer", "content": [{"type": "text", "text": "D"}]},
                {"role": "user", "content": [{"type": "text", "text": "U"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "T"},
                        {"type": "output_text", "text": "O"},
                        {"type": "refusal", "refusal": "R"},
                    ],
                    "reasoning_content": None,
                    "reasoning": "R",
                    "thinking_blocks": [{"type": "thinking", "thinking": "T"}],
                    "reasoning_details": [{"type": "reasoning.text", "text": "T"}],
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"a": "x"}'},
                        },
                        {"id": "c2", "type": "custom", "custom": {"name": "g", "input": "i"}},
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "1"},
                {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "2"}]},
                {"role": "latest_reminder", "content": "L"},
                {"role": "user", "content": "U"},
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "description": "d",
                        "strict": False,
                        "parameters": SCHEMA,
                    },
                },
                {
                    "type": "custom",
                    "custom": {
                        "name": "g",
                        "description": "d",
                        "format": {
                            "type": "grammar",
                            "grammar": {"syntax": "lark", "definition": "x"},
                        },
                    },
                },
            ],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                },
            },
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_tokens": 40,
            "max_completion_tokens": 40,
            "temperature": 0.5,
            "top_p": 0.5,
            "presence_penalty": 1,
            "frequency_penalty": 1,
            "logit_bias": {"20": 1},
            "n": 2,
            "seed": 1,
            "logprobs": True,
            "top_logprobs": 2,
            "prompt_logprobs": 1,
            "prompt_logprobs_start": 2,
            "stop": ["never"],
            "thinking": {"type": "enabled"},
            "reasoning_effort": "high",
            "verbosity": "low",
            "parallel_tool_calls": False,
            "response_format": {"type": "text"},
            "chat_template_kwargs": {"thinking": True, "reasoning_effort": 50},
        },
    ),
    (
        "chat",
        {
            "messages": [
                {"role": "user", "content": "U"},
                {"role": "assistant", "content": "A", "prefix": False},
            ],
            "continue_final_message": True,
            "thinking": {"type": "disabled"},
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "n",
                    "description": "d",
                    "strict": False,
                    "schema": SCHEMA,
                },
            },
        },
    ),
    (
        "chat",
        {
            "messages": [{"role": "user", "content": "U"}],
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "strict": True, "parameters": STRICT},
                }
            ],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
    ),
    (
        "responses",
        {
            "instructions": "I",
            "previous_response_id": KEPT,
            "input": [
                {"type": "message", "role": "developer", "content": "D"},
                {"role": "user", "content": [{"type": "input_text", "text": "U"}]},
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [{"type": "summary_text", "text": "S"}],
                    "content": [{"type": "reasoning_text", "text": "T"}],
                    "encrypted_content": None,
                },
                {
                    "type": "message",
                    "role": "assistant",
                    "id": "msg_1",
                    "status": "completed",
                    "content": [
                        {"type": "output_text", "text": "O", "annotations": []},
                        {"type": "refusal", "refusal": "R"},
                    ],
                },
                {
                    "type": "function_call",
                    "call_id": "c1",
                    "name": "f",
                    "namespace": "ns",
                    "arguments": "{}",
                },
                {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "i"},
                {"type": "tool_search_call", "call_id": "c3", "arguments": {"query": "q"}},
                {"type": "function_call_output", "call_id": "c1", "output": "1"},
                {
                    "type": "custom_tool_call_output",
                    "call_id": "c2",
                    "output": [{"type": "output_text", "text": "2"}],
                },
                {
                    "type": "tool_search_output",
                    "call_id": "c3",
                    "tools": [
                        {"type": "function", "name": "h", "parameters": SCHEMA},
                        {"type": "custom", "name": "k", "description": "d"},
                        {
                            "type": "namespace",
                            "name": "ns2",
                            "tools": [{"type": "function", "name": "m", "parameters": STRICT}],
                        },
                    ],
                },
                {"type": "web_search_call", "id": "ws_1", "status": "completed"},
                {"type": "local_shell_call", "call_id": "c4", "action": {"command": ["ls"]}},
                {
                    "role": "user",
                    "content": [{"type": "input_file", "filename": "a.txt", "file_data": FILE}],
                },
            ],
            "tools": [
                {
                    "type": "function",
                    "name": "f",
                    "description": "d",
                    "strict": False,
                    "parameters": SCHEMA,
                },
                {
                    "type": "custom",
                    "name": "g",
                    "description": "d",
                    "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
                },
                {"type": "custom", "name": "apply_patch", "description": "d"},
                {
                    "type": "namespace",
                    "name": "ns",
                    "description": "d",
                    "tools": [
                        {"type": "function", "name": "f1", "description": "d", "parameters": SCHEMA}
                    ],
                },
                {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
                {"type": "web_search", "filters": {}},
            ],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f"}],
            },
            "reasoning": {"effort": "high", "summary": "auto", "generate_summary": None},
            "text": {"verbosity": "low", "format": {"type": "text"}},
            "stream": True,
            "store": True,
            "background": False,
            "parallel_tool_calls": False,
            "max_output_tokens": 40,
            "top_logprobs": 2,
            "temperature": 0.5,
            "top_p": 0.5,
            "metadata": {"k": "v"},
            "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
            "user": "u",
            "truncation": "auto",
            "stream_options": {"include_obfuscation": False},
        },
    ),
    (
        "responses",
        {
            "input": "U",
            "background": True,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        },
    ),
    (
        "responses",
        {
            "input": [
                {"type": "item_reference", "id": KEPT_ITEM},
                {"role": "user", "content": "U"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
            "tool_choice": {"type": "function", "name": "f"},
        },
    ),
    (
        "messages",
        {
            "max_tokens": 40,
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: b\nS"},
                {"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "U"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "T", "signature": "s"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "A"},
                        {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "x"}},
                        {"type": "tool_use", "id": "c2", "name": "bash", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c1",
                            "is_error": True,
                            "content": [{"type": "text", "text": "1"}],
                        },
                        {"type": "tool_result", "tool_use_id": "c2", "content": "2"},
                        {
                            "type": "document",
                            "title": "t",
                            "source": {"type": "text", "media_type": "text/plain", "data": "D"},
                        },
                        {
                            "type": "search_result",
                            "source": "s",
                            "title": "t",
                            "content": [{"type": "text", "text": "R"}],
                        },
                        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
                        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
                    ],
                },
                {"role": "assistant", "content": "A"},
                {"role": "user", "content": "U"},
            ],
            "tools": [
                {"name": "f", "description": "d", "strict": True, "input_schema": SCHEMA},
                {"type": "bash_20250124", "name": "bash"},
                {"type": "custom", "name": "g", "input_schema": {"type": "object"}},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 1},
            ],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": ["never"],
            "stream": True,
            "temperature": 0.5,
            "top_p": 0.5,
            "output_config": {"effort": "high"},
            "metadata": {"user_id": "u"},
            "context_management": {"edits": []},
        },
    ),
    (
        "messages",
        {
            "max_tokens": 40,
            "messages": [{"role": "user", "content": "U"}, {"role": "assistant", "content": "{"}],
            "thinking": {"type": "disabled"},
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
    (
        "messages",
        {
            "max_tokens": 40,
            "messages": [{"role": "user", "content": "U"}],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "f"},
        },
    ),
    (
        "completions",
        {
            "prompt": "Once",
            "max_tokens": 8,
            "temperature": 0.5,
            "top_p": 0.5,
            "n": 1,
            "seed": 1,
            "logprobs": 2,
            "prompt_logprobs": 1,
            "prompt_logprobs_start": 1,
            "stop": ["never"],
            "stream": True,
            "stream_options": {"include_usage": True},
            "presence_penalty": 1,
            "logit_bias": {"20": 1},
            "echo": False,
            "best_of": 1,
            "suffix": None,
        },
    ),
    ("completions", {"prompt": [[40, 41, 42]], "stop": "never"}),
    ("tokenize", {"prompt": "Once"}),
    ("tokenize", {"messages": [{"role": "user", "content": "U"}]}),
    (
        "parse",
        {
            "text": _DSML,
            "tool_call_parser": "deepseekv41",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        },
    ),
    (
        "separate",
        {"text": "R</think>A", "reasoning_parser": "deepseek-v4", "return_blocks": True},
    ),
]
SEEN: list[tuple[str, dict[str, Any]]] = [
    (
        "chat",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "U"},
                        {"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}},
                        {"type": "file", "file": {"filename": "a.png", "file_data": IMAGE}},
                    ],
                }
            ]
        },
    ),
    (
        "responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [{"type": "input_image", "image_url": IMAGE, "detail": "low"}],
                },
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c1",
                    "output": [{"type": "input_image", "image_url": IMAGE}],
                },
            ]
        },
    ),
    (
        "messages",
        {
            "max_tokens": 40,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": IMAGE_SOURCE,
                        }
                    ],
                },
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c1",
                            "content": [
                                {
                                    "type": "image",
                                    "source": IMAGE_SOURCE,
                                }
                            ],
                        }
                    ],
                },
            ],
        },
    ),
]
