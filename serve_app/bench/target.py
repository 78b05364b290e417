"""The endpoint under test: where it is, how it is asked, and whether it may be asked at all.

Owns: the checks before a load (is it this machine, does it answer, which model) and what differs between servers in a
request's body. Must not know: loads or results.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from serve_app.bench.client import get_json
from serve_app.bench.errors import BenchError

EOS_BIAS = -100.0


class EosBan(StrEnum):
    """How the server is kept from ending an answer early, so that every answer has exactly the planned length."""

    IGNORE_EOS = "ignore_eos"
    LOGIT_BIAS = "logit_bias"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Target:
    """One endpoint. ``base_url`` is without ``/v1``. ``num_slots``: what the test means to use; None does not care.

    ``process_id`` is the root of the server's processes on this machine, where known: its CPU time is measured then.
    ``trust``: whom to believe over HTTPS; None: whom the system believes.
    """

    label: str
    base_url: str
    model: str = ""
    eos_ban: EosBan = EosBan.IGNORE_EOS
    eos_token_ids: tuple[int, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    num_slots: int | None = None
    process_id: int | None = None
    trust: ssl.SSLContext | None = field(default=None, repr=False, compare=False)

    def url(self, endpoint: str) -> str:
        """Where requests of a workload's endpoint ("chat" or "completions") go."""
        return f"{self.base_url}/v1/{'chat/completions' if endpoint == 'chat' else 'completions'}"

    @property
    def extra(self) -> dict[str, Any]:
        """What every request body holds besides the prompt: greedy, streamed, with usage, of exact length."""
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.eos_ban is EosBan.IGNORE_EOS:
            body["ignore_eos"] = True
        elif self.eos_ban is EosBan.LOGIT_BIAS:
            body["logit_bias"] = {str(token_id): EOS_BIAS for token_id in self.eos_token_ids}
        return body


def check_target(target: Target, *, allow_remote: bool) -> None:
    """Refuse an address that is not this machine's, unless that is meant, and a ban that bans nothing.

    A load test is an attack on whoever runs the endpoint, so another machine's is tested only on purpose. Raises
    BenchError.
    """
    host = urlsplit(target.base_url).hostname
    if host is None or urlsplit(target.base_url).scheme not in ("http", "https"):
        raise BenchError(f"{target.base_url!r} is no address.", "write it like http://127.0.0.1:8000")
    if not allow_remote and not _is_loopback(host):
        raise BenchError(f"{host} is not this machine.", "add --allow-remote if its owner agrees to a load test")
    if target.eos_ban is EosBan.LOGIT_BIAS and not target.eos_token_ids:
        raise BenchError("No EOS token is known to ban by logit bias.", "name the model's files with --tokenizer")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def resolve_model(target: Target) -> Target:
    """Fill in the model from ``/v1/models`` when none is named.

    Raises BenchError when nobody answers or many are, UntrustedError for a certificate that is not believed.
    """
    if target.model:
        return target
    document = await get_json(f"{target.base_url}/v1/models", api_key=target.api_key, trust=target.trust)
    if not isinstance(document, Mapping):
        raise BenchError(f"No endpoint answers at {target.base_url}.", "start one with `metalslots serve`")
    names = [str(entry.get("id")) for entry in document.get("data") or ()]
    if len(names) != 1:
        listed = ", ".join(names[:5]) or "none"
        raise BenchError(f"The endpoint offers {len(names)} models ({listed}).", "name one with --model")
    return replace(target, model=names[0])
