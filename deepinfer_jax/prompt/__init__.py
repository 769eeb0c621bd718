"""Prompts of DeepSeek-V4.1: conversations to token ids, model output to reasoning, content and tool calls."""

from deepinfer_jax.prompt.encode import (
    DEFAULT_EFFORT,
    EFFORTS,
    EncodedPrompt,
    RenderedPrompt,
    encode_completion,
    encode_conversation,
    render_conversation,
)
from deepinfer_jax.prompt.errors import PromptError
from deepinfer_jax.prompt.messages import (
    ImagePart,
    Message,
    Tool,
    ToolCall,
    normalize_messages,
    normalize_tools,
)
from deepinfer_jax.prompt.parser import (
    OutputParser,
    OutputStart,
    ParsedDelta,
    ParsedOutput,
    parse_output,
)
from deepinfer_jax.prompt.tokenizer import Detokenizer, Tokenizer

__all__ = [
    "DEFAULT_EFFORT",
    "EFFORTS",
    "Detokenizer",
    "EncodedPrompt",
    "ImagePart",
    "Message",
    "OutputParser",
    "OutputStart",
    "ParsedDelta",
    "ParsedOutput",
    "PromptError",
    "RenderedPrompt",
    "Tokenizer",
    "Tool",
    "ToolCall",
    "encode_completion",
    "encode_conversation",
    "normalize_messages",
    "normalize_tools",
    "parse_output",
    "render_conversation",
]
