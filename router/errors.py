"""The one error type a client can see, its codes, and the two errors of people and engines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """HTTP status, OpenAI error `type`, and what it means (the README's table is tested against this)."""

    status: int
    type: str
    meaning: str


ERRORS: dict[str, ErrorKind] = {
    "bad_request": ErrorKind(400, "invalid_request_error", "the request is not well-formed HTTP for this route"),
    "bad_json": ErrorKind(400, "invalid_request_error", "the body is not a JSON object"),
    "bad_token_ids": ErrorKind(400, "invalid_request_error", "a prompt's token ids are not in the model's vocabulary"),
    "unauthorized": ErrorKind(401, "authentication_error", "client key missing or wrong"),
    "forbidden": ErrorKind(403, "permission_error", "a web page of another origin asked the admin listener"),
    "not_found": ErrorKind(404, "invalid_request_error", "no such route on this listener"),
    "model_not_found": ErrorKind(404, "invalid_request_error", "no worker has ever served this model"),
    "method_not_allowed": ErrorKind(405, "invalid_request_error", "the route exists, with another method"),
    "request_timeout": ErrorKind(408, "invalid_request_error", "the body did not arrive in time"),
    "conflict": ErrorKind(409, "invalid_request_error", "the worker is registered with other settings"),
    "body_too_large": ErrorKind(413, "invalid_request_error", "the body is over listen.max_body_mb"),
    "expectation_failed": ErrorKind(417, "invalid_request_error", "an Expect header other than 100-continue"),
    "queue_full": ErrorKind(429, "rate_limit_error", "every worker is at its limit and no more requests may wait"),
    "internal": ErrorKind(500, "server_error", "a fault of the router itself; its log has the trace"),
    "not_implemented": ErrorKind(501, "invalid_request_error", "upgrades (WebSocket) are not proxied"),
    "upstream_connect": ErrorKind(502, "server_error", "no worker could be connected to"),
    "upstream_reset": ErrorKind(502, "server_error", "the worker closed the connection before it answered"),
    "upstream_protocol": ErrorKind(502, "server_error", "the worker's answer is not valid HTTP"),
    "no_worker": ErrorKind(503, "server_error", "the model is known but no worker can take the request now"),
    "no_prefill_workers": ErrorKind(
        503, "server_error", "decode engines are ready, no prefill engine to pair them with"
    ),
    "no_decode_workers": ErrorKind(
        503, "server_error", "prefill engines are ready, no decode engine to pair them with"
    ),
    "queue_timeout": ErrorKind(503, "server_error", "no worker had room within admission.wait_s"),
    "overloaded": ErrorKind(503, "server_error", "request bodies held are over listen.max_buffered_mb"),
    "draining": ErrorKind(503, "server_error", "this router is shutting down"),
    "upstream_timeout": ErrorKind(504, "server_error", "the worker was silent longer than timeouts.idle_s"),
    "pair_timeout": ErrorKind(
        504, "server_error", "a prefill and a decode engine did not meet in disaggregation.meet_s"
    ),
}


class RouterError(Exception):
    """Becomes `{"error": {"message", "type", "code"}}` with the code's status and `x-kv-router-error: CODE`."""

    def __init__(self, code: str, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        return ERRORS[self.code].status

    @property
    def type(self) -> str:
        return ERRORS[self.code].type


class ConfigError(Exception):
    """What the operator wrote cannot be used. The text names the key and what to write instead."""


class ContractError(Exception):
    """An engine said something that cannot be used. The text says what, and the engine flag that mends it."""
