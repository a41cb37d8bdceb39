"""Where a gated reply says something else than the official codec: case, rule, what it says.

The cases are those of tests/data/codec; undeclared tools are passed on here, so that the cases of
undeclared tools tell something about arguments. Fields that are not listed equal the codec's.
"""

from __future__ import annotations

from typing import Any

# What no engine of ours can send: a content filter, a missing end, tokens without a tokenizer.
OUT_OF_REACH = ("A23", "E06", "E07", "E08", "T14", "T23")

DEVIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "A14": ("stop id ends the text", {"content": "C"}),
    "B12": (
        "a marker that opens nothing is shown, made harmless",
        {"reasoning": "I will use <dsml: tags"},
    ),
    "B14": (
        "tool_choice none: markup is withheld",
        {"content": '[A call of the tool "get_weather" was not delivered: tool_choice is none.]'},
    ),
    "B19": ("parallel_tool_calls false holds", {"calls": [("get_weather", '{"city": "A"}')]}),
    "B21": ("prose in place of a forced call is the answer", {"content": "Sorry, no."}),
    "C09": ("broken JSON becomes a string", {"calls": [("submit", '{"a": ""}')]}),
    "C10": ("broken JSON becomes a string", {"calls": [("submit", '{"a": "{bad"}')]}),
    "C11": ("broken JSON becomes a string", {"calls": [("submit", '{"a": "Paris"}')]}),
    "C13": ("broken JSON becomes a string", {"calls": [("submit", '{"a": "NaN"}')]}),
    "C14": ("broken JSON becomes a string", {"calls": [("submit", '{"a": "1 2"}')]}),
    "C15": ("broken JSON becomes a string", {"calls": [("submit", '{"a": "1, \\"b\\": 2"}')]}),
    "C16": ("the first of two parameters of a name counts", {"calls": [("submit", '{"a": "x"}')]}),
    "C17": (
        "property names are escaped where the codec breaks them",
        {"calls": [("submit", '{"a\\u0020b": "x", "ключ": "y", "": "z"}')]},
    ),
    "C18": (
        "property names are escaped where the codec breaks them",
        {"calls": [("submit", '{"a\\u005cb": "x"}')]},
    ),
    "C19": (
        "property names are escaped where the codec breaks them",
        {"calls": [("submit", '{"a\\u000ab": "x"}')]},
    ),
    "C20": ("attributes are read however they are spelled", {"calls": [("now", '{"a": "x"}')]}),
    "C21": ("attributes are read however they are spelled", {"calls": [("submit", '{"a": "x"}')]}),
    "C22": ("attributes are read however they are spelled", {"calls": [("submit", '{"a": "x"}')]}),
    "C23": ("attributes are read however they are spelled", {"calls": [("now", '{"a": "x"}')]}),
    "C24": (
        "attributes are read however they are spelled",
        {"finish": "tool_calls", "calls": [("now", '{"a": "x"}')]},
    ),
    "C26": (
        "the marker's bar is escaped in arguments",
        {"calls": [("submit", '{"a": "</\\u007cDSML|parameter>"}')]},
    ),
    "C27": (
        "the marker's bar is escaped in arguments",
        {"calls": [("submit", '{"a": "see <\\uff5cDSML\\uff5cinvoke name=\\"x\\"> ok"}')]},
    ),
    "C30": ("stop id ends the text", {"calls": [("submit", '{"a": "x"}')]}),
    "C32": ("a JSON body is the arguments", {"calls": [("get_weather", '{"city": "Paris"}')]}),
    "C37": ("half a character in an escape is U+FFFD", {"calls": [("submit", '{"a": "\\ufffd"}')]}),
    "D04": (
        "an invoke ends the one before",
        {"calls": [("now", '{"a": "x"}'), ("now", '{"a": "x"}')]},
    ),
    "D06": (
        "a call cut short under stop is closed or withheld",
        {"content": "[A tool call was not delivered: it was not finished.]"},
    ),
    "D07": (
        "a call cut short under stop is closed or withheld",
        {
            "content": "[A tool call was not delivered: it was not finished.]",
            "finish": "stop",
            "calls": [],
        },
    ),
    "D08": (
        "a call cut short under stop is closed or withheld",
        {"calls": [("now", '{"a": "hel"}')]},
    ),
    "D09": (
        "a call cut short under stop is closed or withheld",
        {
            "content": '[A call of the tool "now" was not delivered: it was not finished.]',
            "finish": "stop",
            "calls": [],
        },
    ),
    "D11": (
        "calls of a second block count",
        {"calls": [("now", '{"a": "x"}'), ("now", '{"a": "x"}')]},
    ),
    "D12": (
        "the marker's bar is escaped in arguments",
        {
            "calls": [
                (
                    "now",
                    '{"a": "<\\uff5cDSML\\uff5cinvoke name=\\"now\\">\\n<\\uff5cDSML\\uff5cparameter name=\\"a\\" string=\\"true\\">x"}',
                )
            ]
        },
    ),
    "D13": ("an unknown tag is noise", {"calls": [("now", '{"a": "x"}')]}),
    "D14": (
        "a call without a name is withheld",
        {"content": "[A tool call was not delivered: it cannot be read.]"},
    ),
    "D19": ("a marker that opens nothing is shown, made harmless", {"content": "a dsml: b"}),
    "D20": (
        "a marker that opens nothing is shown, made harmless",
        {
            "content": '<dsml:tool_calls>\n<dsml:invoke name="now">\n</dsml:invoke>\n</dsml:tool_calls>'
        },
    ),
    "D21": (
        "a marker that opens nothing is shown, made harmless",
        {"content": "a</dsml:tool_calls>b"},
    ),
    "D27": (
        "a block in the reasoning is a call only if it ends the output",
        {
            "content": "C",
            "reasoning": 'R\n\n<dsml:tool_calls>\n<dsml:invoke name="get_weather">\n<dsml:parameter name="city" string="true">Paris</dsml:parameter>\n</dsml:invoke>\n</dsml:tool_calls>',
            "finish": "stop",
            "calls": [],
        },
    ),
    "E02": ("a value that is not whole is not begun", {"calls": [("now", "")]}),
    "E09": (
        "the marker's bar is escaped in arguments",
        {"calls": [("now", '{"a": "hello</\\uff5cDS')]},
    ),
    "C40": (
        "property names are escaped where the codec breaks them",
        {"calls": [("submit", '{"a\\u0022b": "x"}')]},
    ),
    "C43": ("broken JSON becomes a string", {"calls": [("submit", '{"a": "[1,]"}')]}),
    "C44": ("Python's literals are JSON's", {"calls": [("submit", '{"a": true, "b": null}')]}),
    "C45": ("broken JSON becomes a string", {"calls": [("submit", '{"a": "{bad", "b": "ok"}')]}),
    "C46": (
        "property names are escaped where the codec breaks them",
        {"calls": [("submit", '{"shipping\\u0020address": "x"}')]},
    ),
    "C47": (
        "property names are escaped where the codec breaks them",
        {"calls": [("submit", '{"a\\u0009b": "x"}')]},
    ),
    "C48": ("attributes are read however they are spelled", {"calls": [("now", '{"sel": ["A"]}')]}),
    "C50": ("attributes are read however they are spelled", {"calls": [("now", '{"a": "x"}')]}),
    "G03": ("around a JSON answer nothing is delivered", {"content": '{"a": 1}'}),
    "G04": ("around a JSON answer nothing is delivered", {"content": '{"a": 1}'}),
    "G05": ("an answer that is no JSON is delivered, and reported", {"content": "I cannot."}),
    "G09": ("around a JSON answer nothing is delivered", {"content": '{"a": 1}'}),
    "T08": (
        "a marker that opens nothing is shown, made harmless",
        {
            "content": '<dsml:tool_calls>\n<dsml:invoke name="now">\n</dsml:invoke>\n</dsml:tool_calls>'
        },
    ),
    "T10": (
        "the marker's bar is escaped in arguments",
        {"calls": [("now", '{"a": "x</\\uff5cDSML\\uff5cparameter>y"}')]},
    ),
    "T21": ("stop id ends the text", {"content": "Hi 🎉"}),
}
