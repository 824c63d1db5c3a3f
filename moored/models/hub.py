"""Whether the Hugging Face hub can be reached: asked once, before anything is loaded from it.

Without this question huggingface_hub repeats every lookup of a file for half a minute or more.
"""

from __future__ import annotations

from importlib import import_module

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
