"""Spellings of the control tokens of the V4.1 protocol (`spec/vision_prompt_demo.md` B.1).

Ids differ between tokenizers and are always looked up by these spellings.
"""

from __future__ import annotations

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
LATEST_REMINDER = "<｜latest_reminder｜>"
IMAGE = "<｜deepseek_image｜>"

TASKS = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}
"""Quick-instruction tasks: name in a message -> token at the end of the prompt."""

GROUNDING = tuple(f"<｜{slash}{name}｜>" for name in ("ref", "box", "point", "polygon") for slash in ("", "/"))
"""Tokens with which the model marks places in images; control tokens in the text of assistant turns only."""

REQUIRED = (BOS, EOS, SYSTEM, USER, ASSISTANT, THINK, END_THINK, DSML)
"""A tokenizer without one of these cannot encode any conversation of this protocol."""

OPTIONAL = (PAD, LATEST_REMINDER, IMAGE, *TASKS.values(), *GROUNDING)
"""Needed only by prompts that use them."""
