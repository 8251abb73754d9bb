"""TLS contexts from the configuration."""

from __future__ import annotations

import ssl

from router.config.schema import TlsConfig
from router.errors import ConfigError


def server_context(setting: str, tls: TlsConfig | None) -> ssl.SSLContext | None:
    """What a listener shows its clients. Raises ConfigError that names `setting`, also for a pair that does not fit."""
    if tls is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(tls.cert, tls.key)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{setting}: cannot load {tls.cert} with {tls.key}: {error}") from None
    return context
