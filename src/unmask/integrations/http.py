"""A service that answers over HTTP, as an oracle: several requests at once, patient, and silent about its key.

    POST {"sequences": [[[0.5, …], …], …], "ids": ["9f…", …]}   →   {"answers": [0.25, …]}

One answer, a number or a list of numbers, for each sequence. A number that is not finite is `null`. An error is any
other status than 200, with {"error": "a sentence"}.

`ids` name the questions: equal sequences have equal ids, in every process. When the asker or the line dies, up to
`concurrency`·`per_request` questions are in flight, paid for and never heard. They are asked again under the same ids,
so a service that remembers what it has billed does not bill them twice. An id is BLAKE2b, 16 bytes, keyed with
"0 length width", over the float64 numbers in little-endian order: a service can check that it names its sequence.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import random
import re
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, NoReturn
from urllib.parse import SplitResult, urlsplit

import numpy as np
import torch
from jaxtyping import Float

from unmask import __version__
from unmask.errors import InputError, NoAnswerError, ServiceError, UnmaskError
from unmask.evidence.oracles import Answers, Refused, Sequences, question_keys, refuse_unless_finite

_CHUNK_BYTES = 2**16
_SHOWN_CHARACTERS = 300  # of what a service says about an error
_ABOUT_TOKENS = re.compile(r"\b(tokens?|norms?|overflow\w*)\b", re.IGNORECASE)
_PASSING = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}
_TOO_LARGE = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
_ABOUT_WHAT_WAS_ASKED = {HTTPStatus.BAD_REQUEST, _TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY}


@dataclass(frozen=True)
class _Reply:
    status: int
    body: bytes
    retry_after: str | None
    location: str | None


@dataclass(frozen=True, repr=False)
class HttpOracle:
    """A service that answers at a URL.

    The key comes from the environment variable `api_key_env` and is sent as a bearer token; without such a variable
    none is sent. It is read when it is sent and kept nowhere; names, errors and representations do not hold it, even
    where the service repeats it. Connection errors, time-outs and the statuses 408, 425, 429 and 5xx are asked again
    up to `retries` times, after `backoff_seconds` doubled each time, with chance, or after what Retry-After says.

    Limits: no redirect is followed, and no proxy is used. A service that asks to wait for more than
    `max_wait_seconds` ends the run. `ids` do not tell a repeated question from a resent one.
    Cost: one request for `per_request` sequences; answers of other requests that arrive are handed out before an
    error is raised.
    """

    url: str
    api_key_env: str | None = "UNMASK_API_KEY"
    concurrency: int = 8
    per_request: int = 64
    timeout: float = 30.0  # seconds, for one whole exchange
    retries: int = 6
    backoff_seconds: float = 0.5
    max_wait_seconds: float = 120.0
    max_reply_bytes: int = 2**26
    _idle: deque[http.client.HTTPConnection] = field(default_factory=deque, init=False, compare=False)

    def __post_init__(self) -> None:
        """Check the settings; a URL with a password is refused without being repeated."""
        parts = _parts(self.url)
        if parts.username is not None or parts.password is not None:
            raise InputError(
                f"the URL of {parts.hostname} holds a user name or a password, which would end up in histories and "
                f"reports; leave it out and set the variable {self.api_key_env or 'that api_key_env names'} instead"
            )
        for name in ("concurrency", "per_request", "timeout", "max_reply_bytes"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("retries", "backoff_seconds", "max_wait_seconds"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} must be 0 or more, got {getattr(self, name)}")

    def __repr__(self) -> str:
        return f"HttpOracle({self.name!r}, concurrency={self.concurrency}, per_request={self.per_request})"

    @property
    def name(self) -> str:
        """The URL without user, password and fragment, and with a digest for its query."""
        parts = _parts(self.url)
        digest = hashlib.blake2b(parts.query.encode(), digest_size=4).hexdigest()
        return _hide_secrets(parts) + (f"?{digest}" if parts.query else "")

    def pieces(self, sequences: Sequences) -> Iterator[tuple[list[int], Answers]]:
        """The answers of each request as it arrives."""
        rows = sequences.detach().double().cpu().numpy()
        ids = [key.hex() for key in question_keys(sequences)]
        cuts = [slice(start, start + self.per_request) for start in range(0, len(rows), self.per_request)][::-1]
        failure: UnmaskError | None = None
        over = threading.Event()
        executor = ThreadPoolExecutor(self.concurrency)
        try:
            under_way: dict[Future[Answers], int] = {}
            while cuts or under_way:
                # A request is sent when an earlier one was handed out, so that few answers wait to be kept.
                while cuts and len(under_way) < self.concurrency:
                    cut = cuts.pop()
                    under_way[executor.submit(self._ask, rows[cut], ids[cut], over)] = cut.start
                for request in wait(under_way, return_when=FIRST_COMPLETED).done:
                    start = under_way.pop(request)
                    try:
                        answers = request.result()
                        is_finite = answers.reshape(len(answers), -1).isfinite().all(1)
                        if is_finite.any():
                            kept = is_finite.nonzero().flatten()
                            yield (kept + start).tolist(), answers[kept]
                        refuse_unless_finite(is_finite.numpy())
                    except UnmaskError as error:
                        # Requests under way may still be answered, and are paid for; no other is sent.
                        failure = failure or error
                        over.set()
                        cuts = []
        finally:
            over.set()
            executor.shutdown(wait=False, cancel_futures=True)
        if failure is not None:
            raise failure

    def _ask(self, rows: Float[np.ndarray, "b n d"], ids: list[str], over: threading.Event) -> Answers:
        # Python writes the shortest decimal that reads back as the same float64, so nothing is lost on the way.
        return self._answers(self.post({"sequences": rows.tolist(), "ids": ids}, over), len(rows))

    def post(self, payload: Any, over: threading.Event | None = None) -> bytes:
        """The reply to some JSON, sent until it is answered, hope is lost, or it is all `over`."""
        over = over or threading.Event()
        body = json.dumps(payload).encode()
        for trial in range(self.retries + 1):
            # Chance keeps requests that failed together from coming back together.
            pause = min(self.backoff_seconds * 2**trial * random.uniform(0.5, 1), self.max_wait_seconds)
            try:
                reply = self._request(body)
            except ssl.SSLCertVerificationError as error:
                raise NoAnswerError(f"{self.name} has no valid certificate ({error.verify_message})") from None
            except (OSError, http.client.HTTPException) as error:
                fault = f"the connection failed ({self._public(str(error)) or type(error).__name__})"
            else:
                if reply.status == HTTPStatus.OK:
                    return reply.body
                if reply.status not in _PASSING and reply.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                    self._refuse(reply)
                fault = f"it answered {self._describe_error(reply)}"
                pause = max(pause, _seconds_to_wait(reply.retry_after))
            if pause > self.max_wait_seconds:
                raise NoAnswerError(f"{self.name}: {fault} and asks to wait {pause:.0f} s; start again after that")
            if trial == self.retries or over.wait(pause):
                break
        raise NoAnswerError(
            f"{self.name}: {fault}, {trial + 1} times; see that it runs and start again: what it answered is kept"
        )

    def _request(self, body: bytes) -> _Reply:
        """One request and its reply, over a connection that is kept for the next one."""
        with suppress(IndexError):
            kept = self._idle.pop()
            with suppress(ConnectionError):  # the service closed it while nobody asked
                return self._send(kept, body)
        parts = _parts(self.url)
        connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return self._send(connect(parts.hostname or "", parts.port, timeout=self.timeout), body)

    def _send(self, connection: http.client.HTTPConnection, body: bytes) -> _Reply:
        deadline = time.monotonic() + self.timeout
        try:
            parts = _parts(self.url)
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("POST", path, body, self._headers())
            response = connection.getresponse()
            reply = bytearray()
            while chunk := response.read(_CHUNK_BYTES):
                reply += chunk
                if len(reply) > self.max_reply_bytes:
                    raise ServiceError(
                        f"{self.name} sent more than {self.max_reply_bytes:,} bytes for {self.per_request} sequences; "
                        "ask fewer in a request (per_request), or allow more (max_reply_bytes)"
                    )
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no whole reply in {self.timeout:g} s")
            if response.length:  # bytes that were promised and never came
                raise http.client.IncompleteRead(b"")
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            self._idle.append(connection)
        return _Reply(response.status, bytes(reply), response.getheader("Retry-After"), response.getheader("Location"))

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        headers |= {"Accept-Encoding": "identity", "User-Agent": f"unmask/{__version__}"}
        return headers | ({"Authorization": f"Bearer {key}"} if (key := self._key()) else {})

    def _key(self) -> str:
        key = os.environ.get(self.api_key_env, "").strip() if self.api_key_env else ""
        if not re.fullmatch("[!-~]*", key):
            raise InputError(f"the variable {self.api_key_env} holds signs that no key has; set it again")
        return key

    def _answers(self, body: bytes, num_asked: int) -> Answers:
        """The numbers of a reply; not a number where the service answered `null`."""
        try:
            answers = json.loads(body)["answers"]
            values = torch.tensor([_numbers(answer) for answer in answers], dtype=torch.float64)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise ServiceError(
                f'{self.name} must reply with {{"answers": [one number, or one list of numbers, for each sequence]}}, '
                f"got '{self._public(body.decode(errors='replace'))}'; check the URL"
            ) from None
        if len(values) != num_asked:
            raise ServiceError(
                f"{self.name} was asked {num_asked} sequences and sent {len(values)} answers; it is broken"
            )
        return values

    def _refuse(self, reply: _Reply) -> NoReturn:
        """An error that asking again does not fix."""
        said = self._describe_error(reply)
        if reply.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            variable = (
                f"the variable {self.api_key_env}" if self.api_key_env else "api_key_env, and the variable it names,"
            )
            raise NoAnswerError(f"{self.name} answered {said}; set {variable} to a key that it knows")
        if reply.status in _ABOUT_WHAT_WAS_ASKED and _ABOUT_TOKENS.search(said):
            raise Refused(f"{self.name} does not take such tokens: it answered {said}")
        if reply.location is not None:
            with suppress(InputError):
                said = f"{reply.status} and points to {_hide_secrets(_parts(reply.location))}"
        advice = (
            f"ask fewer than {self.per_request} sequences in a request"
            if reply.status == _TOO_LARGE
            else "check the URL, and the width of a token"
            if reply.status in _ABOUT_WHAT_WAS_ASKED
            else "check the URL"
        )
        raise ServiceError(f"{self.name} answered {said}; {advice}")

    def _describe_error(self, reply: _Reply) -> str:
        """Status and message of an error, as they may be shown."""
        text = reply.body.decode(errors="replace")
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            text = str(json.loads(text)["error"])
        return f"{reply.status} '{self._public(text)}'"

    def _public(self, text: str) -> str:
        """The start of a text, without the key and the query of the URL, whoever repeats them."""
        for secret in (self._key(), _parts(self.url).query):
            text = text.replace(secret, "***") if secret else text
        return " ".join(text[:_SHOWN_CHARACTERS].split())


def _parts(url: str) -> SplitResult:
    """A URL, taken apart; what is wrong with it is said without repeating it."""
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        fits = False
    if not fits or not re.fullmatch("[!-~]*", url):
        raise InputError(
            "the URL of a service must look like https://host:port/path, with no spaces; this one does not"
        )
    return parts


def _hide_secrets(parts: SplitResult) -> str:
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _seconds_to_wait(retry_after: str | None) -> float:
    """What Retry-After says, in seconds or as a date; 0 where it says nothing that can be read."""
    if retry_after is None:
        return 0.0
    if re.fullmatch(r"\d+(\.\d+)?", retry_after.strip()):
        return float(retry_after)
    try:
        then = parsedate_to_datetime(retry_after)
    except ValueError:
        return 0.0
    return max(0.0, ((then if then.tzinfo else then.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds())


def _numbers(answer: Any) -> Any:
    """A number or a list of numbers; `null` is not a number."""
    if isinstance(answer, list):
        return [_numbers(entry) for entry in answer]
    if answer is None:
        return float("nan")
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        raise TypeError(answer)
    return float(answer)
