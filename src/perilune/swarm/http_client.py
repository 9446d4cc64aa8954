"""`ModelClient` over HTTP, for any OpenAI-compatible endpoint.

    client = HTTPClient(base_url="https://api.moonshot.ai/v1", api_key_env="MOONSHOT_API_KEY")
    reply = await client.complete(ModelRequest(agent="main", model="kimi-k2.5", messages=[...]))

A request is the join of its messages' bytes, each encoded once. Replies are streamed; after a stream that was cut,
stalled or malformed the same call is repeated without streaming, and a provider whose streams keep breaking is no
longer asked for them. Calls wait for a place (`turnstile`), are tried again with full jitter, and end with the reply or
one `ModelError` that says what happened. Refusals (429) never use up the attempts of a call, only its time.

Keys come from the environment or as a `Secret`. They live in the transport alone: no repr, error or log shows them, and
an endpoint's own words are scrubbed before they are repeated. Redirects are not followed: a key goes to no other host.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson
import yarl

from perilune.swarm.client import ModelError, ModelErrorKind, ModelReply, ModelRequest, Usage
from perilune.swarm.provider import Limits, Provider, Secret
from perilune.swarm.rate import CircuitBreaker
from perilune.swarm.stream import (
    ErrorInReply,
    EventLines,
    MalformedReply,
    Parsed,
    StreamedReply,
    parse_body,
    parse_events,
)
from perilune.swarm.turnstile import CircuitOpen, Permit, Turnstile, WaitTooLong

RETRIED = frozenset((408, 409, 425, 429))
"""Answers below 500 that may be different next time."""
OVERLOADED = frozenset((429, 503, 529))
FREE = frozenset((503, 529))
"""Errors above 499 that say that nothing was computed."""
QUOTA = frozenset(("insufficient_quota", "billing_hard_limit_reached", "exceeded_current_quota_error"))
"""Codes of 429 that waiting does not cure."""
LARGEST_ERROR = 4096
STREAM_FAULTS = 3
"""Broken streams in a row after which a provider is asked for whole bodies only."""


@dataclass(slots=True)
class _Failure(Exception):
    """One attempt that came to nothing."""

    kind: ModelErrorKind
    text: str
    status: int | None = None
    is_final: bool = False
    is_refusal: bool = False
    retry_after: float | None = None
    spoils_stream: bool = False
    usage: Usage | None = None
    """What the attempt cost, where that is known."""


class _Endpoint:
    """A provider in use: its connections, its turnstile and how its streams fare. Bound to one loop."""

    def __init__(self, provider: Provider, limits: Limits) -> None:
        self.provider = provider
        self.url = yarl.URL(provider.base_url.rstrip("/") + "/chat/completions")
        self.name = provider.name or self.url.host or provider.base_url
        self.turnstile = Turnstile(
            pace=provider.pace,
            max_concurrent=provider.max_concurrent,
            model_paces=dict(provider.model_paces),
            breaker=CircuitBreaker(patience=limits.patience_seconds, first_patience=limits.first_patience_seconds),
        )
        self.stream_faults = 0
        self.bodies_left = 0
        """Calls that go without streaming before it is tried again."""
        secret = provider.key()
        self._secret = secret
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "perilune"}
        if secret is not None:
            headers["Authorization"] = f"Bearer {secret.reveal()}"
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300, keepalive_timeout=60),
            headers=headers | dict(provider.headers),
            cookie_jar=aiohttp.DummyCookieJar(),
            raise_for_status=False,
        )
        self.stream_timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=limits.connect_seconds, sock_read=limits.idle_seconds
        )
        self.body_timeout = aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_seconds, sock_read=None)
        self.extra = b"".join(
            b",%s:%s" % (orjson.dumps(key), orjson.dumps(value)) for key, value in provider.body.items()
        )

    def scrub(self, text: str) -> str:
        """Without the key, whoever repeated it."""
        if self._secret is not None:
            text = text.replace(self._secret.reveal(), "[key]")
        return re.sub(r"(?i)\b(bearer)\s+[^\s\"',;]+", r"\1 [key]", text)

    def wants_stream(self) -> bool:
        if self.bodies_left:
            self.bodies_left -= 1
            return False
        return True

    def note_stream(self, *, is_whole: bool) -> None:
        if is_whole:
            self.stream_faults = 0
            return
        self.stream_faults += 1
        if self.stream_faults >= STREAM_FAULTS:
            self.stream_faults = 0
            self.bodies_left = 200


class _Body(aiohttp.Payload):
    """The bytes of a request that tell when they were written: only then can a refusal be on its way back."""

    def __init__(self, value: bytes, permit: Permit) -> None:
        super().__init__(value, content_type="application/json")
        self._size = len(value)
        self._permit = permit

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self._value.decode(encoding, errors)

    async def as_bytes(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        return self._value

    async def write(self, writer: Any) -> None:
        await writer.write(self._value)
        self._permit.sent()

    async def write_with_length(self, writer: Any, content_length: int | None) -> None:
        await self.write(writer)


class HTTPClient:
    """See the module. One client serves all agents of a run; `close` it at the end, or use `async with`."""

    def __init__(
        self,
        *,
        base_url: str | None = None,
        api_key_env: str | None = "OPENAI_API_KEY",
        api_key: Secret | None = None,
        max_concurrent: int | None = None,
        providers: Sequence[Provider] = (),
        limits: Limits | None = None,
        stream: bool = True,
        token_ids: bool = False,
        seed: int = 0,
    ) -> None:
        """`base_url` with its key, or `providers`. `token_ids` asks for token ids and log-probabilities; `seed` is of
        the pauses between attempts."""
        if (base_url is None) == (not providers):
            raise ValueError(f"base_url {base_url!r} and {len(providers)} providers: expected one or the other")
        if base_url is not None:
            env = None if api_key is not None else api_key_env
            providers = (Provider(base_url=base_url, api_key_env=env, api_key=api_key, max_concurrent=max_concurrent),)
        self.providers = tuple(providers)
        self.limits = limits or Limits()
        self.stream = stream
        self.token_ids = token_ids
        self._random = random.Random(seed)
        self._endpoints: dict[int, _Endpoint] = {}
        self._is_closed = False
        for provider in self.providers:
            provider.key()  # a missing key is reported now, not in the middle of a run

    def __repr__(self) -> str:
        return f"HTTPClient({', '.join(provider.base_url for provider in self.providers)})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self._is_closed = True
        for endpoint in self._endpoints.values():
            await endpoint.session.close()
        self._endpoints.clear()

    def state(self) -> list[dict[str, Any]]:
        """Per provider and model: calls in flight and waiting, the limit in force, refusals so far."""
        return [
            {
                "provider": endpoint.name,
                "model": model,
                "in_flight": lane.limit.in_flight,
                "waiting": len(lane.queue),
                "limit": None if lane.limit.limit == math.inf else int(lane.limit.limit),
                "refused": lane.limit.refusals,
                "circuit_open": endpoint.turnstile.breaker.is_open,
            }
            for endpoint in self._endpoints.values()
            for model, lane in endpoint.turnstile.lanes.items()
        ]

    def _endpoint(self, model: str) -> _Endpoint:
        for number, provider in enumerate(self.providers):
            if any(pattern == "*" or fnmatchcase(model, pattern) for pattern in provider.models):
                endpoint = self._endpoints.get(number)
                if endpoint is None:
                    if self._is_closed:
                        raise RuntimeError("this HTTPClient is closed")
                    endpoint = self._endpoints[number] = _Endpoint(provider, self.limits)
                return endpoint
        served = ", ".join(pattern for provider in self.providers for pattern in provider.models)
        raise ModelError(f"no provider serves the model {model!r}; they serve {served}", kind="refused", attempts=0)

    # A call ----------------------------------------------------------------------------------------------------------

    async def complete(self, request: ModelRequest) -> ModelReply:
        endpoint = self._endpoint(request.model)
        turnstile, limits = endpoint.turnstile, self.limits
        deadline = turnstile.loop.time() + limits.call_seconds
        messages = b",".join([message.wire for message in request.messages])
        tools = b"" if request.tools == b"[]" else request.tools
        stream = self.stream and endpoint.wants_stream()
        attempts = failures = 0
        last: _Failure | None = None
        while True:
            try:
                permit = await turnstile.enter(request.agent, request.model, deadline=deadline, front=attempts > 0)
            except WaitTooLong:
                raise self._too_late(endpoint, last, attempts) from None
            except CircuitOpen:
                kind, why = "circuit_open", "does not answer, and is left alone for a while"
                raise ModelError(self._said(endpoint, why, last, attempts), kind=kind, attempts=attempts) from None
            try:
                usage: Usage | None = None
                if request.meter is not None:
                    request.meter.begin(prompt_bound=len(messages) + len(tools), max_tokens=request.max_tokens)
                attempts += 1
                try:
                    body = self._body(endpoint, request, messages, tools, stream=stream)
                    parsed = await self._attempt(endpoint, request, permit, body, deadline, stream=stream)
                    usage = parsed.usage
                except _Failure as failure:
                    last, usage = failure, failure.usage
                else:
                    return _reply(parsed, attempts)
                finally:
                    if request.meter is not None:
                        request.meter.end(usage)
            finally:
                permit.close()
            failures += not last.is_refusal
            if last.spoils_stream:
                stream = False
            if last.is_final or failures >= limits.attempts:
                break
            await self._pause(turnstile.loop, last, failures, deadline)
        if last.kind == "time":
            raise self._too_late(endpoint, last, attempts)
        text = self._said(endpoint, "", last, attempts)
        raise ModelError(text, kind=last.kind, status=last.status, attempts=attempts)

    async def _pause(self, loop: asyncio.AbstractEventLoop, last: _Failure, failures: int, deadline: float) -> None:
        """Full jitter. A refusal that named a time needs none: the turnstile keeps everybody waiting until then."""
        if last.is_refusal and last.retry_after is not None:
            return
        most = min(self.limits.longest_pause, self.limits.first_pause * 2 ** max(0, failures - 1))
        pause = max(self._random.uniform(0, most), last.retry_after or 0)
        await asyncio.sleep(max(0, min(pause, deadline - loop.time())))

    def _too_late(self, endpoint: _Endpoint, last: _Failure | None, attempts: int) -> ModelError:
        why = f"gave no answer within the {self.limits.call_seconds:g} s of a call"
        if last is not None and last.is_refusal:
            why = f"kept refusing for the {self.limits.call_seconds:g} s of a call, or asked to wait for longer"
            return ModelError(
                self._said(endpoint, why, last, attempts), kind="rate_limit", status=last.status, attempts=attempts
            )
        return ModelError(self._said(endpoint, why, last, attempts), kind="time", attempts=attempts)

    @staticmethod
    def _said(endpoint: _Endpoint, why: str, last: _Failure | None, attempts: int) -> str:
        parts = [f"{endpoint.name} {why}" if why else f"{endpoint.name}:"]
        if last is not None:
            parts.append(f"{'(last: ' if why else ''}{last.text}{')' if why else ''}")
        if attempts > 1:
            parts.append(f"after {attempts} attempts")
        return endpoint.scrub(" ".join(parts))

    def _body(
        self, endpoint: _Endpoint, request: ModelRequest, messages: bytes, tools: bytes, *, stream: bool
    ) -> bytes:
        provider = endpoint.provider
        parts = [
            b'{"model":%s,"messages":[' % orjson.dumps(request.model),
            messages,
            b'],"%s":%d' % (provider.max_tokens_field.encode(), request.max_tokens),
        ]
        if tools:
            parts += [b',"tools":', tools]
        if request.temperature is not None:
            parts.append(b',"temperature":%s' % orjson.dumps(request.temperature))
        if request.seed is not None:
            parts.append(b',"seed":%d' % request.seed)
        if request.response_format is not None:
            parts.append(b',"response_format":%s' % orjson.dumps(dict(request.response_format)))
        if provider.session_field is not None and request.session is not None:
            parts.append(b",%s:%s" % (orjson.dumps(provider.session_field), orjson.dumps(request.session)))
        if self.token_ids:
            parts.append(b',"return_token_ids":true,"logprobs":true')
        if stream:
            parts.append(b',"stream":true,"stream_options":{"include_usage":true}')
        parts += [endpoint.extra, b"}"]
        return b"".join(parts)

    # An attempt ------------------------------------------------------------------------------------------------------

    async def _attempt(
        self, endpoint: _Endpoint, request: ModelRequest, permit: Permit, body: bytes, deadline: float, *, stream: bool
    ) -> Parsed:
        """The parsed reply, or `_Failure`. Tells the permit how it went."""
        loop = endpoint.turnstile.loop
        end = min(deadline, loop.time() + self.limits.attempt_seconds)
        failure: _Failure
        try:
            async with asyncio.timeout_at(end):
                parsed, first_byte = await self._exchange(
                    endpoint, _Body(body, permit), len(request.messages), stream=stream
                )
            permit.succeed(first_byte if stream else None)
            if stream:
                endpoint.note_stream(is_whole=True)
            return parsed
        except _Failure as known:
            failure = known
        except MalformedReply as error:
            failure = _Failure("malformed", str(error), spoils_stream=stream)
        except ErrorInReply as error:
            failure = _Failure("server", str(error), status=error.code, spoils_stream=stream)
        except TimeoutError:  # also aiohttp's own
            is_over = loop.time() >= deadline
            kind: ModelErrorKind = "time" if is_over else "stalled"
            failure = _Failure(kind, "no bytes for too long", is_final=is_over, spoils_stream=stream)
        except aiohttp.ClientConnectorError as error:
            # Nothing was sent, so nothing was used.
            failure = _Failure("network", _network(error), usage=Usage())
        except (aiohttp.ClientError, OSError) as error:
            failure = _Failure("network", _network(error), spoils_stream=stream)
        self._tell(endpoint, permit, failure)
        raise failure

    def _tell(self, endpoint: _Endpoint, permit: Permit, failure: _Failure) -> None:
        if failure.is_refusal:
            permit.refuse(failure.retry_after)
        elif failure.kind in ("network", "server", "stalled"):
            permit.fail()
        else:
            permit.answered()
        if failure.spoils_stream:
            endpoint.note_stream(is_whole=False)

    async def _exchange(self, endpoint: _Endpoint, body: _Body, position: int, *, stream: bool) -> tuple[Parsed, float]:
        began = time.monotonic()
        async with endpoint.session.post(
            endpoint.url,
            data=body,
            allow_redirects=False,
            timeout=endpoint.stream_timeout if stream else endpoint.body_timeout,
            proxy=endpoint.provider.proxy,
        ) as response:
            first_byte = time.monotonic() - began
            if response.status != 200:
                raise await self._refused(endpoint, response)
            if stream and "event-stream" in response.headers.get("Content-Type", ""):
                return await self._read_events(response, position), first_byte
            data = await self._read_body(response)
            start = data.lstrip()[:6]
            is_events = start.startswith((b"data:", b"event:", b":"))
            return (parse_events if is_events else parse_body)(data, position), first_byte

    async def _read_events(self, response: aiohttp.ClientResponse, position: int) -> Parsed:
        lines, reply, content = EventLines(), StreamedReply(), response.content
        while piece := await content.readany():
            for event in lines.feed(piece):
                reply.add(event)
            if lines.size > self.limits.reply_bytes:
                raise MalformedReply(f"the stream is longer than {self.limits.reply_bytes} bytes")
            if reply.is_done:
                if not content.at_eof():
                    await _drain(response)
                break
        else:
            for event in lines.end():
                reply.add(event)
        return reply.finish(position)

    async def _read_body(self, response: aiohttp.ClientResponse) -> bytes:
        pieces, size = [], 0
        while not response.content.at_eof():
            async with asyncio.timeout(self.limits.idle_seconds):
                piece = await response.content.readany()
            pieces.append(piece)
            size += len(piece)
            if size > self.limits.reply_bytes:
                raise MalformedReply(f"the body is longer than {self.limits.reply_bytes} bytes")
        return b"".join(pieces)

    async def _refused(self, endpoint: _Endpoint, response: aiohttp.ClientResponse) -> _Failure:
        status = response.status
        async with asyncio.timeout(self.limits.idle_seconds):
            data = await response.content.read(LARGEST_ERROR)
        message, code = _error_text(data)
        text = endpoint.scrub(f"HTTP {status}: {message}")
        if status < 500:
            kind: ModelErrorKind = "rate_limit" if status == 429 else "refused"
            is_final = status not in RETRIED or code in QUOTA
        else:
            kind, is_final = "server", False
        is_known_free = status < 500 or status in FREE
        return _Failure(
            kind,
            text,
            status=status,
            is_final=is_final,
            is_refusal=status in OVERLOADED and not is_final,
            retry_after=retry_after(response.headers.get("Retry-After"), time.time()),
            usage=Usage() if is_known_free else None,
        )


def _reply(parsed: Parsed, attempts: int) -> ModelReply:
    return ModelReply(
        message=parsed.message,
        finish_reason=parsed.finish_reason,
        usage=parsed.usage,
        model=parsed.model,
        attempts=attempts,
        prompt_token_ids=parsed.prompt_token_ids,
        token_ids=parsed.token_ids,
        logprobs=parsed.logprobs,
        weight_version=parsed.weight_version,
    )


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read the little that follows [DONE], so that the connection can be used again; give it up when more comes."""
    try:
        async with asyncio.timeout(1.0):
            await response.content.readany()
    except TimeoutError:
        response.close()


def _network(error: BaseException) -> str:
    """What happened, without addresses of objects or headers."""
    text = str(error) or "connection lost"
    return f"{type(error).__name__}: {text[:200]}"


def _error_text(data: bytes) -> tuple[str, str | None]:
    """Message and code of an error's body, in any of the usual forms."""
    code = None
    try:
        body = orjson.loads(data)
        error = body.get("error", body) if isinstance(body, dict) else body
        if isinstance(error, dict):
            code = error.get("code") or error.get("type")
            error = error.get("message") or error.get("detail") or error
        text = error if isinstance(error, str) else orjson.dumps(error).decode()
    except orjson.JSONDecodeError:
        text = data.decode("utf-8", "replace")
    text = " ".join(text.split())
    return (text[:300] or "no reason given"), code if isinstance(code, str) else None


def retry_after(value: str | None, now: float) -> float | None:
    """Seconds to wait from a Retry-After header, which holds seconds or a date; None when it makes no sense."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


__all__ = ["HTTPClient", "Limits", "Provider", "Secret", "retry_after"]
