"""Whether a worker's role is what people think it is, and whether a prefill engine can be met. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from router.contract.server_info import ServerInfo

if TYPE_CHECKING:
    from router.fleet.worker import Worker

CHANGE_SHOWN_S = 600.0
"""How long a role that changed in place is named: pools follow it at once, people should know."""


class RoleWatch:
    """Names two kinds of drift of one worker: `role` and `bootstrap`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed: tuple[str, str, float] | None = None

    def took(self, before: ServerInfo | None, info: ServerInfo) -> None:
        """A new description. A role that changed although the process did not: SGLang's --enable-pd-role-switch."""
        if before is not None and before.says_role and info.says_role and before.role != info.role:
            in_place = before.startup_fingerprint == info.startup_fingerprint
            self._changed = (before.role, info.role, self._clock()) if in_place else None

    def check(self, worker: Worker) -> None:
        """Time passed, or something changed."""
        self._check_role(worker)
        self._check_bootstrap(worker)

    def _check_role(self, worker: Worker) -> None:
        info, wanted, changed = worker.info, worker.settings.role, self._changed
        if changed is not None and self._clock() - changed[2] > CHANGE_SHOWN_S:
            changed = self._changed = None
        if info is not None and info.says_role and wanted is not None and wanted != info.role:
            advice = "the engine's own word counts; set workers[].role (or the pod's label) to what it is started as"
            worker.drifted("role", wanted, info.role, advice)
        elif changed is not None:
            advice = (
                "the role changed while the engine ran, and its pool with it: is the other half still large enough?"
            )
            worker.drifted("role", changed[0], changed[1], advice)
        else:
            worker.drift_over("role")

    def _check_bootstrap(self, worker: Worker) -> None:
        if worker.role != "prefill" or worker.dialect == "vllm" or worker.info is None:
            worker.drift_over("bootstrap")
        elif worker.bootstrap_port is None:
            advice = "start the engine with --disaggregation-bootstrap-port: no decode engine can meet it"
            worker.drifted("bootstrap", "a prefill engine", "no bootstrap port", advice)
        elif worker.bootstrap_problem:
            at = f"{worker.url.host}:{worker.bootstrap_port}"
            advice = (
                "decode engines fetch the prompt's KV through this port: open it, or correct the engine's "
                "--disaggregation-bootstrap-port"
            )
            worker.drifted("bootstrap", at, worker.bootstrap_problem, advice)
        else:
            worker.drift_over("bootstrap")
