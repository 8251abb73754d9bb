"""Run by an SGLang environment: its own server, plus `POST /swap_template {"path": FILE}`.

The route does what a start with `--chat-template FILE` does, on a running server: SGLang's own TemplateManager loads
the file, and its own handlers are built over it. So that one start serves for many templates.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from sglang.launch_server import run_server  # type: ignore[import-not-found]
from sglang.srt.entrypoints import http_server  # type: ignore[import-not-found]
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing  # type: ignore[import-not-found]
from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingTokenize  # type: ignore[import-not-found]
from sglang.srt.parser.template_manager import TemplateManager  # type: ignore[import-not-found]
from sglang.srt.server_args import prepare_server_args  # type: ignore[import-not-found]
from sglang.srt.utils import kill_process_tree  # type: ignore[import-not-found]


@http_server.app.post("/swap_template")  # type: ignore[untyped-decorator]
async def swap_template(body: dict[str, str]) -> dict[str, Any]:
    manager = http_server._global_state.tokenizer_manager
    templates = TemplateManager()
    templates.load_chat_template(manager, body["path"], "")
    state = http_server.app.state
    state.openai_serving_chat = manager.serving_chat_class(manager, templates)
    state.openai_serving_tokenize = OpenAIServingTokenize(manager, templates)
    state.anthropic_serving = AnthropicServing(state.openai_serving_chat)
    return {"content_format": templates.jinja_template_content_format}


if __name__ == "__main__":
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
