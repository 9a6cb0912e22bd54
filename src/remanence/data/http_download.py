"""Download one file over HTTP: in bounded size, resumed by ranges, with retries."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from remanence.core.errors import InputError, RunFailed
from remanence.core.memory import size_of

CHUNK = 1 << 20
LIMIT = 4 << 30  # bytes of one file; the largest published one has 1.2 GiB
TRIES = 5  # attempts without a new byte
PAUSE = 1.0  # seconds before the second attempt, doubled each time
TIMEOUT = 60.0  # seconds without a byte

# file name, bytes received, bytes in all if the server sends the length
Report = Callable[[str, int, int | None], None]


def download(url: str, part: Path, report: Report) -> None:
    """Download a file; a broken connection is tried again.

    Args:
        url: the address.
        part: the file to write; bytes of an earlier attempt are kept, and only the rest is
            requested.
        report: called after each chunk.

    Raises:
        RunFailed: the file cannot be downloaded.
        InputError: the file is larger than `LIMIT`.
    """
    if not url.startswith(("https://", "http://")):
        raise InputError(
            f"{url} is not a web address: give one that begins with https:// or http://"
        )
    tries, pause = TRIES, PAUSE
    while True:
        before = _size(part)
        try:
            if _request(url, part, report):
                return
            problem = f"the connection broke after {size_of(_size(part))}"
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise RunFailed(
                    f"{url} answers {error.code} {error.reason}: the publisher has moved the"
                    " file; fetch it by hand"
                ) from None
            problem = f"the server answers {error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            problem = str(getattr(error, "reason", None) or error) or type(error).__name__
        if _size(part) > before:  # progress: count attempts anew
            tries, pause = TRIES, PAUSE
        tries -= 1
        if not tries:
            raise RunFailed(
                f"cannot fetch {url} ({problem}): check the connection; what was"
                " received is kept, and the same command continues from there"
            )
        time.sleep(pause)
        pause *= 2


def _request(url: str, part: Path, report: Report) -> bool:
    """Request the missing bytes; return whether the file is complete."""
    have = _size(part)
    request = urllib.request.Request(
        url, headers={"User-Agent": "remanence", "Accept-Encoding": "identity"}
    )
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:
            raise
        total = error.headers.get("Content-Range", "").rpartition("/")[2]
        error.close()
        if total == str(have):
            return True  # all bytes were there already
        part.unlink()  # longer than the file of the server: bytes of another file
        return False
    with response:
        if have and response.status != 206:  # the server ignores ranges: start again
            have = 0
        elif have and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise http.client.HTTPException(
                f"asked for bytes from {have} on, got {response.headers.get('Content-Range')}"
            )
        length = response.headers.get("Content-Length")
        total_bytes = have + int(length) if length and length.isdecimal() else None
        if (total_bytes or 0) > LIMIT:
            raise InputError(
                f"{url} has {size_of(total_bytes or 0)}, more than any published file: fetch"
                " it by hand if you trust it"
            )
        with part.open("ab" if have else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                have += len(chunk)
                if have > LIMIT:
                    raise InputError(
                        f"{url} sends more than {size_of(LIMIT)}: fetch it by hand if you trust it"
                    )
                report(part.name.removeprefix(".").removesuffix(".part"), have, total_bytes)
    return total_bytes is None or have >= total_bytes


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
