"""The JSON that SGLang 0.5.23 answers with: whole answers, stream chunks, errors (shared/captures, sgl_http)."""

from __future__ import annotations

from typing import Any

import msgspec

from router.engine.body import CHAT, GENERATE, Call
from router.engine.scheduler import Request

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def sse(value: object) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def error_body(path: str, status: int, message: str, kind: str) -> dict[str, Any]:
    if path == GENERATE:
        return {"error": {"message": message}}
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


def usage(requests: list[Request], copies: int, *, cache_report: bool) -> dict[str, Any]:
    """Token counts of an answer. A prompt with n > 1 counts once, and so do its cached tokens."""
    prompt_tokens = sum(request.prompt_tokens for request in requests[::copies])
    completion_tokens = sum(len(request.output) for request in requests)
    cached = {"cached_tokens": sum(request.cached_tokens for request in requests[::copies])}
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": cached if cache_report else None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def generate_item(request: Request, text: str, rank: int | None) -> dict[str, Any]:
    """One /generate result; streams repeat it, longer each time. Times are seconds, `*_ts` seconds since 1970."""
    finish: dict[str, Any] | None = None
    if request.finish == "length":
        finish = {"type": "length", "length": len(request.output)}
    elif request.finish == "abort":
        finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    admitted_s = request.admitted_s if request.admitted_s is not None else request.submitted_s
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": finish,
        "prompt_tokens": request.prompt_tokens,
        "weight_version": "default",
        "num_retractions": 0,
        "queue_time": admitted_s - request.submitted_s,
        "reasoning_tokens": 0,
        "completion_tokens": len(request.output),
        "cached_tokens": request.cached_tokens,
        "cached_tokens_details": {"device": request.cached_tokens, "host": 0} if request.cached_tokens else None,
        "dp_rank": rank,
    }
    if request.finished_s is not None:
        meta["e2e_latency"] = request.finished_s - request.submitted_s
        meta["request_received_ts"] = request.submitted_s
        meta["request_finished_ts"] = request.finished_s
    return {"text": text, "output_ids": request.output, "meta_info": meta}


class OpenAiShapes:
    """Chat and completions share their frame; the parts that differ are in the choice."""

    def __init__(self, call: Call, created_s: int, *, cache_report: bool) -> None:
        self._chat = call.path == CHAT
        self._rid, self._created_s, self._model = call.rid, created_s, call.model
        self._copies = call.copies
        self._cache_report = cache_report

    def usage(self, requests: list[Request]) -> dict[str, Any]:
        return usage(requests, self._copies, cache_report=self._cache_report)

    def answer(self, requests: list[Request], texts: list[str]) -> dict[str, Any]:
        choices = [self._choice(i, texts[i], request.finish) for i, request in enumerate(requests)]
        kind = "chat.completion" if self._chat else "text_completion"
        length = max(len(request.output) for request in requests)
        versions = [{"version": "default", "start": 0, "end": length}]
        return {
            "id": self._rid,
            "object": kind,
            "created": self._created_s,
            "model": self._model,
            "choices": choices,
            "usage": self.usage(requests),
            "metadata": {"weight_version": "default", "weight_versions": versions},
        }

    def opening(self, index: int) -> bytes:
        """Chat streams begin with the role; completions with the first text."""
        return self._chunk(index, {"reasoning_content": None, "role": "assistant", "content": ""}, None, None)

    def token(self, index: int, text: str, finish: str | None, so_far: dict[str, Any] | None) -> bytes:
        if self._chat:
            return self._chunk(index, {"reasoning_content": None, "content": text}, None, so_far)
        return self._chunk(index, text, finish, so_far)

    def closing(self, index: int, finish: str | None) -> bytes:
        """Chat streams end each choice with an empty delta that carries the reason."""
        return self._chunk(index, {"reasoning_content": None}, finish, None)

    def total(self, requests: list[Request]) -> bytes:
        counts = self.usage(requests)
        if not self._chat:
            del counts["completion_tokens_details"]
        return sse({**self._head(), "choices": [], "usage": counts})

    def _choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        content: dict[str, Any] = {"text": text}
        if self._chat:
            content = {"message": {"role": "assistant", "content": text, "reasoning_content": None}}
        return {"index": index, **content, "logprobs": None, "finish_reason": finish, "matched_stop": None}

    def _head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {"id": self._rid, "object": kind, "created": self._created_s, "model": self._model}

    def _chunk(self, index: int, content: object, finish: str | None, so_far: dict[str, Any] | None) -> bytes:
        key = "delta" if self._chat else "text"
        choice = {"index": index, key: content, "logprobs": None, "finish_reason": finish, "matched_stop": None}
        chunk = {**self._head(), "choices": [choice]}
        if so_far is not None or not self._chat:
            chunk["usage"] = so_far
        return sse(chunk)
