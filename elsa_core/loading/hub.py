"""Published weights: from the Hugging Face cache, else the network, else an error in seconds.

The hub's own client retries an unreachable server for most of a minute per file; here the cache is
asked first, and the server is tried once before a download starts.
"""

from __future__ import annotations

import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from elsa_core.base.messages import first_line
from elsa_core.errors import ModelError, UnavailableError

CONNECT_SECONDS = 5.0
# Weights as the hub names them, safetensors first; pickles are read with weights_only.
TIMM_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
OPEN_CLIP_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")


def fetch(repository: str, names: Sequence[str], *, need: str) -> Path:
    """Return the local path of the first of `names` that the hub repository
    (`owner/name[@revision]`) has; `need` says what it is for in the error line."""
    import huggingface_hub
    from huggingface_hub import errors

    repo_id, _, revision = repository.partition("@")
    for cached in (True, False):
        if not cached:
            require_network(huggingface_hub.constants.ENDPOINT, need=need)
        for name in names:
            try:
                found = huggingface_hub.hf_hub_download(
                    repo_id, name, revision=revision or None, local_files_only=cached
                )
            except errors.HFValidationError as error:
                raise ModelError(f"{repository!r} is not a hub id: {error}") from None
            except (errors.RepositoryNotFoundError, errors.GatedRepoError) as error:
                kind = type(error).__name__
                raise ModelError(
                    f"the hub has no repository {repository} that you may read ({kind})"
                ) from None
            except (errors.EntryNotFoundError, OSError) as error:
                absent = isinstance(error, errors.EntryNotFoundError)
                if cached or (absent and not isinstance(error, errors.LocalEntryNotFoundError)):
                    continue
                raise _offline(need, first_line(error)) from None
            return Path(found)
    raise ModelError(f"hub repository {repository} has none of {', '.join(names)}")


def require_file(url: str, *, need: str, folder: Path | None = None) -> None:
    """`require_network`, unless `folder`, or torch.hub's, has the file of this address."""
    from torch.hub import get_dir

    folder = Path(get_dir()) / "checkpoints" if folder is None else folder
    if not (folder / url.rpartition("/")[2]).is_file():
        require_network(url, need=need)


def require_network(url: str, *, need: str) -> None:
    """Raise UnavailableError unless the host of `url`, or its proxy, answers within seconds."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise _offline(need, "HF_HUB_OFFLINE is set")
    try:
        parts = urllib.parse.urlsplit(url)
        proxies = urllib.request.getproxies()
        proxy = proxies.get(parts.scheme) or proxies.get("all")  # as the hub's client takes them
        if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
            parts = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
        server = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
    except ValueError as error:
        why = first_line(error)
        raise _offline(need, f"the server or its proxy has no address ({why})") from None
    outcome: list[str | None] = ["no answer from the name server"]

    def attempt() -> None:
        try:
            socket.create_connection(server, timeout=CONNECT_SECONDS).close()
            outcome[0] = None
        except OSError as error:
            outcome[0] = error.strerror or str(error)

    # getaddrinfo has no timeout of its own, so that it runs where it can be left behind.
    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS + 3.0)
    if outcome[0] is not None:
        raise _offline(need, f"{server[0]} cannot be reached: {outcome[0]}")


def _offline(need: str, reason: str) -> UnavailableError:
    # Without its configuration a hub model cannot even be built with random weights.
    random = "leave out --pretrained for random weights"
    return UnavailableError(
        f"{need} are not in the cache and {reason}; connect, point HF_HOME (TORCH_HOME for"
        " torchvision) at a cache that has them, give a .safetensors file, or"
        f" {'name a timm model' if 'configuration' in need else random}"
    )
