"""The output parser: whole and streamed results agree, nothing raises, nothing is lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax import demo
from deepinfer_jax.prompt import (
    Message,
    OutputParser,
    OutputStart,
    ParsedOutput,
    PromptError,
    Tool,
    ToolCall,
    control,
    encode_conversation,
    parse_output,
)

from .cases import golden, released, texts

D, E = "<｜DSML｜", "</｜DSML｜"
STAGES = ("reasoning", "reasoning_continued", "content", "content_continued", "calls")


def parameter(key: str, value: str, kind: str = ' string="true"') -> str:
    return f'{D} parameter name="{key}"{kind}>{value}{E} parameter>\n'


def invoke(name: str, *parameters: str) -> str:
    return f'{D} invoke name="{name}">\n{"".join(parameters)}{E} invoke>\n'


def block(*invokes: str) -> str:
    return f"{D} calls>\n{''.join(invokes)}{E} calls>"


GOOD = block(invoke("f", parameter("a", "x\ny"), parameter("n", "[1, 2.50]", ' string="false"')), invoke("g"))


def streamed(pieces: Sequence[Any], start: OutputStart, **settings: Any) -> tuple[ParsedOutput, tuple[str, str, list]]:
    """Result of a parser fed piece by piece, and its deltas joined."""
    parser = OutputParser(start, **settings)
    deltas = [parser.push(piece) for piece in pieces]
    deltas.append(parser.finish())
    calls = [call for delta in deltas for call in delta.tool_calls]
    return parser.result, ("".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), calls)


def check_cuts(whole: Any, cuts: Sequence[int], start: OutputStart, **settings: Any) -> ParsedOutput:
    """Assert that cutting changes nothing; return the result."""
    expected = parse_output(whole, start, **settings)
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    result, joined = streamed([whole[a:b] for a, b in itertools.pairwise(edges)], start, **settings)
    assert result == expected
    assert joined == (expected.reasoning, expected.content, list(expected.tool_calls))
    return expected


FRAGMENTS = (
    control.THINK, control.END_THINK, control.DSML, control.EOS, D, E, f"{D} calls>", f"{E} calls>", f"{D}tool_calls>",
    f'{D} invoke name="f">', f"{E} invoke>", f'{D} parameter name="a" string="true">', f"{E} parameter>",
    f'{D} parameter name="b">', f'{D} parameter name="c" string="false">', " calls>", GOOD, GOOD.replace("｜ ", "｜"),
    "<", "</", ">", "\n", "\n\n", " ", "a", "12", "é", "🙂", "{", "[1]", '"', "```json\n", "\n```", "```", "</th", "｜",
)  # fmt: skip
outputs = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)
starts = st.builds(
    OutputStart,
    stage=st.sampled_from(STAGES),
    parse_tool_calls=st.booleans(),
    first_call=st.integers(0, 3),
    json_output=st.booleans(),
)


@settings(max_examples=250)
@given(text=outputs, start=starts, cuts=st.lists(st.integers(0, 400), max_size=12))
def test_any_cut_gives_the_same_text_parse(text: str, start: OutputStart, cuts: list[int]) -> None:
    """Guards streaming of text: cuts inside control tokens, tags and fences change neither result nor notes."""
    parsed = check_cuts(text, cuts, start)
    check_cuts(text, range(len(text)), start)
    assert parsed.raw == text


@settings(max_examples=250)
@given(text=outputs, start=starts, cuts=st.lists(st.integers(0, 400), max_size=12))
def test_any_cut_gives_the_same_id_parse(text: str, start: OutputStart, cuts: list[int]) -> None:
    """Guards streaming of ids: cuts between any tokens, inside characters too, change neither result nor notes."""
    tokenizer = demo.load_tokenizer()
    ids = tokenizer.encode(text, control_tokens=True)
    parsed = check_cuts(ids, cuts, start, tokenizer=tokenizer)
    check_cuts(ids, range(len(ids)), start, tokenizer=tokenizer)
    assert (parsed.raw, parsed.token_ids) == (text, tuple(ids))
    assert parsed.reasoning == parse_output(text, start).reasoning


@settings(max_examples=100)
@given(ids=st.lists(st.one_of(st.integers(0, 3071), st.sampled_from([1, 3054, 3055])), max_size=40), start=starts)
def test_any_ids_parse(ids: list[int], start: OutputStart) -> None:
    """Guards against outputs that raise, and against a raw text that is not the decoded ids."""
    tokenizer = demo.load_tokenizer()
    parsed = check_cuts(ids, range(len(ids)), start, tokenizer=tokenizer)
    assert parsed.raw == tokenizer.decode(ids)


@pytest.mark.parametrize("number", range(len(golden()["output_parsing"])))
def test_golden_outputs_at_every_cut(number: int) -> None:
    """Guards the recorded outputs in two pieces, cut at every place, as text and as ids."""
    case = golden()["output_parsing"][number]
    for stage in ("calls" if case["starts_in_tool_calls"] else "content", "reasoning"):
        start = OutputStart(stage, json_output=case["parse_json_output"])
        for cut in range(len(case["output_text"])):
            check_cuts(case["output_text"], [cut], start)
        for cut in range(len(case["output_ids"])):
            check_cuts(case["output_ids"], [cut], start, tokenizer=released())


def test_calls() -> None:
    """Guards what a well-formed block gives: names, arguments as JSON text, counted ids, content before it."""
    parsed = parse_output(f"why{control.END_THINK}\nSo:\n\n{GOOD}{control.EOS}", OutputStart("reasoning", first_call=4))
    assert parsed == ParsedOutput(
        raw=f"why{control.END_THINK}\nSo:\n\n{GOOD}{control.EOS}",
        reasoning="why",
        content="So:",
        tool_calls=(ToolCall("f", '{"a": "x\\ny", "n": [1, 2.50]}', "call_4"), ToolCall("g", "{}", "call_5")),
    )
    assert parsed.to_message() == Message("assistant", "So:", "why", parsed.tool_calls)
    long = block(invoke("f", parameter("a", "x" * 5000)))  # longer than any tag may be
    assert [len(call.arguments) for call in check_cuts(long, [40, 90], OutputStart()).tool_calls] == [5009]
    older = GOOD.replace("｜ ", "｜").replace("calls>", "tool_calls>")
    assert parse_output("So:\n\n" + older).tool_calls == parse_output("So:\n\n" + GOOD).tool_calls


@pytest.mark.parametrize(
    ("kind", "value", "arguments"),
    [
        ("", "12", '{"a": 12}'),
        ("", "no", '{"a": "no"}'),
        ("", " [1] ", '{"a": [1]}'),
        (' string="true"', "12", '{"a": "12"}'),
        (' string="true"', f"x{control.END_THINK}<\n", '{"a": "x</think><\\n"}'),
        (' string="false"', "\n{\n}\n", '{"a": {\n}}'),
    ],
)
def test_values(kind: str, value: str, arguments: str) -> None:
    """Guards parameter values: text as it is, JSON as it is, and a missing kind decided by the value."""
    (call,) = parse_output(block(invoke("f", parameter("a", value, kind)))).tool_calls
    assert call.arguments == arguments
    assert json.loads(call.arguments).keys() == {"a"}


MALFORMED = {
    "not closed": GOOD.removesuffix(f"{E} calls>"),
    "cut in a value": GOOD[:70],
    "cut in a tag": GOOD[:20],
    "only the token": D,
    "another tag": f"{D} other>",
    "text between tags": GOOD.replace(f"{D} invoke", f"so {D} invoke", 1),
    "no call": block(),
    "no name": GOOD.replace(' name="f"', ""),
    "empty name": GOOD.replace('"f"', '""'),
    "open quote": GOOD.replace('"f"', '"f'),
    "parameter outside a call": block(parameter("a", "1")),
    "call without wrapper": invoke("f"),
    "value not closed": GOOD.replace(f"y{E} parameter>", "y", 1),
    "call not closed": GOOD.replace(f"{E} invoke>\n", "", 1),
    "bad kind": block(invoke("f", parameter("a", "1", ' string="maybe"'))),
    "not JSON": block(invoke("f", parameter("a", "{1", ' string="false"'))),
    "not finite": block(invoke("f", parameter("a", "1e999", ' string="false"'))),
    "too deep": block(invoke("f", parameter("a", "[" * 65 + "]" * 65, ' string="false"'))),
    "half a surrogate pair": block(invoke("f", parameter("a", '"\\ud83d"', ' string="false"'))),
    "twice": block(invoke("f", parameter("a", "1"), parameter("a", "2"))),
    "no bracket": GOOD.replace(f"{D} invoke", f"{control.DSML} invoke", 1),
    "token in a tag": f"{D}{control.DSML} calls>",
    "token in a value": block(invoke("f", parameter("a", f"x{control.DSML}y"))),
    "long tag": block(f'{D} invoke name="f" {" " * 4100}>\n{E} invoke>\n'),
    "thinking ends inside": GOOD.replace(f"{D} invoke", f"{control.END_THINK}{D} invoke", 1),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_block_stays_content(name: str) -> None:
    """Guards against a broken block that raises, gives half a call, or vanishes: it stays text, with a note."""
    text = f"So:\n\n{MALFORMED[name]}"
    tokenizer = demo.load_tokenizer()
    for whole, options in ((text, {}), (tokenizer.encode(text, control_tokens=True), {"tokenizer": tokenizer})):
        parsed = check_cuts(whole, range(len(whole)), OutputStart("content"), **options)
        assert parsed.tool_calls == ()
        assert parsed.content == text.replace(control.END_THINK, "")
        assert parsed.raw == text
        assert parsed.notes[0].startswith("A malformed calls block was kept as text: ")


def test_malformed_block_in_reasoning() -> None:
    """Guards reasoning that mentions a block: it stays reasoning, and the answer after it is found."""
    parsed = parse_output(f"say {D} calls> here{control.END_THINK}yes\n\n{GOOD}", OutputStart("reasoning"))
    assert (parsed.reasoning, parsed.content) == (f"say {D} calls> here", "yes")
    assert [call.name for call in parsed.tool_calls] == ["f", "g"]
    assert parsed.notes == ("A malformed calls block was kept as text: there is text between its tags.",)


def test_ids_tell_text_from_control() -> None:
    """Guards the use of ids: spellings of control tokens that are not control tokens end nothing and call nothing."""
    tokenizer = released()
    text = f"a{control.END_THINK}b\n\n{GOOD}{control.EOS}"
    ids = tokenizer.encode(text, control_tokens=False)
    parsed = parse_output([*ids, tokenizer.eos_id], OutputStart("reasoning"), tokenizer=tokenizer)
    assert (parsed.reasoning, parsed.content, parsed.notes) == (text, "", ())
    assert not parsed.reasoning_finished
    assert parsed.raw == text + control.EOS


def test_end_of_sentence() -> None:
    """Guards the end: EOS is no content, and what follows it is only in the raw text."""
    parsed = parse_output(f"a\n\n{control.EOS}b{control.END_THINK}")
    assert (parsed.content, parsed.raw) == ("a\n\n", f"a\n\n{control.EOS}b{control.END_THINK}")
    assert parsed.notes == ("Text after the end-of-sentence token was ignored.",)
    unfinished = parse_output("a", OutputStart("reasoning"))
    assert (unfinished.reasoning, unfinished.reasoning_finished) == ("a", False)


contents = texts.map(lambda text: text.strip("\n"))
keys = texts.map(lambda text: text.replace('"', ""))
values = st.recursive(
    st.one_of(texts, st.integers(-(10**30), 10**30), st.floats(allow_nan=False, allow_infinity=False), st.booleans()),
    lambda child: st.lists(child, max_size=2) | st.dictionaries(texts, child, max_size=2),
    max_leaves=4,
)
names = texts.map(lambda text: "".join(c for c in text if c not in '"\r\n')[:200] or "f")
calls_of = st.lists(st.tuples(names, st.dictionaries(keys, values, max_size=3)), max_size=3)


@settings(max_examples=100)
@given(reasoning=contents, content=contents, called=calls_of, as_ids=st.booleans())
def test_rendered_turn_parses_back(reasoning: str, content: str, called: list, as_ids: bool) -> None:
    """Guards the round trip: an assistant turn as the encoder writes it gives back its parts, whatever they spell."""
    tokenizer = demo.load_tokenizer()
    calls = tuple(ToolCall(n, json.dumps(a, ensure_ascii=False), f"call_{i}") for i, (n, a) in enumerate(called))
    turn = Message("assistant", content, reasoning, calls)
    answers = [Message("tool", "r", tool_call_id=call.id) for call in calls]
    question = Message("user", "q")
    prompt = encode_conversation(tokenizer, [question], tools=[Tool("f")])
    whole = encode_conversation(tokenizer, [question, turn, *answers, question], tools=[Tool("f")])
    written = list(whole.token_ids[len(prompt.token_ids) :])
    assert whole.token_ids[: len(prompt.token_ids)] == prompt.token_ids
    written = written[: written.index(tokenizer.eos_id) + 1]
    parsed = parse_output(written, prompt.output, tokenizer=tokenizer)
    assert (parsed.reasoning, parsed.content, parsed.notes) == (reasoning, content, ())
    assert [(c.name, c.id, c.arguments_object()) for c in parsed.tool_calls] == [
        (c.name, c.id, c.arguments_object()) for c in calls
    ]
    again = encode_conversation(tokenizer, [question, parsed.to_message(), *answers, question], tools=[Tool("f")])
    assert again.token_ids == whole.token_ids


def test_misuse_is_refused() -> None:
    """Guards against text where ids are expected, foreign ids, reading too early and pushing too late."""
    parser = OutputParser()
    with pytest.raises(PromptError, match="token ids need a tokenizer"):
        parser.push([1])
    with pytest.raises(PromptError, match="lone surrogate"):
        parser.push("\ud800")
    with pytest.raises(PromptError, match="not finished"):
        _ = parser.result
    parser.push("a")
    assert parser.finish().content == ""
    assert parser.finish().content == ""
    assert parser.result.content == "a"
    with pytest.raises(PromptError, match="a new one needs a new parser"):
        parser.push("b")
    with pytest.raises(PromptError, match="for token ids; it got text"):
        parse_output("a", tokenizer=demo.load_tokenizer())
    with pytest.raises(PromptError, match=r"output\[1\]: '99999' is not a token id"):
        parse_output([1, 99999], tokenizer=demo.load_tokenizer())
    with pytest.raises(PromptError, match="stage: 'think' is not one of"):
        OutputStart("think")  # type: ignore[arg-type]


def test_text_streams_at_once() -> None:
    """Guards against a parser that holds everything back until the end."""
    parser = OutputParser(OutputStart("reasoning"))
    assert parser.push("I think").reasoning == "I think"
    assert parser.push("\n").reasoning == ""
    assert parser.push("so <").reasoning == "\nso "
    assert parser.push("b").reasoning == "<b"
    assert parser.push(f"{control.END_THINK}Yes").content == "Yes"
    assert parser.push("\n\n" + GOOD[:-1]).tool_calls == ()
    assert len(parser.push(">").tool_calls) == 2
