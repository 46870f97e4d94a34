"""The process that keeps episodes while actors are let go; see `rlhfless_functions.environments.shelter`."""

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from rlhfless_functions.settings.emulation import EmulationSettings
from rlhfless_operator.platforms.shelters import SampleKey, ShelterClient, ShelterMissingError

_START_SECONDS = 120.0
"""Time limit of its start, in which it imports heavy libraries."""
_END_SECONDS = 5.0


class ShelterProcess:
    """A shelter on this machine: started when it is asked for, and again after it has died. See `ShelterHost`.

    Args:
        log_path: file to which it appends its log.
        emulation: emulated GPUs of a rehearsal, whose environments are emulated as well.
    """

    def __init__(self, log_path: Path, emulation: EmulationSettings | None = None) -> None:
        self._log_path = log_path
        self._variables = {} if emulation is None else {"RLHFLESS_EMULATION": emulation.model_dump_json()}
        self.token = secrets.token_urlsafe(32)
        self._process: asyncio.subprocess.Process | None = None
        self._url = ""
        self._lock = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None

    async def warm(self) -> None:
        """Start it unless it runs. It stays until `close`.

        Raises:
            ShelterMissingError: it does not start.
        """
        await self.url()

    @asynccontextmanager
    async def rollout(self, name: str) -> AsyncIterator[None]:
        """Have it run for a rollout.

        Raises:
            ShelterMissingError: it does not start.
        """
        await self.url()
        try:
            yield
        finally:
            if self._process is not None and self._process.returncode is None:
                await self._client().end(self._url, name)

    async def url(self) -> str:
        """Return its address. Start it unless it runs.

        Raises:
            ShelterMissingError: it does not start.
        """
        async with self._lock:
            if self._process is None or self._process.returncode is not None:
                self._process, self._url = await self._start()
            return self._url

    async def come(self, rollout: str, samples: list[SampleKey]) -> int:
        """Wait for a while until samples need not wait for their environments; see `ShelterHost.come`."""
        return await self._client().come(self._url, rollout, samples)

    async def close(self) -> None:
        """End it with all episodes."""
        if self._session is not None:
            await self._session.close()
        async with self._lock:
            # It may be about to start.
            await self._end()

    def _client(self) -> ShelterClient:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return ShelterClient(self._session, self.token)

    async def _end(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self._process.wait()
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _start(self) -> tuple[asyncio.subprocess.Process, str]:
        try:
            process = await self._spawned()
        except OSError as error:
            raise self._missing(str(error)) from error
        assert process.stdout is not None
        line = b""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_START_SECONDS):
                    line = await process.stdout.readline()
            if not line.strip().isdigit():
                raise self._missing("it told no port")
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        return process, f"http://127.0.0.1:{int(line)}"

    async def _spawned(self) -> asyncio.subprocess.Process:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rlhfless_functions.environments.shelter",
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self._variables, "RLHFLESS_TOKEN": self.token},
            )

    def _missing(self, problem: str) -> ShelterMissingError:
        return ShelterMissingError(
            f"the process that keeps episodes while actors are let go does not start ({problem}); see"
            f" {self._log_path}, or set environment.letGo to never"
        )
