"""Whether the Hugging Face hub can be reached, and what was downloaded from it before.

The first is asked once, before anything is loaded from it: without this question huggingface_hub
repeats every lookup of a file for half a minute or more.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

TIMEOUT_S = 3.0


def hub_answers() -> bool:
    """One quick request; False without a network, and in offline mode (HF_HUB_OFFLINE=1)."""
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import get_session

    session = get_session()
    # Its errors are those of httpx2 from huggingface_hub 2 on, and of httpx before.
    client = import_module(type(session).__module__.partition(".")[0])
    try:
        session.head(constants.ENDPOINT, timeout=TIMEOUT_S)
    except (client.TransportError, OfflineModeIsEnabled):
        return False
    return True


def downloaded_folder(name: str) -> Path | None:
    """Where the config.json of a hub id lies since it was downloaded; asks no network."""
    if find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    # Neither None nor its mark for files that the hub does not have.
    return Path(found).parent if isinstance(found, str) else None
