"""Envoy's `ext_authz` filter over HTTP: the request comes with its body, the answer says where it goes.

200 lets the request through, with header fields to set on it; anything else is the client's answer. Everything that
guards the public listener guards this one: it is the same listener with somebody else to carry the request.
"""

from __future__ import annotations

from router.envoy.pick import ORIGINAL_DESTINATION, Picker, withheld
from router.proxy.attempt import Client, Incoming, Story
from router.proxy.headers import lines_of
from router.proxy.plan import Outcome

REMOVE = b"x-envoy-auth-headers-to-remove"
"""Envoy's HTTP authorization client takes fields named here off the request to the engine."""


class AuthzCarrier:
    """`Carrier` of the listener: answers with a destination instead of a worker's answer."""

    waiting = 0

    def __init__(self, picker: Picker) -> None:
        self._picker = picker

    async def forward(self, incoming: Incoming, client: Client, story: Story) -> None:
        """Raises RouterError when there is nowhere to send it."""
        picked = await self._picker.pick(incoming.route, incoming.fields, incoming.body, incoming.request_id)
        fields = [*picked.fields, (ORIGINAL_DESTINATION, picked.endpoints[0].encode()), *picked.told]
        if taken_off := withheld(incoming.fields, incoming.kept, picked):
            fields.append((REMOVE, b",".join(taken_off)))
        story.worker, story.status, story.answered = picked.worker, 200, True
        story.attempts = 1
        story.outcome = Outcome.OK
        client.begin(200, b"OK", lines_of(fields), 0, True)
        client.end(b"")
