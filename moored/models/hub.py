"""Whether the Hugging Face hub can be reached: asked once, before anything is loaded from it.

Without this question huggingface_hub repeats every lookup of a file for half a minute or more.
"""

from __future__ import annotations

TIMEOUT_S = 3.0


def hub_answers() -> bool:
    """One quick request; False without a network, and in offline mode (HF_HUB_OFFLINE=1)."""
    import httpx2
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S)
    except (httpx2.TransportError, OfflineModeIsEnabled):
        return False
    return True
