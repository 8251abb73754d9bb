"""The one line that says where the listeners are, for whoever started the process (ports may have been 0)."""

from __future__ import annotations

import json
import logging

from router.config import Config, DiscoveryConfig
from router.contract.url import bracketed

log = logging.getLogger("router")


def announce(config: Config, port: int, admin_port: int) -> None:
    """One JSON line on stdout, and what the operator should see in the log at start."""
    where = {
        "listen": f"http{'s' if config.listen.tls else ''}://{bracketed(config.listen.host)}:{port}",
        "admin": f"http://{bracketed(config.admin.host)}:{admin_port}",
    }
    for warning in config.warnings():
        log.warning(warning)
    print(json.dumps(where), flush=True)
    log.info("listening", extra=where)
    if not config.workers and config.discovery == DiscoveryConfig():
        log.warning("no workers yet: give --worker URL, or POST /workers on the admin listener")
