"""The operator's own HTTP endpoints: metrics for Prometheus, liveness for the kubelet, a webhook for the API server.

The operator serves them instead of kopf, because a replica that does not lead is also alive.
"""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from rlhfless_operator.controller.admission import review
from rlhfless_operator.controller.prometheus import OperatorMetrics
from rlhfless_operator.controller.slot_admission import SlotAdmission
from rlhfless_operator.platforms.cluster_settings import ClusterSettingsError, variable_of

logger = logging.getLogger(__name__)

ADMISSION_PATH = "/pods"
"""Path of the webhook that makes pods terminate quickly and places them near each other."""
SLOTS_PATH = "/slots"
"""Path of the webhook that gives pods their slots."""
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LONGEST_REVIEW = 8 * 2**20
"""Largest request. An API server accepts requests of up to 3 MB, and a review may contain an object twice."""
_AT_ONCE = 32
"""Questions of a peer that a webhook answers at a time."""
_LARGE = 2**18
"""Bytes of a large question, as no pod of the operator's asks."""
_LARGE_AT_ONCE = 4
_MOST_WAITING = 1024
"""Questions of a peer that wait for an answer."""
ANSWER_SECONDS = {ADMISSION_PATH: 1.5, SLOTS_PATH: 8.0}
"""Seconds for an answer: a little less than the API server waits for one (`timeoutSeconds` in the chart)."""
_RENEWAL_SECONDS = 60.0
"""Seconds between checks of the certificate's files."""

_Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serve_metrics(metrics: OperatorMetrics, port: int) -> AsyncIterator[int]:
    """Serve `/metrics` on all addresses; yields the port."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=metrics.exposition(), headers={"Content-Type": _CONTENT_TYPE})

    async with _serve("GET", {"/metrics": answer}, port) as bound:
        yield bound


@asynccontextmanager
async def serve_liveness(silent: Callable[[], list[str]], port: int) -> AsyncIterator[int]:
    """Serve `/healthz` on all addresses, with the jobs that have been silent for long; yields the port.

    The answer is 200 as long as the event loop gives any. A restart would interrupt all jobs, so no job may cause one.
    """

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"silent": silent()})

    async with _serve("GET", {"/healthz": answer}, port) as bound:
        yield bound


@asynccontextmanager
async def serve_admission(
    port: int | None,
    certificate: Path,
    grace_seconds: int | None,
    slots: SlotAdmission | None = None,
    *,
    topology_keys: Sequence[str] = (),
    clients: Path | None = None,
    renewal_seconds: float = _RENEWAL_SECONDS,
) -> AsyncIterator[int | None]:
    """Serve the webhooks on all addresses, by TLS; yields the port.

    Args:
        port: port to serve on; None serves nothing.
        certificate: folder with `tls.crt` and `tls.key`, which are reloaded when they change.
        grace_seconds: the longest grace period of a function pod; None keeps Knative's.
        slots: gives slots to pods that use GPUs in turns.
        topology_keys: node labels with the node's location, the nearest domain first; empty leaves the placement to
            Kubernetes.
        clients: file with the authority of the clients' certificates. Only clients with such a certificate are
            answered; if omitted, everybody who reaches the port is.
        renewal_seconds: seconds between checks of the certificate.

    Raises:
        ClusterSettingsError: there is no valid certificate.
    """
    if port is None:
        yield None
        return

    turns = PeerTurns()

    def answering(path: str, review: Callable[[Any], Awaitable[dict[str, Any]]]) -> _Answer:
        seconds = ANSWER_SECONDS[path]

        async def answer(request: web.Request) -> web.Response:
            large = request.content_length is None or request.content_length > _LARGE
            try:
                async with asyncio.timeout(seconds), turns.of(request.remote or "", large=large):
                    return web.json_response(await review(await request.json()))
            except TimeoutError:
                return web.json_response({"error": f"no answer within {seconds:g} s"}, status=503)
            except TooManyQuestionsError as error:
                return web.json_response({"error": str(error)}, status=429)
            except (ValueError, RecursionError) as error:
                # The webhook's failure policy decides what happens to the pod.
                return web.json_response({"error": str(error)}, status=400)

        return answer

    answers: dict[str, _Answer] = {}
    if grace_seconds is not None or topology_keys:
        answers[ADMISSION_PATH] = answering(ADMISSION_PATH, partial(_review, grace_seconds, topology_keys))
    if slots is not None:
        answers[SLOTS_PATH] = answering(SLOTS_PATH, slots.review)

    try:
        files = _certificate(certificate)
        context = _context(certificate)
        if clients is not None:
            context.load_verify_locations(clients)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise ClusterSettingsError(
            f"{variable_of('admission_certificate')}: {certificate} has no valid certificate ({error}); "
            "mount a Secret of type kubernetes.io/tls there"
        ) from error
    renewal = asyncio.create_task(_renew(context, certificate, files, renewal_seconds))
    try:
        async with _serve("POST", answers, port, context) as bound:
            yield bound
    finally:
        renewal.cancel()


class TooManyQuestionsError(Exception):
    """A peer asks more than it may."""


class PeerTurns:
    """Turns of the webhooks' peers. The API server is one of them, and waits for few questions of any other."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}

    @asynccontextmanager
    async def of(self, address: str, *, large: bool = False) -> AsyncIterator[None]:
        """Wait for a turn of a peer, and have it as long as the context lasts.

        Args:
            address: the peer's.
            large: whether the question takes much memory; fewer of these are answered at a time.

        Raises:
            TooManyQuestionsError: too many of its questions wait already.
        """
        peer = self._peers.setdefault(address, _Peer())
        if peer.questions >= _MOST_WAITING:
            raise TooManyQuestionsError(f"{peer.questions} questions of {address} wait already")
        peer.questions += 1
        try:
            async with peer.large_turns if large else peer.turns:
                yield
        finally:
            peer.questions -= 1
            if not peer.questions:
                self._peers.pop(address, None)


class _Peer:
    def __init__(self) -> None:
        self.questions = 0
        self.turns = asyncio.Semaphore(_AT_ONCE)
        self.large_turns = asyncio.Semaphore(_LARGE_AT_ONCE)


async def _review(grace_seconds: int | None, topology_keys: Sequence[str], body: Any) -> dict[str, Any]:
    return review(body, grace_seconds, topology_keys)


def _certificate(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "tls.crt").read_bytes(), (folder / "tls.key").read_bytes()


def _context(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


async def _renew(context: ssl.SSLContext, folder: Path, files: tuple[bytes, bytes], pause: float) -> None:
    while True:
        await asyncio.sleep(pause)
        try:
            found = _certificate(folder)
            if found != files:
                # Load into a new context first: if the pair does not match, the context in use would keep half of it.
                _context(folder)
                context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
                files = found
                logger.info("the webhook uses a new certificate")
        except OSError as error:
            logger.warning("the webhook keeps its certificate, because the one in %s is not valid: %s", folder, error)


@asynccontextmanager
async def _serve(
    method: str, answers: Mapping[str, _Answer], port: int, context: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    app = web.Application(client_max_size=_LONGEST_REVIEW)
    for path, answer in answers.items():
        app.router.add_route(method, path, answer)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "0.0.0.0", port, ssl_context=context)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
